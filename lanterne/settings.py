"""Settings: TOML file, then ``LANTERNE_*`` environment, then arguments. Frozen, keyword-only, checked when built.

``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_SERVICE_NAME``,
``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_SDK_DISABLED`` are honoured where no ``LANTERNE_*`` value is set.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from lanterne import limits
from lanterne.errors import UsageError

DEFAULT_ENDPOINT = "http://127.0.0.1:4318"
DEFAULT_PORT = 4318
T = TypeVar("T", bound="CollectorSettings | ServerSettings")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorSettings:
    """What ``attach`` and ``lanterne run`` read (table in docs/settings.md)."""

    endpoint: str = DEFAULT_ENDPOINT
    """Base URL of the backend; ``/v1/traces`` and its sisters are appended."""
    token: str = ""
    """Bearer token with scope ``ingest``; sent as Authorization. LANTERNE_TOKEN_FILE reads it from a file."""
    job: str = ""
    """Job id; default TORCHELASTIC_RUN_ID, SLURM_JOB_ID, else the script's name and the start time."""
    disabled: bool = False
    """Do nothing at all: attach returns a session that costs nothing."""
    shipper: str = "process"
    """``process`` (one a node), ``thread`` (fallback), or ``none`` (only the black box is written)."""
    dir: str = ""
    """Where rings and spool lie; default /dev/shm/lanterne-<uid>, else the temporary folder."""
    ring_records: int = limits.RING_RECORDS_DEFAULT
    spool_bytes: int = limits.SPOOL_BYTES_DEFAULT
    export_interval_s: float = 0.5
    compression: str = ""
    """``zstd``, ``gzip`` or ``none``; default OTEL_EXPORTER_OTLP_COMPRESSION, else gzip."""
    tap: str = "auto"
    """How collectives are seen: ``auto`` (C++ tap, else torch's hooks, else wrapping), ``python`` (nothing
    compiled is loaded) or ``off``."""
    kernels_every: int = 100
    """Steps between windows of the kernel probe where a CUDA device is in use; 0 = on triggers only."""
    probe_cupti: str = ""
    """A libcupti for the kernel probe where the process has none mapped; given, no device is looked for beforehand."""
    grad_norm_every: int = 10
    """Steps between sampled gradient norms where the user's loop never clips."""
    spikeness_window: int = 50
    """Steps of the sliding window of loss_spikeness."""
    reads: bool = False
    """``lanterne run`` preloads a small library that times the file reads of the ranks and their loader workers."""
    overhead_budget: float = 0.005
    """Share of step time above which the overhead meter sheds sources."""
    hang_floor_s: float = 5.0
    """A hang is max(this, 8 x the p99 of the phase)."""
    commands: bool = True
    """Take signed commands from the backend."""
    restarts: int = 2
    """How often ``lanterne run`` may start the command again when the backend orders it; 0 = never."""
    standby: bool = False
    """Keep the next attempt ready under ``lanterne run``: interpreters that have imported torch and wait."""
    snapshot_every: int = 0
    """Steps between snapshots of the training state in host memory, for the action ``rollback``; 0 = none."""
    snapshot_keep: int = 3
    """Snapshots held, their ages growing by a factor, so that ``rollback`` reaches far back with few of them."""
    command_key: str = ""
    """Public key (hex) that commands must be signed with; default: the one the backend hands out at first contact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What ``lanterne serve`` reads (table in docs/settings.md)."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    grpc_port: int = 4317
    """OTLP/gRPC; 0 switches it off."""
    data: str = "lanterne-data"
    """Folder of the event store and of the embedded control database."""
    control_url: str = ""
    """SQLAlchemy URL of the control database; default SQLite in the data folder."""
    token: str = ""
    """Admin token; needed for any bind that is not loopback."""
    queue_bytes: int = limits.QUEUE_BYTES_DEFAULT
    retention_days: float = 14.0
    retention_bytes: int = 0
    """0 = no bound by size."""
    lake: str = ""
    """DuckLake catalog (``postgres:…``) and data path, joined by ``|``; empty = local file only."""
    allowed_hosts: str = ""
    """Host names, joined by commas, under which the server may be asked besides its own; ``*`` = any."""
    tls_certificate: str = ""
    tls_key: str = ""
    dashboard: bool = True
    memory_limit: str = "4GB"
    policy: str = "suggest"
    """Ceiling over all policies: ``observe``, ``suggest``, ``approve`` or ``auto``."""
    levels: str = ""
    """Fixed levels that fire without the run's baseline: ``grad_norm=12 loss_spikeness=0.5`` (docs/detectors.md)."""
    alerts: str = ""
    """Where incidents are told: ``FORM=ADDRESS`` entries with spaces between; FORM: alertmanager, slack or generic."""
    alert_secret: str = ""
    """Signs the generic form (HMAC-SHA256). LANTERNE_ALERT_SECRET_FILE reads it from a file."""
    alert_private: bool = False
    """Allow targets in loopback, link and private networks."""
    alert_link: str = ""
    """Address of the page as people reach it; alerts link to their incident there."""


