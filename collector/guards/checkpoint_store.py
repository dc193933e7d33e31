"""A checkpoint store that never shows a half-written checkpoint and knows which one is good.

    store = CheckpointStore(folder, rank=rank, world=world, barrier=dist.barrier)
    store.save(step, state)                 # every rank, its own shard
    found = store.load()                    # newest checkpoint that every rank can read back whole; None = none

Each rank writes ``step-N.part/rank-R.pt`` and its SHA-256, flushed to disk (``fsync`` of file and folder). After the
barrier rank 0 checks that all shards are there and renames the folder to ``step-N``: the rename is the commit, so a
crash at any moment leaves either the old state or the new one. ``load`` reads the bytes against the checksum before
it unpickles anything (``weights_only``), puts a folder that fails into ``quarantine/`` and takes the one before it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lanterne.errors import LanterneError, UsageError

KEEP = 3


class CheckpointStore:
    """One rank's door to the common folder. ``barrier`` waits for all ranks; with one rank none is needed.

    ``agree(steps)`` returns the steps that every rank can read (default: those of this rank); see :func:`agree`.
    """

    def __init__(
        self, folder: str | Path, *, rank: int = 0, world: int = 1, keep: int = KEEP,
        barrier: Callable[[], object] | None = None, agree: Callable[[list[int]], list[int]] | None = None,
    ) -> None:  # fmt: skip
        if not 0 <= rank < world or keep < 1:
            raise UsageError(f"rank {rank} of {world}, keep {keep}: rank is below world and keep at least 1")
        if world > 1 and (barrier is None or agree is None):
            raise UsageError("a store of several ranks needs barrier and agree (lanterne.collector.guards)")
        self.folder, self.rank, self.world, self.keep = Path(folder), rank, world, keep
        self.barrier = barrier or (lambda: None)
        self.agree = agree or (lambda steps: steps)
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, state: Any) -> Path:
        """Write this rank's ``state`` for ``step``; returns the folder, which is committed when this returns.

        Raises LanterneError on every rank alike when a shard is missing after the barrier, OSError from the disk.
        """
        import torch

        part, done = self.folder / f"step-{step}.part", self.folder / f"step-{step}"
        part.mkdir(exist_ok=True)
        buffer = io.BytesIO()
        torch.save(state, buffer)
        data = buffer.getvalue()
        about = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "step": step, "world": self.world}
        _write(part / f"rank-{self.rank}.pt", data)
        _write(part / f"rank-{self.rank}.json", json.dumps(about).encode())
        self.barrier()
        if self.rank == 0 and len(list(part.glob("rank-*.json"))) >= self.world:
            shutil.rmtree(done, ignore_errors=True)
            part.rename(done)
            _sync(self.folder)
            self._drop_old()
        self.barrier()
        if not done.exists():
            raise LanterneError(f"checkpoint of step {step}: a shard is missing in {part}; it was not committed")
        return done

    def steps(self) -> list[int]:
        """Committed checkpoints, oldest first; whole or not."""
        found = [p.name.removeprefix("step-") for p in self.folder.glob("step-*") if p.is_dir()]
        return sorted(int(name) for name in found if name.isdigit())

    def check(self, step: int) -> str:
        """Why this rank cannot use the checkpoint of ``step``; empty when it is whole."""
        try:
            self._read(step)
        except (OSError, ValueError, KeyError, LanterneError) as error:
            return str(error)
        return ""

    def load(self) -> tuple[int, Any] | None:
        """``(step, state)`` of the newest checkpoint that all ranks can read; bad ones go to ``quarantine/``."""
        import torch

        good = [step for step in self.steps() if not self.check(step)]
        common = self.agree(good)
        self.barrier()
        if self.rank == 0:
            for step in self.steps():
                if step not in common:
                    self._quarantine(step)
        self.barrier()
        if not common:
            return None
        step = max(common)
        return step, torch.load(io.BytesIO(self._read(step)), weights_only=True)

    def _read(self, step: int) -> bytes:
        path = self.folder / f"step-{step}" / f"rank-{self.rank}.pt"
        about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        data = path.read_bytes()
        if about["world"] != self.world:
            raise LanterneError(f"{path}: written by {about['world']} ranks, this job has {self.world}")
        if len(data) != about["bytes"] or hashlib.sha256(data).hexdigest() != about["sha256"]:
            raise LanterneError(f"{path}: the bytes are not those that were written (SHA-256 differs)")
        return data

    def _quarantine(self, step: int) -> None:
        place = self.folder / "quarantine"
        place.mkdir(exist_ok=True)
        shutil.rmtree(place / f"step-{step}", ignore_errors=True)
        (self.folder / f"step-{step}").rename(place / f"step-{step}")

    def _drop_old(self) -> None:
        for step in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / f"step-{step}", ignore_errors=True)


def agree(steps: list[int]) -> list[int]:
    """The steps that every rank of the default process group names; one small object collective."""
    import torch.distributed as dist

    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, steps)
    return sorted(set.intersection(*map(set, everybody)))


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
