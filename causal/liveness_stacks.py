"""Stacks alone: most ranks stand in a collective, and a few stand elsewhere; those are whom the rest waits for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from lanterne.causal.facts import Facts
from lanterne.causal.liveness import Wait
from lanterne.causal.words import Words, evidence
from lanterne.nouns import Cause

FRAMES = 8  # innermost frames that tell where a thread stands
SURE_MAX = 0.7  # one look at a job: a second one may show it elsewhere
_COLLECTIVE = re.compile(
    r"(?:all_?reduce|all_?gather\w*|reduce_scatter\w*|all_?to_?all\w*|barrier|broadcast\w*|monitored_barrier"
    r"|_all_gather_base|gather_object|scatter_object_list|wait_for_process_group|nccl\w+)\b[^/]*\(",
    re.IGNORECASE,
)


def spoken(facts: Facts, words: Words, explain_root: Callable[..., list[Cause]]) -> list[Cause]:
    """Causes from the ranks whose stacks are not in a collective, where the stacks of more than half are in one."""
    waiting: dict[int, str] = {}
    others: list[int] = []
    for e in facts.events:
        if e.name != "stack" or e.rank < 0 or not e.body or e.rank in waiting or e.rank in others:
            continue
        frames = e.body.splitlines()[:FRAMES]
        call = next((f for f in frames if _COLLECTIVE.match(f.strip())), "")
        if call:
            waiting[e.rank] = call
        else:
            others.append(e.rank)
    if not others or len(waiting) <= len(others):
        return []
    op = next(iter(waiting.values())).split(" (")[0].strip()
    wait = Wait("", -1, op, 0, tuple(sorted(waiting)), tuple(sorted(others)), source="stacks")
    who = ",".join(map(str, wait.waiters[:16]))
    says = f"the stacks of ranks {who} stand in {op}; not that of {','.join(map(str, wait.absent[:16]))}"
    proof = [evidence(says, value=float(len(waiting)), unit="ranks", ref="stacks")]
    out: list[Cause] = []
    for rank in wait.absent[:4]:
        out += explain_root(facts, words, rank, wait, proof, alone=len(others) == 1)
    again = "a second dump some seconds later: the same frames prove that it stands still"
    return [replace(c, confidence=min(c.confidence, SURE_MAX), needs=(*c.needs, again)) for c in out]
