"""How shippers come and go: thread mode, left spools, old folders, and a launcher that waits a moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from shipper_backend import Backend

from lanterne.collector import shipper, upkeep
from lanterne.collector.shipper import ensure_running, is_running
from lanterne.collector.spool import Part, Spool
from lanterne.quality import Quality
from lanterne.settings import CollectorSettings

TRAINER = Path(__file__).with_name("ring_trainer.py")
pytestmark = pytest.mark.slow


def environment(url: str, **more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "LANTERNE_"))}
    return {**clean, "LANTERNE_ENDPOINT": url, **more}


def train(folder: Path, url: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TRAINER), str(folder), "0", *arguments]
    return subprocess.run(command, env=environment(url, **more), capture_output=True, text=True, check=False)


def test_a_thread_delivers_everything_before_the_trainer_leaves(tmp_path: Path) -> None:
    folder = tmp_path / "ring-job" / "0"
    with Backend() as backend:
        done = train(folder, backend.url, "200", "close", "0.002", LANTERNE_SHIPPER="thread")
        assert (done.returncode, done.stderr) == (0, "")
        assert backend.steps() == list(range(200))
        assert not is_running(folder)


def test_a_thread_without_a_backend_lets_the_trainer_go(tmp_path: Path) -> None:
    with Backend() as gone:
        port = gone.port
    folder = tmp_path / "ring-job" / "0"
    done = train(folder, f"http://127.0.0.1:{port}", "50", "exception", LANTERNE_SHIPPER="thread")
    assert done.returncode == 1
    assert "boom in user code" in done.stderr
    assert list(folder.glob("spool-*/*.seg"))


def test_none_writes_the_black_box_and_starts_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "ring-job" / "0"
    assert train(folder, "http://127.0.0.1:9", "10", "close", LANTERNE_SHIPPER="none").returncode == 0
    assert (folder / "rank-0.ring").exists()
    assert not (folder / "shipper.lock").exists()


def test_the_trainers_pipes_close_with_the_trainer(tmp_path: Path) -> None:
    """The shipper lives on (nobody takes its events) and holds neither stdout nor stderr of the trainer."""
    folder = tmp_path / "ring-job" / "0"
    done = train(folder, "http://127.0.0.1:9", "10", "close")  # returns only when both pipes are closed
    assert done.returncode == 0
    assert is_running(folder)
    stop(folder)


def stop(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            pid = int(json.loads((folder / "shipper.json").read_text())["pid"])
            os.kill(pid, signal.SIGKILL)
            return
        except (OSError, ValueError):
            time.sleep(0.05)


def test_calling_again_starts_no_second_shipper(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "0"
    folder.mkdir(parents=True)
    for _ in range(5):
        ensure_running(folder, CollectorSettings(endpoint="http://127.0.0.1:9"))
    assert is_running(folder)
    stop(folder)
    mine = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert not [p for p in mine if "lanterne.collector.shipper" in Path(f"/proc/{p}/cmdline").read_text()]


def test_a_folder_that_cannot_be_written_is_said_and_survived(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ensure_running(tmp_path / "absent", CollectorSettings())
    assert "lanterne: no shipper" in capsys.readouterr().err


def test_the_next_shipper_delivers_what_an_earlier_one_left(tmp_path: Path) -> None:
    left = tmp_path / "old-job" / "0"
    with Backend() as gone:
        port = gone.port
    assert train(left, f"http://127.0.0.1:{port}", "30", "close").returncode == 0
    stop(left)
    with Backend(port=port) as backend:
        while is_running(left):
            time.sleep(0.05)
        assert train(tmp_path / "new-job" / "0", backend.url, "30", "close").returncode == 0
        assert backend.wait(lambda: backend.steps().count(29) == 2)


def test_old_sessions_leave_and_unsent_ones_stay(tmp_path: Path) -> None:
    now_s = time.time()
    for n in range(12):
        folder = tmp_path / f"job{n:02d}" / "0"
        folder.mkdir(parents=True)
        if n == 0:
            Spool(folder / "spool", quality=Quality()).append([Part("logs", "none", b"x", 1)], {})
        for path in [*folder.iterdir(), folder]:
            os.utime(path, (now_s - 86_400 + n, now_s - 86_400 + n))
    removed = upkeep.prune(tmp_path, keep=tmp_path / "job11" / "0", now_s=now_s)
    assert sorted(path.parent.name for path in removed) == ["job01", "job02", "job03"]
    assert (tmp_path / "job00" / "0" / "spool").is_dir()
    assert not (tmp_path / "job01").exists()


def test_the_launcher_waits_until_the_end_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "ring-job" / "0"
    with Backend() as backend:
        code = "import sys; from lanterne.collector.integrations.launch import main; sys.exit(main(sys.argv[1:]))"
        trainer = [sys.executable, str(TRAINER), str(folder), "0", "50", "exception"]
        command = [sys.executable, "-c", code, "--", *trainer]
        done = subprocess.run(command, env=environment(backend.url), capture_output=True, text=True, check=False)
        assert done.returncode == 1
        (row,) = backend.events("exited")
        assert row["attributes"]["exit_code"] == "1"
        assert "boom in user code" in row["body"]
        assert "boom in user code" in done.stderr


def test_a_killed_shipper_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "KEEP_S", 0.2)
    folder, stop = tmp_path / "job" / "0", threading.Event()
    folder.mkdir(parents=True)
    settings = CollectorSettings(endpoint="http://127.0.0.1:9")

    def pid_of_next(before: int) -> int:
        for _ in range(600):
            try:
                found = int(json.loads((folder / "shipper.json").read_text(encoding="utf-8"))["pid"])
            except (OSError, ValueError):
                found = before
            if found != before:
                return found
            time.sleep(0.1)
        raise AssertionError("no shipper came")

    ensure_running(folder, settings)
    first = pid_of_next(0)
    shipper.keep_running(folder, settings, stop)
    os.kill(first, signal.SIGKILL)
    second = pid_of_next(first)
    stop.set()
    os.kill(second, signal.SIGKILL)
