"""Preflight: readings of this host with one thing wrong at a time."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from lanterne.collector.guards.preflight import Check, preflight

LOCAL = {"MASTER_ADDR": "127.0.0.1", "RANK": "0"}


def named(checks: list[Check], name: str) -> Check:
    return next(c for c in checks if c.name == name)


def test_a_sound_host_fails_nothing_but_what_is_really_short() -> None:
    checks = preflight(environ=LOCAL)
    assert named(checks, "torch").ok
    assert named(checks, "master address").ok
    assert all(c.category is None and not c.remedy for c in checks if c.ok)
    assert all(c.category is not None and c.remedy for c in checks if not c.ok)


@pytest.mark.parametrize(
    ("environ", "name", "category"),
    [
        ({"NCCL_SOCKET_IFNAME": "ib17"}, "NCCL_SOCKET_IFNAME", "interface_misconfigured"),
        ({"MASTER_ADDR": "no-such-host.invalid"}, "master address", "interface_misconfigured"),
        ({"MASTER_ADDR": "192.0.2.7", "RANK": "0"}, "master address", "interface_misconfigured"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_WORLD_SIZE": "4"}, "devices", "device_misassigned"),
        ({"CUDA_VISIBLE_DEVICES": "0,0", "LOCAL_WORLD_SIZE": "2"}, "devices", "device_misassigned"),
    ],
)
def test_one_wrong_thing_is_named_with_its_cause(environ: dict[str, str], name: str, category: str) -> None:
    check = named(preflight(environ=environ), name)
    assert (check.ok, check.category) == (False, category)
    assert check.remedy


@pytest.mark.parametrize("environ", [{"NCCL_SOCKET_IFNAME": "lo"}, {"NCCL_SOCKET_IFNAME": "^docker0"}])
def test_right_interfaces_are_not_blamed(environ: dict[str, str]) -> None:
    assert all(c.ok for c in preflight(environ=environ) if c.name == "NCCL_SOCKET_IFNAME")


def test_few_open_files_are_told() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        assert not named(preflight(environ={}), "open files").ok
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_command_says_that_the_backend_is_away() -> None:
    command = [sys.executable, "-m", "lanterne", "check", "--endpoint", "http://127.0.0.1:9", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    rows = json.loads(done.stdout)
    assert [r["name"] for r in rows if not r["ok"]][-1] == "backend"
