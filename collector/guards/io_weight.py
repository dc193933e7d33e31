"""The share of the disk that this process's cgroup gets: ``io.weight`` of cgroup v2.

    with io_weight(20):            # checkpoint traffic yields to the neighbours' reads
        torch.save(state, path)

A weight (1 to 10000, default 100) only matters while others want the same disk. It belongs to the whole cgroup of
the process: a thread cannot have its own (the io controller is not a threaded one, kernel documentation
``admin-guide/cgroup-v2``), so the loader's reads of this rank get the same share meanwhile. Where the kernel, the
container or the permissions do not allow it, :class:`CommandRefused` says which, and nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lanterne.errors import CommandRefused

WEIGHT_MIN, WEIGHT_MAX, WEIGHT_DEFAULT = 1, 10_000, 100


def _mount(root: Path) -> Path:
    try:
        mounts = (root / "proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CommandRefused(f"io weight: the mounts cannot be read: {error}") from None
    for line in mounts:
        _, place, kind, *_ = line.split(" ")
        if kind == "cgroup2":
            return root / place.lstrip("/")
    raise CommandRefused("io weight: no cgroup v2 is mounted here; only cgroup v1, which has no io.weight")


def weight_file(root: str | Path = "/") -> Path:
    """``io.weight`` of this process's cgroup. Raises CommandRefused with the reason where there is none to write."""
    place = Path(root)
    mount = _mount(place)
    lines = (place / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    inside = next((line[len("0::") :] for line in lines if line.startswith("0::")), None)
    if inside is None:
        raise CommandRefused("io weight: this process is in no cgroup v2")
    path = mount / inside.lstrip("/") / "io.weight"
    if inside == "/" and not path.exists():
        raise CommandRefused("io weight: this process is in the root cgroup, which has no weight; start it in its own")
    if not path.exists():
        raise CommandRefused(
            f"io weight: the io controller is off for {inside}; write +io to cgroup.subtree_control of its parent"
        )
    if not os.access(path, os.W_OK):
        raise CommandRefused(f"io weight: {path} may not be written by uid {os.getuid()}; delegate the cgroup to it")
    return path


def _default(path: Path) -> int:
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(" ")
        if name == "default" and value.isdigit():
            return int(value)
    return WEIGHT_DEFAULT


def set_io_weight(weight: int, root: str | Path = "/") -> tuple[int, Callable[[], None]]:
    """Set the weight; returns the weight before and the undo. Raises CommandRefused where it is not possible."""
    if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
        raise CommandRefused(f"io weight: {weight} is outside {WEIGHT_MIN} to {WEIGHT_MAX}")
    path = weight_file(root)
    before = _default(path)
    _write(path, weight)
    return before, lambda: _write(path, before)


def _write(path: Path, weight: int) -> None:
    try:
        path.write_text(f"default {weight}\n", encoding="utf-8")
    except OSError as error:
        raise CommandRefused(f"io weight: {path}: {error.strerror}") from None


@contextmanager
def io_weight(weight: int, root: str | Path = "/") -> Iterator[bool]:
    """The weight while a checkpoint is written; yields whether it could be set. Never raises by itself."""
    try:
        _, undo = set_io_weight(weight, root)
    except CommandRefused:
        yield False
        return
    try:
        yield True
    finally:
        try:
            undo()
        except CommandRefused:
            pass  # the cgroup went away with its weight
