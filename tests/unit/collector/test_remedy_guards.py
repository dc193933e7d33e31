"""Guards that need no peers: the disk share, the log of a two-phase update, the store's commit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lanterne.collector.guards.checkpoint_store import CheckpointStore
from lanterne.collector.guards.collective_breaker import CollectiveBreaker
from lanterne.collector.guards.io_weight import io_weight, set_io_weight
from lanterne.collector.guards.snapshots import REACH, Snapshots
from lanterne.collector.guards.two_phase import TwoPhaseUpdate
from lanterne.errors import CommandRefused, LanterneError, UsageError


class Alone(torch.nn.Linear):
    """A module of one process: it has nothing to synchronise."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def cgroups(
    root: Path, *, inside: str = "/job.slice/rank0", kind: str = "cgroup2", weight: str | None = "default 100"
) -> Path:
    """A root folder with the files that the kernel shows."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mounts").write_text(f"proc /proc proc rw 0 0\nnone /sys/fs/cgroup {kind} rw 0 0\n")
    (root / "proc/self/cgroup").write_text(f"0::{inside}\n")
    place = root / "sys/fs/cgroup" / inside.lstrip("/")
    place.mkdir(parents=True)
    if weight is not None:
        (place / "io.weight").write_text(f"{weight}\n8:16 200\n")
    return place / "io.weight"


def test_the_weight_is_set_and_taken_back(tmp_path: Path) -> None:
    path = cgroups(tmp_path, weight="default 150")
    before, undo = set_io_weight(20, tmp_path)
    assert (before, path.read_text()) == (150, "default 20\n")
    undo()
    assert path.read_text() == "default 150\n"
    with io_weight(30, tmp_path) as done:
        assert done
        assert path.read_text() == "default 30\n"
    assert path.read_text() == "default 150\n"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"kind": "cgroup"}, "no cgroup v2 is mounted"),
        ({"weight": None}, "the io controller is off for /job.slice/rank0"),
        ({"weight": None, "inside": "/"}, "root cgroup, which has no weight"),
    ],
)
def test_where_it_cannot_be_set_the_reason_is_said_and_nothing_changes(
    tmp_path: Path, found: dict[str, str | None], why: str
) -> None:
    cgroups(tmp_path, **found)  # type: ignore[arg-type]
    with pytest.raises(CommandRefused, match=why):
        set_io_weight(20, tmp_path)
    with io_weight(20, tmp_path) as done:
        assert not done


def test_a_weight_outside_the_kernels_bounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandRefused, match="outside 1 to 10000"):
        set_io_weight(0, tmp_path)


def test_an_update_whose_rank_died_between_vote_and_step_is_in_doubt(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    first = TwoPhaseUpdate(optimizer, tmp_path)
    parameter.grad = torch.ones(2)
    assert first.step(0) == "committed"

    def die(values: list[float]) -> list[float]:
        raise ConnectionError("the store is gone")

    first.reduce = die
    with pytest.raises(ConnectionError):
        first.step(1)
    first.close()
    again = TwoPhaseUpdate(optimizer, tmp_path)
    assert again.in_doubt == 1
    assert again.step(1) == "committed"
    again.close()
    assert TwoPhaseUpdate(optimizer, tmp_path).in_doubt is None
    assert parameter.tolist() == [0.0, 0.0]


def test_a_crash_while_saving_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        store.save(step, {"step": step})
    assert store.steps() == [2, 3]
    (tmp_path / "step-4.part").mkdir()
    (tmp_path / "step-4.part" / "rank-0.pt").write_bytes(b"half")
    assert CheckpointStore(tmp_path).load() == (3, {"step": 3})
    (tmp_path / "step-3" / "rank-0.pt").write_bytes(b"rotten")
    assert "SHA-256 differs" in store.check(3)
    assert CheckpointStore(tmp_path).load() == (2, {"step": 2})
    assert (tmp_path / "quarantine" / "step-3").is_dir()
    assert CheckpointStore(tmp_path / "empty").load() is None


def test_a_checkpoint_without_all_shards_is_not_committed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, rank=0, world=2, barrier=lambda: None, agree=lambda steps: steps)
    with pytest.raises(LanterneError, match="a shard is missing"):
        store.save(7, {})
    assert store.steps() == []


def test_what_the_guards_cannot_work_with_is_said() -> None:
    with pytest.raises(UsageError, match="needs barrier and agree"):
        CheckpointStore("/nowhere", rank=0, world=2)
    with pytest.raises(UsageError, match="1 <= window <= cache_steps"):
        CollectiveBreaker(torch.nn.Linear(1, 1), window=9, cache_steps=3)


def test_an_error_in_the_block_is_raised_on_and_three_open_the_breaker() -> None:
    breaker = CollectiveBreaker(Alone(1, 1), window=1)
    for step in range(3):
        with pytest.raises(RuntimeError), breaker.step(step):
            raise RuntimeError("the peer is gone")
    with breaker.step(3) as reduced:
        assert reduced
    with breaker.step(4) as reduced:
        pass
    assert (breaker.state, breaker.opened) == ("open", 1)


def test_few_snapshots_reach_far_back_and_all_ranks_let_go_alike(tmp_path: Path) -> None:
    def held() -> list[list[int]]:
        host = SimpleNamespace(model=torch.nn.Linear(1, 1), optimizer=None, scaler=None)
        kept, seen = Snapshots(host, keep=4), []
        for step in range(10, 20_001, 10):
            kept.take(step)
            seen.append([s for s in range(0, step + 1, 10) if kept.latest(s + 1) == s])
        return seen

    seen = held()
    assert seen == held()
    assert max(map(len, seen)) == 4
    for steps in seen[50:]:
        newest, oldest = steps[-1], steps[0]
        assert newest - steps[-2] <= 40  # one is near
        assert 60 <= newest - oldest <= 10 * 2 ** (4 + REACH) + 40  # one is far, and none is out of reach
