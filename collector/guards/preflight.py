"""Preflight: what would stop or slow a distributed run on this host, found in seconds before it starts.

Each check is a pure reading of this host; nothing is changed. Run it on every node, best inside the launcher
(``srun lanterne check``), since limits there may differ from those of a login shell.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from lanterne.nouns import CauseCategory

SHM_BYTES_MIN = 1 << 30
OPEN_FILES_MIN = 4096
DISK_SHARE_MIN = 0.05
ENDPOINT_TIMEOUT_S = 3.0
C = CauseCategory


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One reading. ``category`` is the cause that a failed check would become; ``remedy`` the first step."""

    name: str
    ok: bool
    says: str
    category: CauseCategory | None = None
    remedy: str = ""


def _good(name: str, says: str) -> Check:
    return Check(name=name, ok=True, says=says)


def _shared_memory(environ: Mapping[str, str]) -> Iterator[Check]:
    del environ
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return
    free = shutil.disk_usage(shm).free
    if free < SHM_BYTES_MIN:
        yield Check(
            name="shared memory",
            ok=False,
            says=f"/dev/shm has {free >> 20} MiB free; loaders and NCCL want 1 GiB or more",
            category=C.SHARED_MEMORY_EXHAUSTED,
            remedy="raise the container's shm size (--shm-size, emptyDir medium Memory)",
        )
    else:
        yield _good("shared memory", f"/dev/shm has {free >> 30} GiB free")


def _limits(environ: Mapping[str, str]) -> Iterator[Check]:
    del environ
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < OPEN_FILES_MIN
    yield Check(
        name="open files",
        ok=not few,
        says=f"the limit of open files is {soft}",
        category=C.HOST_MISCONFIGURED if few else None,
        remedy=f"ulimit -n {OPEN_FILES_MIN} or more" if few else "",
    )
    if not Path("/sys/class/infiniband").is_dir():
        return
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    bounded = locked != resource.RLIM_INFINITY
    yield Check(
        name="locked memory",
        ok=not bounded,
        says=f"locked memory is limited to {locked >> 10} KiB in this process"
        if bounded
        else "locked memory is unlimited",
        category=C.HOST_MISCONFIGURED if bounded else None,
        remedy="set memlock to unlimited inside the launcher, not only in the shell" if bounded else "",
    )


def _resolve(name: str) -> set[str]:
    return {str(info[4][0]) for info in socket.getaddrinfo(name, None)}


def _names(environ: Mapping[str, str]) -> Iterator[Check]:
    own = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    for what, name in (("host name", socket.gethostname()), ("master address", environ.get("MASTER_ADDR", ""))):
        if not name:
            continue
        try:
            found = _resolve(name)
        except OSError as error:
            yield Check(
                name=what,
                ok=False,
                says=f"{name} does not resolve: {error}",
                category=C.INTERFACE_MISCONFIGURED,
                remedy="mend DNS or /etc/hosts, or use the address itself",
            )
            continue
        serves = environ.get("RANK", environ.get("GROUP_RANK", "")) == "0"
        if what == "master address" and serves and not found & own:
            yield Check(
                name=what,
                ok=False,
                says=f"this node must serve {name}, which resolves to {', '.join(sorted(found))}: not ours",
                category=C.INTERFACE_MISCONFIGURED,
                remedy="set MASTER_ADDR to an address of the node of rank 0",
            )
        else:
            yield _good(what, f"{name} resolves to {', '.join(sorted(found))}")


def _interfaces(environ: Mapping[str, str]) -> Iterator[Check]:
    there = set(psutil.net_if_addrs())
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = environ.get(variable, "")
        if not wanted or wanted.startswith("^"):
            continue
        names = [n.strip().lstrip("=") for n in wanted.split(",")]
        if any(name == n or n.startswith(name) for name in names for n in there):
            yield _good(variable, f"{wanted} is there")
        else:
            yield Check(
                name=variable,
                ok=False,
                says=f"no interface {wanted}; there are {', '.join(sorted(there))}",
                category=C.INTERFACE_MISCONFIGURED,
                remedy=f"unset {variable} or name an interface of this host",
            )


