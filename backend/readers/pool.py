"""One function over many files, in this process or in several; answers come in the order of the files."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from lanterne.backend.readers.source import Source

T = TypeVar("T")
POOL_BYTES_MIN = 48 << 20
"""Below this a second process costs more time (about a second to start) than it saves."""


def each(read: Callable[[Source], T], sources: Sequence[Source], workers: int) -> Iterator[tuple[T, str]]:
    """``read`` of each source, with its name."""
    if workers < 2 or len(sources) < 2 or sum(s.size for s in sources) < POOL_BYTES_MIN:
        for source in sources:
            yield read(source), source.name
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(sources)), mp_context=context) as executor:
        for source, found in zip(sources, executor.map(read, sources), strict=True):
            yield found, source.name
