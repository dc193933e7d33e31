"""What the scheduler tells of a process: real processes that share one core, and one that is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from lanterne.collector.sources.host import CpuDelay

SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"


def test_processes_that_share_a_core_wait_for_it_half_of_the_time() -> None:
    core = str(max(os.sched_getaffinity(0)))
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN, core], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in spinning:
            assert process.stdout is not None
            process.stdout.readline()
        source = CpuDelay()
        assert source.sample(spinning[0].pid) == []
        time.sleep(0.5)
        ((name, share, label),) = source.sample(spinning[0].pid)
        assert (name, label) == ("process.cpu.delay", "")
        assert 0.3 < share <= 1.0
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def test_a_process_that_is_gone_raises_what_the_sampler_catches() -> None:
    with pytest.raises(OSError, match="schedstat"):
        CpuDelay().sample(2**22 - 1)
