"""A trainer without torch: writes real records into a real ring, keeps a real shipper, and ends as told.

python ring_trainer.py FOLDER RANK STEPS ENDING [PAUSE_S]
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from lanterne.blackbox_files import PHASE_RECORD, STEP_RECORD
from lanterne.collector.ring import Ring
from lanterne.collector.shipper import ensure_running
from lanterne.nouns import Identity
from lanterne.settings import CollectorSettings, load


def main() -> None:
    folder, rank, steps, ending = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    pause_s = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
    settings = load(CollectorSettings)
    folder.mkdir(parents=True, exist_ok=True)
    ring = Ring(folder, rank, settings.ring_records)
    stacks = (folder / f"rank-{rank}.stacks").open("w")
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    identity = Identity(job="ring-job", rank=rank, local_rank=rank, world_size=4, host="here", pid=os.getpid())
    about = {"identity": asdict(identity), "pid": os.getpid(), "stacks_signal": int(signal.SIGUSR2)}
    temporary = folder / f"rank-{rank}.json.tmp"
    temporary.write_text(json.dumps(about))
    temporary.replace(folder / f"rank-{rank}.json")
    ensure_running(folder, settings)
    train(ring, steps, pause_s)
    end(ring, ending)


def train(ring: Ring, steps: int, pause_s: float) -> None:
    step_name, forward = ring.intern("step"), ring.intern("forward")
    for step in range(steps):
        at = time.monotonic_ns()
        ring.progress(step, forward, at, at)
        time.sleep(pause_s)
        now = time.monotonic_ns()
        ring.span(PHASE_RECORD, 1, forward, step, at, now - at)
        ring.metric("training.loss", step, now, 1.0 / (step + 1))
        ring.span(STEP_RECORD, 1, step_name, step, at, now - at)
        ring.progress(step, forward, now, now)


def end(ring: Ring, ending: str) -> None:
    print("trained", flush=True)
    if ending == "close":
        ring.event("closed", -1, time.monotonic_ns())
        ring.say_closed()
    elif ending == "exception":
        raise RuntimeError("boom in user code")
    elif ending.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, ending))
        time.sleep(60)
    elif ending == "_exit":
        os._exit(7)
    elif ending == "hang":
        wait_for_godot()
    elif ending == "gil":
        hold_the_interpreter()
    elif ending == "pause":
        time.sleep(4.0)
        train(ring, 20, 0.01)
    elif ending == "segfault":
        faulthandler._sigsegv()


def wait_for_godot() -> None:
    time.sleep(600)


def hold_the_interpreter() -> None:
    re.match("(a+)+$", "a" * 64 + "b")  # exponential, in C, with the GIL held


if __name__ == "__main__":
    main()
