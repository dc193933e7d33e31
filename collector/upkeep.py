"""What a shipper does for the folders of others before it leaves: deliver left spools, remove old black boxes.

Session folders usually lie in /dev/shm, which is memory: they must not pile up. A folder is touched only
while its lock is free, its ranks are gone, and it is ours.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from lanterne.collector.export import Exporter
from lanterne.collector.shipper import try_lock
from lanterne.collector.spool import Spool
from lanterne.quality import Quality
from lanterne.settings import CollectorSettings

KEEP_FOLDERS = 8
"""Newest finished sessions of a host that stay for a post-mortem."""
IDLE_S = 3600.0
UNSENT_S = 7 * 86_400.0
"""How long events that no backend ever took are kept."""


def _sessions(base: Path) -> Iterator[Path]:
    """``<base>/<job>/<attempt>`` folders that belong to this user."""
    for path in base.glob("*/*"):
        try:
            if path.name.isdigit() and path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid():
                yield path
        except OSError:
            continue


def _alive(folder: Path) -> bool:
    for path in folder.glob("rank-*.json"):
        try:
            if os.path.exists(f"/proc/{int(json.loads(path.read_text(encoding='utf-8'))['pid'])}"):
                return True
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return False


def _touched_s(folder: Path) -> float:
    """Newest modification of anything in the folder (Unix s)."""
    newest = 0.0
    for path in [folder, *folder.iterdir()]:
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:
            continue
    return newest


def adopt(base: Path, settings: CollectorSettings, *, patience_s: float) -> int:
    """Send what lies unsent in spools that nobody serves; stops at the first refusal. Returns parts sent."""
    deadline, sent = time.monotonic() + patience_s, 0
    for folder in _sessions(base):
        if not (folder / "spool").is_dir():
            continue
        try:
            fd = try_lock(folder)
        except OSError:
            continue
        if fd < 0:
            continue
        try:
            if _alive(folder):
                continue
            spool = Spool(folder / "spool", quality=Quality(), bytes_max=settings.spool_bytes)
            exporter = Exporter(spool, settings, os.environ, quality=Quality())
            while time.monotonic() < deadline and exporter.send_one() == 0:
                sent += 1
            exporter.close()
            spool.close()
            if not exporter.reachable():
                return sent
        except OSError:
            continue
        finally:
            os.close(fd)
    return sent


def prune(base: Path, *, keep: Path, now_s: float) -> list[Path]:
    """Remove finished sessions beyond the newest ``KEEP_FOLDERS`` and those older than ``UNSENT_S``.

    A session with unsent events stays for ``UNSENT_S``. Returns what was removed.
    """
    removed: list[Path] = []
    sessions = sorted((f for f in _sessions(base) if f != keep), key=_touched_s, reverse=True)
    for place, folder in enumerate(sessions, start=1):
        age_s = now_s - _touched_s(folder)
        if age_s < IDLE_S or (place < KEEP_FOLDERS and age_s < UNSENT_S) or _alive(folder):
            continue
        try:
            fd = try_lock(folder)
        except OSError:
            continue
        if fd < 0:
            continue
        try:
            if age_s < UNSENT_S and _has_unsent(folder):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
            folder.parent.rmdir()  # the job's folder, when this was its last attempt
        except OSError:
            continue
        finally:
            os.close(fd)
    return removed


def _has_unsent(folder: Path) -> bool:
    if not (folder / "spool").is_dir():
        return False
    spool = Spool(folder / "spool", quality=Quality())
    try:
        return spool.next() is not None
    finally:
        spool.close()
