"""Field cases C19 to C36, C56 to C63, P3, P7, P10: host, device, network, launch, memory, checkpoints, endings."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cases.evidence import Logs, categories, first, hedged, judge, metrics_file, named_ranks, watchdog


def text(folder: Path, *lines: str, name: str = "job.out") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(("ranks", "every", "pause"), [(4, 260, 1_450.0), (8, 180, 1_100.0)])
def test_c19_collection_at_different_steps(tmp_path: Path, ranks: int, every: int, pause: float) -> None:
    noise = random.Random(7)
    for rank in range(ranks):
        rows = [
            {
                "step": s,
                "rank": rank,
                "step_ms": 800 + noise.gauss(0, 4) + (pause if s % every == 31 * rank % every else 0),
            }
            for s in range(1, 4 * every)
        ]
        metrics_file(tmp_path / f"rank_{rank}.jsonl", rows)
    assert first(judge(tmp_path)).category == "gc_pause"


def test_c19_in_words(tmp_path: Path) -> None:
    logs = Logs(2)
    for rank in range(2):
        logs.say(
            rank,
            f"step {100 + 40 * rank}",
            "gc: collecting generation 2...",
            f"gc: done, 1052 unreachable, 0 uncollectable, 1.4{rank}21s elapsed",
        )
    assert first(judge(logs.write(tmp_path)[0])).category == "gc_pause"


@pytest.mark.parametrize(
    "lines",
    [
        (
            "CPU(s):                          96",
            " 10:00:00 up 3 days, load average: 360.12, 310.00, 200.00",
            "| N/A   41C    P0   80W / 400W |  40321MiB / 81559MiB |      0%      Default |",
        ),
        ("OMP_NUM_THREADS is not set", "GPU util 0%, 360 cores busy, 112 s/step"),
    ],
)
def test_c20_threads(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert first(judge(text(tmp_path, *lines))).category == "host_contention"


def test_c22_equal_backward_cannot_be_localised(tmp_path: Path) -> None:
    noise = random.Random(3)
    for rank in range(4):
        rows = [
            {"step": s, "rank": rank, "backward_ms": 93.0 + (200 if s > 30 else 0) + noise.gauss(0, 0.5)}
            for s in range(90)
        ]
        metrics_file(tmp_path / f"rank_{rank}.jsonl", rows)
    report = judge(tmp_path)
    assert not report.healthy
    assert named_ranks(report) == set()
    assert hedged(report)
    assert "arriv" in " ".join(first(report).needs) or "entry" in " ".join(first(report).needs)


@pytest.mark.parametrize("slow", [0, 2])
def test_c22_control_a_loader_stall_is_named(tmp_path: Path, slow: int) -> None:
    noise = random.Random(3)
    for rank in range(4):
        rows = [
            {
                "step": s,
                "rank": rank,
                "data_wait_ms": 10.4 + (189.3 if rank == slow and s > 30 else 0) + noise.gauss(0, 0.3),
                "step_ms": 300 + (190 if s > 30 else 0) + noise.gauss(0, 1),
            }
            for s in range(90)
        ]
        metrics_file(tmp_path / f"rank_{rank}.jsonl", rows)
    cause = first(judge(tmp_path))
    assert (cause.category, cause.subject.rank) == ("data_stall", slow)


def test_c24_thermal(tmp_path: Path) -> None:
    cold = ["GPU 00000000:1B:00.0", "        HW Thermal Slowdown               : Not Active"]
    hot = [
        "GPU 00000000:3B:00.0",
        "        HW Thermal Slowdown               : Active",
        "        GPU Current Temp                  : 91 C",
    ]
    cause = first(judge(text(tmp_path, *cold, *hot, *cold)))
    assert (cause.category, cause.subject.device) == ("thermal_throttle", "00000000:3B:00.0")


def test_c24_nothing_when_cool(tmp_path: Path) -> None:
    report = judge(
        text(
            tmp_path,
            "GPU 00000000:1B:00.0",
            "        HW Thermal Slowdown               : Not Active",
            "        SM                                : 1980 MHz",
        )
    )
    assert report.healthy


@pytest.mark.parametrize("rank", [3, 12])
def test_c26_ecc_then_out_of_memory(tmp_path: Path, rank: int) -> None:
    logs = Logs(16).say(
        rank,
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "restarting array job",
        "RuntimeError: CUDA error: out of memory",
    )
    report = judge(logs.write(tmp_path)[0])
    assert (first(report).category, first(report).subject.rank) == ("device_fault", rank)
    assert "out_of_memory" not in categories(report)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(
    "clue",
    [
        "NCCL_P2P_DISABLE=1: all_reduce completes",
        "ACSCtl: SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-",
        "DMAR: IOMMU enabled",
    ],
)
def test_c27_first_collective_deadlocks(tmp_path: Path, ranks: int, clue: str) -> None:
    logs = Logs(ranks)
    for rank in range(ranks):
        logs.say(
            rank,
            f"box:{100 + rank}:200 [{rank}] NCCL INFO Channel 00 : {rank}[{rank}] -> "
            f"{(rank + 1) % ranks}[{(rank + 1) % ranks}] via P2P/IPC",
            watchdog(rank, 1, "ALLREDUCE", 1024),
        )
    logs.say(0, clue)
    assert first(judge(logs.write(tmp_path)[0])).category == "host_misconfigured"


def test_p3_a_pair_is_not_a_part(tmp_path: Path) -> None:
    logs = Logs(2)
    for rank in range(2):
        logs.say(rank, watchdog(rank, 1, "ALLREDUCE", 1024))
    logs.say(
        0,
        "GPUs 2,5: all_reduce hangs",
        "NCCL_P2P_DISABLE=1: all_reduce completes",
        "NCCL_SHM_DISABLE=1: all_reduce completes",
    )
    report = judge(logs.write(tmp_path)[0])
    assert first(report).category == "unknown"
    assert hedged(report)


@pytest.mark.parametrize(
    "line",
    [
        "node2:11:12 [1] misc/ibvwrap.cc:284 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate "
        "memory",
        "node2:11:12 [1] NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
        "max locked memory       (kbytes, -l) 8192",
    ],
)
def test_c29_locked_memory(tmp_path: Path, line: str) -> None:
    report = judge(text(tmp_path, line, "torch.distributed.DistBackendError: NCCL error: unhandled system error"))
    assert first(report).category == "host_misconfigured"
    assert "out_of_memory" not in categories(report)


def test_c32_silent_fallback_to_sockets(tmp_path: Path) -> None:
    lines = [f"node{n}:11:12 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.{n}<0>" for n in (1, 2)]
    lines += [f"node{n}:11:12 [0] NCCL INFO Using network Socket" for n in (1, 2)]
    report = judge(
        text(
            tmp_path,
            "node1:11:12 [0] NCCL INFO NET/IB : No device found.",
            *lines,
            "1 GB all_reduce algbw 5.0 GB/s (expected 25)",
        )
    )
    assert first(report).category == "interface_misconfigured"
    assert "slow_compute" not in categories(report)


def test_c32_one_node_differs(tmp_path: Path) -> None:
    lines = [f"node{n}:11:12 [0] NCCL INFO Using network {'Socket' if n == 3 else 'IB'}" for n in (1, 2, 3, 4)]
    cause = first(judge(text(tmp_path, *lines)))
    assert (cause.category, cause.subject.host) == ("interface_misconfigured", "node3")


def test_c32_a_single_node_needs_no_network(tmp_path: Path) -> None:
    assert judge(
        text(
            tmp_path,
            "node1:11:12 [0] NCCL INFO Using network Socket",
            "node1:11:12 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC",
        )
    ).healthy


@pytest.mark.parametrize(
    "line",
    [
        "torch.distributed.DistNetworkError: The client socket has timed out after 60s while trying to connect to "
        "(node-a, 29500).",
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has "
        "failed. See inner exception for details.",
        "[W socket.cpp:601] [c10d] The IPv6 network addresses of (head-0, 29500) cannot be retrieved (gai error: -2 - "
        "Name or service not known).",
    ],
)
def test_c34_rendezvous(tmp_path: Path, line: str) -> None:
    assert first(judge(text(tmp_path, "launching", line))).category == "interface_misconfigured"


@pytest.mark.parametrize(("a", "b", "device"), [(0, 1, "4000"), (5, 2, "b1000")])
def test_c36_duplicate_gpu(tmp_path: Path, a: int, b: int, device: str) -> None:
    report = judge(
        text(
            tmp_path,
            f"node1:5:6 [0] init.cc:795 NCCL WARN Duplicate GPU detected : rank {a} and rank {b} both on CUDA "
            f"device {device}",
            "torch.distributed.DistBackendError: NCCL error, invalid usage",
        )
    )
    assert first(report).category == "env_mismatch"
    assert first(report).subject.device == device
    assert first(report).subject.rank in (a, b)


@pytest.mark.parametrize("ranks", [4, 8])
def test_c56_extra_processes_on_device_zero(tmp_path: Path, ranks: int) -> None:
    rows = [
        f"|    {r}   N/A  N/A     {1000 + r}      C   /usr/bin/python                 31725MiB |" for r in range(ranks)
    ]
    rows += [
        f"|    0   N/A  N/A     {1000 + r}      C   /usr/bin/python                   725MiB |" for r in range(1, ranks)
    ]
    report = judge(
        text(tmp_path, *rows, "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB.")
    )
    cause = first(report)
    assert (cause.category, cause.subject.rank, cause.subject.device) == ("out_of_memory", 0, "0")
    assert "map_location" in cause.remedy.says


def test_c56_one_process_a_device_is_healthy(tmp_path: Path) -> None:
    rows = [f"|    {r}   N/A  N/A     {1000 + r}      C   /usr/bin/python                 31725MiB |" for r in range(8)]
    assert judge(text(tmp_path, *rows)).healthy


@pytest.mark.parametrize("rank", [0, 6])
def test_c58_shared_memory(tmp_path: Path, rank: int) -> None:
    logs = Logs(8).say(
        rank,
        "shm              64M   62M  2.0M  96% /dev/shm",
        "RuntimeError: DataLoader worker (pid 1234) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.",
    )
    report = judge(logs.write(tmp_path)[0])
    assert (first(report).category, first(report).subject.rank) == ("shared_memory_exhausted", rank)
    assert categories(report) == ["shared_memory_exhausted"]


@pytest.mark.parametrize(
    "path",
    [
        "/ckpt/checkpoint-4000/optimizer.pt",
        "/fsx/run7/global_step12000/mp_rank_00_model_states.pt",
        "/ckpt/step_900/__3_0.distcp",
    ],
)
def test_c60_incomplete_checkpoint(tmp_path: Path, path: str) -> None:
    report = judge(
        text(
            tmp_path,
            "slurmstepd: error: *** JOB 123 ON node1 CANCELLED AT 2026-05-01T10:00:00 ***",
            "Traceback (most recent call last):",
            f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'",
        )
    )
    assert first(report).category == "checkpoint_incomplete"


@pytest.mark.parametrize(("world", "rank"), [(16, 7), (64, 33)])
def test_c61_world_size_changed(tmp_path: Path, world: int, rank: int) -> None:
    report = judge(
        text(
            tmp_path,
            f"FileNotFoundError: [Errno 2] No such file or directory: "
            f"'/ckpt/global_step_300/actor/model_world_size_{world}_rank_{rank}.pt'",
        )
    )
    assert str(first(report).category).startswith("checkpoint_")
    assert "layout" in first(report).remedy.says


@pytest.mark.parametrize("rank", [1, 6])
def test_c63_one_rank_crashed_job_stays(tmp_path: Path, rank: int) -> None:
    logs = Logs(8).say(
        rank,
        "step 200 loss 3.1",
        "Traceback (most recent call last):",
        '  File "train.py", line 10, in <module>',
        "ValueError: bad sample 881",
    )
    for other in range(8):
        if other != rank:
            logs.say(other, "step 200 loss 3.1")
    logs.say(0 if rank else 1, "JobState=RUNNING Reason=None RunTime=06:12:33")
    cause = first(judge(logs.write(tmp_path)[0]))
    assert (cause.category, cause.subject.rank) == ("external_termination", rank)
    assert "kill-on-bad-exit" in cause.remedy.says
    assert any("ValueError: bad sample 881" in e.says for e in cause.evidence)


def test_p7_non_shared_disks(tmp_path: Path) -> None:
    report = judge(
        text(
            tmp_path,
            "The following zero checkpoints paths are missing: "
            "['global_step500/zero_pp_rank_8_mp_rank_00_optim_states.pt']",
            "step 501 loss 4.1",
        )
    )
    assert hedged(report)


def test_p10_a_refuted_hypothesis(tmp_path: Path) -> None:
    report = judge(
        text(tmp_path, "mlx5_core 0000:5e:00.0 ibp94s0: Link down", "cordoned leaf12, no improvement in step time")
    )
    assert first(report).category == "unknown"
    assert "network_failure" not in categories(report)


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: *** JOB 123 ON node1 CANCELLED AT 2026-05-01T10:00:00 DUE TO PREEMPTION ***",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15",
        "Spot interruption notice received: instance will be terminated in 2 minutes",
    ],
)
def test_preemption_and_the_port_after_it(tmp_path: Path, line: str) -> None:
    report = judge(
        text(
            tmp_path,
            "step 10 loss 2.0",
            line,
            "[c10d] The server socket has failed to listen on any local network address. port: 29500, code: -98, "
            "name: EADDRINUSE, message: address already in use",
        )
    )
    assert first(report).category == "external_termination"


@pytest.mark.parametrize(
    ("line", "sure"),
    [
        (
            "node3:4242:4300 [3] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<43567> "
            "with error 12, opcode 0, len 0, vendor err 129",
            True,
        ),
        (
            "node3:4242:4300 [3] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<43567> with "
            "status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) reqSize=0 vendor_err=129",
            True,
        ),
    ],
)
def test_fabric_fault_during_a_run(tmp_path: Path, line: str, sure: bool) -> None:
    report = judge(text(tmp_path, "step 900 loss 2.0", line, watchdog(3, 8000, "ALLREDUCE", 4096)))
    assert (first(report).category == "network_failure") is sure


@pytest.mark.parametrize(
    "code",
    [
        (-9, "Signal 9 (SIGKILL) received by PID 4242"),
        (-11, "Signal 11 (SIGSEGV) received by PID 4242"),
        (1, "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"),
    ],
)
def test_elastic_report_names_the_first_failure(tmp_path: Path, code: tuple[int, str]) -> None:
    block = [
        "train.py FAILED",
        "-" * 60,
        "Failures:",
        "[1]:",
        "  time      : 2026-01-01_00:00:02",
        "  host      : node1",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : -15 (pid: 4243)",
        "  error_file: <N/A>",
        "  traceback : Signal 15 (SIGTERM) received by PID 4243",
        "-" * 60,
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-01-01_00:00:01",
        "  host      : node1",
        "  rank      : 5 (local_rank: 5)",
        f"  exitcode  : {code[0]} (pid: 4242)",
        "  error_file: <N/A>",
        f"  traceback : {code[1]}",
        "=" * 60,
    ]
    cause = first(judge(text(tmp_path, *block)))
    assert (cause.category, cause.subject.rank, cause.subject.host) == ("rank_crashed", 5, "node1")
