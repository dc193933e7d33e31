"""The examples run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lanterne.blackbox import BlackBox
from lanterne.nouns import Event, Kind

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_each_is_a_program_that_the_table_names(script: Path) -> None:
    compile(script.read_text(encoding="utf-8"), script.name, "exec")
    assert f"]({script.name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_the_batch_script_is_sound_bash() -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / "job.sbatch")], check=True)


@pytest.mark.slow
def test_the_plain_loop_tells_steps_losses_and_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "LANTERNE_"))}
    clean |= {"LANTERNE_DIR": str(tmp_path), "LANTERNE_JOB": "ex", "LANTERNE_SHIPPER": "none", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launch, str(EXAMPLES / "ddp.py"), "20"], env=clean, check=True, capture_output=True)
    for rank in (0, 1):
        box, events = BlackBox(tmp_path / "ex" / "0", rank), list[Event]()
        while found := box.drain():
            events += found
        assert [e.step for e in events if e.kind is Kind.STEP] == list(range(20))
        assert len([e for e in events if e.name == "training.loss"]) == 20
        assert "checkpoint" in {e.name for e in events if e.kind is Kind.PHASE}
