"""Who is the straggler in a folder of Kineto traces: the same question to Lanterne and to HolisticTraceAnalysis.

Each answers in a process of its own: ``python -m benchmarks._traces lanterne FOLDER``, and ``hta`` with the
interpreter of an environment that has HolisticTraceAnalysis. Both print CPU seconds (imports left out) and peak memory.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
REAL = HERE / "tests" / "data" / "cases" / "kineto" / "sampled_rank-0.json.gz"
GAP_US = 1_300_000
LATE_US = 40_000


def write(folder: Path, ranks: int, repeats: int, straggler: int) -> int:
    """Traces of ``ranks`` ranks: the two steps of a real trace (HTA's own sample), repeated; events written in all.

    The straggler's communication kernels start ``LATE_US`` late and end with the others', as a late member's do.
    """
    with gzip.open(REAL, "rt", encoding="utf-8") as file:
        real = json.load(file)
    written = 0
    for rank in range(ranks):
        events: list[dict[str, Any]] = [e for e in real["traceEvents"] if e.get("ph") != "X"]
        for turn in range(repeats):
            whole = (e for e in real["traceEvents"] if e.get("ph") == "X")
            events += [_moved(event, turn, late=rank == straggler) for event in whole]
        info = {"backend": "nccl", "rank": rank, "world_size": ranks}
        text = json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events})
        with gzip.open(folder / f"rank-{rank}.json.gz", "wt", encoding="utf-8", compresslevel=1) as file:
            file.write(text)
        written += len(events)
    return written


def _moved(event: dict[str, Any], turn: int, *, late: bool) -> dict[str, Any]:
    moved = event | {"ts": event["ts"] + turn * GAP_US}
    name = str(event["name"])
    if name.startswith("ProfilerStep#"):
        moved["name"] = f"ProfilerStep#{int(name.removeprefix('ProfilerStep#')) + 2 * turn}"
    arguments = event.get("args") or {}
    ids = {k: arguments[k] + turn * 10_000_000 for k in ("correlation", "External id") if k in arguments}
    if ids:
        moved["args"] = arguments | ids
    if event.get("cat") == "kernel" and name.startswith("nccl"):
        wait = min(LATE_US, event["dur"] / 2)
        if late:
            moved |= {"ts": moved["ts"] + wait, "dur": event["dur"] - wait}
    return moved


def hta_python(install: bool) -> tuple[str, str]:
    """(interpreter that has HolisticTraceAnalysis, "") or ("", why there is none). ``install``: into a throw-away
    environment in the temporary folder, which later runs find again."""
    if importlib.util.find_spec("hta") is not None:
        return sys.executable, ""
    home = Path(tempfile.gettempdir()) / f"benchmarks-hta-{os.getuid()}"
    python = home / "bin" / "python"
    if (home / "whole").exists():
        return str(python), ""
    if not install:
        return "", "HolisticTraceAnalysis is not installed; --hta PYTHON names an interpreter that has it"
    try:
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(home)], check=True, capture_output=True, timeout=120
        )
        pip = [str(python), "-m", "pip", "install", "--quiet", "HolisticTraceAnalysis"]
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=240)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or b"").strip().splitlines() or ["no error text"]
        return "", f"HolisticTraceAnalysis could not be installed: {lines[-1]!s:.200}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"HolisticTraceAnalysis could not be installed: {error}"
    (home / "whole").touch()
    return str(python), ""


def compare(python: str, why_not: str, *, ranks: int, repeats: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Figures ``hta_time_ratio`` and ``hta_memory_ratio`` (Lanterne / HTA on the same traces; null with the reason
    where there is no comparison), and what both answered."""
    straggler = ranks // 2
    with tempfile.TemporaryDirectory() as name:
        events = write(Path(name), ranks, repeats, straggler)
        ours = ask(sys.executable, "lanterne", Path(name))
        theirs = ask(python, "hta", Path(name)) if python else {"reason": why_not}
    reason = ours.get("reason") or theirs.get("reason") or ""
    if not reason and ours["straggler"] != straggler:
        reason = f"Lanterne named rank {ours['straggler']}, it is {straggler}"
    figures = []
    for figure, key in (("hta_time_ratio", "cpu_s"), ("hta_memory_ratio", "peak_kib")):
        value = None if reason else round(ours[key] / theirs[key], 4)
        figures.append({"name": figure, "value": value, "unit": "1", "goal": 1.0, "better": "lower"})
        if reason:
            figures[-1]["reason"] = reason
    return figures, {"ranks": ranks, "events": events, "straggler": straggler, "lanterne": ours, "hta": theirs}


def ask(python: str, who: str, folder: Path, timeout_s: float = 240.0) -> dict[str, Any]:
    """The answer of ``who``; ``{"reason": …}`` where it gives none."""
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    try:
        run = subprocess.run(
            [python, str(Path(__file__)), who, str(folder)],
            capture_output=True, text=True, timeout=timeout_s, env=environment, check=False,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"reason": f"{who}: {error}"}
    except (ValueError, IndexError):
        return {"reason": f"{who} gave no answer: {(run.stderr.strip().splitlines() or ['no error'])[-1]}"[:300]}
    return found


def _cpu_s() -> float:
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _peak_kib() -> int:
    """Peak memory of this process alone: ru_maxrss would count the parent that started it, and forks share pages."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/status has no VmHWM")


def lanterne(folder: Path) -> Any:
    """Reads the traces when called and names the rank that the others waited for longest."""
    from lanterne.backend.align import matching, stream
    from lanterne.backend.align import traces as aligned
    from lanterne.backend.readers import traces
    from lanterne.backend.readers.source import probe

    def answer() -> int:
        found = [traces.load(probe(path)) for path in sorted(folder.iterdir())]
        calls = matching.from_collectives([c for trace in found for c in aligned.collectives(trace)])
        hosts = {trace.rank: trace.host or "one" for trace in found}
        result = stream.whole(calls, (), hosts)
        late = [0.0] * len(found)
        for rank, last, wait in zip(
            result.calls.rank.tolist(),
            result.attribution.last.tolist(),
            result.attribution.wait_ns.tolist(),
            strict=True,
        ):
            if last >= 0 and last != rank:
                late[last] += wait
        return max(range(len(late)), key=late.__getitem__)

    return answer


def _hta(folder: Path) -> Any:
    import logging

    logging.disable(logging.CRITICAL)
    from hta.trace_analysis import TraceAnalysis

    return lambda: int(TraceAnalysis(trace_dir=str(folder)).get_potential_stragglers(num_candidates=1)[0])


def _main() -> None:
    who, folder = sys.argv[1], Path(sys.argv[2])
    answer = {"lanterne": lanterne, "hta": _hta}[who](folder)
    before = _cpu_s()
    rank = answer()
    spent = _cpu_s() - before
    print(json.dumps({"straggler": rank, "cpu_s": spent, "peak_kib": _peak_kib()}))


if __name__ == "__main__":
    _main()
