"""The commands that look after things: stores, policies, checkpoints, probes, tokens, plans."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lanterne.cli_base import Data, Json, need, print_json
from lanterne.cli_causes import causes
from lanterne.cli_node import agent
from lanterne.errors import UsageError

policy_app = typer.Typer(help="Policies: what may be done, when, and how often.", no_args_is_help=True)
checkpoint_app = typer.Typer(help="Checkpoints: are all pieces there, and whole?", no_args_is_help=True)
probe_app = typer.Typer(help="The compiled CUDA and NCCL probes.", no_args_is_help=True)
token_app = typer.Typer(help="Access tokens of the server.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Hang the commands of this file on the root."""
    subs = (("policy", policy_app), ("checkpoint", checkpoint_app), ("probe", probe_app), ("token", token_app))
    for name, sub in subs:
        app.add_typer(sub, name=name)
    for command in (check, migrate, export, import_, plan, inject, agent, causes):
        app.command(name=command.__name__.strip("_"), context_settings=PASS_ON if command is inject else None)(command)


PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def migrate(data: Data = "lanterne-data", revision: str = "head") -> None:
    """Bring the stores in a data folder to this version (or to REVISION).

    Example: `lanterne migrate --data ./lanterne-data`
    """
    from lanterne.settings import ServerSettings, load

    need("lanterne.backend.store.migrate").upgrade(load(ServerSettings, data=data), revision=revision)
    Console(stderr=True).print(f"{data}: at {revision}")


@policy_app.command("test")
def policy_test(
    file: Annotated[Path, typer.Argument(help="Policy file (YAML).", exists=True)],
    data: Data = "lanterne-data",
    as_json: Json = False,
) -> None:
    """Replay a policy over the stored incidents and say what it would have done.

    Example: `lanterne policy test my-policy.yaml --data ./lanterne-data`
    """
    from lanterne.settings import ServerSettings, load

    policy = need("lanterne.backend.policy")
    rows = policy.replay_file(file, load(ServerSettings, data=data))
    if as_json:
        print_json(rows)
        return
    for line in policy.told(rows):
        Console().print(line, markup=False, highlight=False, soft_wrap=True)


@checkpoint_app.command("verify")
def checkpoint_verify(
    folder: Annotated[Path, typer.Argument(help="A checkpoint or a folder of checkpoints.", exists=True)],
    as_json: Json = False,
) -> None:
    """Check that every piece of a checkpoint is there and whole; nothing is unpickled.

    Example: `lanterne checkpoint verify /ckpt/step-4000`
    """
    checkpoints = need("lanterne.backend.readers.checkpoints")
    from lanterne.nouns import to_json

    problems = [to_json(p) for p in checkpoints.verify(folder)]
    if as_json:
        print_json({"folder": str(folder), "ok": not problems, "problems": problems})
    else:
        console = Console()
        for problem in problems:
            console.print(f"{problem['kind']}: {problem['path']}: {problem['says']}", markup=False)
        if not problems:
            console.print(f"{folder}: every piece is there and whole")
    raise typer.Exit(1 if problems else 0)


@probe_app.command("build")
def probe_build(as_json: Json = False) -> None:
    """Compile the probes on this machine (needs a C++ compiler; nvcc is used where it is there).

    Example: `lanterne probe build`
    """
    from lanterne import cuda_probe

    result = cuda_probe.build()
    if as_json:
        print_json(result)
    else:
        Console().print(cuda_probe.describe(result), soft_wrap=True, markup=False)
    raise typer.Exit(0 if result["built"] else 2)


@probe_app.command("status")
def probe_status(as_json: Json = False) -> None:
    """Say which probe collects, and why not where it does not.

    Example: `lanterne probe status --json`
    """
    from lanterne import cuda_probe
    from lanterne.collector.sources.collectives import tier_here

    result = cuda_probe.status()
    result["probes"] = [*cuda_probe.probes(result), tier_here()]
    if as_json:
        print_json(result)
    else:
        Console().print(cuda_probe.describe(result), soft_wrap=True, markup=False)


