"""The vote log of one rank: JSON lines, on disk before anything that depends on them is said aloud.

Three kinds of line: ``vote`` (round, order, target step, yes or no), ``decision`` (commit or abort) and
``applied`` (step, before, after). A torn last line, the mark of a crash, is ignored on reading.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line of the log, oldest first; nothing where there is no log."""
    try:
        raw = path.read_bytes()
    except OSError:
        return
    for line in raw.split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry


class VoteLog:
    """Append-only; ``write`` returns after fsync. Raises OSError when the disk refuses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.last_round = -1
        self.last_counter = -1
        """Highest counter that this rank saw committed: nothing at or below it is carried out again."""
        counters: dict[int, int] = {}
        for entry in read(path):
            number = int(entry.get("round", -1))
            self.last_round = max(self.last_round, number)
            if "counter" in entry:
                counters[number] = int(entry["counter"])
            if entry.get("kind") == "decision" and entry.get("decision") == "commit":
                self.last_counter = max(self.last_counter, counters.get(number, -1))
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, **fields}, separators=(",", ":")) + "\n"
        data = ("\n" + line).encode()  # a torn line of an earlier life must not swallow this one
        if os.write(self._fd, data) != len(data):
            raise OSError(f"{self.path}: short write")
        os.fsync(self._fd)
        if kind == "vote":
            self.last_round = max(self.last_round, int(fields["round"]))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def decision_of(folder: Path, number: int) -> str | None:
    """What any rank of this node wrote down as the decision of round ``number``; None when none did."""
    for path in sorted(folder.glob("rank-*.wal")):
        for entry in read(path):
            if entry.get("kind") == "decision" and entry.get("round") == number:
                return str(entry["decision"])
    return None
