"""A process that ``lanterne run`` has attached learns from the script's own ``attach`` where it resumes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch, lanterne
first = lanterne.attach()  # as the launcher's hook does, before the script knows anything
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
session = lanterne.attach(model, optimizer, scaler=scaler, start_step=40)
assert session is first and session.scaler is scaler, session.scaler
for _ in session.steps([1, 2, 3]):
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
assert session.step_number == 43, session.step_number
lanterne.attach(start_step=7)  # too late: steps were counted
assert session.step_number == 43
"""


@pytest.mark.slow
def test_the_step_and_the_scaler_of_a_resumed_script_are_taken(tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "LANTERNE_"))}
    clean |= {"LANTERNE_DIR": str(tmp_path), "LANTERNE_SHIPPER": "none", "LANTERNE_COMMANDS": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "not attached" not in done.stderr