@probe_app.command("device")
def probe_device(
    kind: Annotated[str, typer.Argument(help="cpu, cuda, npu, xpu, or a vendor's name.")] = "cpu",
    index: Annotated[int, typer.Option(help="Which device of that kind.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Run a fixed small GEMM and copy on one device, in a process of its own: is the device slow, or its work?

    Exits 2 where the device cannot be measured.

    Example: `lanterne probe device cuda --index 3`
    """
    from dataclasses import asdict

    from lanterne.collector.devices import measure_apart

    found = measure_apart(kind, index)
    if as_json:
        print_json(asdict(found))
    elif found.error:
        Console().print(f"{found.device}: not measured: {found.error}", markup=False)
    else:
        Console().print(
            f"{found.device}: GEMM {found.gemm_ms:.3f} ms ({found.gemm_tflops:.2f} Tflop/s), "
            f"copy {found.copy_ms:.3f} ms ({found.copy_gb_per_s:.1f} GB/s)",
            markup=False,
        )
    raise typer.Exit(2 if found.error else 0)


@token_app.command("create")
def token_create(
    scope: Annotated[str, typer.Option(help="ingest, read, operate or admin.")] = "read",
    job: Annotated[str, typer.Option(help="Bind the token to one job.")] = "",
    days: Annotated[int, typer.Option(help="Days until it expires.")] = 90,
    data: Data = "lanterne-data",
) -> None:
    """Make an access token; it is shown once and stored hashed.

    Example: `lanterne token create --scope ingest --job my-job`
    """
    from lanterne.settings import ServerSettings, load

    tokens = need("lanterne.backend.api.tokens")
    sys.stdout.write(tokens.create(load(ServerSettings, data=data), scope=scope, job=job, days=days) + "\n")


def export(
    target: Annotated[Path, typer.Argument(help="Folder to write Parquet files and the control tables to.")],
    data: Data = "lanterne-data",
    job: Annotated[str, typer.Option(help="Only this job.")] = "",
) -> None:
    """Write the store of a stopped server as Parquet and JSON: a backup that any tool can read.

    Example: `lanterne export ./backup --data ./lanterne-data`
    """
    from lanterne.settings import ServerSettings, load

    backup = need("lanterne.backend.store.backup")
    rows = backup.export(load(ServerSettings, data=data), target, job=job)
    Console(stderr=True).print(f"wrote {rows:,} rows to {target}")


def import_(
    source: Annotated[Path, typer.Argument(help="Folder that `lanterne export` wrote.", exists=True)],
    data: Data = "lanterne-data",
) -> None:
    """Bring an export back into an empty data folder.

    Example: `lanterne import ./backup --data ./new-data`
    """
    from lanterne.settings import ServerSettings, load

    backup = need("lanterne.backend.store.backup")
    rows = backup.restore(load(ServerSettings, data=data), source)
    Console(stderr=True).print(f"restored {rows:,} rows into {data}")


def check(
    endpoint: Annotated[
        str, typer.Option(help="Also check that this backend answers.", envvar="LANTERNE_ENDPOINT")
    ] = "",
    as_json: Json = False,
) -> None:
    """Preflight of this host: limits, names, interfaces, devices, shared memory, disk.

    Example: `srun lanterne check --endpoint http://backend:4318`
    """
    from lanterne.collector.guards.preflight import preflight
    from lanterne.nouns import to_json

    found = preflight(endpoint)
    if as_json:
        print_json([to_json(c) for c in found])
    else:
        console = Console()
        for one in found:
            console.print(f"{'ok ' if one.ok else 'BAD'}  {one.name}: {one.says}", markup=False)
            if one.remedy:
                console.print(f"     {one.category}: {one.remedy}", markup=False)
    raise typer.Exit(0 if all(c.ok for c in found) else 1)


def plan(
    parameters: Annotated[float, typer.Option(help="Parameters of the model, in billions.")],
    layers: Annotated[int, typer.Option(help="Transformer layers.")],
    hidden: Annotated[int, typer.Option(help="Hidden size.")],
    heads: Annotated[int, typer.Option(help="Attention heads.")],
    devices: Annotated[int, typer.Option(help="Devices in all.")],
    sequence: Annotated[int, typer.Option(help="Tokens a sequence.")] = 4096,
    global_batch: Annotated[int, typer.Option(help="Sequences a step, over all devices.")] = 1024,
    micro_batch: Annotated[int, typer.Option(help="Sequences a micro-batch.")] = 1,
    memory: Annotated[float, typer.Option(help="Memory of a device in GiB.")] = 80.0,
    top: Annotated[int, typer.Option(help="How many layouts to show.")] = 8,
    as_json: Json = False,
) -> None:
    """Which (dp, tp, pp) fit in memory, and which of them waste least.

    Example: `lanterne plan --parameters 70 --layers 80 --hidden 8192 --heads 64 --devices 512`
    """
    from dataclasses import asdict

    planner = need("lanterne.backend.plan")
    model = planner.Model(
        parameters=parameters * 1e9, layers=layers, hidden=hidden, heads=heads, sequence=sequence,
        global_batch=global_batch, micro_batch=micro_batch,
    )  # fmt: skip
    found = planner.plans(model, planner.Cluster(devices=devices, memory_gib=memory))[:top]
    if as_json:
        print_json([asdict(p) for p in found])
        return
    from rich.table import Table

    table = Table("dp", "tp", "pp", "ZeRO", "recompute", "states GiB", "activations GiB", "free GiB", "bubble", "fits")
    for p in found:
        table.add_row(
            str(p.dp), str(p.tp), str(p.pp), str(p.zero), "yes" if p.recompute else "no", f"{p.states_gib:.1f}",
            f"{p.activations_gib:.1f}", f"{p.free_gib:.1f}", f"{p.bubble:.1%}", "yes" if p.fits else p.why,
        )  # fmt: skip
    Console().print(table)


def inject(
    context: typer.Context,
    fault: Annotated[str, typer.Option(help="KIND:RANK:STEP, for example slow-rank:3:100.")],
) -> None:
    """Run a training command with a real fault in one rank, to see whether it would be found.

    Example: `lanterne inject --fault slow-rank:3:100 -- torchrun --nproc-per-node 4 train.py`
    """
    import os

    from lanterne.collector.sim.game import VARIABLE, parse

    parse(fault)
    command = [a for i, a in enumerate(context.args) if not (i == 0 and a == "--")]
    if not command:
        raise UsageError("inject: no command; example: lanterne inject --fault slow-rank:3:100 -- torchrun train.py")
    os.environ[VARIABLE] = fault
    from lanterne.collector.integrations.launch import main as launch

    raise typer.Exit(launch(command))