def _devices(environ: Mapping[str, str]) -> Iterator[Check]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    local = environ.get("LOCAL_WORLD_SIZE", "")
    if visible is None or not local.isdigit():
        return
    devices = [d for d in visible.split(",") if d.strip()]
    if 0 < len(devices) < int(local):
        yield Check(
            name="devices",
            ok=False,
            says=f"{local} local ranks share {len(devices)} visible devices ({visible})",
            category=C.DEVICE_MISASSIGNED,
            remedy="start as many ranks as there are devices, or show them all",
        )
    elif len(set(devices)) < len(devices):
        yield Check(
            name="devices",
            ok=False,
            says=f"CUDA_VISIBLE_DEVICES names a device twice: {visible}",
            category=C.DEVICE_MISASSIGNED,
            remedy="name each device once",
        )


def _torch(environ: Mapping[str, str]) -> Iterator[Check]:
    del environ
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield Check(
            name="torch",
            ok=False,
            says=f"torch cannot be imported: {error}",
            category=C.ENV_MISMATCH,
            remedy="install torch 2.6 or newer in this environment",
        )
        return
    version = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 6):
        yield Check(
            name="torch",
            ok=False,
            says=f"torch {torch.__version__} is older than 2.6",
            category=C.VERSION_MISMATCH,
            remedy="update torch",
        )
    else:
        backends = [b for b in ("nccl", "gloo") if dist.is_available() and getattr(dist, f"is_{b}_available")()]
        yield _good("torch", f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, {', '.join(backends)}")


def _compiler(environ: Mapping[str, str]) -> Iterator[Check]:
    found = next((c for c in (environ.get("CXX", ""), "c++", "g++", "clang++") if c and shutil.which(c)), "")
    says = (
        f"{found} builds the collective tap"
        if found
        else "no C++ compiler: collectives are seen by Python wrapping only"
    )
    yield _good("compiler", says)


def _disk(environ: Mapping[str, str]) -> Iterator[Check]:
    del environ
    usage = shutil.disk_usage(Path.cwd())
    low = usage.free / usage.total < DISK_SHARE_MIN
    yield Check(
        name="disk",
        ok=not low,
        says=f"{usage.free >> 30} GiB of {usage.total >> 30} GiB are free in {Path.cwd()}",
        category=C.STORAGE_SLOW if low else None,
        remedy="make room before checkpoints are written" if low else "",
    )


def _backend(endpoint: str) -> Check:
    try:
        with urllib.request.urlopen(f"{endpoint.rstrip('/')}/readyz", timeout=ENDPOINT_TIMEOUT_S) as answer:
            return _good("backend", f"{endpoint} answers {answer.status}")
    except (urllib.error.URLError, OSError, ValueError) as error:
        return Check(
            name="backend",
            ok=False,
            says=f"{endpoint} does not answer ({error}); training would go on and spool",
            category=C.INTERFACE_MISCONFIGURED,
            remedy="start `lanterne serve` there, or set LANTERNE_ENDPOINT",
        )


CHECKS: tuple[Callable[[Mapping[str, str]], Iterator[Check]], ...] = (
    _torch,
    _devices,
    _shared_memory,
    _limits,
    _names,
    _interfaces,
    _disk,
    _compiler,
)


def preflight(endpoint: str = "", environ: Mapping[str, str] | None = None) -> list[Check]:
    """All checks of this host, failed ones first. ``endpoint`` adds a check that the backend answers."""
    environ = os.environ if environ is None else environ
    found = [check for make in CHECKS for check in make(environ)]
    if endpoint:
        found.append(_backend(endpoint))
    return sorted(found, key=lambda c: c.ok)
