"""The causal engine: facts in, causes out. Pure: no I/O, no clock."""

from lanterne.causal.engine import diagnose
from lanterne.causal.facts import Diagnosis, Edge, FactEvent, Facts, Place, Waits

__all__ = ["Diagnosis", "Edge", "FactEvent", "Facts", "Place", "Waits", "diagnose"]
