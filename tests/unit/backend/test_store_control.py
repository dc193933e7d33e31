"""The control store: one counter for commands, states that only one caller wins, tokens kept as hashes."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from sqlalchemy import text

from lanterne import orders
from lanterne.backend.store import migrate
from lanterne.backend.store.control import ControlStore, control_url
from lanterne.backend.store.database import engine_of
from lanterne.backend.store.models import Base
from lanterne.backend.store.records import IncidentSummary
from lanterne.clock import SimulatedClock
from lanterne.errors import CommandRefused, StoreUnavailable, UsageError
from lanterne.nouns import Cause, CauseCategory, Cost, Identity, Incident, IncidentStatus, Severity, Subject, to_json
from lanterne.settings import ServerSettings


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


POSTGRES = pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.heavy])


@pytest.fixture(params=["sqlite", POSTGRES])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> ServerSettings:
    """Of a store with its control database in SQLite, and in PostgreSQL."""
    if request.param == "sqlite":
        return ServerSettings(data=str(tmp_path))
    server, name = request.getfixturevalue("postgres_server"), f"t{secrets.token_hex(6)}"
    server.make(name)
    return ServerSettings(data=str(tmp_path), control_url=server.url(name))


@pytest.fixture
def control(settings: ServerSettings, clock: SimulatedClock) -> Iterator[ControlStore]:
    migrate.upgrade(settings, branch="control")
    store = ControlStore.open(settings, clock=clock)
    yield store
    store.close()


def incident(name: str = "i1", **more: object) -> Incident:
    cause = Cause(category=CauseCategory.DATA_STALL, subject=Subject(rank=3), cost=Cost(gpu_hours=0.5))
    fields = {"status": IncidentStatus.OPEN, "causes": [cause], **more}
    return Incident(id=name, kind="straggler", severity=Severity.P1, opened_step=7, opened_at="t", **fields)  # type: ignore[arg-type]


def test_commands_are_signed_and_counted(control: ControlStore) -> None:
    first = control.create_command("job", 0, "pause", {"max_s": 5.0})
    second = control.create_command("job", 0, "resume", {})
    public = control.job_key("job")[1].hex()
    assert (first.counter, second.counter) == (1, 2)
    for command in (first, second):
        orders.examine(command.wire, public=public, job="job", attempt=0, now_ns=command.issued_ns)
    with pytest.raises(CommandRefused):
        orders.verify(first.wire | {"attempt": 1}, public)
    with pytest.raises(CommandRefused):
        orders.verify(first.wire, control.job_key("other")[1].hex())
    assert control.command(first.id) == first


@pytest.mark.parametrize(
    "arguments",
    [
        {"action": "rm", "parameters": {}},
        {"action": "pause", "parameters": {}},
        {"action": "pause", "parameters": {"max_s": 1e9}},
        {"action": "resume", "parameters": {}, "ranks": [0]},
        {"action": "resume", "parameters": {}, "expires_s": 1e9},
        {"action": "resume", "parameters": {}, "state": "applied"},
    ],
)
def test_commands_out_of_bounds_are_never_written(control: ControlStore, arguments: dict[str, object]) -> None:
    with pytest.raises(CommandRefused):
        control.create_command("job", 0, **arguments)  # type: ignore[arg-type]
    assert control.commands("job") == []


def test_two_approvals_at_once_give_one_command(control: ControlStore) -> None:
    made = control.create_command("job", 0, "resume", {}, state="proposed")
    won: list[object] = []
    barrier = threading.Barrier(4)

    def approve() -> None:
        barrier.wait()
        won.append(control.approve_command(made.id, "me"))

    threads = [threading.Thread(target=approve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(w is not None for w in won) == 1
    approved = control.command(made.id)
    assert approved is not None
    assert (approved.state, approved.counter) == ("pending", 2)
    orders.verify(approved.wire, control.job_key("job")[1].hex())


def test_an_idempotency_key_sends_once(control: ControlStore) -> None:
    ids = {control.create_command("job", 0, "resume", {}, idempotency_key="k").id for _ in range(3)}
    assert len(ids) == len(control.commands("job")) == 1


def test_old_commands_expire_and_states_move_by_compare_and_set(control: ControlStore, clock: SimulatedClock) -> None:
    made = control.create_command("job", 0, "resume", {}, expires_s=10)
    assert not control.set_command_state(made.id, "applied", expected=("sent",))
    clock.advance(11 * 10**9)
    assert [c.state for c in control.commands("job")] == ["expired"]
    assert not control.set_command_state(made.id, "cancelled", expected=("pending",))


def test_a_clock_stepped_back_makes_no_second_counter(control: ControlStore, clock: SimulatedClock) -> None:
    first = control.create_command("job", 0, "resume", {})
    clock.step_wall(-86_400 * 10**9)
    second = control.create_command("job", 0, "resume", {})
    assert second.counter > first.counter
    with pytest.raises(CommandRefused, match="future"):
        orders.examine(first.wire, public=control.job_key("job")[1].hex(), job="job", attempt=0, now_ns=clock.unix_ns())


def test_incidents_are_replaced_with_their_causes_and_come_back_whole(control: ControlStore) -> None:
    control.save_incident("job", 0, incident(), fingerprint="f", verdict="rank 3 waits for data")
    control.save_incident("job", 0, incident(status=IncidentStatus.RESOLVED))
    found = control.incident("i1")
    assert found is not None
    assert to_json(found.incident) == to_json(incident(status=IncidentStatus.RESOLVED))
    assert (found.fingerprint, found.verdict, found.open) == ("f", "rank 3 waits for data", False)
    control.save_incident("job", 0, incident("i2"), verdict="again")
    about = control.incident_summary(["job", "none"])
    assert about["none"] == IncidentSummary()
    assert about["job"] == IncidentSummary(open=1, gpu_hours_lost=1.0, verdict="again", hang_open=False)
    assert [r.incident.id for r in control.incidents("job", open_only=True)] == ["i2"]
    changed = control.set_incident_status("i2", IncidentStatus.DISMISSED)
    assert changed is not None
    assert changed.incident.status is IncidentStatus.DISMISSED
    assert control.graph("i1") == {"nodes": [], "edges": []}
    control.save_graph("i1", {"nodes": [{"id": "a"}], "edges": []})
    assert control.graph("i1") == {"nodes": [{"id": "a"}], "edges": []}
    assert control.graph("none") is None


def test_pages_neither_skip_nor_repeat(control: ControlStore, clock: SimulatedClock) -> None:
    for n in range(25):
        control.save_incident("job", 0, incident(f"i{n:02}"))
        if n % 3 == 0:
            clock.advance(1)
    seen: list[str] = []
    before = None
    while rows := control.incidents("job", before=before, limit=4):
        seen += [r.incident.id for r in rows]
        before = (rows[-1].opened_ns, rows[-1].incident.id)
    assert sorted(seen) == [f"i{n:02}" for n in range(25)]


def test_tokens_are_hashed_revocable_and_expire(
    settings: ServerSettings, control: ControlStore, clock: SimulatedClock
) -> None:
    text_, record = control.create_token(["read", "ingest"], job="job", expires_s=60)
    secret = text_.rsplit("_", 1)[-1]
    with engine_of(control_url(settings)).connect() as connection:
        rows = connection.execute(text("SELECT * FROM tokens")).fetchall()
    assert len(rows) == 1
    assert secret not in repr(rows)
    verified = control.verify_token(text_)
    assert verified is not None
    assert (verified.job, verified.scopes) == ("job", {"read", "ingest"})
    for wrong in ("", "lt_", text_[:-1] + ("a" if text_[-1] != "a" else "b"), text_ + "x", f"lt_{'0' * 16}_{secret}"):
        assert control.verify_token(wrong) is None
    clock.advance(61 * 10**9)
    assert control.verify_token(text_) is None
    other, record = control.create_token(["admin"])
    assert control.revoke_token(record.id)
    assert not control.revoke_token(record.id)
    assert control.verify_token(other) is None
    with pytest.raises(UsageError):
        control.create_token(["root"])


def test_identities_become_jobs_attempts_and_ranks(control: ControlStore, clock: SimulatedClock) -> None:
    control.touch([Identity(job="a", rank=r, world_size=4, host="h", mesh={"dp_shard": r}) for r in range(3)])
    clock.advance(5)
    control.touch([Identity(job="a", attempt=1, rank=0, world_size=4), Identity(job="foreign", rank=-1, world_size=0)])
    job = control.job("a")
    assert job is not None
    assert [(a.attempt, a.world_size) for a in job.attempts] == [(0, 4), (1, 4)]
    assert [r.identity.mesh for r in control.ranks("a", 0)] == [{"dp_shard": 0}, {"dp_shard": 1}, {"dp_shard": 2}]
    assert control.ranks("foreign", 0) == []
    assert [j.id for j in control.jobs()] == ["foreign", "a"]


def test_the_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    migrate.upgrade(ServerSettings(data=str(tmp_path)), branch="control")
    assert (tmp_path / "control.sqlite").stat().st_mode & 0o077 == 0


# --- migrations ----------------------------------------------------------------------------------


def test_both_branches_go_up_down_and_up_again(settings: ServerSettings) -> None:
    for _ in range(2):
        migrate.upgrade(settings)
        migrate.upgrade(settings)
        assert migrate.control_revision(control_url(settings)) == "c002"
        with duckdb.connect(str(migrate.events_file(settings))) as connection:
            assert migrate.events_revision(connection) == "e003"
        migrate.downgrade(settings)
        with duckdb.connect(str(migrate.events_file(settings))) as connection:
            assert migrate.events_revision(connection) is None


def test_models_and_migrations_agree(settings: ServerSettings) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    migrate.upgrade(settings, branch="control")
    with engine_of(control_url(settings)).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_a_store_from_the_future_is_refused(settings: ServerSettings) -> None:
    migrate.upgrade(settings)
    with duckdb.connect(str(migrate.events_file(settings))) as connection:
        connection.execute("UPDATE schema_version SET version_num = 'e999'")
    with pytest.raises(StoreUnavailable, match="newer than this release"):
        migrate.upgrade(settings, branch="events")
    engine = engine_of(control_url(settings))
    with engine.execution_options(lanterne_write=True).connect() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'c999'"))
        connection.commit()
    with pytest.raises(StoreUnavailable, match="newer than this release"):
        migrate.upgrade(settings, branch="control")


def test_a_locked_or_broken_database_is_told_as_unavailable(settings: ServerSettings, control: ControlStore) -> None:
    with engine_of(control_url(settings)).begin() as connection:
        connection.execute(text("DROP TABLE audit"))
    with pytest.raises(StoreUnavailable):
        control.audit("me", "did", "something")
