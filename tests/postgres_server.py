"""A PostgreSQL server of one's own, in a folder of its own, on a unix socket only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PORT = "5599"
USER = "lanterne"


@dataclass(frozen=True)
class Postgres:
    folder: Path
    binaries: Path

    def make(self, database: str) -> None:
        command = [self.binaries / "createdb", "-h", self.folder, "-p", PORT, "-U", USER, database]
        subprocess.run(command, check=True)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://{USER}@/{database}?host={self.folder}&port={PORT}"

    def catalog(self, database: str) -> str:
        return f"postgres:dbname={database} host={self.folder} port={PORT} user={USER}"


def binaries() -> Path | None:
    """The folder with initdb and postgres; None where there is none."""
    found = shutil.which("postgres") or shutil.which("pg_config")
    folder = Path(os.path.realpath(found)).parent if found else None
    return folder if folder is not None and (folder / "initdb").exists() else None


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """Started and ready; PostgreSQL refuses to run as root, so root hands it to the user ``postgres`` or ``nobody``."""
    where = binaries()
    assert where is not None
    with tempfile.TemporaryDirectory(prefix="lanterne-pg-", dir="/tmp") as name:
        folder = Path(name)
        as_user: list[str] = []
        if os.geteuid() == 0:
            user = "postgres" if subprocess.run(["id", "postgres"], capture_output=True).returncode == 0 else "nobody"
            shutil.chown(folder, user)
            as_user = ["runuser", "-u", user, "--"]
        folder.chmod(0o755)
        initdb = [*as_user, str(where / "initdb"), "-D", str(folder / "data"), "-A", "trust", "-U", USER, "--no-sync"]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL)
        options = ["-k", str(folder), "-p", PORT, "-c", "listen_addresses=", "-c", "fsync=off"]
        command = [*as_user, str(where / "postgres"), "-D", str(folder / "data"), *options]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            for _ in range(200):
                asked = [str(where / "pg_isready"), "-q", "-h", str(folder), "-p", PORT]
                if subprocess.run(asked, check=False).returncode == 0:
                    break
                time.sleep(0.1)
            yield Postgres(folder, where)
        finally:
            process.terminate()
            process.wait(30)
