"""``lanterne run -- torchrun …`` on a real DDP job whose script knows nothing of Lanterne."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from shipper_backend import Backend

pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("plain_ddp.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
LAUNCH = "import sys; from lanterne.collector.integrations.launch import main; sys.exit(main(sys.argv[1:]))"


def environment(tmp_path: Path, url: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "LANTERNE_"))}
    return {**clean, "LANTERNE_ENDPOINT": url, "LANTERNE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}


@contextmanager
def launched(tmp_path: Path, backend: Backend, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LAUNCH, "--", *TORCHRUN, *arguments]
    process = subprocess.Popen(
        command,
        env=environment(tmp_path, backend.url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_everything_is_seen_and_the_training_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    alone = subprocess.run([*TORCHRUN, "20"], env=environment(tmp_path, ""), capture_output=True, text=True, check=True)
    with Backend() as backend:
        with launched(tmp_path, backend, "20") as process:
            out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert sorted(out.splitlines()) == sorted(alone.stdout.splitlines())
        assert backend.wait(lambda: len(backend.events("exited")) == 2)
        assert backend.events("stall") == []
        for rank in (0, 1):
            found = backend.sequences(rank)
            assert sorted(found) == list(range(len(found)))
            assert set(found.values()) == {1}
            assert backend.steps(rank) == list(range(20))
        spans = {row["name"] for kind, row in backend.rows if kind == "traces"}
        assert {"forward", "backward", "optimizer", "data_wait", "allreduce"} <= spans
        metrics = {row["name"] for kind, row in backend.rows if kind == "metrics"}
        assert {"training.loss", "training.lr", "training.grad_norm"} <= metrics
        assert {row["rank"] for _, row in backend.rows} == {0, 1}  # no loader worker, no agent


def test_the_code_and_the_last_words_of_a_crashed_rank_are_told(tmp_path: Path) -> None:
    with Backend() as backend:
        with launched(tmp_path, backend, "20", "crash") as process:
            _, err = process.communicate(timeout=200)
        assert process.returncode == 1
        assert "disk on fire" in err
        assert backend.wait(lambda: backend.events("exited", 1))
        (row,) = backend.events("exited", 1)
        assert row["attributes"]["exit_code"] == "3"
        assert row["attributes"]["closed"] == "false"
        assert "disk on fire" in row["body"]


def test_a_hang_shows_who_waits_and_where_the_other_one_is(tmp_path: Path) -> None:
    with Backend() as backend, launched(tmp_path, backend, "20", "hang"):
        assert backend.wait(lambda: backend.events("stall", 0) and backend.events("stall", 1), 120)
        (victim,), (culprit,) = backend.events("stall", 0), backend.events("stall", 1)
        assert victim["attributes"]["waiting"] == "true"
        assert (victim["attributes"]["op"], victim["attributes"]["group"]) == ("allreduce", "0-1")
        assert culprit["attributes"]["waiting"] == "false"
        assert "stuck_in_user_code" in culprit["body"]
        assert backend.events("collective_pending", 0)
