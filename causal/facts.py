"""What the causal engine is given. Pure data: no I/O, no clock, nothing to fetch later.

Whoever has evidence (the live store, dump readers, the simulator) builds a :class:`Facts`; detectors
and :func:`lanterne.causal.diagnose` read it. Arrays are ``[steps, ranks]`` float64, NaN = not known.

Series names (a closed vocabulary; times in ms, sizes in bytes):

=================== ===========================================================================
step_ms             whole step, optimizer step to optimizer step
data_wait_ms h2d_ms forward_ms backward_ms optimizer_ms checkpoint_ms eval_ms compile_ms other_ms
                    phases as the host saw them (a blocked collective inflates the victims')
busy_ms             own time of the rank: the step less what it waited for others in collectives
lateness_ms         entry behind the median member, worst collective of the step, clock-corrected
wait_ms             waited for others in collectives, summed over the step
collective_ms       duration of one collective (rows are calls, not steps): the last to enter has the shortest
transfer_ms         last arrival to completion, summed over the step (the network's share)
gc_ms               garbage collection inside the step
device_ms           kernels of the rank's own work in the step, communication left out (profiler traces)
operators_ms        operators on the host that the profiler saw in the step, nested ones counted once
loss grad_norm      as the user's optimizer saw them (after the reduction)
grad_norm_local     before the reduction (first rank to move)
grad_nonfinite      non-finite gradient elements before the reduction, or after where not known
loss_spikeness lr lr_planned lr_drift loss_scale update_ratio
tokens samples      work of the step on that rank
throughput          work per second as the trainer printed it (tokens, samples or steps: compare it with itself only)
rss_bytes cgroup_bytes gpu_allocated_bytes gpu_reserved_bytes shm_bytes
rss_limit_bytes gpu_limit_bytes  the most that the process, or what its device holds, may reach at that time
fp16_underflow fp16_overflow e4m3_underflow e4m3_overflow  shares of a sample of the (scaled) gradient elements
grad_std            standard deviation of that sample
gpu_clock_mhz gpu_temperature_c gpu_throttle (bit mask) gpu_power_w gpu_ecc_errors
host_cpu_percent host_steal_percent host_runqueue process_cpu_ms (CPU time of the rank in the step)
cpu_delay_percent   share of the time in which the rank's main thread stood ready and got no core
loader_ms           time a loader worker took for the batch   net_retries  disk_ms
file_read_ms        in file reads of the rank and its loader workers, added up (``LANTERNE_READS``)
send_queue_bytes    written to TCP sockets and not taken by the network: piles up in front of a slow link
parameter_checksum  replicated parameters or synchronised gradients, equal on healthy replicas
=================== ===========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lanterne.nouns import (
    NO_RANK,
    NO_STEP,
    Anomaly,
    AttributeValue,
    Cause,
    Collective,
    Quality,
    Symptom,
)

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank lives. ``mesh`` holds coordinates by axis name (nouns.MESH_AXES)."""

    host: str = ""
    device: str = ""
    switch: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactEvent:
    """A discrete thing that happened. ``name`` is an EventName or a reader's own word; ``ref`` says where it stands.

    ``job_ns`` is on the job clock (0 = not known). Readers set ``attributes['line']``/``['file']`` through ``ref``.
    """

    name: str
    rank: int = NO_RANK
    step: int = NO_STEP
    job_ns: int = 0
    host: str = ""
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    body: str = ""
    ref: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Aligned collectives, one row a (group, sequence, rank); parallel arrays of length [N].

    ``lateness_ms``: entry behind the median member. ``wait_ms``: last arrival minus own arrival.
    ``transfer_ms``: completion minus last arrival. ``error_ms``: half-width of the clock interval
    of the row: a lateness below it is noise.
    """

    group: Sequence[str] = ()  # group names, indexed by group_index
    group_index: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    sequence: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    step: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    rank: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    bytes: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    lateness_ms: FloatArray = field(default_factory=lambda: np.zeros(0))
    wait_ms: FloatArray = field(default_factory=lambda: np.zeros(0))
    transfer_ms: FloatArray = field(default_factory=lambda: np.zeros(0))
    error_ms: FloatArray = field(default_factory=lambda: np.zeros(0))
    op: Sequence[str] = ()  # collective operations, indexed by op_index; empty = not known
    op_index: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything known about a window of one attempt of one job."""

    job: str
    attempt: int = 0
    ranks_expected: int = 0
    ranks: tuple[int, ...] = ()  # [R], the columns of every series
    steps: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))  # [T]
    step_start_ns: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))  # [T] job clock; empty = not known
    series: Mapping[str, FloatArray] = field(default_factory=dict)  # name -> [T, R]
    places: Mapping[int, Place] = field(default_factory=dict)
    waits: Waits = field(default_factory=Waits)
    collectives: Sequence[Collective] = ()  # the last calls of each (rank, group), pending ones included
    events: Sequence[FactEvent] = ()
    changes: Sequence[FactEvent] = ()  # since the last healthy run: code, config, host, driver
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    now_ns: int = 0  # job clock at the end of the window
    ended: bool = False  # the job is over (offline), so silence is final
    sources: Sequence[str] = ()  # which kinds of evidence were there: flight_recorder, nccl_log, stderr, live, …
    quality: Quality = field(default_factory=Quality)

    def get(self, name: str) -> FloatArray:
        """Series ``name`` as [T, R]; all NaN where it was never recorded."""
        found = self.series.get(name)
        return np.full((len(self.steps), len(self.ranks)), np.nan) if found is None else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """An edge of the explanation graph. ``kind``: structure, resource, learned or pattern; ``refused``: why unused."""

    source: str
    target: str
    kind: str
    weight: float
    says: str
    lag: int = 0
    statistic: float | None = None
    p_value: float | None = None
    samples: int = 0
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Ranked causes (best first; saving x confidence), victims and effects as symptoms, and the graph behind them.

    ``nodes`` maps a node id to {"label", "role": cause|link|effect|ruled_out, "rank", "metric"}.
    """

    kind: str  # straggler | hang | crash | numerics | memory | storage | launch | communication | none
    causes: Sequence[Cause] = ()
    symptoms: Sequence[Symptom] = ()
    nodes: Mapping[str, Mapping[str, AttributeValue]] = field(default_factory=dict)
    edges: Sequence[Edge] = ()
    verdict: str = ""
    anomalies: Sequence[Anomaly] = ()
