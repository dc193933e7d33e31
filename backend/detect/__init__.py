"""Detectors: pure functions from Facts to Anomalies, one file each (docs/detectors.md: formula, default, source)."""

from __future__ import annotations

from lanterne.backend.detect import (
    communication,
    device_probe,
    heartbeat,
    host,
    liveness,
    memory,
    node,
    numerics,
    precision,
    replicas,
    sample,
    schedule,
    step_time,
    storage,
    straggler,
    sync,
)
from lanterne.backend.detect.base import Levels, sharing
from lanterne.backend.detect.heartbeat import Beats
from lanterne.causal.facts import Facts
from lanterne.nouns import Anomaly

KINDS = (
    "straggler", "intermittent_straggler", "step_time", "data_stall", "gc_pause", "slow_transfer", "thermal_throttle",
    "device_error", "hang", "crash", "silent_rank", "collective_mismatch", "out_of_memory", "memory_leak", "nonfinite",
    "overflow", "loss_scale_collapse", "loss_spike", "loss_spikeness", "grad_spike", "grad_norm", "grad_explosion",
    "grad_vanishing", "lr_drift", "lr_disagree", "replica_divergence", "seed_mismatch", "checkpoint_stall",
    "checkpoint_corrupt", "checkpoint_incomplete", "sync_delay", "sync_skew", "loss_variance", "heartbeat_lost",
    "version_gap", "liveness", "scaler_misuse", "optimizer_mismatch", "host_contention", "storage_slow",
    "slow_device",
)  # fmt: skip
"""Every ``Anomaly.kind`` that a detector may give."""

DETECTORS = (
    liveness.detect, memory.detect, communication.detect, storage.detect, replicas.detect, precision.detect,
    straggler.detect, host.detect, step_time.detect, node.detect, sample.detect,
    device_probe.detect,
)  # fmt: skip

LEVELLED = (numerics.detect, schedule.detect, sync.detect)
"""Detectors that know fixed levels."""


def run(facts: Facts, levels: Levels | None = None, beats: Beats | None = None) -> list[Anomaly]:
    """All detectors over one window. Worst first, then by first step.

    ``levels`` are the user's fixed levels; without it a level fires only together with the run's own baseline.
    ``beats``: a live job's heartbeats, which are kept apart from the window's other events.
    """
    with sharing(facts):
        found = [anomaly for detector in DETECTORS for anomaly in detector(facts)]
        found += [anomaly for detector in LEVELLED for anomaly in detector(facts, levels)]
    found += heartbeat.detect(facts, beats) if beats is not None else []
    return sorted(found, key=lambda a: (a.severity, a.first_step, a.kind))
