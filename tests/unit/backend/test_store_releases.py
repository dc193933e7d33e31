"""Stores written by earlier releases open in this one, with their rows (tests/data/stores, one folder a release)."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from backend_rows import events, identity

from lanterne import wire
from lanterne.backend.store import migrate
from lanterne.backend.store.batch import from_columns
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.events import EventStore
from lanterne.settings import ServerSettings

STORES = Path(__file__).parents[2] / "data" / "stores"
WRITTEN_NS = 1_790_000_000_000_000_000


@pytest.mark.parametrize("release", sorted(path.name for path in STORES.iterdir() if path.is_dir()))
def test_25_a_store_of_an_earlier_release_opens_with_its_rows(tmp_path: Path, release: str) -> None:
    for packed in (STORES / release).glob("*.gz"):
        (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    settings = ServerSettings(data=str(tmp_path))
    migrate.upgrade(settings)
    store, control = EventStore.open(settings), ControlStore.open(settings)
    try:
        for signal, rows in (("spans", 24), ("points", 6), ("logs", 2)):
            found = store.rows(f"SELECT count(*) AS n FROM {signal}_history WHERE job = 'old'")
            assert found == [{"n": rows}], signal
        request = wire.encode(identity(0, job="old", world_size=2), events(3, now_ns=WRITTEN_NS)).traces
        assert request is not None
        again = store.submit(from_columns("spans", wire.decode_traces(request))).result()
        assert (again.stored, again.duplicates) == (0, 12)
        job = control.job("old")
        assert job is not None
        assert [a.world_size for a in job.attempts] == [2]
        assert len(control.job_key("old")[1]) == 32
    finally:
        store.close()
        control.close()
