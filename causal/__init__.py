"""The causal engine: facts in, causes out. Pure: no I/O, no clock."""

from lanterne.causal.counterfactual import Operations, WhatIf, what_if
from lanterne.causal.engine import diagnose, family_of
from lanterne.causal.facts import Diagnosis, Edge, FactEvent, Facts, Place, Waits
from lanterne.causal.generic import Ranked, rank_metrics

__all__ = [
    "diagnose",
    "rank_metrics",
    "what_if",
    "family_of",
    "Diagnosis",
    "Edge",
    "FactEvent",
    "Facts",
    "Operations",
    "Place",
    "Ranked",
    "Waits",
    "WhatIf",
]