def _convert(name: str, hint: Any, raw: Any) -> Any:
    if hint is bool:
        if isinstance(raw, bool):
            return raw
        text = str(raw).strip().lower()
        if text in {"1", "true", "yes", "on"}:
            return True
        if text in {"0", "false", "no", "off", ""}:
            return False
        raise UsageError(f"{name}: {raw!r} is not a yes or no; use 1 or 0")
    try:
        return hint(raw)
    except (TypeError, ValueError):
        raise UsageError(f"{name}: {raw!r} is not a valid {hint.__name__}") from None


def _otel(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        found["endpoint"] = environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        found["disabled"] = True
    return found


def _validate(settings: CollectorSettings | ServerSettings) -> None:
    if isinstance(settings, CollectorSettings):
        low, high = limits.RING_RECORDS_MIN, limits.RING_RECORDS_MAX
        if not low <= settings.ring_records <= high:
            raise UsageError(
                f"ring_records: {settings.ring_records} is outside {low} to {high}; "
                f"leave it unset to use {limits.RING_RECORDS_DEFAULT}"
            )
        if settings.shipper not in {"process", "thread", "none"}:
            raise UsageError(f"shipper: {settings.shipper!r} is not one of process, thread, none")
        if settings.tap not in {"auto", "python", "off"}:
            raise UsageError(f"tap: {settings.tap!r} is not one of auto, python, off")
        if settings.compression not in {"", "zstd", "gzip", "none"}:
            raise UsageError(f"compression: {settings.compression!r} is not one of zstd, gzip, none")
    elif settings.lake and not settings.control_url.startswith("postgresql"):
        raise UsageError("lake: backends that share it share their control database; set control_url to postgresql://…")
    elif settings.policy not in {"observe", "suggest", "approve", "auto"}:
        raise UsageError(f"policy: {settings.policy!r} is not one of observe, suggest, approve, auto")


def load(kind: type[T], *, environ: Mapping[str, str] | None = None, file: str = "", **arguments: Any) -> T:
    """Build settings from file, environment and arguments, the later winning; None arguments are skipped.

    Raises :class:`UsageError` on unknown keys and on values that do not fit their type or bound.
    """
    environ = os.environ if environ is None else environ
    hints = get_type_hints(kind)
    known = {f.name for f in fields(kind)}
    values: dict[str, Any] = _otel(environ) if kind is CollectorSettings else {}
    section = "collector" if kind is CollectorSettings else "server"
    path = file or environ.get("LANTERNE_CONFIG", "")
    if path:
        try:
            loaded = tomllib.loads(Path(path).read_text(encoding="utf-8")).get(section, {})
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{path}: cannot be read as TOML: {error}") from error
        unknown = sorted(set(loaded) - known)
        if unknown:
            raise UsageError(f"{path}: unknown keys in [{section}]: {', '.join(unknown)}; see docs/settings.md")
        values |= loaded
    for name in known:
        raw = environ.get(f"LANTERNE_{name.upper()}")
        secret = environ.get(f"LANTERNE_{name.upper()}_FILE")
        if raw is not None:
            values[name] = raw
        elif secret:
            values[name] = Path(secret).read_text(encoding="utf-8").strip()
    values |= {k: v for k, v in arguments.items() if v is not None}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(f"unknown settings: {', '.join(unknown)}; see docs/settings.md")
    built = kind(**{k: _convert(k, hints[k], v) for k, v in values.items()})
    _validate(built)
    return built
