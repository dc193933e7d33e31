"""Bytes that a rank has written to its TCP sockets and the network has not taken: who sits behind a slow link.

In a ring every member's transfer takes as long as the slowest link, so times cannot say whose link it is. The send
queue can: data piles up in front of the link that does not take it. Read from ``/proc/<pid>/net/tcp`` (Linux), by
another process, without privileges for one's own processes.
"""

from __future__ import annotations

import os
from pathlib import Path

LINES_MAX = 20_000
"""A host with more sockets than this is not read: the table would cost more than the answer is worth."""

_STATE_ESTABLISHED = "01"


def _inodes(pid: int) -> set[str]:
    found = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _queues(pid: int, inodes: set[str]) -> list[int]:
    queues = []
    for name in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{name}")
        if not path.exists():
            continue
        with path.open(encoding="ascii", errors="replace") as table:
            for number, line in enumerate(table):
                if number > LINES_MAX:
                    break
                fields = line.split()
                if len(fields) > 9 and fields[9] in inodes and fields[3] == _STATE_ESTABLISHED:
                    queues.append(int(fields[4].split(":")[0], 16))
    return queues


def sample(pid: int) -> list[tuple[str, float, str]]:
    """``(metric, value, label)`` rows: ``system.network.send_queue`` in bytes, summed over the process's TCP sockets.

    Empty where the process is gone, is not ours, or has no TCP sockets.
    """
    try:
        inodes = _inodes(pid)
        queues = _queues(pid, inodes) if inodes else []
    except (OSError, ValueError):
        return []
    return [("system.network.send_queue", float(sum(queues)), "")] if queues else []
