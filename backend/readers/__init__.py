"""Offline evidence: files of a dead job become :class:`lanterne.causal.facts.Facts`.

``read`` walks folders, decides by content what each file is, and never lets one bad file spoil the rest:
what cannot be used stands in ``facts.quality.notes``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lanterne.backend.readers import (
    checkpoints,
    devices,
    documents,
    flight_recorder,
    fusion,
    nccl,
    plain_pickle,
    pool,
    session,
    stacks,
    straggler,
    tensorboard,
    text,
    traces,
)
from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.source import Source, probe, walk
from lanterne.causal.facts import Facts
from lanterne.errors import UnreadableInput
from lanterne.nouns import Report

Progress = Callable[[int, int, str], None]
"""Called with files read, files in all, and the name of the last one."""
_Reader = tuple[Callable[[Source], bool], Callable[[Source, Gather], int]]

_READERS: tuple[_Reader, ...] = (
    (straggler.is_parquet, straggler.read),
    (traces.sniff, traces.read),
    (nccl.is_tests, nccl.read_tests),
    (stacks.is_stacks, stacks.read),
    (devices.is_smi, devices.read_smi),
    (devices.is_dcgm, devices.read_dcgm),
    (documents.is_prometheus, documents.read_prometheus),
    (documents.is_json_document, documents.read_json),
    (documents.is_json_lines, documents.read_json_lines),
    (documents.is_csv, documents.read_csv),
    (tensorboard.sniff, tensorboard.read),
)
_IGNORED = ("license", "licence", "readme", "notice", "copying")


def _is_text(source: Source) -> bool:
    head = source.head[:4096]
    if b"\0" in head:
        return False
    return not head or sum(b < 9 or 13 < b < 27 or 27 < b < 32 for b in head) < 0.02 * len(head)


def _one(source: Source, gather: Gather) -> int:
    """Read one file by the first reader that knows it; text is the last resort."""
    for knows, reader in _READERS:
        if knows(source):
            try:
                found = reader(source, gather)
                return found if found or not _is_text(source) else text.read(source, gather)
            except UnreadableInput:
                if not _is_text(source):
                    raise
                found = text.read(source, gather)
                if found:
                    return found
                raise
    if _is_text(source):
        return text.read(source, gather)
    raise UnreadableInput(source.name, "unknown kind of file", offset=0, do="see docs/readers.md for what is read")


def read(paths: Sequence[Path], *, workers: int = 1, progress: Progress | None = None) -> Facts:
    """Read files and folders of one job. Raises UnreadableInput only when nothing at all could be used.

    ``workers``: processes for many megabytes of logs (only where the main module may be imported again).
    """
    gather = Gather()
    files = [p for p in walk([Path(p) for p in paths]) if not p.name.lower().startswith(_IGNORED)]
    dumps: list[flight_recorder.Dump] = []
    segments: list[Path] = []
    problems: list[UnreadableInput] = []
    sessions = session.folders(files)
    pieces = _checkpoints(files, gather)
    left = [p for p in files if p not in pieces and not session.belongs(p, sessions)]
    others: list[Source] = []
    with plain_pickle.FastReader() as fast:
        for done, path in enumerate(left):
            try:
                _sort(path, gather, dumps, segments, others, fast)
            except UnreadableInput as error:
                problems.append(error)
            if progress and done % 16 == 0:
                progress(0, len(left), f"sorting {len(left)} files")
    at = len(left) - len(others)
    for found, name in pool.each(_alone, others, workers):
        at += 1
        if isinstance(found, Gather):
            gather.merge(found)
        else:
            problems.append(found)
        if progress:
            progress(at, len(left), name)
    for problem in problems:
        gather.gap(str(problem))
    if dumps:
        flight_recorder.add(dumps, gather)
    live = session.read(sessions, segments, gather)
    if not gather.used and live is None:
        raise _nothing(paths, problems)
    return _joined(live, gather)


def _sort(
    path: Path,
    gather: Gather,
    dumps: list[flight_recorder.Dump],
    segments: list[Path],
    others: list[Source],
    fast: plain_pickle.FastReader,
) -> None:
    """What needs its peers is kept for later; the rest is read one by one."""
    source = probe(path)
    if source.size == 0:
        gather.event("empty_file", ref=str(path), file_rank=source.rank)
        gather.gap(f"{path}: empty")
    elif session.is_segment(source):
        segments.append(path)
    elif flight_recorder.sniff(source):
        dumps.append(flight_recorder.parse(source, fast))
        if len(dumps) % 32 == 0:
            flight_recorder.trim(dumps)
    else:
        others.append(source)


_FORMS: dict[bytes, Any] = {}
"""Forms of log lines, for all files that this process reads; bounded by ``forms.FORMS_MAX``."""


def _alone(source: Source) -> Gather | UnreadableInput:
    """The facts of one file, or why it cannot be used."""
    gather = Gather(forms=_FORMS)
    try:
        if _one(source, gather):
            gather.used = 1
        else:
            gather.gap(f"{source.name}: nothing in it is known")
    except UnreadableInput as error:
        return error
    gather.forms = {}
    return gather


def _checkpoints(files: Sequence[Path], gather: Gather) -> set[Path]:
    """Verify the checkpoint folders among the files; their pieces are not read as anything else."""
    pieces = {p for p in files if checkpoints.is_piece(p) and not flight_recorder.sniff(probe(p))}
    folders = {p.parent for p in pieces}
    folders |= {f.parent for f in folders if sum(g.parent == f.parent for g in folders) > 1}
    tops = [f for f in sorted(folders) if not any(o in f.parents for o in folders)]
    for top in tops:
        gather.used += 1
        gather.sources.add("checkpoint")
        for problem in checkpoints.verify(top):
            gather.event(
                "checkpoint_problem", ref=problem.path, kind=problem.kind, path=problem.path, body=problem.says
            )
    return pieces


def _joined(live: Facts | None, gather: Gather) -> Facts:
    """Facts of our own session come first; logs, dumps and files beside it add their events."""
    facts = fusion.fused(gather.facts(), gather)
    if live is None:
        return facts
    notes = (*live.quality.notes, *facts.quality.notes)
    quality = replace(
        live.quality, notes=notes, dropped_events=live.quality.dropped_events + facts.quality.dropped_events
    )
    return replace(
        live,
        events=(*live.events, *facts.events),
        collectives=live.collectives or facts.collectives,
        groups={**facts.groups, **live.groups},
        sources=tuple(sorted({*live.sources, *facts.sources})),
        quality=quality,
    )


def _nothing(paths: Sequence[Path], problems: Sequence[UnreadableInput]) -> UnreadableInput:
    if len(problems) == 1:
        return problems[0]
    where = ", ".join(str(p) for p in list(paths)[:3])
    why = f"nothing in it could be used ({len(problems)} unreadable files)" if problems else "nothing in it is known"
    return UnreadableInput(where, why, do="see docs/readers.md for what is read")


def diagnose_paths(paths: Sequence[Path], *, workers: int = 1, progress: Progress | None = None) -> Report:
    """Read and judge in one go: what ``lanterne diagnose`` and ``POST /api/v1/diagnose`` call."""
    from lanterne.backend.pipeline import judge

    return judge(read(paths, workers=workers, progress=progress))
