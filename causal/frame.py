"""One window of facts, prepared once for all stages: roles, hosts, usable steps, peer differences.

The in-step graph of a barrier-synchronised job is known, so nothing is learned here: a rank is compared
with the peers that do the same work (same pipeline stage), now and before. That *double difference* removes
what the whole job shares (learning rate, batch size, checkpoints) and what a rank always had.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lanterne.causal import stats
from lanterne.causal.facts import Facts, Place
from lanterne.causal.stats import Bools, Floats, Ints

ROLE_PEERS_MIN = 3
"""Fewer ranks in a role than this have no median worth the name; the whole job is the reference then."""

WARM_UP_STEPS_MIN, WARM_UP_STEPS_MAX = 5, 20
LONG_PHASE_MS = 1.0
TOLD_SHARE = 0.7
"""Share of the ranks that usually tell a step without which its row is not judged."""


@dataclass(slots=True)
class Frame:
    """Prepared facts. ``usable`` [T]: neither warm-up nor a step with checkpoint, evaluation or compilation."""

    facts: Facts
    stage: Ints  # [R] pipeline stage
    host: Ints  # [R] index into hosts
    hosts: tuple[str, ...]
    switch: Ints
    switches: tuple[str, ...]
    usable: Bools
    long_steps: Bools  # [T] with a checkpoint, evaluation or compilation
    step_ms: Floats  # [T] median over ranks
    base_step_ms: float
    parallel: bool  # pipeline or tensor parallel: lateness alone does not tell the culprit
    locator: str  # the series that tells who is late: lateness_ms, busy_ms, phases or ""
    own: Floats  # [T, R] own time beyond the role peers, ms
    _peer_cache: dict[str, Floats] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.facts.ranks

    def step(self, row: int) -> int:
        """Step number of a row."""
        return int(self.facts.steps[min(max(row, 0), len(self.facts.steps) - 1)])

    def beyond_peers(self, name: str, column: int) -> Floats:
        """Series ``name`` of one rank less the median of its role peers, ``[T]``."""
        key = f"{name}/{column}"
        found = self._peer_cache.get(key)
        if found is None:
            x = self.facts.series.get(name)
            nothing = np.full(len(self.facts.steps), np.nan)
            found = nothing if x is None else x[:, column] - self._reference(name, x, column)
            self._peer_cache[key] = found
        return found

    def _reference(self, name: str, x: Floats, column: int) -> Floats:
        """Median of the role peers, kept for the other ranks of the role."""
        if x.shape[1] < ROLE_PEERS_MIN:
            return self._median_of_peers(x, column)
        key = f"{name}|{self.stage[column]}"
        if key not in self._peer_cache:
            self._peer_cache[key] = self._median_of_peers(x, column)
        return self._peer_cache[key]

    def _median_of_peers(self, x: Floats, column: int) -> Floats:
        peers = np.flatnonzero(self.stage == self.stage[column])
        if len(peers) < ROLE_PEERS_MIN:
            peers = np.arange(x.shape[1])
        if len(peers) < ROLE_PEERS_MIN:
            others = np.delete(peers, np.flatnonzero(peers == column))
            return stats.median(x[:, others], 1) if len(others) else np.zeros(len(x))
        return stats.median(x[:, peers], 1)


def slim(x: Floats) -> Floats:
    """Half the memory for large windows: medians and sums of milliseconds do not need float64."""
    return x.astype(np.float32) if x.size > 1 << 17 else x


def _labels(names: list[str]) -> tuple[Ints, tuple[str, ...]]:
    seen = sorted(set(names))
    index = {n: i for i, n in enumerate(seen)}
    return np.array([index[n] for n in names], np.int64), tuple(seen)


def long_rows(facts: Facts) -> Bools:
    """``[T]``: steps that hold a checkpoint, an evaluation or a compilation on any rank."""
    rows = np.zeros(len(facts.steps), bool)
    for name in ("checkpoint_ms", "eval_ms", "compile_ms"):
        x = facts.series.get(name)
        if x is not None and x.size:
            rows |= (np.where(np.isfinite(x), x, 0.0) > LONG_PHASE_MS).any(1)
    return rows


def peers_removed(x: Floats, stage: Ints, base: Floats | None = None) -> Floats:
    """``x - base`` less the median of the role peers; ``base`` [R] is what each rank usually has."""
    y = x if base is None else x - base
    if len(np.unique(stage)) == x.shape[1] or x.shape[1] < ROLE_PEERS_MIN:
        stage = np.zeros_like(stage)
    out = np.empty_like(y)
    for s in np.unique(stage):
        role = stage == s
        if role.sum() == 2 and x.shape[1] == 2:
            pair = y[:, role]
            out[:, role] = pair - pair[:, ::-1]
        elif role.sum() < ROLE_PEERS_MIN:
            out[:, role] = y[:, role] - stats.median(y, 1)[:, None]
        else:
            out[:, role] = y[:, role] - stats.median(y[:, role], 1)[:, None]
    return out


def _locator(facts: Facts, parallel: bool) -> tuple[str, Floats]:
    """Which series tells whose own time grew. Durations of collectives never do: the culprit's are the shortest."""

    def known(name: str) -> bool:
        x = facts.series.get(name)
        return x is not None and x.size > 0 and float(np.isfinite(x).mean()) > 0.4

    order = ("busy_ms", "lateness_ms") if parallel else ("lateness_ms", "busy_ms")
    for name in order:
        if known(name) and not (parallel and name == "lateness_ms"):
            return name, facts.series[name]
    parts = [facts.series[n] for n in ("data_wait_ms", "h2d_ms", "forward_ms") if known(n)]
    if parts:
        longest = max(parts, key=lambda p: float(np.nanmedian(p)))  # where that one was not told, the sum says nothing
        total = np.sum([np.nan_to_num(p) for p in parts], axis=0)
        return "phases", np.where(np.isfinite(longest), total, np.nan)
    return "", np.full((len(facts.steps), len(facts.ranks)), np.nan)


