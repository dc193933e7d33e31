"""Node readings from trees shaped like the real /proc and /sys."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lanterne.clock import SimulatedClock
from lanterne.collector.sources.node import NodeSource, family, worst
from lanterne.collector.sources.node_disks import Room, Space
from lanterne.collector.sources.node_findings import judge
from lanterne.nouns import CauseCategory

PROC_STAT = "cpu  {user} 0 0 {idle} 0 0 0 {steal}\ncpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\nprocs_running {queue}\n"


class Tree:
    """A root folder that a test writes into."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = SimulatedClock(monotonic_ns=10**9)
        self.cpu()

    def put(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def cpu(self, user: int = 0, idle: int = 0, steal: int = 0, queue: int = 1) -> None:
        self.put("proc/stat", PROC_STAT.format(user=user, idle=idle, steal=steal, queue=queue))

    def process(self, pid: int, name: str, ticks: int, parent: int = 1, waited_ns: int = 0) -> None:
        zeros = " ".join(["0"] * 8)
        self.put(
            f"proc/{pid}/stat", f"{pid} ({name}) R {parent} 1 1 0 -1 {0} {' '.join(zeros.split()[:4])} {ticks} 0 0 0\n"
        )
        self.put(f"proc/{pid}/schedstat", f"1 {waited_ns} 1\n")

    def node(self, **more: object) -> NodeSource:
        return NodeSource(self.root, clock=self.clock, **more)  # type: ignore[arg-type]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_every_source_of_an_empty_host_says_why_it_is_absent(tree: Tree) -> None:
    states = tree.node(tracing=True).states
    absent = {k for k, v in states.items() if v}
    assert absent >= {"psi", "cgroup", "disk_space", "disk_io", "network", "infiniband", "scheduler", "perf", "ebpf"}
    assert "CONFIG_PSI" in states["psi"]


def test_rates_are_over_the_time_between_two_looks(tree: Tree) -> None:
    tree.put("proc/diskstats", "8 0 sda 100 0 0 1000 0 0 0 0 0 500 0\n7 0 loop0 9 0 0 9 0 0 0 0 0 9 0\n")
    tree.process(50, "trainer", 0)
    node = tree.node()
    tree.put("proc/self/schedstat", "0 0 0")
    node.sample()
    tree.clock.advance(2 * 10**9)
    tree.put("proc/diskstats", "8 0 sda 110 0 0 4000 0 0 0 0 0 2500 0\n")
    tree.cpu(user=150, idle=50)
    tree.process(50, "trainer", 200)
    found = {(m, label): value for m, value, label in node.sample()}
    assert found["system.disk.busy", "sda"] == 1.0
    assert found["system.disk.latency", "sda"] == pytest.approx(0.3)
    assert found["system.cpu.utilization", ""] == 0.75
    assert found["process.neighbour.cpu", "trainer (pid 50)"] == pytest.approx(1.0)
    assert not any(label == "loop0" for _, label in found)


def test_a_busy_neighbour_is_named_and_the_jobs_own_work_is_not(tree: Tree) -> None:
    node = tree.node(job_pids=lambda: [50])
    for pid, name, parent in ((50, "trainer", 1), (51, "loader", 50), (90, "intruder (x)", 1)):
        tree.process(pid, name, 0, parent)
    node.sample()
    tree.clock.advance(10**9)
    tree.cpu(user=200, queue=9)
    for pid, name, parent, ticks in ((50, "trainer", 1, 60), (51, "loader", 50, 60), (90, "intruder (x)", 1, 90)):
        tree.process(pid, name, ticks, parent)
    samples = node.sample()
    [found] = judge(samples, [], "node7", has_job=True)
    assert (found.category, found.host, found.what) == (CauseCategory.HOST_CONTENTION, "node7", "intruder (x) (pid 90)")
    assert found.evidence[0].value == pytest.approx(0.9)
    only_mine = [s for s in samples if s[0] != "process.neighbour.cpu"] + [("process.neighbour.cpu", 0.0, "all")]
    assert judge(only_mine, [], "node7", has_job=True) == []


V1 = "nr_periods {p}\nnr_throttled {t}\nthrottled_time {ns}\n"
V2 = "usage_usec 5\nnr_periods {p}\nnr_throttled {t}\nthrottled_usec {us}\n"


@pytest.mark.parametrize("version", [1, 2])
def test_a_throttled_cgroup_is_named(tree: Tree, version: int) -> None:
    base = "sys/fs/cgroup/cpu" if version == 1 else "sys/fs/cgroup"
    text = V1 if version == 1 else V2

    def write(periods: int, throttled: int, seconds: float) -> None:
        said = text.format(p=periods, t=throttled, ns=int(seconds * 1e9), us=int(seconds * 1e6))
        tree.put(f"{base}/pods/train/cpu.stat", said)

    tree.put(f"{base}/cpu.stat", text.format(p=0, t=0, ns=0, us=0))
    if version == 2:
        tree.put("sys/fs/cgroup/cgroup.controllers", "cpu memory io")
    write(100, 10, 1.0)
    node = tree.node()
    assert node.states["cgroup"] == ""
    node.sample()
    tree.clock.advance(2 * 10**9)
    write(120, 28, 2.6)
    samples = node.sample()
    assert {label: value for name, value, label in samples if name == "system.cgroup.throttled_share"} == {
        "/pods/train": pytest.approx(0.9)
    }
    [found] = judge(samples, [], "node7", has_job=False)
    assert (found.category, found.source, found.what) == (CauseCategory.HOST_CONTENTION, "cgroup", "/pods/train")


def test_a_small_quota_that_costs_little_is_no_finding(tree: Tree) -> None:
    samples = [("system.cgroup.throttled_share", 0.9, "/sidecar"), ("system.cgroup.throttled_time", 0.05, "/sidecar")]
    assert judge(samples, [], "h", has_job=False) == []


def test_a_full_disk_and_one_without_inodes_are_found() -> None:
    rooms = {
        "/full": Room(1e12, 5e6, 1e6, 9e5), "/inodes": Room(1e12, 5e11, 1e6, 10), "/fine": Room(1e12, 5e11, 1e6, 9e5),
        "/big": Room(1e15, 1e13, 0, 0),
    }  # fmt: skip
    space = Space(Path("/nonexistent"), list(rooms), ask=rooms.__getitem__)
    found = judge(space.read(0.0), [], "node3", has_job=False)
    assert {(f.category, f.host, f.what) for f in found} == {
        (CauseCategory.STORAGE_SLOW, "node3", "/full"), (CauseCategory.STORAGE_SLOW, "node3", "/inodes"),
    }  # fmt: skip


def test_a_mount_that_hangs_is_said_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanterne.collector.sources.node_disks.PATIENCE_S", 0.05)
    free = threading.Event()

    def ask(path: str) -> Room:
        if path == "/nfs":
            free.wait(30)
        return Room(1e12, 5e11, 0, 0)

    space = Space(Path("/nonexistent"), ["/nfs", "/ok"], ask=ask)
    first = space.read(0.0)
    assert ("system.disk.silent", 1.0, "/nfs") in first
    [found] = judge(first, [], "node3", has_job=False)
    assert (found.category, found.what) == (CauseCategory.STORAGE_SLOW, "/nfs")
    free.set()
    space._open["/nfs"].wait(5.0)
    assert not [s for s in space.read(0.0) if s[0] == "system.disk.silent"]


def test_links_and_ports_give_their_errors(tree: Tree) -> None:
    head = "a\nb\n"
    tree.put(
        "proc/net/dev", head + "  eth0: 1 1 3 4 0 0 0 0 1 1 5 6 0 0 0 0\n    lo: 1 1 9 9 0 0 0 0 1 1 9 9 0 0 0 0\n"
    )
    tree.put("proc/net/snmp", "Tcp: A RetransSegs\nTcp: 1 77\n")
    tree.put("sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", "2\n")
    assert set(tree.node().sample()) >= {
        ("system.network.errors", 8.0, "eth0"), ("system.network.dropped", 10.0, "eth0"),
        ("system.network.retransmits", 77.0, ""), ("hw.network.errors", 2.0, "mlx5_0/1 link_downed"),
    }  # fmt: skip


def test_a_source_that_breaks_becomes_absent_with_its_error(tree: Tree) -> None:
    tree.put("proc/pressure/cpu", "some avg10=12.50 avg60=0 avg300=0 total=1\n")
    node = tree.node()
    assert not any(s[0].startswith("system.psi") for s in node.sample())
    assert "FileNotFoundError" in node.states["psi"]


def test_descendants_belong_to_the_job() -> None:
    assert family([1], {2: 1, 3: 2, 4: 9}) == {1, 2, 3}


def test_worst_keeps_one_of_each_metric() -> None:
    samples = [("a", 1.0, "x"), ("a", 3.0, "y"), ("b", 1.0, "")]
    assert worst(samples, ["a"]) == [("a", 3.0, "y")]
