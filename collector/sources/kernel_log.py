"""What the kernel says: GPU faults (Xid), the OOM killer, heat, links that went down, storage that does not answer.

Reads ``/dev/kmsg``, where only lines of the kernel itself count: a line that a program wrote there (its facility is
not the kernel's) is passed over. Any other path is followed as a text file (``dmesg --follow`` output, kern.log).
Events are named as the log reader names them (``log.xid``, ``log.host_oom``, …), so that both lead to one verdict.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lanterne import limits
from lanterne.clock import Clock, SystemClock
from lanterne.nouns import AttributeValue, CauseCategory

KMSG = "/dev/kmsg"
READ_BYTES = 16 << 10
LINES_A_POLL_MAX = 20_000
XID_APPLICATION = frozenset({13, 31, 43, 45, 68, 69, 109})
"""Xids that a program's own fault (or the clean-up after one) raises too: NVIDIA Xid catalogue."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """``category`` is what the line alone proves, None where it proves nothing by itself."""

    event: str
    category: CauseCategory | None
    regex: re.Pattern[str]


def _pattern(event: str, category: CauseCategory | None, regex: str) -> Pattern:
    return Pattern(event, category, re.compile(regex))


PATTERNS = (
    _pattern(
        "xid", CauseCategory.DEVICE_FAULT,
        r"NVRM: Xid \((?P<device>[^)]*)\):\s*(?P<xid>\d+)(?:,\s*(?:pid=(?P<pid>[^,]+),)?\s*(?P<message>.*))?",
    ),
    _pattern("sxid", CauseCategory.DEVICE_FAULT, r"SXid \((?P<device>[^)]*)\):\s*(?P<xid>\d+)(?:,\s*(?P<message>.*))?"),
    _pattern(
        "gpu_lost", CauseCategory.DEVICE_FAULT,
        r"NVRM: (?:.*GPU (?:at )?(?:PCI:)?(?P<device>[0-9a-fA-F:.]+).*)?(?P<message>.*fallen off the bus.*)",
    ),
    _pattern(
        "host_oom", CauseCategory.OUT_OF_MEMORY,
        r"(?P<message>(?:Memory cgroup out of memory|Out of memory): "
        r"Killed process (?P<pid>\d+) \((?P<process>[^)]*)\).*)",
    ),
    _pattern(
        "thermal_throttle", CauseCategory.THERMAL_THROTTLE,
        r"(?P<device>CPU\d+): (?P<message>(?:Core|Package) temperature (?:is )?above threshold.*)",
    ),
    _pattern(
        "link_down", CauseCategory.NETWORK_FAILURE,
        r"(?P<message>\b(?:mlx[45]_core|mlx5_ib|bnxt_en|ice|i40e|ionic|efa)\b.*?(?P<device>[\w.:]+): "
        r"(?:.*\b)?[Ll]ink (?:is )?[Dd]own.*)",
    ),
    _pattern(
        "storage_slow", CauseCategory.STORAGE_SLOW,
        r"(?P<message>(?:nfs: server (?P<device>\S+) not responding|INFO: task \S+ blocked for more than \d+ seconds"
        r"|(?:blk_update_request: |Buffer )?I/O error,? (?:on )?dev(?:ice)? (?P<disk>\w+)"
        r"|Lustre: .*(?:timed out|Connection .* lost)).*)",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One line that says something. ``age_s`` is how long ago the kernel said it, 0 where the file does not tell."""

    event: str
    category: CauseCategory | None
    line: str
    age_s: float
    attributes: dict[str, AttributeValue]


def recognise(line: str, age_s: float = 0.0) -> KernelEvent | None:
    """The event that a kernel line tells, None for all the others."""
    for pattern in PATTERNS:
        found = pattern.regex.search(line)
        if found is None:
            continue
        plain: dict[str, AttributeValue] = {k: v for k, v in found.groupdict().items() if v}
        category = pattern.category
        if "xid" in plain:
            plain["xid"] = int(str(plain["xid"]))
            category = None if plain["xid"] in XID_APPLICATION else category
        return KernelEvent(pattern.event, category, line[: limits.ATTRIBUTE_VALUE_BYTES_MAX], age_s, plain)
    return None


class KernelLog:
    """Follows the kernel log. ``look_back_s`` bounds how old a line may be at the first poll.

    ``absent`` says why nothing can be read. ``lost`` counts gaps where the kernel's buffer went round before us.
    """

    name = "kernel_log"

    def __init__(self, path: str | Path = KMSG, *, look_back_s: float = 600.0, clock: Clock | None = None) -> None:
        self.absent, self.lost = "", 0
        self._path, self._look_back_s = Path(path), look_back_s
        self._clock: Clock = clock or SystemClock()
        self._rest = b""
        self._fd = -1
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._is_device = stat.S_ISCHR(os.fstat(self._fd).st_mode)
        except OSError as error:
            hint = (
                " (only root may read it here: kernel.dmesg_restrict)"
                if error.errno in (errno.EPERM, errno.EACCES)
                else ""
            )
            self.absent = f"{self._path}: {error.strerror}{hint}"

    def poll(self) -> list[KernelEvent]:
        """What the kernel has said since the last poll; never waits."""
        if self._fd < 0:
            return []
        lines = self._records() if self._is_device else self._text_lines()
        found = (recognise(text, age) for age, text in lines)
        return [e for e in found if e is not None and e.age_s <= self._look_back_s]

    def _records(self) -> Iterator[tuple[float, str]]:
        """``priority,sequence,microseconds,flags;text`` records; facility 0 is the kernel."""
        for _ in range(LINES_A_POLL_MAX):
            try:
                raw = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:
                self.lost += 1
                continue
            except OSError as error:
                self.absent = f"{self._path}: {error.strerror}"
                self.close()
                return
            head, _, text = raw.decode("utf-8", "replace").partition(";")
            fields = head.split(",")
            if len(fields) >= 3 and fields[0].isdigit() and int(fields[0]) >> 3 == 0 and fields[2].isdigit():
                age_s = self._clock.monotonic_ns() / 1e9 - int(fields[2]) / 1e6
                yield max(0.0, age_s), text.split("\n", 1)[0]

    def _text_lines(self) -> Iterator[tuple[float, str]]:
        """Whole lines appended since; a file that was replaced or cut is read anew from its start."""
        try:
            here, there = os.fstat(self._fd), os.stat(self._path)
            if here.st_ino != there.st_ino or there.st_size < os.lseek(self._fd, 0, os.SEEK_CUR):
                os.close(self._fd)
                self._fd, self._rest = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), b""
            for _ in range(LINES_A_POLL_MAX):
                raw = os.read(self._fd, READ_BYTES)
                if not raw:
                    return
                *whole, self._rest = (self._rest + raw).split(b"\n")
                self._rest = self._rest[-limits.LINE_BYTES_MAX :]
                yield from ((0.0, line.decode("utf-8", "replace")) for line in whole)
        except OSError as error:
            self.absent = f"{self._path}: {error.strerror}"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
