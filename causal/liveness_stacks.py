"""Hangs without a time-out in the logs: stacks, the ranks' own watchdogs, and NCCL's own count of operations.

Most ranks stand in one collective, and a few stand elsewhere or have not come to it: those are whom the rest waits for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from lanterne.causal.facts import Facts
from lanterne.causal.liveness import Wait
from lanterne.causal.words import Words, evidence, listed, number
from lanterne.nouns import Cause, EventName

FRAMES = 8  # innermost frames that tell where a thread stands
COUNT_SURE_MAX = 0.55
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
    says = f"the stacks of {listed(wait.waiters)} stand in {op}; not that of {listed(wait.absent)}"
    proof = [evidence(says, value=float(len(waiting)), unit="ranks", ref="stacks")]
    out: list[Cause] = []
    for rank in wait.absent[:4]:
        out += explain_root(facts, words, rank, wait, proof, alone=len(others) == 1)
    again = "a second dump some seconds later: the same frames prove that it stands still"
    return [replace(c, confidence=min(c.confidence, SURE_MAX), needs=(*c.needs, again)) for c in out]


def stalled(facts: Facts, words: Words, explain_root: Callable[..., list[Cause]]) -> list[Cause]:
    """What the ranks' own watchdogs say where no open call was told: most stand in a collective, a few do not."""
    told = {e.rank: str(e.attributes.get("waiting", "")).lower() for e in facts.events if e.name == EventName.STALL}
    ahead = sorted(r for r, waiting in told.items() if waiting == "true")
    behind = sorted(r for r, waiting in told.items() if waiting == "false")
    if not behind or len(ahead) <= len(behind):
        return []
    wait = Wait("", -1, "a collective", 0, tuple(ahead), tuple(behind), source="collectives")
    says = f"{listed(ahead)} stand in a collective; {listed(behind)} stand still outside of one"
    proof = [evidence(says, value=float(len(ahead)), unit="ranks", ref="stall")]
    return [c for rank in behind[:4] for c in explain_root(facts, words, rank, wait, proof, alone=len(behind) == 1)]


def counted(facts: Facts, words: Words, explain_root: Callable[..., list[Cause]]) -> list[Cause]:
    """Ranks whose last NCCL operation stands below the one at which all others stand; with three ranks or more."""
    last: dict[int, int] = {}
    name = ""
    for e in words.said("nccl_operation"):
        if e.rank >= 0 and int(number(e, "nranks")) == facts.ranks_expected:
            at = int(str(e.attributes.get("count", "0")), 16)
            if at >= last.get(e.rank, -1):
                last[e.rank], name = at, str(e.attributes.get("op", "")).lower()
    top = max(last.values(), default=0)
    behind = sorted(r for r, n in last.items() if n < top)
    ahead = sorted(r for r, n in last.items() if n == top)
    if len(last) < 3 or not behind or len(behind) * 3 > len(last) or words.said("training_done"):
        return []
    wait = Wait("", top, name, 0, tuple(ahead), tuple(behind), source="log")
    says = f"{listed(ahead)} reached NCCL operation {top}; {listed(behind)} only operation {last[behind[0]]}"
    proof = [evidence(says, value=float(last[behind[0]]), unit="operations", baseline=float(top), ref="log")]
    out: list[Cause] = []
    for rank in behind[:4]:
        out += explain_root(facts, words, rank, wait, proof, alone=len(behind) == 1)
    need = "that the logs reach to the end of the job: a log that is cut looks the same"
    return [replace(c, confidence=min(c.confidence, COUNT_SURE_MAX), needs=(*c.needs, need)) for c in out]
