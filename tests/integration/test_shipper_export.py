"""The real shipper process against real servers that misbehave: every event once, trainers left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import shipper_backend
from certificates import self_signed
from shipper_backend import Backend

from lanterne.collector.shipper import is_running

TRAINER = Path(__file__).with_name("ring_trainer.py")
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "ring-job" / "0"
    yield path
    pid = shipper_pid(path)
    if pid:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def shipper_pid(folder: Path) -> int:
    """Pid of the running shipper, 0 when there is none."""
    try:
        found = json.loads((folder / "shipper.json").read_text())
    except (OSError, ValueError):
        return 0
    return 0 if found["state"] == "ended" else int(found["pid"])


def environment(url: str, **more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "LANTERNE_"))}
    return {**clean, "LANTERNE_ENDPOINT": url, "OTEL_EXPORTER_OTLP_TIMEOUT": "2", **more}


def start(folder: Path, url: str, steps: int, ending: str, *, rank: int = 0, pause_s: float = 0.002, **more: str):
    command = [sys.executable, str(TRAINER), str(folder), str(rank), str(steps), ending, str(pause_s)]
    return subprocess.Popen(
        command, env=environment(url, **more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def train(folder: Path, url: str, steps: int, ending: str, **more: str) -> subprocess.CompletedProcess[str]:
    process = start(folder, url, steps, ending, **more)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def assert_everything_once(backend: Backend, steps: int, rank: int = 0) -> None:
    found = backend.sequences(rank)
    assert sorted(found) == list(range(len(found)))
    assert set(found.values()) == {1}
    assert backend.steps(rank) == list(range(steps))


ENDINGS = [("close", 0), ("exception", 1), ("SIGTERM", -15), ("SIGKILL", -9), ("_exit", 7), ("segfault", -11)]


@pytest.mark.parametrize(("ending", "code"), ENDINGS)
def test_the_trainer_ends_as_it_would_without_us_and_the_end_is_told(folder: Path, ending: str, code: int) -> None:
    with Backend() as backend:
        done = train(folder, backend.url, 100, ending)
        assert done.returncode == code
        assert done.stdout == "trained\n"
        assert ("boom in user code" in done.stderr) == (ending == "exception")
        assert backend.wait(lambda: backend.events("exited"))
        (row,) = backend.events("exited")
        assert row["attributes"]["closed"] == ("true" if ending == "close" else "false")
        known = {k: int(v) for k, v in row["attributes"].items() if k in {"exit_code", "signal"}}
        assert known in ({"exit_code": code} if code >= 0 else {"signal": -code}, {})  # {} before Linux 6.15
        assert_everything_once(backend, 100)


BAD: dict[str, Callable[[shipper_backend._Handler], None]] = {
    "500s": shipper_backend.fail_500,
    "503 with Retry-After": shipper_backend.busy_503,
    "captive portal": shipper_backend.portal,
    "nonsense": shipper_backend.nonsense,
    "redirect": shipper_backend.redirect,
    "reset": shipper_backend.reset,
    "endless reply": shipper_backend.endless,
    "endless drip": shipper_backend.endless_drip,
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.heavy) if n == "endless drip" else n for n in sorted(BAD)],
)
def test_whatever_the_backend_does_every_event_arrives_once(folder: Path, name: str) -> None:
    with Backend(shipper_backend.first(2, BAD[name])) as backend:
        assert train(folder, backend.url, 100, "close").returncode == 0
        assert backend.wait(lambda: backend.events("exited"), 90)  # a drip holds each of two requests to its deadline
        assert_everything_once(backend, 100)


def test_a_redirect_is_not_followed_and_the_token_stays_here(folder: Path) -> None:
    with Backend() as thief, Backend() as backend:

        def elsewhere(handler: shipper_backend._Handler, signal_: str) -> bool:
            handler.answer(307, b"", Location=f"{thief.url}/v1/{signal_}")
            return True

        backend.behaviour = elsewhere
        assert train(folder, backend.url, 20, "close", LANTERNE_TOKEN="secret").returncode == 0
        assert backend.wait(lambda: len(backend.requests) >= 2)
        assert all(headers["authorization"] == "Bearer secret" for _, headers, _ in backend.requests)
        assert thief.requests == []


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "none"])
def test_compression_as_asked(folder: Path, encoding: str) -> None:
    with Backend() as backend:
        train(folder, backend.url, 50, "close", LANTERNE_COMPRESSION=encoding)
        assert backend.wait(lambda: backend.events("exited"))
        said = {headers.get("content-encoding", "none") for _, headers, _ in backend.requests}
        assert said == {encoding}
        assert_everything_once(backend, 50)


def test_standard_variables_are_honoured(folder: Path) -> None:
    with Backend() as backend:
        environ = environment("")
        del environ["LANTERNE_ENDPOINT"]
        environ |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": backend.url,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-team=nlp",
            "OTEL_SERVICE_NAME": "bert",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=lab",
        }
        subprocess.run([sys.executable, str(TRAINER), str(folder), "0", "20", "close"], env=environ, check=True)
        assert backend.wait(lambda: backend.events("exited"))
        assert all(headers["x-team"] == "nlp" for _, headers, _ in backend.requests)
        assert {row["service"] for _, row in backend.rows} == {"bert"}


def test_a_backend_that_comes_back_gets_everything_once(folder: Path) -> None:
    """Nobody listens at first; the trainer is over long before somebody does."""
    with Backend() as placeholder:
        port = placeholder.port
    assert train(folder, f"http://127.0.0.1:{port}", 300, "close").returncode == 0
    time.sleep(1.0)
    with Backend(port=port) as backend:
        assert backend.wait(lambda: backend.events("exited"), 60)
        assert_everything_once(backend, 300)


def restart(folder: Path, url: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lanterne.collector.shipper", str(folder)]
    return subprocess.Popen(command, env=environment(url), stdin=subprocess.DEVNULL)


def test_a_killed_shipper_is_replaced_and_nothing_is_told_twice(folder: Path) -> None:
    """SIGKILL in the middle of sending, several times; the lock is free at once and the next one goes on."""
    with Backend() as backend:
        trainer = start(folder, backend.url, 3000, "close")
        assert backend.wait(lambda: shipper_pid(folder) and backend.rows)
        os.kill(shipper_pid(folder), signal.SIGKILL)
        assert backend.wait(lambda: not is_running(folder))
        for _ in range(3):
            shipper, known = restart(folder, backend.url), len(backend.requests)
            assert backend.wait(lambda known=known: len(backend.requests) > known + 2)
            shipper.kill()
            shipper.wait()
        last = restart(folder, backend.url)
        trainer.communicate(timeout=120)
        assert trainer.returncode == 0
        assert backend.wait(lambda: backend.events("exited"), 60)
        assert last.wait(timeout=60) == 0
    # what was in flight when the shipper died came again under its number: the store keeps one of each
    found = backend.sequences()
    assert sorted(found) == list(range(len(found)))
    by_number: dict[tuple[str, int], set[str]] = {}
    for kind, row in backend.rows:
        by_number.setdefault((kind, row["sequence"]), set()).add(json.dumps(row, default=repr, sort_keys=True))
    assert all(len(versions) == 1 for versions in by_number.values())
    assert sorted(set(backend.steps())) == list(range(3000))


def test_one_shipper_serves_all_ranks_of_the_node(folder: Path) -> None:
    with Backend() as backend:
        trainers = [start(folder, backend.url, 100, "close", rank=rank) for rank in range(4)]
        for trainer in trainers:
            trainer.communicate(timeout=60)
            assert trainer.returncode == 0
        assert backend.wait(lambda: len(backend.events("exited")) == 4)
        for rank in range(4):
            assert_everything_once(backend, 100, rank)


def test_the_node_s_clock_is_held_against_the_backend_s_while_it_trains(folder: Path) -> None:
    with Backend() as backend:
        trainer = start(folder, backend.url, 2000, "close")
        assert backend.wait(lambda: backend.events("clock_snapshot", 0))
        trainer.communicate(timeout=60)
    assert trainer.returncode == 0


def test_tls_that_does_not_verify_sends_nothing(folder: Path, tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    with Backend(tls=certificate) as backend:
        assert train(folder, backend.url, 20, "close").returncode == 0
        time.sleep(2.0)
        assert backend.requests == []


def test_tls_with_the_named_certificate_works(folder: Path, tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    with Backend(tls=certificate) as backend:
        train(folder, backend.url, 20, "close", OTEL_EXPORTER_OTLP_CERTIFICATE=str(certificate))
        assert backend.wait(lambda: backend.events("exited"))
        assert_everything_once(backend, 20)
