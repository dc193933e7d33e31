"""Trainer metrics in text: key=value, key: value, Megatron's pipes, CSV, JSON lines, nanoGPT's short keys.

One table of aliases maps other people's names to the closed vocabulary of :mod:`lanterne.causal.facts`.
A name that says loss or norm of something else (``val_loss``, ``lm_loss_aux``) keeps its own name and is not judged.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.source import Source
from lanterne.nouns import NO_RANK

ALIASES: dict[str, tuple[str, float]] = {}
"""Canonical spelling (lower case, letters and digits only) -> (series, factor)."""


def _alias(series: str, factor: float, *names: str) -> None:
    for name in names:
        ALIASES[_key(name)] = (series, factor)


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_alias("loss", 1.0, "loss", "train_loss", "train/loss", "training_loss", "lm loss", "lm_loss", "lm-loss-training/lm_loss",
       "loss/train", "trl", "global_avg_loss", "loss_metrics/global_avg_loss", "training.loss", "ce_loss", "nll_loss", "ppl_loss",
       "reduced_train_loss", "batch_loss", "step_loss", "avg_loss", "mean_loss", "total_loss", "train.loss", "train_loss_step",
       "local_loss", "rank_loss", "loss_local")  # fmt: skip
_alias("grad_norm", 1.0, "grad_norm", "grad norm", "gnorm", "train/grad_norm", "norm", "gradient_norm", "total_norm",
       "global_grad_norm", "training.grad_norm", "grad_norm_total", "grads_norm", "train/gnorm", "optim/grad_norm")  # fmt: skip
_alias("grad_norm_local", 1.0, "grad_norm_local", "local_grad_norm", "training.grad_norm_local", "pre_reduce_grad_norm",
       "grad_norm_before_reduce", "rank_grad_norm")  # fmt: skip
_alias(
    "grad_nonfinite", 1.0, "grad_nonfinite", "nonfinite_grads", "nan_count", "num_nonfinite", "number of nan iterations"
)
_alias("lr", 1.0, "lr", "learning_rate", "learning rate", "train/learning_rate", "train/lr", "training.lr", "lr-adamw", "lr_0",
       "optim/learning_rate", "lr/group_0")  # fmt: skip
_alias("lr_planned", 1.0, "lr_planned", "planned_lr", "training.lr_planned", "scheduler_lr")
_alias(
    "loss_scale", 1.0, "loss_scale", "loss scale", "scale", "grad_scale", "amp_scale", "training.loss_scale", "scaler"
)
_alias("update_ratio", 1.0, "update_ratio", "update_norm_ratio", "param_update_ratio", "update_to_weight", "training.update_ratio",
       "update_norm", "effective_lr", "update_rms")  # fmt: skip
_alias("step_ms", 1.0, "step_ms", "step_time_ms", "iter_ms", "iter_time_ms", "elapsed time per iteration (ms)", "iteration_time_ms",
       "step_duration_ms", "elapsed_ms")  # fmt: skip
_alias("step_ms", 1000.0, "step_time", "iter_time", "iteration-time", "iteration_time", "time_per_step", "sec_per_step", "step_time_s",
       "batch_time", "seconds_per_step", "iteration_seconds", "s/step", "step_seconds", "train_step_timing in s",
       "time_metrics/end_to_end(s)")  # fmt: skip
for _phase in ("data_wait", "h2d", "forward", "backward", "optimizer", "checkpoint", "eval", "compile", "other", "busy", "lateness",
               "wait", "transfer", "gc", "loader"):  # fmt: skip
    _alias(f"{_phase}_ms", 1.0, f"{_phase}_ms", f"{_phase}_time_ms")
    _alias(f"{_phase}_ms", 1000.0, f"{_phase}_s", f"{_phase}_time", f"{_phase}_time_s", f"{_phase}_seconds")
_alias(
    "data_wait_ms",
    1000.0,
    "data_time",
    "dataloader_time",
    "data_loading_time",
    "time_metrics/data_loading(s)",
    "batch_load_time",
)
_alias("data_wait_ms", 1.0, "data_ms", "dataloader_ms", "data_loading_ms", "loader_wait_ms", "dataload_ms")
_alias("forward_ms", 1.0, "fwd_ms")
_alias("backward_ms", 1.0, "bwd_ms", "backward_wall_ms")
_alias("tokens", 1.0, "tokens", "num_tokens", "n_tokens", "ntokens", "local_tokens")
_alias("samples", 1.0, "samples", "num_samples", "batch_size")
_alias("valid_labels", 1.0, "valid_labels", "valid_label_count", "num_valid_labels", "n_valid", "label_count", "num_label_tokens",
       "valid_tokens", "loss_tokens", "num_loss_tokens", "nonpad_tokens", "denominator")  # fmt: skip
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
_alias("parameter_checksum", 1.0, "parameter_checksum", "param_checksum", "checksum", "weight_checksum", "param_norm",
       "training.parameter_checksum", "norm_weight_checksum", "replica_checksum")  # fmt: skip
_alias("accumulation", 1.0, "gradient_accumulation_steps", "accumulation_steps", "grad_accum", "grad_acc_steps", "accumulate",
       "grad_accum_steps", "accumulation", "num_microbatches")  # fmt: skip
_alias("time_s", 1.0, "time_s", "timestamp", "wall_time", "_timestamp", "ts", "unix_time", "walltime")

STEP_KEYS = ("step", "global_step", "iteration", "iter", "_step", "train/global_step", "trainer/global_step", "global_steps",
             "steps", "num_updates", "it", "s", "training_step", "optimizer_step")  # fmt: skip
_STEP_KEYS = frozenset(_key(k) for k in STEP_KEYS)
_RANK_KEYS = frozenset(
    _key(k) for k in ("rank", "global_rank", "process_index", "RANK", "node_rank_global", "proc", "dp_rank")
)
_HOST_KEYS = frozenset(_key(k) for k in ("host", "hostname", "node"))
SETTING_KEYS = {
    _key("max_grad_norm"): "clip", _key("clip_grad"): "clip", _key("gradient_clip_val"): "clip", _key("grad_clip"): "clip",
    _key("gradient_clipping"): "clip", _key("clip_grad_norm"): "clip", _key("clip_norm"): "clip", _key("clip"): "clip",
    _key("clip_value"): "clip",
    _key("fp16"): "fp16", _key("precision"): "precision", _key("dtype"): "precision", _key("mixed_precision"): "precision",
    _key("gradient_accumulation_steps"): "accumulation", _key("world_size"): "world_size",
    _key("overlap_param_gather"): "overlap_param_gather", _key("fp8"): "fp8", _key("fp8_recipe"): "fp8_recipe",
    _key("n_shards"): "shards", _key("num_shards"): "shards", _key("seed"): "seed",
    _key("warmup_steps"): "warmup_steps",
}  # fmt: skip

_NUMBER = r"[+-]?(?:\d+(?:,\d{3})*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|NaN|NAN|inf|Inf|INF|Infinity)\b"
_PAIR = re.compile(rf"(?P<key>[A-Za-z_][\w /.()-]{{0,60}}?)['\"]?\s*[=:]\s*['\"]?(?P<value>{_NUMBER})(?P<unit>ms|s|%)?")
_STEP_WORD = re.compile(
    r"\b(?:step|iteration|iter|it|global_step|steps)\b['\"]?\s*[=:# ]?\s*\[?(\d{1,12})\b", re.IGNORECASE
)
_NANOGPT = re.compile(r"^s:(\d+) (\w+):")
_WORTH = re.compile(
    r"loss|norm|\blr\b|learning.rate|\btrl:|_ms\b|step.time|iter.*time|checksum|scale|valid_|tokens", re.IGNORECASE
)
_TWO_COLUMNS = re.compile(rf"^(\d+)[\t ,]+({_NUMBER})$")


def worth(text: str) -> bool:
    """A cheap look: may this line carry metrics?"""
    return text[:1].isdigit() or _WORTH.search(text[:4_000]) is not None


def number(value: Any) -> float | None:
    """A metric value as float; text like ``nan`` counts, other text does not."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value.replace(",", ""))
        except ValueError:
            return None
    return None


