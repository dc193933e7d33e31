"""File reads of a process and its workers, timed by the preloaded library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lanterne import native
from lanterne.collector.integrations.launch import environment
from lanterne.collector.sources import reads
from lanterne.settings import CollectorSettings

MIB = 1 << 20
PROGRAM = """
import multiprocessing, os, sys
def work(path):
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
    os.pread(os.open(path, os.O_RDONLY), 4096, 0)
    os.read(os.pipe()[0], 0)
work(sys.argv[1])
worker = multiprocessing.get_context("fork").Process(target=work, args=(sys.argv[1],))
worker.start()
print("ready", flush=True)
sys.stdin.readline()
worker.join()
"""


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no C++ compiler on this machine")
def test_reads_of_a_rank_and_its_workers_add_up(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(8 * MIB))
    variables = reads.preload(CollectorSettings(reads=True), str(tmp_path))
    command = [sys.executable, "-S", "-c", PROGRAM, str(file)]
    process = subprocess.Popen(
        command, env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    source = reads.ReadTimes(variables[reads.FOLDER])
    try:
        assert process.stdout.readline() == "ready\n"
        source.sample(process.pid)  # both processes live, or the worker's page is there for one more look
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 0
        found = {name: value for name, value, _ in source.sample(process.pid)}
    finally:
        process.kill()
        process.communicate()
    both = 2 * (8 * MIB + 4096)
    assert both <= found["process.file.read"] < both + 64 * MIB  # the interpreter reads its own files as well
    assert found["process.file.reads"] >= 20
    assert 0 < found["process.file.read_time"] < 60
    again = {name: value for name, value, _ in source.sample(process.pid)}
    assert again == found


def test_a_program_without_the_counters_has_none(tmp_path: Path) -> None:
    found = reads.ReadTimes(tmp_path).sample(os.getpid())
    assert [value for _, value, _ in found] == [0.0, 0.0, 0.0]


def test_nothing_is_preloaded_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    plain = environment(CollectorSettings(), ["python", "t.py"], str(tmp_path))
    assert "LD_PRELOAD" not in plain
    assert reads.FOLDER not in plain


def test_a_launch_goes_on_where_it_cannot_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(native, "compiler", lambda: None)
    found = environment(CollectorSettings(reads=True), ["python", "t.py"], str(tmp_path))
    assert reads.FOLDER not in found
    assert capsys.readouterr().err.count("file reads are not timed: no C++ compiler") == 1
