"""Which samples did each rank see, and from which random state: seeds, samplers, fingerprints, equal losses."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import numpy as np

from lanterne.causal import words as w
from lanterne.causal.facts import FactEvent, Facts
from lanterne.causal.words import Words, cause, evidence
from lanterne.nouns import Cause
from lanterne.nouns import CauseCategory as C

EQUAL_STEPS_MIN = 3
OWN_WORK = ("tokens", "valid_labels", "samples", "grad_norm_local")
"""Series that differ between ranks with different batches."""


def candidates(facts: Facts, words: Words) -> list[Cause]:
    """At most one cause; the sampler's own words before what follows from them."""
    return _samplers(facts, words) or _fingerprints(words) or _equal_losses(facts)


def seeds(words: Words) -> list[Cause]:
    """A seed that all ranks share but one; seeds that follow the rank, or that all differ, are meant so."""
    said: dict[str, dict[int, FactEvent]] = defaultdict(dict)
    for e in words.said("seed"):
        if e.rank >= 0:
            kind = re.sub(r"\d+", "#", e.body.lower())
            said[kind].setdefault(e.rank, e)
    for rows in said.values():
        values = {r: int(w.number(e, "value")) for r, e in rows.items()}
        usual, count = Counter(values.values()).most_common(1)[0] if values else (0, 0)
        odd = sorted(r for r, v in values.items() if v != usual)
        if len(values) < 3 or not odd or 2 * count <= len(values):
            continue
        who = ",".join(map(str, odd[:8]))
        says = f"rank {who} starts from seed {values[odd[0]]}, the other {count} ranks from {usual}"
        proof = [evidence(says, value=float(values[odd[0]]), unit="1", baseline=float(usual), ref=rows[odd[0]].ref)]
        rank = odd[0] if len(odd) == 1 else None
        do = "seed model initialisation alike on all ranks; only data order may follow the rank"
        return [cause(C.SEED_MISMATCH, 0.85, proof, rank=rank, host=rows[odd[0]].host, do=do)]
    return []


_SPLIT = "print rank and world size inside the sampler; build it after init_process_group with both given explicitly"


def _samplers(facts: Facts, words: Words) -> list[Cause]:
    """Samplers that think they are alone, or that share one shard: every rank sees the same samples."""
    layout: dict[int, tuple[int, int]] = {}
    first: dict[int, FactEvent] = {}
    for e in words.said("sampler_layout"):
        if e.rank >= 0:
            layout.setdefault(e.rank, (int(w.number(e, "shard")), int(w.number(e, "replicas"))))
            first.setdefault(e.rank, e)
    world = max(facts.ranks_expected, len(facts.ranks))
    if len(layout) < 2 and not (layout and world > 1):
        return []
    shards = Counter(layout.values())
    alone = [r for r, (_, replicas) in layout.items() if replicas == 1]
    (shard, replicas), most = shards.most_common(1)[0]
    if len(alone) < 2 and (most < 2 or len(layout) > replicas):
        return []
    says = f"{max(most, len(alone))} ranks have a sampler for shard {shard} of {replicas}: they read the same samples"
    proof = [evidence(says, value=float(most), unit="ranks", baseline=1.0, ref=next(iter(first.values())).ref)]
    proof += [w.line(e) for e in list(first.values())[:2]]
    return [cause(C.DATA_ORDER, 0.9, proof, do=_SPLIT)]


def _fingerprints(words: Words) -> list[Cause]:
    prints: dict[int, dict[int, str]] = {}
    for e in words.said("batch_fingerprint"):
        if e.rank >= 0:
            prints.setdefault(e.step, {})[e.rank] = str(e.attributes.get("value"))
    full = [p for p in prints.values() if len(p) > 1]
    if not full or not all(len(set(p.values())) < len(p) for p in full):
        return []
    says = f"ranks share batch fingerprints in {len(full)} of {len(full)} steps"
    do = "seed one sampler for the job and split it by rank (DistributedSampler)"
    return [cause(C.DATA_ORDER, 0.9, [evidence(says, value=float(len(full)), unit="steps")], do=do)]


def _equal_losses(facts: Facts) -> list[Cause]:
    """Losses of several ranks, equal to the last digit: the same batches, unless the loss was reduced before."""
    table = facts.get("loss")
    spoke = np.isfinite(table).any(axis=0).sum() if table.size else 0
    if spoke < 2 or _reduced(facts):
        return []
    own = any(e.name == "local_loss" for e in facts.events)  # called a rank's own, so not reduced
    both = np.isfinite(table).sum(axis=1) >= 2
    rows = table[both]
    if len(rows) < EQUAL_STEPS_MIN or len(rows) <= 0.5 * len(table):
        return []
    spread = np.nanmax(rows, axis=1) - np.nanmin(rows, axis=1)
    known = rows[np.isfinite(rows)]
    if float(np.mean(np.round(known, 4) == known)) > 0.5:
        return []  # printed with few digits: the usual log of a reduced loss
    moving = float(np.nanstd(rows[:, 0])) > 0 if np.isfinite(rows[:, 0]).any() else True
    if not moving or float(np.mean(spread == 0.0)) <= 0.95:
        return []
    says = f"the per-rank losses of {len(rows)} steps are equal to the last digit on {len(facts.ranks)} ranks"
    do = "fingerprint the batch per rank: rank detection or the sampler is wrong"
    needs = ("batch fingerprints per rank: equal losses may also be a loss that was reduced before it was logged",)
    proof = [evidence(says, value=float(len(rows)), unit="steps")]
    return [cause(C.DATA_ORDER, 0.75 if own else 0.55, proof, do=do, needs=needs)]


def _reduced(facts: Facts) -> bool:
    """Was the loss reduced before it was logged? Not when it is called a rank's own.

    A log that gives the (reduced) gradient norm beside it gives the reduced loss too, and ranks that did different
    work cannot have one loss each to the last digit.
    """
    if any(e.name == "local_loss" for e in facts.events):
        return False
    for name in OWN_WORK:
        table = facts.get(name)
        full = np.isfinite(table).sum(axis=1) >= 2 if table.size else np.zeros(0, bool)
        if full.any() and (np.nanmax(table[full], axis=1) > np.nanmin(table[full], axis=1)).any():
            return True
    norm = facts.get("grad_norm")
    return bool(norm.size) and int(np.isfinite(norm).any(axis=0).sum()) > 1