def _telling(facts: Facts) -> float:
    """Share of the ranks that tell a step, at its best: ranks without any step of their own do not count."""
    known = np.isfinite(facts.series["step_ms"])
    return float(known.any(0).mean()) if known.size else 0.0


def warm_up_rows(facts: Facts) -> int:
    """How many leading rows are warm-up; none when the window does not start with the run."""
    total = len(facts.steps)
    if not total or int(facts.steps[0]) > WARM_UP_STEPS_MAX:
        return 0
    return min(total // 3, max(WARM_UP_STEPS_MIN, min(WARM_UP_STEPS_MAX, total // 12)))


def prepare(facts: Facts) -> Frame:
    """Build the frame of ``facts``; series whose shape is not ``[steps, ranks]`` raise ValueError."""
    shape = (len(facts.steps), len(facts.ranks))
    for name, x in facts.series.items():
        if x.shape != shape:
            raise ValueError(f"series {name!r} has shape {x.shape}; facts say {shape} (steps, ranks)")
    places = [facts.places.get(r, Place()) for r in facts.ranks]
    stage = np.array([p.mesh.get("pp", 0) for p in places], np.int64)
    host, hosts = _labels([p.host for p in places])
    switch, switches = _labels([p.switch for p in places])
    mesh_size = {axis: len({p.mesh.get(axis, 0) for p in places}) for axis in ("pp", "tp", "cp")}
    parallel = any(n > 1 for n in mesh_size.values())
    long_steps = long_rows(facts)
    usable = ~long_steps
    usable[: warm_up_rows(facts)] = False
    if shape[1] and "step_ms" in facts.series:  # rows that most ranks have told: the rest is still on its way
        usable &= np.isfinite(facts.series["step_ms"]).mean(1) > TOLD_SHARE * _telling(facts)
    step_ms = stats.median(slim(facts.get("step_ms")), 1) if shape[1] else np.full(shape[0], np.nan)
    locator, x = _locator(facts, parallel)
    x = slim(x)
    own = peers_removed(x, stage) if locator and x.size else np.full(shape, np.nan)
    base = stats.rows_median(step_ms[usable][: max(20, int(usable.sum()) // 3)]) if usable.any() else float("nan")
    return Frame(
        facts=facts,
        stage=stage,
        host=host,
        hosts=hosts,
        switch=switch,
        switches=switches,
        usable=usable,
        long_steps=long_steps,
        step_ms=step_ms,
        base_step_ms=base,
        parallel=parallel,
        locator=locator,
        own=own,
    )
