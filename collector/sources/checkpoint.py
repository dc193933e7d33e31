"""Checkpoints: how long a save took, what it wrote, and whether the file can be read back.

``torch.save`` and ``torch.distributed.checkpoint.save`` are wrapped; a save to a path is a checkpoint phase. Files are
read back by one background thread after the save: a torch file is a zip whose entries carry checksums made when they
were written, so a bit that the storage flipped afterwards is found without a checksum of our own.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import Any

from lanterne.collector.core import CHECKPOINT
from lanterne.collector.sources.patches import Patches
from lanterne.collector.steps import Recorder
from lanterne.nouns import EventName

VERIFY_BYTES_MAX = 2 << 30
VERIFY_DELAY_S = 0.5
"""A corruption that follows the save closely shall be met, and the save's own traffic shall be over."""
CHUNK_BYTES = 1 << 20
FILES_MAX = 4_096
LOOK_EVERY = 32


def verify(path: Path) -> tuple[bool, str, int]:
    """(ok, what is wrong, crc32 of the content) of one file. Entries of a torch file are checked one by one.

    Raises OSError when the file cannot be read at all.
    """
    if not zipfile.is_zipfile(path):
        with path.open("rb") as raw:
            if raw.read(4) == b"PK\x03\x04":
                return False, "the file is cut or its directory is damaged", 0
            raw.seek(0)
            return True, "no checksums inside: read through", _crc(raw.read)
    total = 0
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as member:
                    total = zlib.crc32(f"{entry.filename}:{_crc(member.read):08x}".encode(), total)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        return False, str(error), 0
    return True, "", total


def _crc(read: Callable[[int], bytes]) -> int:
    found = 0
    while chunk := read(CHUNK_BYTES):
        found = zlib.crc32(chunk, found)
    return found


def size_on_disk(path: Path) -> int:
    """Bytes of a file, or of all files of a folder (the first 4,096 of them)."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for i, (folder, _, names) in enumerate(os.walk(path)):
        total += sum((Path(folder) / name).stat().st_size for name in names if (Path(folder) / name).is_file())
        if i > FILES_MAX:
            break
    return total


class CheckpointSource:
    """``saved`` is also the hook for savers that are not wrapped (a callback of a framework, a store of the user's)."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._queue: queue.SimpleQueue[tuple[Path, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._depth = 0
        self._dcp: Any = None

    def install(self, patches: Patches) -> None:
        """Wrap ``torch.save``; the distributed saver is wrapped by :meth:`look` once the user has imported it."""
        import torch

        self._patches = patches
        patches.wrap(torch, "save", lambda original: self._timed(original, _save_target))
        self.look(0)

    def look(self, step: int) -> None:
        """At a step boundary: has ``torch.distributed.checkpoint`` been imported? We do not: it takes seconds."""
        if step % LOOK_EVERY == 0 and self._dcp is None:
            self._dcp = sys.modules.get("torch.distributed.checkpoint")
            if self._dcp is not None:
                self._patches.wrap(self._dcp, "save", lambda original: self._timed(original, _dcp_target))

    def _timed(self, original: Callable[..., Any], target: Callable[..., Path | None]) -> Callable[..., Any]:
        recorder = self.recorder

        def save(*args: Any, **kwargs: Any) -> Any:
            path = target(args, kwargs)
            if path is None or self._depth:
                return original(*args, **kwargs)
            outermost = recorder.core.user_phase < 0
            began = recorder.enter(CHECKPOINT) if outermost else monotonic_ns()
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
                took = monotonic_ns() - began
                if outermost:
                    recorder.leave(CHECKPOINT, began)
            self.saved(path, took_ns=took)
            return result

        return save

    def saved(self, path: str | os.PathLike[str], *, took_ns: int = 0) -> None:
        """A checkpoint was written to ``path`` (file or folder): tell it, and read it back in the background."""
        recorder = self.recorder
        try:
            where = Path(path)
            said: dict[str, Any] = {"path": str(where), "bytes": size_on_disk(where)}
            if took_ns:
                said["duration_ms"] = round(took_ns / 1e6, 3)
            recorder.ring.note(EventName.CHECKPOINT_SAVED, recorder.step, monotonic_ns(), said)
            if where.is_file() and said["bytes"] <= VERIFY_BYTES_MAX:
                self._verify_later(where)
        except Exception as error:
            recorder.failed("checkpoint", error)

    def _verify_later(self, path: Path) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="lanterne-verify", daemon=True)
            self._thread.start()
        self._queue.put((path, self.recorder.step))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            path, step = job
            time.sleep(VERIFY_DELAY_S)
            try:
                ok, detail, crc = verify(path)
            except FileNotFoundError:
                continue  # rotated away by the user in the meantime
            except OSError as error:
                ok, detail, crc = False, str(error), 0
            said: dict[str, Any] = {"ok": ok, "path": str(path), "detail": detail}
            if ok:
                said["checksum"] = f"{crc:08x}"
            self.recorder.ring.note(EventName.CHECKPOINT_VERIFIED, step, monotonic_ns(), said)

    def finish(self, wait_s: float = 2.0) -> None:
        """Let the reading back end, for at most ``wait_s`` seconds."""
        if self._thread is not None and self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(wait_s)


def _save_target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path | None:
    """The path that ``torch.save(obj, f)`` writes to, None for a buffer or a file that is open already."""
    target = args[1] if len(args) > 1 else kwargs.get("f")
    return Path(target) if isinstance(target, (str, os.PathLike)) else None


def _dcp_target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path | None:
    target = kwargs.get("checkpoint_id")
    if target is None:
        writer = kwargs.get("storage_writer")
        target = getattr(writer, "path", None) if writer is not None else None
    return Path(target) if isinstance(target, (str, os.PathLike)) else None
