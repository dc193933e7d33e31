"""Generic mode: any table of metrics with an onset -> ranked causes, so that the engine can be judged on public data.

A column is named ``entity`` or ``entity|metric`` or ``entity|metric|statistic``. Each column gets a one-sided score:
how far it left its own past, against a floored scale and against how much columns of the same kind moved in that
time (the double difference of the engine, with columns of one kind as peers). Where the symptom is a column, effect
size decides as it does for ranks: which share of the symptom's loss (seconds, failures; times the entity's requests
where they are known) does the entity's own loss explain? An entity whose own causes explain it is explained away.
Known structure first: without a graph only scores rank, and associations learned from the table break ties alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from lanterne.causal import granger, stats
from lanterne.causal.finding import number
from lanterne.causal.patterns import SERVICE

Table = Mapping[str, NDArray[np.float64]]

FALLS = ("availab", "success", "hit_ratio", "hit_rate", "throughput", "health")
"""Words in a metric's name whose fall, not rise, is the trouble."""
EITHER = ("requests", "count", "invocations", "traffic", "load")
"""Words of metrics that say how much was asked for: a change either way is an effect more often than a cause."""
EITHER_WEIGHT = 0.25
RELATIVE_FLOOR = 0.02
DECAY = 0.97
EXPLAINED_AWAY = 0.6
ACTIVE = 3.0  # sigmas from which an entity counts as anomalous
LEARN_ROWS_MIN = 60


@dataclass(frozen=True, slots=True)
class Ranked:
    """One entity. ``score`` in sigmas after explaining away; ``metric`` moved most; ``path`` leads to the symptom."""

    entity: str
    score: float
    metric: str
    sigmas: float
    says: str
    path: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()


def entity_of(column: str) -> str:
    """``payments|latency|p90`` -> ``payments``."""
    return column.split("|", 1)[0]


def _kind(column: str) -> str:
    return column.split("|", 1)[1] if "|" in column else ""


def _direction(column: str) -> int:
    name = _kind(column).lower() or column.lower()
    if any(word in name for word in FALLS):
        return -1
    return 0 if any(word in name for word in EITHER) else 1


def column_scores(table: Table, onset: int) -> dict[str, float]:
    """Signed-by-trouble sigmas of each column from row ``onset`` on, against its past and the columns of its kind.

    Columns of one kind (same text after the first ``|``) must move apart from each other to count: traffic that
    rises for everybody moves all of them.
    """
    raw: dict[str, float] = {}
    for name, values in table.items():
        raw[name] = _own_score(np.asarray(values, np.float64), onset, _direction(name))
    kinds: dict[str, list[str]] = {}
    for name in raw:
        kinds.setdefault(_kind(name), []).append(name)
    out = {}
    for names in kinds.values():
        known = np.array([raw[n] for n in names if np.isfinite(raw[n])])
        common = float(np.median(known)) if len(known) >= 8 else 0.0
        peers = float(stats.MAD_TO_SIGMA * np.median(np.abs(known - common))) if len(known) >= 8 else 1.0
        for n in names:
            score = raw[n] - max(common, 0.0)
            out[n] = 0.0 if not np.isfinite(score) else max(0.0, score) / max(peers, 1.0)
    return out


def _own_score(x: NDArray[np.float64], onset: int, direction: int) -> float:
    before, after = x[:onset], x[onset:]
    before, after = before[np.isfinite(before)], after[np.isfinite(after)]
    if len(before) < 2 or not len(after):
        return float("nan")
    level = float(np.median(before))
    scale = max(float(stats.floored_scale(before)), RELATIVE_FLOOR * abs(level), 1e-9)
    if len(before) < 8:  # two points tell little about noise: half the range of the past, at least
        scale = max(scale, 0.5 * float(np.ptp(before)))
    moved = after - level
    best = np.abs(moved) * EITHER_WEIGHT if direction == 0 else moved * direction
    return float(np.log1p(max(0.0, float(best.max()) / scale)) * np.log(10))


def estimated_onset(table: Table) -> int:
    """Row at which most columns change together, by the least-squares split of their standardised absolute change."""
    x = np.column_stack([np.asarray(v, np.float64) for v in table.values()])
    scale = stats.floored_scale(x)
    with np.errstate(invalid="ignore", divide="ignore"):
        z = np.abs(x - stats.median(x, 0)) / np.where(scale > 0, scale, np.nan)
    together = np.nan_to_num(np.array([stats.rows_mean(np.minimum(row, 10)) for row in z]))
    return max(2, int(stats.split(together[:, None], left=2, right=1).at[0]))


