"""Other people's names of metrics and settings, and the series of the closed vocabulary that they mean."""

from __future__ import annotations

import re

ALIASES: dict[str, tuple[str, float]] = {}
"""Canonical spelling (lower case, letters and digits only) -> (series, factor)."""


def _alias(series: str, factor: float, *names: str) -> None:
    for name in names:
        ALIASES[key_of(name)] = (series, factor)


def key_of(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_alias(
    "loss",
    1.0,
    "loss",
    "train_loss",
    "train/loss",
    "training_loss",
    "lm loss",
    "lm_loss",
    "lm-loss-training/lm_loss",
    "loss/train",
    "trl",
    "global_avg_loss",
    "loss_metrics/global_avg_loss",
    "training.loss",
    "ce_loss",
    "nll_loss",
    "ppl_loss",
    "reduced_train_loss",
    "batch_loss",
    "step_loss",
    "avg_loss",
    "mean_loss",
    "total_loss",
    "train.loss",
    "train_loss_step",
    "local_loss",
    "rank_loss",
    "loss_local",
)
_alias(
    "grad_norm",
    1.0,
    "grad_norm",
    "grad norm",
    "gnorm",
    "train/grad_norm",
    "norm",
    "gradient_norm",
    "total_norm",
    "global_grad_norm",
    "training.grad_norm",
    "grad_norm_total",
    "grads_norm",
    "train/gnorm",
    "optim/grad_norm",
    "actor/grad_norm",
)
_alias(
    "grad_norm_local",
    1.0,
    "grad_norm_local",
    "local_grad_norm",
    "training.grad_norm_local",
    "pre_reduce_grad_norm",
    "grad_norm_before_reduce",
    "rank_grad_norm",
)
_alias(
    "grad_nonfinite", 1.0, "grad_nonfinite", "nonfinite_grads", "nan_count", "num_nonfinite", "number of nan iterations"
)
_alias(
    "lr",
    1.0,
    "lr",
    "learning_rate",
    "learning rate",
    "train/learning_rate",
    "train/lr",
    "training.lr",
    "lr-adamw",
    "lr_0",
    "optim/learning_rate",
    "actor/lr",
    "lr/group_0",
)
_alias("lr_planned", 1.0, "lr_planned", "planned_lr", "training.lr_planned", "scheduler_lr")
_alias(
    "loss_scale", 1.0, "loss_scale", "loss scale", "scale", "grad_scale", "amp_scale", "training.loss_scale", "scaler"
)
_alias(
    "update_ratio",
    1.0,
    "update_ratio",
    "update_norm_ratio",
    "param_update_ratio",
    "update_to_weight",
    "training.update_ratio",
    "update_norm",
    "effective_lr",
    "update_rms",
)
_alias(
    "step_ms",
    1.0,
    "step_ms",
    "step_time_ms",
    "iter_ms",
    "iter_time_ms",
    "elapsed time per iteration (ms)",
    "iteration_time_ms",
    "step_duration_ms",
    "elapsed_ms",
)
_alias(
    "step_ms",
    1000.0,
    "step_time",
    "iter_time",
    "iteration-time",
    "iteration_time",
    "time_per_step",
    "sec_per_step",
    "step_time_s",
    "batch_time",
    "seconds_per_step",
    "iteration_seconds",
    "s/step",
    "step_seconds",
    "train_step_timing in s",
    "time_metrics/end_to_end(s)",
    "perf/time_per_step",
    "timing_s/step",
)
for _phase in (
    "data_wait",
    "h2d",
    "forward",
    "backward",
    "optimizer",
    "checkpoint",
    "eval",
    "compile",
    "other",
    "busy",
    "lateness",
    "wait",
    "transfer",
    "gc",
    "loader",
):
    _alias(f"{_phase}_ms", 1.0, f"{_phase}_ms", f"{_phase}_time_ms")
    _alias(f"{_phase}_ms", 1000.0, f"{_phase}_s", f"{_phase}_time", f"{_phase}_time_s", f"{_phase}_seconds")
_alias(
    "data_wait_ms",
    1000.0,
    "data_time",
    "data_time_s",
    "data_seconds",
    "dataloader_time",
    "data_loading_time",
    "time_metrics/data_loading(s)",
    "batch_load_time",
)
_alias("data_wait_ms", 1.0, "data_ms", "dataloader_ms", "data_loading_ms", "loader_wait_ms", "dataload_ms")
_alias("busy_ms", 1000.0, "compute_time", "compute_time_s", "compute_seconds")
_alias("busy_ms", 1.0, "compute_ms", "compute_time_ms")
_alias("forward_ms", 1.0, "fwd_ms")
_alias("backward_ms", 1.0, "bwd_ms", "backward_wall_ms")
_alias("tokens", 1.0, "tokens", "num_tokens", "n_tokens", "ntokens", "local_tokens")
_alias("samples", 1.0, "samples", "num_samples", "batch_size")
_alias(
    "valid_labels",
    1.0,
    "valid_labels",
    "valid_label_count",
    "num_valid_labels",
    "n_valid",
    "label_count",
    "num_label_tokens",
    "valid_tokens",
    "loss_tokens",
    "num_loss_tokens",
    "nonpad_tokens",
    "denominator",
)
_alias("rss_bytes", 1.0, "rss_bytes", "rss", "process.memory.usage", "host_rss_bytes")
_alias("rss_bytes", float(1 << 20), "rss_mb", "rss_mib", "host_mem_mb")
_alias("rss_bytes", float(1 << 30), "rss_gb", "rss_gib", "host_mem_gb")
_alias("shm_bytes", 1.0, "shm_bytes")
_alias(
    "gpu_allocated_bytes", 1.0, "gpu_allocated_bytes", "mem-allocated-bytes", "memory_allocated", "hw.gpu.memory.usage"
)
_alias(
    "gpu_allocated_bytes",
    float(1 << 30),
    "memory_allocated_gb",
    "gpu_mem_gb",
    "memory/max_active(gib)",
    "allocated_gib",
    "max_memory_allocated_gib",
    "max_memory_allocated_gb",
    "max_mem_gb",
    "peak_mem_gb",
)
_alias("gpu_allocated_bytes", float(1 << 20), "memory_allocated_mb", "gpu_mem_mb", "allocated_mib")
_alias("gpu_reserved_bytes", 1.0, "gpu_reserved_bytes", "memory_reserved")
_alias("gpu_reserved_bytes", float(1 << 30), "memory_reserved_gb", "memory/max_reserved(gib)", "reserved_gib")
_alias("gpu_clock_mhz", 1.0, "gpu_clock_mhz", "sm_clock_mhz", "sm_clock", "hw.gpu.clock")
_alias("gpu_temperature_c", 1.0, "gpu_temperature_c", "gpu_temp", "temperature_c", "hw.temperature", "gpu_temp_c")
_alias("gpu_throttle", 1.0, "gpu_throttle", "throttle_reasons", "hw.gpu.throttle")
_alias("gpu_utilization", 1.0, "gpu_utilization", "gpu_util", "gpu_util_percent", "hw.gpu.utilization")
_alias("host_cpu_percent", 1.0, "host_cpu_percent", "cpu_percent", "cpu_util", "system.cpu.utilization")
_alias("host_runqueue", 1.0, "host_runqueue", "run_queue", "runnable", "procs_running", "load1", "system.cpu.runqueue")
_alias(
    "parameter_checksum",
    1.0,
    "parameter_checksum",
    "param_checksum",
    "checksum",
    "weight_checksum",
    "param_norm",
    "training.parameter_checksum",
    "norm_weight_checksum",
    "replica_checksum",
)
_alias(
    "accumulation",
    1.0,
    "gradient_accumulation_steps",
    "accumulation_steps",
    "grad_accum",
    "grad_acc_steps",
    "accumulate",
    "grad_accum_steps",
    "accumulation",
    "num_microbatches",
)
_alias("time_s", 1.0, "time_s", "timestamp", "wall_time", "_timestamp", "ts", "unix_time", "walltime")

_alias(
    "throughput",
    1.0,
    "throughput",
    "tps",
    "tokens_per_second",
    "tokens_per_sec",
    "tokens/s",
    "tokens/sec",
    "tok/s",
    "tok/sec",
    "toks/s",
    "train_tokens_per_second",
    "tokens per second",
    "samples_per_second",
    "samples/s",
    "samples/sec",
    "samples per second",
    "samplespersec",
    "currsamplespersec",
    "img/s",
    "images/sec",
    "imgs_per_sec",
    "throughput_metrics/tps",
    "perf/throughput",
    "throughput(tps)",
    "it/s",
    "iter/s",
    "steps_per_second",
    "throughput/tokens_per_sec",
    "tokens_per_gpu_per_second",
    "tgs",
)
SIZED = dict.fromkeys(
    map(key_of, ("memory", "mem", "max_mem", "max mem", "gpu_mem", "gpu mem", "gpu memory", "peak_mem", "mem_used")),
    "gpu_allocated_bytes",
)
"""Names that mean a size only with a unit behind their number."""

STEP_KEYS = (
    "step",
    "global_step",
    "iteration",
    "iter",
    "_step",
    "train/global_step",
    "trainer/global_step",
    "global_steps",
    "steps",
    "num_updates",
    "it",
    "s",
    "training_step",
    "optimizer_step",
)
STEP_KEY_SET = frozenset(key_of(k) for k in STEP_KEYS)
RANK_KEYS = frozenset(
    key_of(k) for k in ("rank", "global_rank", "process_index", "RANK", "node_rank_global", "proc", "dp_rank")
)
HOST_KEYS = frozenset(key_of(k) for k in ("host", "hostname", "node"))
SETTING_KEYS = {
    key_of("max_grad_norm"): "clip",
    key_of("clip_grad"): "clip",
    key_of("gradient_clip_val"): "clip",
    key_of("grad_clip"): "clip",
    key_of("gradient_clipping"): "clip",
    key_of("clip_grad_norm"): "clip",
    key_of("clip_norm"): "clip",
    key_of("clip"): "clip",
    key_of("clip_value"): "clip",
    key_of("fp16"): "fp16",
    key_of("precision"): "precision",
    key_of("dtype"): "precision",
    key_of("mixed_precision"): "precision",
    key_of("gradient_accumulation_steps"): "accumulation",
    key_of("world_size"): "world_size",
    key_of("overlap_param_gather"): "overlap_param_gather",
    key_of("fp8"): "fp8",
    key_of("fp8_recipe"): "fp8_recipe",
    key_of("n_shards"): "shards",
    key_of("num_shards"): "shards",
    key_of("seed"): "seed",
    key_of("warmup_steps"): "warmup_steps",
}