def flatten(row: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Nested JSON objects joined by ``/`` (four levels)."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping) and depth < 4:
            inner = flatten(value, depth + 1)
            out.update({k if k not in out else f"{key}/{k}": v for k, v in inner.items()})
            out.update({f"{key}/{k}": v for k, v in inner.items()})
        else:
            out[str(key)] = value
    return out


_QUANTISED = re.compile(r"0\.0{3,}\d?")
"""A learning rate printed with fixed decimals and at most one digit left: 0.000002 says nothing of its course."""
_JUDGED = frozenset({"loss", "grad_norm", "grad_norm_local"})


class RowMetrics:
    """Takes rows (name -> value) with a step and, maybe, a rank; used by JSON, CSV, TensorBoard and text."""

    def __init__(self, gather: Gather, rank: int, where: str) -> None:
        self.gather, self.rank, self.where = gather, rank, where
        self.count = 0
        self.found = 0
        self.keys: dict[int, set[str]] = {}
        self.per_rank_columns = re.compile(r"^(?P<name>.+?)[/_.\[ -]?rank[_ -]?(?P<rank>\d+)\]?$", re.IGNORECASE)

    def row(self, row: Mapping[str, Any], step: int | None = None, rank: int | None = None) -> int | None:
        """Add one row; the answer is its step."""
        flat = flatten(row)
        by_key = {_key(k): v for k, v in flat.items()}
        if step is None:
            step = next(
                (
                    int(v)
                    for k in STEP_KEYS
                    if (v := number(by_key.get(_key(k)))) is not None and math.isfinite(v) and v >= 0
                ),
                None,
            )
        own = next((number(by_key[k]) for k in _RANK_KEYS if k in by_key), None)
        who = (
            int(own)
            if own is not None and math.isfinite(own) and 0 <= own < 131_072
            else (self.rank if rank is None else rank)
        )
        host = next((str(by_key[k]) for k in _HOST_KEYS if k in by_key), "")
        if host and who >= 0:
            self.gather.place(who, host=host)
        self._settings(by_key)
        names = [k for k in flat if _key(k) in ALIASES or self.per_rank_columns.match(k)]
        if step is None:
            step = self.count if names else None
        self.count += bool(names)
        for name in names:
            self._value(name, flat[name], step or 0, who)
        self._note_keys(flat, who)
        self._words(by_key, step, who)
        return step

    def _value(self, name: str, raw: Any, step: int, rank: int) -> None:
        column = self.per_rank_columns.match(name)
        if column and _key(column["name"]) in ALIASES:
            name, rank = column["name"], int(column["rank"])
        alias = ALIASES.get(_key(name))
        if alias is None or step >= 1 << 53:
            return
        values = raw if isinstance(raw, list) else [raw]
        for i, item in enumerate(values[:131_072]):
            value = number(item)
            if value is not None and not (alias[0] == "lr" and isinstance(item, str) and _QUANTISED.fullmatch(item)):
                self.found += 1
                who = i if isinstance(raw, list) and len(values) > 1 else rank
                if not math.isfinite(value) and alias[0] in _JUDGED:
                    self.gather.event("nonfinite_sample", rank=who, step=step, ref=self.where, series=alias[0])
                self.gather.sample(
                    alias[0], step, i if isinstance(raw, list) and len(values) > 1 else rank, value * alias[1]
                )

    def _settings(self, by_key: Mapping[str, Any]) -> None:
        for key, name in SETTING_KEYS.items():
            value = by_key.get(key)
            if isinstance(value, (str, int, float, bool)) and f"setting:{name}={value}" not in self.gather.notes_seen:
                self.gather.notes_seen.add(f"setting:{name}={value}")
                self.gather.event("setting", rank=NO_RANK, ref=self.where, key=name, value=value)
                if name == "world_size" and isinstance(value, int) and 0 < value <= 131_072:
                    self.gather.expected = max(self.gather.expected, value)

    def _note_keys(self, flat: Mapping[str, Any], rank: int) -> None:
        if rank >= 0 and len(self.keys.setdefault(rank, set())) < 1_000:
            self.keys[rank].update(k for k, v in flat.items() if number(v) is not None or v is None)

    def _words(self, by_key: Mapping[str, Any], step: int | None, rank: int) -> None:
        """Rows that carry an event in words: ``{"event": "resume", "step": 4000}``."""
        for key in ("event", "msg", "message", "note", "type"):
            text = by_key.get(key)
            if isinstance(text, str) and text:
                from lanterne.backend.readers import patterns

                for pattern, attributes in patterns.match(text):
                    plain = {
                        k: v for k, v in attributes.items() if k not in {"rank", "step", "host", "name", "ref", "body"}
                    }
                    self.gather.event(
                        f"log.{pattern.event}",
                        rank=rank,
                        step=-1 if step is None else step,
                        body=text[:1000],
                        ref=self.where,
                        **plain,
                    )
                if re.search(r"resum|restor|load.*checkpoint", text, re.IGNORECASE):
                    self.gather.event(
                        "log.resumed", rank=rank, step=-1 if step is None else step, body=text[:200], ref=self.where
                    )
        if by_key.get("resumed") in (True, 1) or by_key.get("resume") in (True, 1):
            self.gather.event(
                "log.resumed", rank=rank, step=-1 if step is None else step, body="resumed", ref=self.where
            )

    def close(self) -> None:
        """Leave which keys each rank logged: uneven sets are a broken stream of reductions."""
        for rank, keys in self.keys.items():
            if keys:
                self.gather.event("log.metric_keys", rank=rank, ref=self.where, keys=",".join(sorted(keys))[:4000])


class LineMetrics:
    """Metrics inside log lines; feeds :class:`RowMetrics`."""

    def __init__(self, source: Source, gather: Gather) -> None:
        self.rows = RowMetrics(gather, NO_RANK, source.name)
        self.two_columns = 0

    @property
    def found(self) -> int:
        return self.rows.found

    def close(self) -> None:
        """Leave which keys each rank logged."""
        self.rows.close()

    def line(self, text: str, rank: int) -> int | None:
        """Take one line; the answer is its step where it has one."""
        if (short := _NANOGPT.match(text)) and short[2] != "trl":
            return int(short[1])
        plain = _TWO_COLUMNS.match(text)
        if plain:
            return self.rows.row({"step": int(plain[1]), "loss": plain[2]}, rank=rank)
        start = text.find("{")
        if start >= 0 and text.rstrip().endswith("}"):
            row = parse_object(text[start:])
            if row is not None:
                return self.rows.row(row, rank=rank)
        pairs = {m["key"].strip(): _with_unit(m) for m in _PAIR.finditer(text[:4_000])}
        pairs = {_last_words(k): v for k, v in pairs.items()}
        if not any(_key(k) in ALIASES for k in pairs):
            return None
        step = _STEP_WORD.search(text[:4_000])
        return self.rows.row(pairs, step=int(step.group(1)) if step else (int(short[1]) if short else None), rank=rank)


def _with_unit(found: re.Match[str]) -> str:
    return found["value"]


def _last_words(key: str) -> str:
    """The longest tail of a captured key that is a known name (``12:00 step 5 - loss`` -> ``loss``)."""
    words = key.split(" ")
    for i in range(len(words)):
        tail = " ".join(words[i:]).strip(" -")
        if _key(tail) in ALIASES or _key(tail) in _STEP_KEYS:
            return tail
    return key


def parse_object(text: str) -> dict[str, Any] | None:
    """A JSON object or a printed Python dict of plain values; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        import ast

        try:
            value = ast.literal_eval(text[:20_000].replace(": nan", ": 'nan'").replace(": inf", ": 'inf'"))
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return None
    return value if isinstance(value, dict) else None


def rows(source: Source, gather: Gather, items: Iterable[Mapping[str, Any]]) -> int:
    """Read an iterable of rows; the answer is how many values were kept."""
    table = RowMetrics(gather, source.rank, source.name)
    for item in items:
        table.row(item)
    table.close()
    return table.found
