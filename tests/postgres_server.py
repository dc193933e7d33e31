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


@dataclass
class Postgres:
    folder: Path
    binaries: Path
    as_user: list[str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until it answers."""
        options = ["-k", str(self.folder), "-p", PORT, "-c", "listen_addresses=", "-c", "fsync=off"]
        command = [*self.as_user, str(self.binaries / "postgres"), "-D", str(self.folder / "data"), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        asked = [str(self.binaries / "pg_isready"), "-q", "-h", str(self.folder), "-p", PORT]
        for _ in range(200):
            if subprocess.run(asked, check=False).returncode == 0:
                return
            time.sleep(0.1)
        raise AssertionError("PostgreSQL did not come up")

    def stop(self) -> None:
        """Shut down at once, whoever is connected."""
        if self.process is not None:
            control = [*self.as_user, str(self.binaries / "pg_ctl"), "-D", str(self.folder / "data"), "-m", "immediate"]
            subprocess.run([*control, "stop"], check=True, stdout=subprocess.DEVNULL)
            self.process.wait(30)
            self.process = None

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
        server = Postgres(folder, where, as_user)
        server.start()
        try:
            yield server
        finally:
            server.stop()
