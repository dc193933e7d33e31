"""Trainer logs and metric files of the reports whose evidence is numbers, in the forms that frameworks write."""

from __future__ import annotations

import json
import math
import pickle
import random
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

BUILDERS: dict[str, Callable[[Path], None]] = {}


def builder(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Register a builder under its own name."""
    BUILDERS[make.__name__] = make
    return make


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("\n".join(lines) + "\n")


def _loss(step: int, noise: random.Random, start: float = 10.5, end: float = 2.2, pace: float = 60.0) -> float:
    return end + (start - end) * math.exp(-step / pace) + noise.gauss(0, 0.03)


def titan(step: int, loss: float, tps: float = 7421, norm: float | None = None) -> str:
    middle = f"grad_norm: {norm:7.4f}  " if norm is not None else ""
    return (
        f"[rank0]:[titan] 2025-03-01 10:{step // 60 % 60:02d}:{step % 60:02d},123 - root - INFO - "
        f"\x1b[31mstep: {step:2d}  \x1b[32mloss: {loss:7.4f}  \x1b[38;2;180;60;0m{middle}\x1b[33mmemory: "
        f"40.02GiB(50.33%)  \x1b[34mtps: {tps:,.0f}  \x1b[36mtflops: {tps / 19.5:.2f}  \x1b[35mmfu: 38.55%\x1b[39m"
    )


def megatron(step: int, loss: float | None, norm: str = "0.752", ms: float = 7613.1, lr: float = 6.68e-6) -> str:
    said = f"lm loss: {loss:.6E} | " if loss is not None else ""
    nan = 0 if loss is not None else 1
    return (
        f" [2025-03-01 10:00:00] iteration {step:8d}/    8000 | consumed samples: {step * 64:12d} | elapsed time per "
        f"iteration (ms): {ms:.1f} | learning rate: {lr:.3E} | global batch size:    64 | {said}loss scale: 1.0 | "
        f"grad norm: {norm} | number of skipped iterations:   0 | number of nan iterations:   {nan} |"
    )


def hf(loss: float, lr: float, epoch: float, norm: float = 1.04) -> str:
    shown = "nan" if math.isnan(norm) else f"{norm}"
    return f"{{'loss': {loss:.4f}, 'grad_norm': {shown}, 'learning_rate': {lr}, 'epoch': {epoch:.2f}}}"


@builder
def titan_slows(folder: Path) -> None:
    noise = random.Random(1)
    for rank in range(4):
        rows = [
            titan(s, _loss(s, noise), noise.gauss(7500 if s < 60 else 5100, 40)).replace("[rank0]", f"[rank{rank}]")
            for s in range(1, 121)
        ]
        _write(folder / f"rank_{rank}.log", rows)


@builder
def csv_one_slow(folder: Path) -> None:
    noise = random.Random(2)
    for rank in range(8):
        rows = ["step,rank,loss,forward_ms,backward_ms"]
        for s in range(100):
            slow = 1.6 if rank == 5 and s >= 40 else 1.0
            rows.append(f"{s},{rank},{_loss(s, noise):.4f},{slow * noise.gauss(80, 1):.2f},{noise.gauss(170, 2):.2f}")
        _write(folder / f"metrics_rank{rank}.csv", rows)


@builder
def csv_loader(folder: Path) -> None:
    noise = random.Random(3)
    for rank in range(4):
        rows = ["global_step,rank,train_loss,data_time_s,step_time_s"]
        for s in range(100):
            wait = noise.gauss(1.9, 0.1) if rank == 1 and s >= 30 else noise.gauss(0.01, 0.001)
            rows.append(f"{s},{rank},{_loss(s, noise):.4f},{wait:.4f},{0.5 + (1.9 if s >= 30 else 0):.3f}")
        _write(folder / f"rank{rank}.csv", rows)


@builder
def rss_grows(folder: Path) -> None:
    noise = random.Random(4)
    for rank in range(4):
        rows = []
        for s in range(200):
            rss = 20e9 + noise.gauss(0, 2e7) + (4e7 * s if rank == 3 else 0)
            rows.append(json.dumps({"step": s, "rank": rank, "loss": _loss(s, noise), "rss_bytes": rss}))
        _write(folder / f"rank_{rank}.jsonl", rows)


@builder
def ds_calibrates(folder: Path) -> None:
    noise = random.Random(5)
    rows = [
        f"[2025-01-01 10:00:{i:02d},000] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 "
        f"Skipping step. Attempted loss scale: {2 ** (32 - i)}, reducing to {2 ** (31 - i)}"
        for i in range(14)
    ]
    rows += [
        f"[2025-01-01 10:{s // 60:02d}:{s % 60:02d},000] [INFO] [logging.py:96:log_dist] [Rank 0] step={s}, "
        f"skipped=14, lr=[0.0001], mom=[[0.9, 0.999]]\nsteps: {s} loss: {_loss(s, noise):.4f} iter time (s): 1.203 "
        f"samples/sec: 26.600"
        for s in range(20, 200)
    ]
    _write(folder / "job.log", rows)


@builder
def megatron_nan(folder: Path) -> None:
    noise = random.Random(6)
    rows = [megatron(s, _loss(s, noise)) for s in range(1, 60)]
    rows += [megatron(s, None, "nan") for s in range(60, 66)]
    _write(folder / "train.log", rows)


@builder
def hf_nan(folder: Path) -> None:
    noise = random.Random(7)
    rows = [hf(_loss(s, noise), 1e-5, s / 100) for s in range(60)]
    rows += [hf(0.0, 1e-5, s / 100, math.nan) for s in range(60, 70)]
    _write(folder / "train.log", rows)


@builder
def hf_resume(folder: Path) -> None:
    noise = random.Random(8)
    rows = [hf(_loss(s, noise, 4.0, 1.2), min(s / 20, 1) * 1e-4, s / 100) for s in range(1, 120)]
    rows += [
        "  Continuing training from checkpoint, will skip to saved global_step",
        "  Continuing training from epoch 1",
        "  Continuing training from global step 120",
    ]
    rows += [hf(1.75 + noise.gauss(0, 0.03), min((s - 119) / 20, 1) * 1e-4, s / 100) for s in range(120, 180)]
    _write(folder / "train.log", rows)


@builder
def nanotron_spike(folder: Path) -> None:
    noise, rows = random.Random(9), []
    for s in range(1, 400):
        loss, norm = _loss(s, noise), abs(noise.gauss(1.2, 0.05))
        if 300 <= s < 325:
            loss += 2.4 * math.exp(-(s - 302) / 6) if s >= 302 else 0.0
            norm *= 40 if s < 306 else 3
        rows.append(
            f"10/17/2025 16:{s // 60:02d}:{s % 60:02d} "
            f"[INFO|DP=0|PP=0|TP=0]: iteration: {s} / 378950 | "
            f"consumed_tokens: 85.8G | elapsed_time_per_iteration_ms: 11.5K | tokens_per_sec: 22.8K | "
            f"global_batch_size: 64 | lm_loss: {loss:.3g} | lr: 1e-05 | model_tflops_per_gpu: 38.3 | "
            f"hardware_tflops_per_gpu: 38.3 | grad_norm: {norm:.3g}"
        )
    _write(folder / "node0.log", rows)


@builder
def accumulation(folder: Path) -> None:
    noise = random.Random(10)
    rows = ["***** Running training *****", "  Gradient Accumulation steps = 8"]
    rows += [hf(8 * _loss(s, noise), 1e-5, s / 100, 8.3) for s in range(60)]
    _write(folder / "train.log", rows)


@builder
def local_losses(folder: Path) -> None:
    for rank in range(4):
        noise = random.Random(11)
        rows = [json.dumps({"step": s, "rank": rank, "local_loss": _loss(s, noise)}) for s in range(60)]
        _write(folder / f"rank_{rank}.jsonl", rows)


@builder
def reduced_losses(folder: Path) -> None:
    for rank in range(4):
        noise = random.Random(12)
        _write(folder / f"rank_{rank}.log", [f"step {s} loss {_loss(s, noise):.15f}" for s in range(60)])


@builder
def titan_nan(folder: Path) -> None:
    noise = random.Random(13)
    for rank in range(4):
        rows = [titan(s, _loss(s, noise)).replace("[rank0]", f"[rank{rank}]") for s in range(1, 61)]
        rows += [titan(s, math.nan).replace("[rank0]", f"[rank{rank}]") for s in range(61, 70)]
        _write(folder / f"rank_{rank}.log", rows)


@builder
def explodes(folder: Path) -> None:
    noise, rows = random.Random(14), ["step,loss,grad_norm,lr"]
    for s in range(200):
        norm = abs(noise.gauss(1.0, 0.08)) * (1.25 ** max(0, s - 140))
        loss = _loss(s, noise) + (0.15 * max(0, s - 150) if s > 150 else 0)
        rows.append(f"{s},{loss:.4f},{norm:.4f},0.0003")
    _write(folder / "metrics.csv", rows)


@builder
def lr_times_ten(folder: Path) -> None:
    noise, rows = random.Random(15), ["step,loss,grad_norm,lr"]
    rows += [
        f"{s},{_loss(s, noise) + (1.5 if s >= 120 else 0):.4f},1.0,{0.003 if s >= 120 else 0.0003}" for s in range(200)
    ]
    _write(folder / "metrics.csv", rows)


@builder
def megatron_healthy(folder: Path) -> None:
    noise = random.Random(16)
    rows = [" > building indices for blendable datasets ...", "training ..."]
    rows += [
        megatron(s, _loss(s, noise), f"{abs(noise.gauss(0.8, 0.1)):.3f}", noise.gauss(7600, 60)) for s in range(300)
    ]
    rows.insert(200, "saving checkpoint at iteration     200 to /ckpt in torch_dist format")
    rows.insert(201, "  successfully saved checkpoint from iteration     200 to /ckpt [ t 1/8, p 1/4 ]")
    _write(folder / "train.log", rows)


@builder
def titan_healthy(folder: Path) -> None:
    noise = random.Random(17)
    rows = [titan(s, _loss(s, noise), noise.gauss(7400, 50), abs(noise.gauss(1, 0.1))) for s in range(1, 300)]
    rows.insert(
        100,
        "[rank0]:[titan] 2025-03-01 10:01:40,123 - root - INFO - Saving the checkpoint (or staging if async).",
    )
    rows.insert(
        101, "[rank0]:[titan] 2025-03-01 10:01:44,123 - root - INFO - Finished saving the checkpoint in 4.12 seconds."
    )
    rows += [
        "[rank0]:[titan] 2025-03-01 11:01:44,123 - root - INFO - Training completed",
        "[rank0]:[W301 11:01:46.1 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called "
        "before program exit, which can leak resources.",
    ]
    _write(folder / "rank_0.log", rows)


@builder
def hf_healthy(folder: Path) -> None:
    noise = random.Random(18)
    rows = []
    for s in range(1, 200):
        rows.append(f" {s // 2:2d}%|{'█' * (s // 20):10s}| {s}/200 [00:{s % 60:02d}<00:10,  1.00it/s]")
        rows.append(hf(_loss(s, noise), 1e-5 * (1 - s / 200), s / 100, abs(noise.gauss(1, 0.1))))
    rows.append("{'train_runtime': 200.1, 'train_samples_per_second': 8.0, 'train_loss': 2.9, 'epoch': 2.0}")
    _write(folder / "train.log", ["\r".join(rows)])


@builder
def hf_shard_missing(folder: Path) -> None:
    where = folder / "checkpoint-500"
    where.mkdir()
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = {"metadata": {"total_size": 48}, "weight_map": {f"w{i}": s for i, s in enumerate(shards)}}
    (where / "model.safetensors.index.json").write_text(json.dumps(index))
    for i in (0, 2):
        head = json.dumps({f"w{i}": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
        (where / shards[i]).write_bytes(struct.pack("<Q", len(head)) + head + bytes(16))


@builder
def mmengine_nan(folder: Path) -> None:
    noise, rows = random.Random(19), []
    for s in range(10, 400, 10):
        norm = "nan" if s >= 240 else f"{abs(noise.gauss(2.7, 0.2)):.4f}"
        rows.append(
            f"10/30 22:{s // 60:02d}:{s % 60:02d} - mmengine - INFO - Epoch(train) [1][{s}/735]  lr: 1.9828e-04  eta: "
            f"2:45:16  time: 2.8833  data_time: 0.0040  memory: 10762  loss: {_loss(s, noise):.4f}  grad_norm: {norm}"
        )
    _write(folder / "train.log", rows)


@builder
def epochs_nan(folder: Path) -> None:
    noise = random.Random(20)
    rows = [f"epoch: {s} loss: {_loss(s, noise) if s < 80 else math.nan}" for s in range(100)]
    _write(folder / "train.log", rows)


@builder
def imagenet_starves(folder: Path) -> None:
    noise, rows = random.Random(21), []
    for s in range(0, 2000, 20):
        wait = abs(noise.gauss(0.045, 0.003)) if s < 600 else abs(noise.gauss(8.6, 0.3))
        rows.append(
            f"Epoch: [1][{s:4d}/5005]\tTime {wait + 0.12:6.3f} ({wait + 0.12:6.3f})\tData {wait:6.3f} ({wait:6.3f})\t"
            f"Loss {_loss(s // 20, noise):.4e} ({_loss(s // 20, noise):.4e})\tAcc@1  12.50 ( 10.10)"
        )
    _write(folder / "train.log", rows)


@builder
def detectron_healthy(folder: Path) -> None:
    noise = random.Random(22)
    rows = [
        f"[05/20 15:{s // 60 % 60:02d}:{s % 60:02d} d2.utils.events]: eta: 0:05:18  iter: {s}  "
        f"total_loss: {_loss(s // 20, noise, 3.0, 0.4):.4f}  loss_cls: 0.1730  loss_box_reg: 0.0546    time: 0.5427  "
        f"last_time: 0.5401  data_time: 0.0067  last_data_time: 0.0059   lr: 0.01  max_mem: 9540M"
        for s in range(19, 2000, 20)
    ]
    _write(folder / "log.txt", rows)


@builder
def titan_memory(folder: Path) -> None:
    noise, rows = random.Random(23), []
    for s in range(1, 200):
        gib = 40 + 0.19 * s
        rows.append(titan(s, _loss(s, noise)).replace("40.02GiB(50.33%)", f"{gib:.2f}GiB({gib / 0.8:.2f}%)"))
    rows.append(
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity "
        "of 79.11 GiB of which 0.60 GiB is free."
    )
    _write(folder / "rank_0.log", rows)


@builder
def titan_save(folder: Path) -> None:
    noise, rows = random.Random(24), []
    for s in range(1, 401):
        rows.append(titan(s, _loss(s, noise)))
        if s % 50 == 0:
            took = 412.12 if s == 350 else noise.gauss(4.1, 0.2)
            rows.append(
                f"[rank0]:[titan] 2025-03-01 10:01:44,123 - root - INFO - Finished saving the checkpoint in {took:.2f} "
                "seconds."
            )
    _write(folder / "rank_0.log", rows)


@builder
def nccl_healthy(folder: Path) -> None:
    noise = random.Random(25)
    for node in (0, 1):
        rows = []
        for local in range(4):
            r, who = 4 * node + local, f"dgx0{node}:{500 + local}:{900 + local} [{local}]"
            rows += [
                f"{who} NCCL INFO Bootstrap : Using bond0:10.0.0.{node}<0>",
                f"{who} NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
                f"{who} NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB bond0:10.0.0.{node}<0>",
                f"{who} NCCL INFO Using network IB",
                f"{who} NCCL INFO comm 0x55d0 rank {r} nranks 8 cudaDev {local} nvmlDev {local} busId {local + 1}8000 "
                "commId 0x1f - Init START",
                f"{who} NCCL INFO Channel 00/0 : {r}[{local}] -> {(r + 1) % 8}[{(local + 1) % 4}] via P2P/CUMEM",
                f"{who} NCCL INFO comm 0x55d0 rank {r} nranks 8 cudaDev {local} nvmlDev {local} busId {local + 1}8000 "
                "commId 0x1f - Init COMPLETE",
            ]
        rows += [f"step {s} loss {_loss(s, noise):.3f}" for s in range(100)]
        _write(folder / f"node{node}.log", rows)


@builder
def lightning_resume(folder: Path) -> None:
    noise = random.Random(26)
    rows = [f"Epoch 3: step={s} train_loss={_loss(s, noise):.3f} lr=1e-4" for s in range(200, 300)]
    rows += ["Restoring states from the checkpoint path at /ckpt/last.ckpt", "Restored all states from the checkpoint"]
    rows += [f"Epoch 3: step={s} train_loss={_loss(s, noise):.3f} lr=1e-4" for s in range(300, 400)]
    _write(folder / "train.log", rows)


@builder
def verl_healthy(folder: Path) -> None:
    noise = random.Random(27)
    rows = [
        f"(TaskRunner pid=4242) step:{s} - global_seqlen/min:41022 - global_seqlen/max:52011 - actor/entropy:0.41 - "
        f"actor/pg_loss:{noise.gauss(0, 0.02):.4f} - actor/grad_norm:{abs(noise.gauss(0.3, 0.03)):.3f} - "
        f"actor/lr:1e-06 - "
        f"critic/score/mean:{0.3 + s / 400:.3f} - perf/time_per_step:{noise.gauss(41, 1):.2f} - "
        f"perf/throughput:{noise.gauss(1200, 20):.1f}"
        for s in range(1, 120)
    ]
    _write(folder / "verl.log", rows)


def _entries(count: int, done: int, sequence_key: str) -> list[dict[str, object]]:
    return [
        {
            sequence_key: s,
            "pg_id": 0,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 1_760_000_000_000_000_000 + s * 10**6,
            "input_sizes": [[4096]],
            "output_sizes": [[4096]],
            "state": "completed" if s <= done else "scheduled",
            "frames": [{"name": "backward", "filename": "train.py", "line": 3}],
            **({"process_group": ["0", "default_pg"], "op_id": s, "record_id": s} if sequence_key != "seq_id" else {}),
        }
        for s in range(1, count + 1)
    ]


@builder
def json_dumps(folder: Path) -> None:
    for rank in range(8):
        last = 40 if rank != 5 else 39
        value = {
            "version": "2.5",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(8)))}},
            "entries": _entries(last, 39, "collective_seq_id"),
        }
        (folder / f"nccl_trace_rank_{rank}").write_text(json.dumps(value))


@builder
def old_dumps(folder: Path) -> None:
    for rank in range(4):
        value = {"version": "1.5", "entries": _entries(20 if rank != 2 else 19, 19, "seq_id")}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(value, protocol=2))


@builder
def wandb_nan(folder: Path) -> None:
    noise = random.Random(28)
    rows = [
        json.dumps(
            {
                "_step": s,
                "_timestamp": 1.7e9 + s,
                "train/loss": _loss(s, noise) if s < 70 else "NaN",
                "train/grad_norm": 1.0,
            }
        )
        for s in range(80)
    ]
    _write(folder / "wandb-history.jsonl", rows)


@builder
def compute_times(folder: Path) -> None:
    noise = random.Random(29)
    rows = []
    for s in range(100):
        for rank in range(8):
            slow = 0.52 if rank == 3 and s >= 20 else 0.4
            own = slow + noise.gauss(0, 0.004)
            rows.append(
                json.dumps(
                    {
                        "iteration": s,
                        "rank": rank,
                        "compute_time": own,
                        "comm_time": 0.1 + (0.52 - own if s >= 20 else 0),
                    }
                )
            )
    _write(folder / "timing.jsonl", rows)
