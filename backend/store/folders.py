"""Folders and files of the stores: made private, or refused with what to do."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from lanterne.errors import StoreUnavailable

_DISK_FAULTS = frozenset({errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG})


def make_folder(folder: Path) -> None:
    """Make ``folder`` where it is missing. Raises :class:`StoreUnavailable` where that cannot be."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(_explain(folder, error)) from error


def make_private_file(file: Path) -> None:
    """Make ``file`` with mode 0600 where it is missing; :class:`StoreUnavailable` where it cannot be written."""
    make_folder(file.parent)
    try:
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise StoreUnavailable(_explain(file, error)) from error


def disk_fault(folder: Path) -> str:
    """Why nothing can be written below ``folder`` just now, by the disk's fault (full, read-only, failing); else empty.

    A folder that may not be written, or cannot be there, is the fault of whoever named it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{folder}: {error.strerror}" if error.errno in _DISK_FAULTS else ""
    return ""


def _explain(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror}; name a folder that can be written with --data or LANTERNE_DATA"
