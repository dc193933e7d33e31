"""Checkpoints: are all pieces there, and whole? torch.save, safetensors, DCP, Hugging Face, DeepSpeed, Megatron.

Nothing is unpickled: archives are checked by their own directory and checksums, names by what the layout promises.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TORCH = frozenset({".pt", ".pth", ".bin", ".ckpt"})
HEADER_BYTES_MAX = 100 << 20  # the bound of the safetensors format
FILES_MAX = 200_000
_ZERO = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_MODEL = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
_WORLD = re.compile(r"^(?P<what>.*?)_?world_size_(?P<world>\d+)_rank_(?P<rank>\d+)(?P<end>\..*)?$")
_PIECE = re.compile(rb"__\d+_\d+\.distcp")
_OF = re.compile(r"^(?P<what>.+)-(?P<i>\d{5})-of-(?P<n>\d{5})\.(?P<end>safetensors|bin)$")


@dataclass(frozen=True, slots=True)
class Problem:
    """``kind`` is ``incomplete`` (a piece is missing) or ``corrupt`` (a piece is broken)."""

    kind: str
    path: str
    says: str


def is_piece(path: Path) -> bool:
    """Does the name look like a part of a checkpoint?"""
    return (
        path.suffix in TORCH
        or path.suffix in {".safetensors", ".distcp"}
        or path.name == ".metadata"
        or path.name.endswith(".index.json")
    )


def verify(folder: Path, *, deep: bool = True) -> list[Problem]:
    """Check one checkpoint folder and the folders in it; empty = complete and whole as far as can be told.

    ``deep`` also reads archives through to check their checksums. Raises FileNotFoundError where there is none.
    """
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such checkpoint folder")
    files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())[:FILES_MAX]
    found = [p for file in files for p in _file(file, deep)]
    for place in sorted({f.parent for f in files}):
        found += _folder(place, [f for f in files if f.parent == place])
    return found + (_siblings(folder) if folder.is_dir() else [])


def _file(path: Path, deep: bool) -> list[Problem]:
    try:
        size = path.stat().st_size
        if is_piece(path) and size == 0:
            return [Problem("incomplete", str(path), f"{path.name} is empty: the save was cut off")]
        if path.suffix == ".safetensors":
            return _safetensors(path, size)
        if path.suffix in TORCH or path.suffix == ".distcp":
            return _archive(path, deep)
    except OSError as error:
        return [Problem("corrupt", str(path), f"{path.name} cannot be read: {error.strerror or error}")]
    return []


def _archive(path: Path, deep: bool) -> list[Problem]:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] != b"PK":
        return []  # the legacy pickle format has neither directory nor checksum
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip() if deep else None
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, RuntimeError, struct.error) as error:
        return [Problem("corrupt", str(path), f"{path.name} is cut off or broken: {error}")]
    if bad:
        return [Problem("corrupt", str(path), f"{path.name}: checksum of {bad} is wrong")]
    if not any(n.endswith("data.pkl") for n in names):
        return []
    return []


def _safetensors(path: Path, size: int) -> list[Problem]:
    with path.open("rb") as file:
        raw = file.read(8)
        if len(raw) < 8:
            return [Problem("corrupt", str(path), f"{path.name} ends within its header length ({size} bytes)")]
        (length,) = struct.unpack("<Q", raw)
        if length > min(HEADER_BYTES_MAX, size - 8):
            return [Problem("corrupt", str(path), f"{path.name}: header of {length} bytes in a file of {size}")]
        try:
            header = json.loads(file.read(length))
            end = max((int(t["data_offsets"][1]) for k, t in header.items() if k != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            return [Problem("corrupt", str(path), f"{path.name}: unreadable header at byte 8")]
    if 8 + length + end > size:
        return [Problem("corrupt", str(path), f"{path.name} is cut off: {size} bytes of {8 + length + end}")]
    return []


def _folder(place: Path, files: list[Path]) -> list[Problem]:
    names = {f.name for f in files}
    out = _indexes(place, names) + _shards(place, names) + _pieces(place, names) + _zero(place, names)
    out += _worlds(place, names)
    for pointer, form in (("latest", "{}"), ("latest_checkpointed_iteration.txt", "iter_{:0>7}")):
        if pointer in names:
            tag = (place / pointer).read_text(errors="replace").strip()[:200]
            target = place / form.format(tag)
            if tag and tag != "release" and "/" not in tag and not target.exists():
                out.append(Problem("incomplete", str(target), f"{pointer} points to {target.name}, which is not there"))
    return out


def _indexes(place: Path, names: Iterable[str]) -> list[Problem]:
    """Hugging Face ``*.index.json``: every file of the weight map."""
    out = []
    have = set(names)
    for name in sorted(n for n in have if n.endswith(".index.json")):
        try:
            weights = json.loads((place / name).read_text())["weight_map"]
            wanted = sorted({str(v) for v in weights.values()})
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
            out.append(Problem("corrupt", str(place / name), f"{name} is not a readable index"))
            continue
        out += [
            Problem("incomplete", str(place / w), f"{w} is in {name} and not in the folder")
            for w in wanted
            if w not in have
        ]
    return out


def _shards(place: Path, names: Iterable[str]) -> list[Problem]:
    """``model-00001-of-00004.safetensors``: all of the n."""
    sets: dict[tuple[str, int, str], set[int]] = {}
    for name in names:
        found = _OF.match(name)
        if found:
            sets.setdefault((found["what"], int(found["n"]), found["end"]), set()).add(int(found["i"]))
    return [
        Problem("incomplete", str(place / f"{what}-{i:05d}-of-{n:05d}.{end}"), f"{what}: piece {i} of {n} is missing")
        for (what, n, end), have in sets.items()
        for i in range(1, min(n, 10_000) + 1)
        if i not in have
    ]


def _pieces(place: Path, names: Iterable[str]) -> list[Problem]:
    """PyTorch DCP: ``.metadata`` is written last and names every ``__rank_i.distcp``."""
    have = set(names)
    pieces = {n for n in have if n.endswith(".distcp")}
    if not pieces and ".metadata" not in have:
        return []
    if ".metadata" not in have:
        return [
            Problem(
                "incomplete",
                str(place / ".metadata"),
                f"{len(pieces)} pieces and no .metadata: the save did not finish",
            )
        ]
    wanted = {m.decode() for m in _PIECE.findall((place / ".metadata").read_bytes()[: 256 << 20])}
    return [
        Problem("incomplete", str(place / w), f"{w} is named in .metadata and not in the folder")
        for w in sorted(wanted - pieces)
    ]


def _zero(place: Path, names: Iterable[str]) -> list[Problem]:
    """DeepSpeed: optimizer shards without holes, and the model states beside them."""
    grid: dict[int, set[int]] = {}
    have = set(names)
    for name in have:
        found = _ZERO.match(name)
        if found:
            grid.setdefault(int(found[2]), set()).add(int(found[1]))
    if not grid:
        return []
    size = max(max(r) for r in grid.values()) + 1
    out = [
        Problem("incomplete", str(place), f"optimizer shard of data rank {r}, model rank {mp} is missing")
        for mp, ranks in sorted(grid.items())
        for r in range(min(size, 100_000))
        if r not in ranks
    ]
    if not any(_MODEL.match(n) or n.endswith("_model_states.pt") for n in have):
        out.append(Problem("incomplete", str(place), "optimizer shards without any *_model_states.pt"))
    return out


def _worlds(place: Path, names: Iterable[str]) -> list[Problem]:
    """``…_world_size_N_rank_R``: all of the N."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in names:
        found = _WORLD.match(name)
        if found:
            sets.setdefault((found["what"], int(found["world"])), set()).add(int(found["rank"]))
    return [
        Problem("incomplete", str(place), f"{what or 'state'} of rank {r} of a world of {n} is missing")
        for (what, n), have in sets.items()
        for r in range(min(n, 100_000))
        if r not in have
    ]


def _siblings(folder: Path) -> list[Problem]:
    """Checkpoints of one run have the same files: what all older ones have and the newest lacks is missing."""
    family: dict[str, list[tuple[int, Path]]] = {}
    for place in sorted(p for p in folder.iterdir() if p.is_dir()):
        found = re.match(r"^(.*?)(\d+)$", place.name)
        if found:
            family.setdefault(found[1], []).append((int(found[2]), place))
    out = []
    for members in family.values():
        members.sort()
        if len(members) < 2:
            continue
        newest = members[-1][1]
        older = [{f.relative_to(p).as_posix() for f in p.rglob("*") if f.is_file()} for _, p in members[:-1]]
        lacking = set.intersection(*older) - {
            f.relative_to(newest).as_posix() for f in newest.rglob("*") if f.is_file()
        }
        out += [
            Problem("incomplete", str(newest / name), f"{newest.name} lacks {name}, which all older ones have")
            for name in sorted(lacking)[:50]
        ]
    return out
