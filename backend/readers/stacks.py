"""Stacks of a live or dead process: py-spy dumps and faulthandler output, one file a rank."""

from __future__ import annotations

import re

from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.source import Source, lines

_PROCESS = re.compile(r"^Process (?P<pid>\d+): (?P<command>.*)$")
_THREAD = re.compile(r'^Thread (?P<id>\S+)(?: \((?P<state>[\w+]+)\))?(?:: "(?P<name>[^"]*)")?$')
_FAULT = re.compile(r"^(?P<current>Current thread|Thread) 0x[0-9a-f]+(?: \[[^\]]*\])? \(most recent call first\):")
_FRAME = re.compile(r"^\s+(?P<function>[^\s(]\S*) \((?P<file>[^)]*)\)$")
_FILE = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?: in (?P<function>.*))?$')
_RANK = re.compile(r"\bRANK[=:]\s?(\d+)|--rank[= ](\d+)|\brank[ _=:]?(\d+)\b", re.IGNORECASE)
FRAMES_MAX = 64


def is_stacks(source: Source) -> bool:
    """A py-spy dump (``Process N: …`` then ``Thread …``) or a faulthandler dump."""
    head = source.text_head
    return bool(
        re.search(r"^Process \d+: ", head, re.MULTILINE) and re.search(r"^Thread \S+ \(", head, re.MULTILINE)
    ) or bool(re.search(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):", head, re.MULTILINE))


def read(source: Source, gather: Gather) -> int:
    """One fact ``stack`` a process: frames of its main thread, and who holds the interpreter's lock."""
    threads: list[tuple[str, str, list[str]]] = []
    rank, command = source.rank, ""
    found = 0

    def close() -> None:
        nonlocal found, threads
        if threads:
            _emit(source, gather, rank, command, threads)
            found += 1
        threads = []

    for _, line in lines(source):
        process = _PROCESS.match(line)
        if process:
            close()
            command = process["command"]
            said = _RANK.search(command)
            rank = int(next(g for g in said.groups() if g)) if said else source.rank
            continue
        thread = _THREAD.match(line) or _FAULT.match(line)
        if thread:
            groups = thread.groupdict()
            main = groups.get("name") == "MainThread" or groups.get("current") == "Current thread"
            threads.append((groups.get("name") or ("MainThread" if main else ""), groups.get("state") or "", []))
            continue
        frame = _FRAME.match(line) or _FILE.match(line)
        if frame and threads and len(threads[-1][2]) < FRAMES_MAX:
            place = frame.groupdict()
            threads[-1][2].append(
                f"{place.get('function') or '?'} ({place['file']}{':' + place['line'] if place.get('line') else ''})"
            )
    close()
    if found:
        gather.sources.add("stacks")
    return found


def _emit(source: Source, gather: Gather, rank: int, command: str, threads: list[tuple[str, str, list[str]]]) -> None:
    main = next((t for t in threads if t[0] == "MainThread"), threads[0])
    holder = next((t for t in threads if "gil" in t[1]), None)
    gather.event(
        "stack",
        rank=rank,
        body="\n".join(main[2]),
        ref=source.name,
        gil=holder is not None,
        holder=holder[0] if holder else "",
        others_waiting=holder is not None and len(threads) > 1,
        command=command[:200],
        threads=len(threads),
    )
