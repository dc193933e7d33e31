"""The one JSON object that every benchmark prints (docs: DESIGN 7), and where it was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def figure(
    name: str, value: float | None, unit: str, *, goal: float | None = None, better: str = "lower"
) -> dict[str, Any]:
    """One figure; ``goal`` is None where it has none, ``value`` where it could not be measured."""
    rounded = None if value is None else round(value, 4)
    return {"name": name, "value": rounded, "unit": unit, "goal": goal, "better": better}


def report(benchmark: str, figures: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The object to print; ``more`` holds what is not a figure (settings, what was skipped and why)."""
    here = Path(__file__).parents[1]
    commit = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    load = round(os.getloadavg()[0], 1)
    return {
        "benchmark": benchmark, "commit": commit.stdout.strip(), "machine": machine, "load": load, "figures": figures,
        **more,
    }  # fmt: skip