def rank_metrics(
    table: Table,
    onset: int | None = None,
    graph: Sequence[tuple[str, str]] | None = None,
    *,
    symptom: str | None = None,
) -> list[Ranked]:
    """Rank the entities of a metric table as causes, best first.

    ``table``: column -> values ``[rows]``, all of one length. ``onset``: first abnormal row; None = estimated.
    ``graph``: edges (cause, effect) between entities; a service that is called is the cause of its caller.
    ``symptom``: entity, or column of it, from which the search starts; entities that do not reach it rank last.
    Raises ValueError on columns of different lengths or an onset that leaves fewer than two rows before it.
    """
    lengths = {len(v) for v in table.values()}
    if len(lengths) != 1:
        raise ValueError(f"metric table: columns have {sorted(lengths)} rows; they must all have one length")
    rows = lengths.pop()
    at = estimated_onset(table) if onset is None else onset
    if not 2 <= at < rows:
        raise ValueError(f"metric table: onset {at} of {rows} rows; at least two rows before and one after are needed")
    columns = column_scores(table, at)
    entities: dict[str, list[str]] = {}
    for name in columns:
        entities.setdefault(entity_of(name), []).append(name)
    own = {e: _entity_score([columns[n] for n in names]) for e, names in entities.items()}
    if symptom in table:
        own = _explained_loss(table, at, str(symptom), list(entities), own)
        symptom = entity_of(str(symptom))
    known = nx.DiGraph(list(graph or ()))
    known.add_nodes_from(entities)
    out = [_ranked(e, names, own, columns, known, symptom) for e, names in entities.items()]
    ties = _association(table, symptom, rows) if graph is None else {}
    return sorted(out, key=lambda r: (-round(r.score, 6), -ties.get(r.entity, 0.0), r.entity))


def _entity_score(scores: list[float]) -> float:
    """Half the largest column, half the mean of the three largest: one odd percentile is less than all of them."""
    top = sorted(scores, reverse=True)[:3]
    return 0.5 * top[0] + 0.5 * sum(top) / len(top)


def _explained_loss(
    table: Table, onset: int, symptom: str, entities: list[str], own: Mapping[str, float]
) -> dict[str, float]:
    """Score of each entity by the share of the symptom's loss that its own column of that kind explains.

    The loss of a row is the change for the worse, times the entity's requests where the table has them (added
    seconds, failed requests), averaged over the rows in which the symptom suffers, weighted by how much.
    The scale 0..10 is that of the sigmas; the entity's own score breaks ties.
    """
    kind, direction = _kind(symptom), _direction(symptom) or 1
    weight = np.maximum(direction * _change(table[symptom], onset), 0.0)
    if weight.sum() <= 0:
        return dict(own)

    def loss(entity: str) -> float:
        values = table.get(f"{entity}|{kind}")
        if values is None:
            return 0.0
        asked = next((v for n, v in table.items() if entity_of(n) == entity and _kind(n).startswith("requests")), None)
        volume = np.ones(len(weight)) if asked is None else np.nan_to_num(np.asarray(asked, np.float64)[onset:])
        return float((weight * direction * _change(values, onset) * volume).sum() / weight.sum())

    whole = loss(entity_of(symptom))
    if whole <= 0:
        return dict(own)
    return {e: 10 * min(1.0, max(0.0, loss(e)) / whole) + 1e-3 * min(own[e], 10.0) for e in entities}


def _change(values: NDArray[np.float64], onset: int) -> NDArray[np.float64]:
    """Rows from the onset on, less the median before it; unknown counts as no change."""
    x = np.asarray(values, np.float64)
    before = x[:onset][np.isfinite(x[:onset])]
    return np.nan_to_num(x[onset:] - (float(np.median(before)) if len(before) else np.nan))


def _ranked(
    entity: str,
    names: list[str],
    own: Mapping[str, float],
    columns: Mapping[str, float],
    known: nx.DiGraph,
    symptom: str | None,
) -> Ranked:
    score = own[entity]
    causes = [own.get(p, 0.0) for p in known.predecessors(entity)]
    strongest = max(causes, default=0.0)
    if score > 0 and strongest >= ACTIVE:
        score *= 1 - EXPLAINED_AWAY * min(1.0, strongest / score)
    path: tuple[str, ...] = ()
    if symptom is not None and known.number_of_edges():
        if symptom in known and nx.has_path(known, entity, symptom):
            path = tuple(nx.shortest_path(known, entity, symptom))
            quiet = sum(own.get(p, 0.0) < ACTIVE and p in own for p in path[1:-1])
            score *= DECAY ** max(0, len(path) - 2) * 0.5**quiet
        else:
            score *= 0.1
    if entity == symptom:
        score *= 0.5
    metric = max(names, key=lambda n: columns[n])
    matched = tuple(p.name for p in SERVICE if any(w in _kind(metric).lower() for w in p.match))
    says = f"{metric} moved by {number(columns[metric])} sigma beyond its past and its peers"
    if strongest >= ACTIVE and known.number_of_edges():
        says += f"; a cause of it moved by {number(strongest)} sigma, which explains part of it"
    return Ranked(entity, float(score), metric, float(columns[metric]), says, path, matched)


def _association(table: Table, symptom: str | None, rows: int) -> dict[str, float]:
    """Mutual information with the symptom's strongest column, for ties only; needs enough rows."""
    if symptom is None or rows < LEARN_ROWS_MIN:
        return {}
    target = next((np.asarray(v, np.float64) for n, v in table.items() if entity_of(n) == symptom), None)
    if target is None:
        return {}
    out: dict[str, float] = {}
    for name, values in table.items():
        mi = granger.mutual_information_pair(np.asarray(values, np.float64), target)
        out[entity_of(name)] = max(out.get(entity_of(name), 0.0), mi)
    return out
