"""Sentences of real tools, as they print them: one fixed meaning each, and the right rank."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lanterne.nouns import Report
from tests.cases.evidence import Logs, first, judge, metrics_file, watchdog

FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
PEER_GONE = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a "
    "network error, NCCL version 2.21.5"
)


def said(folder: Path, *text: str, name: str = "job.log") -> Report:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(text) + "\n")
    return judge(folder)


SENTENCES = [
    (
        "collective_divergence",
        5,
        "[rank5]: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
    ),
    (
        "collective_mismatch",
        3,
        "[rank0]: RuntimeError: DDP expects same model across all ranks, but Rank 3 has 148 params, while rank 0 has "
        "inconsistent 150 params.",
    ),
    (
        "collective_mismatch",
        2,
        "[rank2]: RuntimeError: [2]: params[0] in this process with sizes [32000, 4096] appears not to match sizes of "
        "the same param in process 0.",
    ),
    (
        "collective_mismatch",
        None,
        "[rank1]: RuntimeError: [enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. "
        "8192 vs 4096",
    ),
    ("host_misconfigured", 4, "[rank4]: OSError: [Errno 24] Too many open files: '/data/shard-0004.tar'"),
    (
        "interface_misconfigured",
        None,
        "RuntimeError: The server socket has failed to listen on any local network address. The server socket has "
        "failed to bind to [::]:29500 (errno: 98 - Address already in use).",
    ),
    ("loss_scale_collapse", None, "[rank0]: FloatingPointError: Minimum loss scale reached (0.0001). Try lowering lr."),
    (
        "nonfinite_values",
        3,
        "[rank3]: RuntimeError: Function 'LogSoftmaxBackward0' returned nan values in its 0th output.",
    ),
    (
        "nonfinite_values",
        6,
        "[rank6]: AssertionError: Rank 6: found NaN in local grad norm in backward pass before data-parallel "
        "communication collective. Device: 6, node: hgx-12",
    ),
    ("scaler_misuse", None, "[rank0]: ValueError: Attempting to unscale FP16 gradients."),
    (
        "replica_divergence",
        6,
        "[rank0]: parameter hash mismatch across data-parallel replicas: rank 6 has 0x9a others 0x17",
    ),
    ("resume_state_lost", None, "WARNING: optimizer state not found in checkpoint, optimizer will be re-initialized"),
    (
        "data_order",
        None,
        "WARNING: DistributedSampler.set_epoch was never called: the same order is used in every epoch",
    ),
    (
        "checkpoint_incomplete",
        None,
        "ZeRORuntimeException: The checkpoint being loaded used a DP world size of 16 but the current world size is 8.",
    ),
    ("checkpoint_incomplete", None, "[rank0]: RuntimeError: Error(s) in loading state_dict for GPT:"),
    ("version_mismatch", None, "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."),
    (
        "version_mismatch",
        8,
        "[rank8]: ImportError: /lib/libc.so.6: version `GLIBC_2.32' not found (required by flash_attn_2_cuda.so)",
    ),
    (
        "env_mismatch",
        None,
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR "
        "expected, but not set",
    ),
    (
        "external_termination",
        None,
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4 got signal: 2",
    ),
    ("out_of_memory", None, "      Reason:       OOMKilled"),
    ("recompile", None, "W1105 torch/_dynamo/convert_frame.py:906] [0/8] torch._dynamo hit config.recompile_limit (8)"),
    (
        "thermal_throttle",
        None,
        "[ 812.1] CPU12: Core temperature above threshold, cpu clock throttled (total events = 41)",
    ),
]


@pytest.mark.parametrize(("category", "rank", "text"), SENTENCES)
def test_a_sentence_names_its_cause(tmp_path: Path, category: str, rank: int | None, text: str) -> None:
    cause = first(said(tmp_path, text, FAILED))
    assert (cause.category, cause.subject.rank) == (category, rank)


@pytest.mark.parametrize("rank", [1, 6])
def test_an_exhausted_loader_under_torchrun(tmp_path: Path, rank: int) -> None:
    logs = Logs(8).say(rank, "Traceback (most recent call last):", "StopIteration")
    for other in set(range(8)) - {rank}:
        logs.say(other, watchdog(other, 3001, "_REDUCE_SCATTER_BASE", 8_388_608))
    cause = first(judge(logs.write(tmp_path)[0]))
    assert (cause.category, cause.subject.rank) == ("uneven_inputs", rank)


@pytest.mark.parametrize(
    ("number", "words"), [(31, "an illegal memory access was encountered"), (13, "device-side assert triggered")]
)
def test_an_application_xid_is_the_programs(tmp_path: Path, number: int, words: str) -> None:
    kernel = f"NVRM: Xid (PCI:0000:c1:00): {number}, pid=4125, name=python, MMU Fault"
    cause = first(said(tmp_path, kernel, f"[rank3]: RuntimeError: CUDA error: {words}"))
    assert (cause.category, cause.subject.rank) == ("rank_crashed", 3)
    assert any("Xid" in e.says for e in cause.evidence)


def test_completion_errors_after_a_crash_are_effects(tmp_path: Path) -> None:
    logs = Logs(4).say(2, "Traceback (most recent call last):", "ValueError: invalid literal for int()")
    for rank in (0, 1, 3):
        error = "NET/IB : Got completion from peer 10.0.0.6<1> with error 12, opcode 1, len 0, vendor err 129"
        logs.say(rank, f"h{rank}:2:9 [0] transport/net_ib.cc:1295 NCCL WARN {error}", PEER_GONE)
    cause = first(judge(logs.write(tmp_path)[0]))
    assert (cause.category, cause.subject.rank) == ("rank_crashed", 2)


def test_a_warning_with_a_source_place_names_its_host(tmp_path: Path) -> None:
    text = "gpu-3:6411:6500 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr_iova2 failed: Cannot allocate memory"
    assert first(said(tmp_path, text)).subject.host == "gpu-3"


@pytest.mark.parametrize("interface", ["docker0", "lo"])
def test_bootstrap_on_an_inner_interface(tmp_path: Path, interface: str) -> None:
    rows = [f"node{n}:88:90 [0] NCCL INFO Bootstrap : Using {interface}:172.17.0.1<0>" for n in (1, 2)]
    assert first(said(tmp_path / "two", *rows, f"[rank8]: {PEER_GONE}")).category == "interface_misconfigured"
    assert not said(tmp_path / "one", rows[0], "NCCL version 2.21.5+cuda12.4").incidents


def test_errors_about_a_peer_alone_are_no_cause_and_not_healthy(tmp_path: Path) -> None:
    cause = first(said(tmp_path, PEER_GONE, name="rank_0.log"))
    assert cause.category == "unknown"
    assert cause.needs


@pytest.mark.parametrize(("held", "category"), [("37.61", "fragmentation"), ("20.90", "out_of_memory")])
def test_fragmentation_in_the_old_wording(tmp_path: Path, held: str, category: str) -> None:
    text = (
        "[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 39.59 GiB total capacity; "
        f"20.44 GiB already allocated; 200.19 MiB free; {held} GiB reserved in total by PyTorch)"
    )
    cause = first(said(tmp_path, text))
    assert (cause.category, cause.subject.rank) == (category, 1)


@pytest.mark.parametrize(
    "words", ["saving checkpoint at iteration 500 to /ckpt", "WARNING: loss is nan, skipping this batch"]
)
def test_a_branch_of_one_rank_is_not_the_end_of_its_data(tmp_path: Path, words: str) -> None:
    logs = Logs(4)
    for rank in range(4):
        logs.say(rank, *([words] if rank == 2 else []), watchdog(rank, 1501, numel=1 if rank == 2 else 26_214_400))
    cause = first(judge(logs.write(tmp_path)[0]))
    assert (cause.category, cause.subject.rank) == ("collective_divergence", 2)


def test_only_the_absent_rank_is_done(tmp_path: Path) -> None:
    logs = Logs(4).say(
        3, "Epoch 0: 100%|##########| 731/731 [10:02<00:00]", "`Trainer.fit` stopped: `max_epochs=1` reached."
    )
    for rank in range(3):
        logs.say(rank, "Epoch 0:  99%|######### | 731/732 [10:02<00:00]", watchdog(rank, 2200))
    cause = first(judge(logs.write(tmp_path)[0]))
    assert (cause.category, cause.subject.rank) == ("uneven_inputs", 3)


def test_batch_fingerprints_in_json_lines(tmp_path: Path) -> None:
    def rows(shared: bool) -> list[dict[str, object]]:
        return [
            {"step": i, "rank": r, "batch_fingerprint": f"{i}-{0 if shared else r}"}
            for i in range(20)
            for r in range(4)
        ]

    metrics_file(tmp_path / "same" / "m.jsonl", rows(True))
    metrics_file(tmp_path / "own" / "m.jsonl", rows(False))
    assert first(judge(tmp_path / "same")).category == "data_order"
    assert not judge(tmp_path / "own").incidents


def test_a_loader_stall_beats_equal_logged_losses(tmp_path: Path) -> None:
    rows = [
        {"step": i, "rank": r, "step_time_s": 1.2 if i > 100 else 0.4, "loss": 2.0 - i * 0.001,
         "data_time_s": 0.82 if i > 100 and r == 2 else 0.02}
        for i in range(1, 200) for r in range(4)
    ]  # fmt: skip
    metrics_file(tmp_path / "m.jsonl", rows)
    cause = first(judge(tmp_path))
    assert (cause.category, cause.subject.rank) == ("data_stall", 2)


def test_a_learning_rate_jump_and_a_slow_divergence(tmp_path: Path) -> None:
    jump = [
        {"step": i, "loss": 3 - 0.004 * i if i < 150 else 2.4 + 0.3 * min(i - 150, 20), "lr": 3e-4 if i < 149 else 3e-2}
        for i in range(200)
    ]
    climb = [{"step": i, "loss": 3 - 0.002 * i if i < 200 else 2.6 + 0.05 * (i - 200)} for i in range(300)]
    noisy = [
        {"step": i, "loss": 2.5 * math.exp(-i / 90) + 1 + 0.05 * math.sin(i * 1.7), "lr": 3e-4} for i in range(300)
    ]
    for name, rows in (("jump", jump), ("climb", climb), ("healthy", noisy)):
        metrics_file(tmp_path / name / "m.jsonl", rows)
    assert first(judge(tmp_path / "jump")).category == "lr_misconfigured"
    assert first(judge(tmp_path / "climb")).category == "training_instability"
    assert not judge(tmp_path / "healthy").incidents


def test_one_save_takes_many_times_the_others(tmp_path: Path) -> None:
    rows = [f"step {i}: checkpoint save took {12 if i < 50 else 640} s" for i in range(10, 80, 10)]
    assert first(said(tmp_path / "slow", *rows)).category == "checkpoint_stall"
    assert not said(tmp_path / "even", *rows[:4]).incidents


def test_warnings_of_healthy_jobs(tmp_path: Path) -> None:
    report = said(
        tmp_path,
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
        "UserWarning: Grad strides do not match bucket view strides.",
        "[rank0]:[W reducer.cpp:1389] Warning: find_unused_parameters=True was specified in DDP constructor",
        "huggingface/tokenizers: The current process just got forked, after parallelism has already been used.",
        "[rank0]:[W1105 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before we",
    )
    assert not report.incidents


def test_a_bracketed_log_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("[rank0]: hello\n")
    (tmp_path / "m.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    assert not any("not JSON" in note for note in judge(tmp_path).quality.notes)
