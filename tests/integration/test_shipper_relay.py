"""Commands, key and time come from the backend as they are and are written once; the trainer judges them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from shipper_backend import Backend

from lanterne.clock import SystemClock
from lanterne.collector.export import Transport, resolve
from lanterne.collector.relay import INBOX_BYTES_MAX, Relay
from lanterne.settings import CollectorSettings, load


@pytest.fixture
def backend() -> Iterator[Backend]:
    with Backend() as found:
        yield found


def relay(folder: Path, url: str, **more: str) -> Relay:
    settings = load(CollectorSettings, environ={}, endpoint=url)
    transport = Transport(resolve(settings, "logs", os.environ))
    return Relay(transport, url, folder, "my/job", 2, SystemClock(), takes_commands=lambda: True, **more)  # type: ignore[arg-type]


def inbox(folder: Path) -> list[str]:
    path = folder / "commands" / "inbox.jsonl"
    return [json.loads(line)["id"] for line in path.read_text().splitlines()] if path.exists() else []


def test_commands_are_written_once_also_after_a_restart(tmp_path: Path, backend: Backend) -> None:
    first = relay(tmp_path, backend.url)
    backend.commands = [{"id": "a", "action": "pause"}, {"id": "b", "action": "resume"}]
    assert first.poll_commands() == 2
    assert first.poll_commands() == 0
    backend.commands.append({"id": "c", "action": "stop"})
    assert relay(tmp_path, backend.url).poll_commands() == 1
    assert inbox(tmp_path) == ["a", "b", "c"]


def test_nonsense_instead_of_commands_writes_nothing(tmp_path: Path, backend: Backend) -> None:
    backend.commands = [None, 7, {"id": 5}, {"no": "id"}, {"id": ["a"]}]  # type: ignore[list-item]
    assert relay(tmp_path, backend.url).poll_commands() == 0
    assert inbox(tmp_path) == []


def test_the_inbox_has_a_bound(tmp_path: Path, backend: Backend) -> None:
    backend.commands = [{"id": "big", "parameters": {"x": "y" * 50_000}}]
    (tmp_path / "commands").mkdir()
    (tmp_path / "commands" / "inbox.jsonl").write_text("{}\n" + " " * (INBOX_BYTES_MAX - 100) + "\n")
    relay(tmp_path, backend.url).poll_commands()
    assert (tmp_path / "commands" / "inbox.jsonl").stat().st_size <= INBOX_BYTES_MAX


def test_the_key_of_the_first_contact_stays(tmp_path: Path, backend: Backend) -> None:
    path = tmp_path / "commands" / "key.json"
    assert relay(tmp_path, backend.url).fetch_key()
    assert json.loads(path.read_text())["public_key"] == "ab" * 32
    path.write_text(json.dumps({"public_key": "first"}))
    assert relay(tmp_path, backend.url).fetch_key()
    assert json.loads(path.read_text())["public_key"] == "first"


def test_a_key_given_by_settings_is_the_one(tmp_path: Path, backend: Backend) -> None:
    assert relay(tmp_path, backend.url, pinned_key="cd" * 32).fetch_key()
    assert json.loads((tmp_path / "commands" / "key.json").read_text())["public_key"] == "cd" * 32


def test_time_is_exchanged_and_an_absent_backend_gives_none(tmp_path: Path, backend: Backend) -> None:
    found = relay(tmp_path, backend.url)
    assert found.sync_clock()
    (snapshot,) = found.snapshots
    assert snapshot.sound()
    assert abs(snapshot.offset_ns) <= snapshot.round_trip_ns
    assert not relay(tmp_path, "http://127.0.0.1:9").sync_clock()
