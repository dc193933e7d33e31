"""``lanterne agent``: the host's own watcher."""

from __future__ import annotations

import signal
import threading
from typing import Annotated, Any

import typer
from rich.console import Console

from lanterne.cli_base import Json, print_json

ONCE_S = 2.0


def agent(
    once: Annotated[bool, typer.Option("--once", help="Look once, print what is found, and leave.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2)] = 5.0,
    endpoint: Annotated[str | None, typer.Option(help="Send to this server.")] = None,
    path: Annotated[list[str], typer.Option(help="A folder to watch besides the mounts; may be repeated.")] = [],  # noqa: B006
    pid: Annotated[list[int], typer.Option(help="A process of the job, with its children; may be repeated.")] = [],  # noqa: B006
    root: Annotated[str, typer.Option(help="Where the host's /proc, /sys and /dev lie (in a container).")] = "/",
    trace: Annotated[bool, typer.Option("--trace", help="Let bpftrace measure; it runs at context switches.")] = False,
    as_json: Json = False,
) -> None:
    """Watch this host itself: neighbours, quotas, disks, links, the kernel log. One process a node.

    With --once it looks for two seconds and exits 1 when something is found.

    Example: `lanterne agent --once --json`
    """
    from lanterne.collector.agent import Agent
    from lanterne.settings import CollectorSettings, load

    watcher = Agent(load(CollectorSettings, endpoint=endpoint), root=root, paths=path, pids=pid, trace=trace)
    if once:
        found = watcher.once(ONCE_S)
        watcher.close()
        print_json(found) if as_json else _print(found)
        raise typer.Exit(1 if found["findings"] else 0)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    says = f"watching {watcher.host} every {interval:g} s; sending to {watcher.settings.endpoint}"
    Console(stderr=True).print(says)
    watcher.run(stop, interval)
    watcher.close()


def _print(found: dict[str, Any]) -> None:
    console = Console()
    for row in found["sources"]:
        reason = f": {row['reason']}" if row["reason"] else ""
        console.print(f"{row['source']:<12} {row['state']}{reason}", markup=False)
    for row in found["findings"]:
        console.print(f"{row['category']} on {row['host']}: {row['evidence'][0]['says']}", markup=False)
        if row["remedy"]:
            console.print(f"  {row['remedy']}", markup=False)
    if not found["findings"]:
        console.print(f"{found['host']}: nothing stands out")
