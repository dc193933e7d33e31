"""Who this process is, from the launcher's environment: torchrun, Slurm, Open MPI, or a plain single process."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from lanterne import limits
from lanterne.nouns import MESH_AXES, AttributeValue, Identity
from lanterne.settings import CollectorSettings

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_WORLD_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RUN = ("LANTERNE_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
_ATTEMPT = ("LANTERNE_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
ATTEMPT_BASE = "LANTERNE_ATTEMPT_BASE"
"""Set by ``lanterne run`` when it starts the command again: added to what the launcher below counts itself."""
_MEANINGLESS = frozenset({"", "none", "null", "0"})
"""Run ids that launchers put when nobody named the run: two runs would share them."""


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _number(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    text = _first(environ, names)
    return int(text) if text.isdigit() else default


def own_attempt(environ: Mapping[str, str], *, elastic: bool) -> int:
    """The attempt that a freshly started command counts for itself; torchrun (``elastic``) counts from 0."""
    return _number(environ, _ATTEMPT[:1] if elastic else _ATTEMPT, 0)


def clean_id(text: str) -> str:
    """``text`` as an id that every part accepts (``limits.ID_PATTERN``): other characters become ``-``."""
    cleaned = re.sub(r"[^A-Za-z0-9._:-]+", "-", text).strip("-.")[:128]
    return cleaned or "job"


def named_job(environ: Mapping[str, str]) -> str:
    """The job's id where user or launcher gave one that is unique to the run; ``""`` otherwise."""
    found = next((environ[name] for name in _RUN if environ.get(name, "").lower() not in _MEANINGLESS), "")
    return clean_id(found) if found else ""


def invented_job() -> str:
    """A fresh id: script name, start time, four random hex digits. Ranks agree on one through their store."""
    main = getattr(sys.modules.get("__main__"), "__file__", None) or (sys.argv[0] if sys.argv else "") or "python"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return clean_id(f"{Path(main).stem}-{stamp}-{secrets.token_hex(2)}")


def _mesh(environ: Mapping[str, str]) -> dict[str, int]:
    """``LANTERNE_MESH="dp_shard=2,tp=0"``: coordinates of this rank, for jobs without a DeviceMesh."""
    mesh: dict[str, int] = {}
    for part in environ.get("LANTERNE_MESH", "").split(","):
        axis, _, value = part.partition("=")
        if axis.strip() in MESH_AXES and value.strip().isdigit():
            mesh[axis.strip()] = int(value)
    return mesh


def _extra(environ: Mapping[str, str]) -> dict[str, AttributeValue]:
    extra: dict[str, AttributeValue] = {}
    for part in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, _, value = part.partition("=")
        if key.strip() and value.strip() and key.strip() != "service.name":
            extra[key.strip()] = value.strip()
    for name in ("SLURM_JOB_ID", "SLURM_NODEID", "SLURM_JOB_NODELIST"):
        if environ.get(name):
            extra[f"lanterne.{name.lower()}"] = environ[name]
    return extra


def identity_from_environment(
    job: str = "",
    environ: Mapping[str, str] | None = None,
    *,
    pid: int | None = None,
    backend: str = "",
    device: str = "",
) -> Identity:
    """Identity of this process. ``job`` wins over LANTERNE_JOB, TORCHELASTIC_RUN_ID, SLURM_JOB_ID and their like.

    Where nobody named the run, the id is invented (:func:`invented_job`) and differs from process to process:
    a distributed job then agrees on rank 0's through its store (``session.attach`` does that).
    """
    environ = os.environ if environ is None else environ
    service = environ.get("OTEL_SERVICE_NAME", "")
    return Identity(
        job=clean_id(job) if job else named_job(environ) or invented_job(),
        attempt=_number(environ, _ATTEMPT, 0) + _number(environ, (ATTEMPT_BASE,), 0),
        rank=_number(environ, _RANK, 0),
        local_rank=_number(environ, _LOCAL_RANK, 0),
        world_size=_number(environ, _WORLD_SIZE, 1),
        host=node_name(environ),
        pid=os.getpid() if pid is None else pid,
        backend=backend,
        service_name=service or "lanterne",
        device=device,
        mesh=_mesh(environ),
        extra=_extra(environ),
    )


def node_name(environ: Mapping[str, str] | None = None) -> str:
    """``LANTERNE_NODE``, else this host's name: what the job, its launcher and the node's agent call this node."""
    return (os.environ if environ is None else environ).get("LANTERNE_NODE", "") or socket.gethostname()


def base_dir(settings: CollectorSettings) -> Path:
    """``LANTERNE_DIR``, else ``/dev/shm/lanterne-<uid>``, else ``<tmp>/lanterne-<uid>``. Not created."""
    if settings.dir:
        return Path(settings.dir)
    shared = Path("/dev/shm")
    root = shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"lanterne-{os.getuid()}"


def session_dir(settings: CollectorSettings, identity: Identity) -> Path:
    """``<dir>/<job>/<attempt>``, made with mode 0700. Raises OSError where it cannot be made or is another user's."""
    base = base_dir(settings)
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = base.stat().st_uid
    if owner != os.getuid():
        raise PermissionError(
            f"{base} belongs to uid {owner}, not to uid {os.getuid()}; set LANTERNE_DIR to a folder of yours"
        )
    folder = base / identity.job / str(identity.attempt)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


if limits.ID_PATTERN != r"^[A-Za-z0-9._:-]{1,128}$":
    raise AssertionError("clean_id must follow limits.ID_PATTERN")
