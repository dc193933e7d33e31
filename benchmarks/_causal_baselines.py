"""What the causal engine is measured against: each baseline gives the rank that it blames, or the entities in order.

The rank baselines are given the true onset; the engine is not. Granger and mutual information are the engine's own
kernels, so that only what is made of them differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from lanterne.causal import Facts, granger, stats
from lanterne.causal.generic import entity_of

Floats = NDArray[np.float64]
SERIES = ("step_ms", "busy_ms", "wait_ms", "lateness_ms", "data_wait_ms", "forward_ms", "backward_ms", "gc_ms")


def _halves(x: Floats, onset: int) -> tuple[Floats, Floats]:
    return x[20:onset], x[onset:]


def slowest_rank(facts: Facts, onset: int) -> int:
    """The longest step as the host sees it: the largest mean of the phases after the onset."""
    total = sum(facts.get(k) for k in ("data_wait_ms", "forward_ms", "backward_ms"))
    return facts.ranks[int(np.nanmean(np.asarray(total)[onset:], 0).argmax())]


def _z(facts: Facts, onset: int) -> Floats:
    """Largest absolute z of each (series, rank) after the onset, ``[series, ranks]``."""
    out = []
    for name in SERIES:
        before, after = _halves(facts.get(name), onset)
        scale = np.maximum(before.std(0), 1e-9)
        out.append(np.abs((after - before.mean(0)) / scale).mean(0) if len(after) else np.zeros(len(facts.ranks)))
    return np.nan_to_num(np.array(out))


def max_z(facts: Facts, onset: int) -> int:
    return facts.ranks[int(_z(facts, onset).max(0).argmax())]


def first_deviation(facts: Facts, onset: int) -> int:
    """The rank with the earliest |z| > 5 in any series; ties by size."""
    first = np.full(len(facts.ranks), 1 << 30)
    for name in SERIES:
        x = facts.get(name)
        before, after = _halves(x, onset)
        if not len(after):
            continue
        out = np.abs(after - before.mean(0)) > 5 * np.maximum(before.std(0), 1e-9)
        first = np.minimum(first, np.where(out.any(0), out.argmax(0), 1 << 30))
    tied = np.flatnonzero(first == first.min())
    return facts.ranks[int(tied[_z(facts, onset).max(0)[tied].argmax()])]


def _learned(facts: Facts, onset: int) -> tuple[Floats, Floats, list[int]] | None:
    """Granger p and mutual information over the 60 most anomalous series, and the rank of each."""
    z = _z(facts, onset)
    order = np.argsort(-z, axis=None)[:60]
    rows, columns = np.unravel_index(order, z.shape)
    stop = min(len(facts.steps), onset + 60)
    x = np.column_stack(
        [facts.get(SERIES[r])[max(20, onset - 60) : stop, c] for r, c in zip(rows, columns, strict=True)]
    )
    if len(x) < 20 or not np.isfinite(x).all():
        return None
    return granger.granger_all(x, 3).p_value, granger.mutual_information(x), [facts.ranks[c] for c in columns]


def granger_pagerank(facts: Facts, onset: int) -> int:
    learned = _learned(facts, onset)
    if learned is None:
        return max_z(facts, onset)
    stands = granger.benjamini_hochberg(learned[0], 0.05)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(learned[2])))
    graph.add_edges_from((int(i), int(j)) for i, j in np.argwhere(stands))  # effect -> cause
    score = nx.pagerank(graph)
    return learned[2][max(score, key=lambda k: score[k])]


def granger_mi_walk(facts: Facts, onset: int) -> int:
    """The plain walk: edge weight (1 - p) x normalised MI, decay 0.95 a hop, from the most anomalous series."""
    learned = _learned(facts, onset)
    if learned is None:
        return max_z(facts, onset)
    p, mi, ranks = learned
    weight = np.where(p < 0.05, (1 - p) * np.sqrt(1 - np.exp(-2 * mi)), 0.0)
    reach = np.zeros(len(ranks))
    reach[0] = 1.0
    for _ in range(4):
        reach = np.maximum(reach, (weight * reach[:, None]).max(0) * 0.95)
    reach[0] = 0.0
    return ranks[int(reach.argmax())] if reach.max() > 0.7 else ranks[0]


BASELINES: dict[str, Callable[[Facts, int], int]] = {
    "slowest_rank": slowest_rank,
    "max_z": max_z,
    "first_deviation": first_deviation,
    "granger_pagerank": granger_pagerank,
    "granger_mi_walk": granger_mi_walk,
}


# --- metric tables of services: entities, most suspect first ---------------------------------------


def _before_after(values: Floats, onset: int) -> tuple[Floats, Floats]:
    x = np.asarray(values, np.float64)
    before, after = x[:onset], x[onset:]
    return before[np.isfinite(before)], after[np.isfinite(after)]


def _by_entity(scores: Mapping[str, float]) -> list[str]:
    best: dict[str, float] = {}
    for name, score in scores.items():
        best[entity_of(name)] = max(best.get(entity_of(name), -np.inf), score)
    return sorted(best, key=lambda e: (-best[e], e))


def _ordered(scores: Mapping[str, float], table: Mapping[str, Floats]) -> list[str]:
    entities = set(map(entity_of, table))
    return sorted(entities, key=lambda e: (-scores.get(e, -np.inf), e))


def n_sigma(table: Mapping[str, Floats], onset: int) -> dict[str, float]:
    """Largest |z| after the onset, scale = standard deviation before it (0 where that is 0)."""
    out = {}
    for name, values in table.items():
        before, after = _before_after(values, onset)
        scale = float(before.std()) if len(before) else 0.0
        out[name] = float(np.abs(after - before.mean()).max() / scale) if scale > 0 and len(after) else 0.0
    return out


def baro(table: Mapping[str, Floats], onset: int) -> dict[str, float]:
    """BARO (FSE 2024): largest (x - median) / IQR after the onset; an IQR of 0 counts as 1."""
    out = {}
    for name, values in table.items():
        before, after = _before_after(values, onset)
        if not len(before) or not len(after):
            out[name] = 0.0
            continue
        q1, q2, q3 = np.quantile(before, [0.25, 0.5, 0.75])
        out[name] = float(((after - q2) / ((q3 - q1) or 1.0)).max())
    return out


def robust_z(table: Mapping[str, Floats], onset: int, symptom: str) -> dict[str, float]:
    """Mean (x - median) / scale after the onset by entity, in the symptom's own metric (any statistic of it), for the
    worse; the scale has the floor of ``stats.floored_scale``. The best of eight variants tried on PetShop."""
    kind = symptom.split("|")[1] if "|" in symptom else ""
    sign = -1.0 if "availab" in kind else 1.0
    out: dict[str, float] = {}
    for name, values in table.items():
        before, after = _before_after(values, onset)
        if (kind and kind not in name.split("|")[1:]) or len(before) < 2 or not len(after):
            continue
        z = sign * (after - np.median(before)) / max(float(stats.floored_scale(before)), 1e-9)
        out[entity_of(name)] = max(out.get(entity_of(name), -np.inf), float(z.mean()))
    return out


def traversal(table: Mapping[str, Floats], onset: int, edges: Sequence[tuple[str, str]], symptom: str) -> list[str]:
    """Walk the known call graph from the symptom to callees that are anomalous (:func:`robust_z` > 3, the best of 72
    variants tried on PetShop by Avg@5); those without an anomalous callee come first."""
    scores = dict.fromkeys(map(entity_of, table), -np.inf) | robust_z(table, onset, symptom)
    graph = nx.DiGraph(edges)
    seen, frontier = {entity_of(symptom)}, [entity_of(symptom)]
    while frontier:
        node = frontier.pop(0)
        found = [c for c in graph.predecessors(node) if scores.get(c, 0.0) > 3.0] if node in graph else []
        frontier += [c for c in found if c not in seen]
        seen.update(found)
    leaf = {n for n in seen if n in graph and not seen & set(graph.predecessors(n))}
    return sorted(scores, key=lambda e: (e not in seen, e not in leaf, -scores[e], e))


TABLE_BASELINES: dict[str, Callable[[Mapping[str, Floats], int, Sequence[tuple[str, str]], str], list[str]]] = {
    "n_sigma": lambda table, onset, edges, symptom: _by_entity(n_sigma(table, onset)),
    "baro": lambda table, onset, edges, symptom: _by_entity(baro(table, onset)),
    "robust_z": lambda table, onset, edges, symptom: _ordered(robust_z(table, onset, symptom), table),
    "traversal": traversal,
}
