"""``lanterne policy test``: a file over the incidents of a stored job, through the command line."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from typer.testing import CliRunner
from whole_backend import House

from lanterne.cli import app
from lanterne.collector.sim.faults import simulate
from lanterne.collector.sim.model import Shape

SMALL = Shape(dp=4, steps=130, forward_ms=20, backward_ms=40, data_ms=2, optimizer_ms=3, transfer_ms=5,
              checkpoint_every=40, checkpoint_ms=90, jitter=0.05)  # fmt: skip
FILE = """
    policies:
      - name: halve-jumped-lr
        says: the rate is far above its plan; halve it
        causes: [lr_misconfigured]
        when: lr.now > lr.planned * 5.0
        mode: auto
        action: scale_lr
        parameters: {factor: "=lr.planned / lr.now"}
"""


def test_a_policy_is_replayed_over_a_stored_job_and_tells_what_it_would_have_done(tmp_path: Path) -> None:
    data, file = tmp_path / "data", tmp_path / "mine.yaml"
    file.write_text(textwrap.dedent(FILE))
    house = House(data)
    house.play(simulate(SMALL, (("lr_jump", 2, 60),), seed=3, name="j"), evaluate_every=15)
    (found,) = house.report("j").incidents
    house.close()

    said = CliRunner().invoke(app, ["policy", "test", str(file), "--data", str(data)])
    assert said.exit_code == 0, said.output
    assert f"j  step {found.opened_step}: lr_misconfigured ({found.id})" in said.output
    assert "halve-jumped-lr would act: the rate is far above its plan; halve it" in said.output
    assert "scale_lr(factor=0.1) on all ranks" in said.output
    assert "decided in earnest: lr-back-to-plan: observe" in said.output
    assert "1 incidents with a cause: 1 act" in said.output

    (row,) = json.loads(CliRunner().invoke(app, ["policy", "test", str(file), "--data", str(data), "--json"]).output)
    assert (row["choice"], row["series"], row["was"]["choice"]) == ("act", True, "observe")


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(textwrap.dedent(FILE))
    House(tmp_path / "data").close()
    said = CliRunner().invoke(app, ["policy", "test", str(file), "--data", str(tmp_path / "data")])
    assert "no incident with a cause is stored" in said.output
