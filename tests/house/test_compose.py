"""What each compose service of ours runs is started here as a plain process, as docker-compose.yml says."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from lanterne.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[2]
OURS = ("lanterne", "trainer", "lanterne-a", "lanterne-b")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def defaults(value: str) -> str:
    """``${NAME:-default}`` as compose would fill it with no environment."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))


def environment(service: dict[str, Any], replace: dict[str, str]) -> dict[str, str]:
    own = {k: defaults(v) for k, v in service.get("environment", {}).items()}
    for old, new in replace.items():
        own = {k: v.replace(old, new) for k, v in own.items()}
    return {**os.environ, **own}


def command(service: dict[str, Any], replace: dict[str, str]) -> list[str]:
    words = [replace.get(w, w) for w in service["command"]]
    return [sys.executable, "-m", "lanterne", *words[1:]] if words[0] == "lanterne" else words


def healthy(service: dict[str, Any], port: int, seconds: float) -> bool:
    test = service["healthcheck"]["test"]
    assert test[0] == "CMD"
    words = [sys.executable if w == "python" else w.replace(":4318/", f":{port}/") for w in test[1:]]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if subprocess.run(words, capture_output=True, check=False).returncode == 0:
            return True
        time.sleep(0.3)
    return False


def start_backend(service: dict[str, Any], folder: Path, port: int) -> subprocess.Popen[bytes]:
    replace = {"4318": str(port), "4317": str(free_port()), "/data": str(folder / "data"), "0.0.0.0": "127.0.0.1"}
    settings = {
        "postgresql+psycopg://lanterne:lanterne@postgres:5432/lanterne": f"sqlite:///{folder / 'control.db'}",
        "postgres:dbname=lanterne host=postgres user=lanterne password=lanterne|/lake": "",
    }
    return subprocess.Popen(command(service, replace), env=environment(service, settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lanterne", "lanterne-b"])
def test_backend_service_runs_and_is_healthy(compose: dict[str, Any], name: str, tmp_path: Path) -> None:
    service = compose["services"][name]
    container_port = service["ports"][0].rsplit(":", 1)[1]
    assert container_port in service["command"]
    port = free_port()
    process = start_backend(service, tmp_path, port)
    try:
        assert healthy(service, port, 60)
    finally:
        process.terminate()
        assert process.wait(30) in {0, -15}


@pytest.mark.slow
def test_trainer_service_reports_to_the_backend(compose: dict[str, Any], tmp_path: Path) -> None:
    services = compose["services"]
    port = free_port()
    backend = start_backend(services["lanterne"], tmp_path, port)
    try:
        assert healthy(services["lanterne"], port, 60)
        replace = {"2000": "30", "/tmp/checkpoints": str(tmp_path / "checkpoints")}
        env = environment(services["trainer"], {"http://lanterne:4318": f"http://127.0.0.1:{port}"})
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        env["LANTERNE_DIR"] = str(tmp_path / "session")
        done = subprocess.run(command(services["trainer"], replace), env=env, timeout=200, check=False)
        assert done.returncode == 0
        assert ranks_seen(port, env["LANTERNE_JOB"], env["LANTERNE_TOKEN"]) == 4
    finally:
        backend.terminate()
        backend.wait(30)


def ranks_seen(port: int, job: str, token: str) -> int:
    import httpx

    url = f"http://127.0.0.1:{port}/api/v1/jobs/{job}"
    for _ in range(60):
        answer = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=5)
        if answer.status_code == 200 and answer.json()["ranks_seen"] == 4:
            return 4
        time.sleep(0.5)
    return int(answer.json().get("ranks_seen", 0)) if answer.status_code == 200 else 0


def test_every_service_of_ours_names_things_that_exist(compose: dict[str, Any]) -> None:
    services = compose["services"]
    stages = re.findall(r"^FROM .* AS (\w+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    for name in OURS:
        assert services[name]["build"]["target"] in stages
        assert services[name]["command"][0] == "lanterne"
    assert (ROOT / "examples" / "otel-collector.yaml").exists()
    used = {v.split(":")[0] for s in services.values() for v in s.get("volumes", []) if not v.startswith(("./", "/"))}
    assert used == set(compose["volumes"])


def test_26_containers_are_shut_in(compose: dict[str, Any]) -> None:
    """No root, nothing writable but the data, no capability, no way to the container engine, a health check."""
    for name, service in compose["services"].items():
        assert not any("docker.sock" in volume for volume in service.get("volumes", [])), name
        assert not service.get("privileged"), name
        if name in OURS and name != "trainer":
            assert service["read_only"], name
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert service["healthcheck"]["test"], name
            assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    last_users = {s.split()[2]: re.findall(r"^USER (\w+)$", s, re.MULTILINE)[-1:] for s in stages}
    for stage in ("server", "scale", "trainer"):
        assert last_users[stage] == ["lanterne"], stage


def test_the_kubernetes_example_sets_what_the_server_knows() -> None:
    known = {f"LANTERNE_{name.upper()}" for name in get_type_hints(ServerSettings)}
    text = (ROOT / "examples" / "kubernetes.yaml").read_text(encoding="utf-8")
    kinds = {part["kind"]: part for part in yaml.safe_load_all(text)}
    assert {"Secret", "Service", "StatefulSet", "PersistentVolumeClaim"} <= set(kinds)
    spec = kinds["StatefulSet"]["spec"]["template"]["spec"]
    container = spec["containers"][0]
    assert {e["name"] for e in container["env"]} <= known
    mounted = {m["name"] for m in container["volumeMounts"]}
    claimed = {c["metadata"]["name"] for c in kinds["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    assert mounted == claimed | {v["name"] for v in spec["volumes"]}
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
