"""Whatever the backend does while a real model trains, the weights and the random state are those of a bare run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import shipper_backend
from shipper_backend import Backend

TRAINER = Path(__file__).with_name("hostile_trainer.py")
pytestmark = pytest.mark.heavy

BAD = {
    "500s": shipper_backend.fail_500,
    "nonsense": shipper_backend.nonsense,
    "reset": shipper_backend.reset,
    "slow": shipper_backend.endless_drip,
}


def train(how: str, folder: Path, url: str) -> str:
    """What the trainer printed; it must end well and say nothing on stderr."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "LANTERNE_"))}
    env = {**clean, "LANTERNE_ENDPOINT": url, "LANTERNE_DIR": str(folder), "LANTERNE_SPOOL_BYTES": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, str(TRAINER), how], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train("off", tmp_path_factory.mktemp("bare"), "http://127.0.0.1:1")


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_hostile_backend_changes_no_bit(bare: str, tmp_path: Path, name: str) -> None:
    with Backend(shipper_backend.first(1_000, BAD[name])) as backend:
        assert train("on", tmp_path, backend.url) == bare
        assert backend.requests  # it was asked, and answered as it does


def test_tls_against_a_plain_server_and_nobody_at_all_change_no_bit(bare: str, tmp_path: Path) -> None:
    with Backend() as backend:
        assert train("on", tmp_path / "tls", backend.url.replace("http:", "https:")) == bare
    assert train("on", tmp_path / "nobody", "http://127.0.0.1:1") == bare
