"""What the shipper asks the backend for: the time, the key that commands are signed with, and commands.

Nothing is trusted here: commands are written down as they came (bounded) and verified by rank 0.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lanterne import limits
from lanterne.clock import Clock
from lanterne.collector import clock_sync
from lanterne.collector.clock_sync import ClockSync, Snapshot
from lanterne.collector.export import Transport

COMMAND_POLL_S = 0.5
ROUND_WAIT_MAX_S = 30.0
INBOX_BYTES_MAX = 4 << 20
_SEEN_MAX = 4_096


class Relay:
    """Talks to ``/api/v1`` of the backend; ``run`` is the body of its own thread.

    ``snapshots`` fills with clock readings for the main loop to turn into events. Commands are asked for
    only while ``takes_commands()`` says so (the node that holds rank 0).
    """

    def __init__(
        self,
        transport: Transport,
        endpoint: str,
        folder: Path,
        job: str,
        attempt: int,
        clock: Clock,
        *,
        takes_commands: Callable[[], bool],
        pinned_key: str = "",
    ) -> None:
        self._transport, self._base = transport, endpoint.rstrip("/") + "/api/v1"
        self._folder, self._job, self._attempt = folder / "commands", quote(job, safe=""), attempt
        self._takes_commands, self._pinned = takes_commands, pinned_key
        self._sync = ClockSync(lambda: self._get("/clock"), clock)
        self._seen: deque[str] = deque(maxlen=_SEEN_MAX)
        self.snapshots: deque[Snapshot] = deque(maxlen=16)

    def _get(self, path: str) -> bytes:
        status, _, body = self._transport.request("GET", self._base + path)
        if status != 200:
            raise OSError(f"{path}: HTTP {status}")
        return body

    def _get_json(self, path: str) -> Any:
        try:
            return json.loads(self._get(path))
        except (OSError, ValueError, RecursionError):
            return None

    def sync_clock(self) -> bool:
        """One round of exchanges; True when it gave a reading."""
        found = self._sync.round()
        if found is not None:
            self.snapshots.append(found)
        return found is not None

    def fetch_key(self) -> bool:
        """Write ``commands/key.json`` once; True when it stands there. A key already there is never replaced."""
        path = self._folder / "key.json"
        if path.exists():
            return True
        found = (
            {"public_key": self._pinned, "source": "settings"}
            if self._pinned
            else self._get_json(f"/jobs/{self._job}/key")
        )
        if not isinstance(found, dict) or len(json.dumps(found)) > limits.ATTRIBUTE_VALUE_BYTES_MAX:
            return False
        return self._write_new(path, json.dumps(found))

    def _write_new(self, path: Path, text: str) -> bool:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(text, encoding="utf-8")
            os.link(temporary, path)  # unlike rename, fails when another shipper was first
            temporary.unlink()
        except OSError:
            return path.exists()
        return True

    def poll_commands(self) -> int:
        """Append commands not seen before to ``commands/inbox.jsonl``; returns how many."""
        found = self._get_json(f"/jobs/{self._job}/commands?state=pending&attempt={self._attempt}")
        items = found.get("items") if isinstance(found, dict) else found
        if not isinstance(items, list):
            return 0
        if not self._seen:
            self._seen.extend(self._known())
        lines = []
        for item in items[:100]:
            identifier = item.get("id") if isinstance(item, dict) else None
            if isinstance(identifier, str) and identifier not in self._seen:
                self._seen.append(identifier)
                lines.append(json.dumps(item, separators=(",", ":")) + "\n")
        return self._append(lines)

    def _append(self, lines: list[str]) -> int:
        path = self._folder / "inbox.jsonl"
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                if file.tell() + sum(map(len, lines)) > INBOX_BYTES_MAX:
                    return 0
                file.write("".join(lines))
        except OSError:
            return 0
        return len(lines)

    def _known(self) -> list[str]:
        """Ids already in the inbox: a restarted shipper does not write them again."""
        try:
            lines = (self._folder / "inbox.jsonl").read_text(encoding="utf-8").splitlines()
            return [str(json.loads(line).get("id", "")) for line in lines]
        except (OSError, ValueError, AttributeError):
            return []

    def run(self, stop: threading.Event) -> None:
        """Clock each ``clock_sync.PERIOD_S``, commands each ``COMMAND_POLL_S``; slower while nobody answers."""
        turn, wait_s = 0, COMMAND_POLL_S
        while not stop.wait(wait_s):
            wanted = self._takes_commands()
            if turn % round(clock_sync.PERIOD_S / COMMAND_POLL_S) == 0 or not wanted:
                answered = self.sync_clock()
                wait_s = COMMAND_POLL_S if answered else min(ROUND_WAIT_MAX_S, wait_s * 2)
                if not answered:
                    continue  # nobody there: ask the time again first, and later
            if wanted and self.fetch_key():
                self.poll_commands()
            if not wanted:
                wait_s = clock_sync.PERIOD_S
            turn += 1
