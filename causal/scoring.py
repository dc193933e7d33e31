"""Confidence: raw scores become frequencies. The table is data, its recipe stands in it and in docs/causal.md."""

from __future__ import annotations

from importlib import resources

import numpy as np
import yaml

CLAIM = 0.7  # at or above: said as a fact
LEAD = 0.3  # at or above: said as a lead; below: not said


def _table() -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    text = (resources.files("lanterne.causal") / "calibration.yaml").read_text(encoding="utf-8")
    out = {}
    for family, points in yaml.safe_load(text)["families"].items():
        raw, right = tuple(float(p[0]) for p in points), tuple(float(p[1]) for p in points)
        if list(raw) != sorted(raw) or list(right) != sorted(right):
            raise ValueError(f"calibration.yaml: {family}: points must rise in both coordinates")
        out[family] = raw, right
    return out


TABLE = _table()


def calibrated(family: str, raw: float) -> float:
    """Share of injected cases with this raw score that were right; linear between the table's points."""
    points = TABLE.get(family)
    return float(raw if points is None else np.interp(raw, *points))
