"""A real hang: a gloo job of three processes in which one does not come; its own Flight Recorder dumps are read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases.evidence import first, judge, named_ranks

JOB = """
import datetime, os, sys, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
folder, culprit, fault = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
rank = dist.get_rank()
for _ in range(6):
    dist.all_reduce(torch.ones(64))
try:
    if fault == "hang" and rank == culprit:
        time.sleep(2)
    elif fault == "order" and rank == culprit:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(128))
        dist.all_reduce(torch.ones(256))
except RuntimeError:
    pass
text = _dump_fr_trace_json(True, False)
with open(f"{folder}/json/rank{rank}.json", "wb") as file:
    file.write(text if isinstance(text, bytes) else text.encode())
with open(f"{folder}/pickle/_dump_{rank}", "wb") as file:
    file.write(_dump_fr_trace(True, False, False))
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("culprit", "fault"), [(1, "hang"), (2, "order")])
def test_the_rank_that_did_not_come(tmp_path: Path, culprit: int, fault: str) -> None:
    script, dumps = tmp_path / "job.py", tmp_path / "dumps"
    script.write_text(JOB)
    for form in ("pickle", "json"):
        (dumps / form).mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "3",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    subprocess.run(
        [*command, str(script), str(dumps), str(culprit), fault],
        check=True,
        timeout=120,
        capture_output=True,
        env=_environment(),
    )
    wanted = ("rank_hung",) if fault == "hang" else ("collective_mismatch", "collective_divergence", "uneven_inputs")
    for form in ("pickle", "json"):
        report = judge(dumps / form)
        assert str(first(report).category) in wanted
        assert named_ranks(report) == {culprit}


def _environment() -> dict[str, str]:
    return {**os.environ, "TORCH_FR_BUFFER_SIZE": "256", "OMP_NUM_THREADS": "1"}
