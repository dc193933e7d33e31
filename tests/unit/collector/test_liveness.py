"""The worker server inside the trainer: it comes and goes without a word, and never holds up the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from pathlib import Path
import torch
from lanterne.collector.sources.liveness import WorkerServer
for _ in range(20):
    server = WorkerServer(Path(sys.argv[1]), 0)
    assert server.path
    server.stop()
assert not Path(server.path).exists()
print("ended")
"""


def test_a_server_that_is_stopped_at_once_ends_silently(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
