"""What policies did in a job, kept in the control store: uses, tries, failures, and what is being verified."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lanterne.backend.policy.decide import History
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.records import rfc3339

NAME = "ledger"
SWITCH = "stop-switch"
USES_MAX = 1_000
TRIES_MAX = 2


@dataclass
class Book:
    """``open``: actions not yet judged (plain data).

    ``outcomes``: incident -> open, verified, done, undone, failed, refused, unjudged.
    """

    job: str
    used: dict[str, list[int]] = field(default_factory=dict)
    tries: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    open: list[dict[str, Any]] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    stopped: str = ""
    _stored: str = ""

    @classmethod
    def load(cls, control: ControlStore, job: str) -> Book:
        body = control.policy_state(NAME, job)
        switch = control.policy_state(SWITCH, job) or control.policy_state(SWITCH, "*")
        known = {k: body[k] for k in ("used", "tries", "failed", "open", "outcomes") if k in body}
        found = cls(job=job, stopped=str(switch.get("stopped", "")), **known)
        found._stored = found._text()
        return found

    def _body(self) -> dict[str, Any]:
        keep = {"used": self.used, "tries": self.tries, "failed": self.failed}
        return keep | {"open": self.open, "outcomes": self.outcomes}

    def _text(self) -> str:
        return json.dumps(self._body(), sort_keys=True, default=str)

    def save(self, control: ControlStore) -> None:
        """Write it down where it changed since it was read."""
        if self._text() == self._stored:
            return
        control.save_policy_state(NAME, self.job, self._body())
        self._stored = self._text()
        for policy, uses in self.used.items():
            broken = [s for s, n in self.tries.items() if s.startswith(f"{policy}/") and n >= TRIES_MAX]
            state = {"used": len(uses), "breaker": "open" if broken else "closed", "last": rfc3339(uses[-1])}
            control.save_policy_state(policy, self.job, state)

    def history(self) -> History:
        return History(
            used=self.used,
            tries=self.tries,
            failed=self.failed,
            open=[entry["signature"] for entry in self.open],
            stopped=self.stopped,
        )

    def acted(self, policy: str, signature: str, now_ns: int) -> None:
        self.used[policy] = [*self.used.get(policy, []), now_ns][-USES_MAX:]
        self.tries[signature] = self.tries.get(signature, 0) + 1

    def close(self, entries: Iterable[dict[str, Any]], outcome: str) -> None:
        for entry in entries:
            self.open.remove(entry)
            self.outcomes[entry["incident"]] = outcome
            if outcome in {"undone", "failed"}:
                self.failed[entry["signature"]] = self.failed.get(entry["signature"], 0) + 1


def stop(control: ControlStore, actor: str, *, job: str = "*", on: bool = True) -> None:
    """Pull (or release) the stop switch: no policy acts in the job (``*``: in any) while it is pulled."""
    control.save_policy_state(SWITCH, job, {"stopped": f"pulled by {actor}"} if on else {})
    control.audit(actor, "policy.stopped" if on else "policy.released", job)
