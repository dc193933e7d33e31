"""The command line. stdout carries data, stderr talk; exit 0 = healthy, 1 = an incident was found, 2 = usage.

Commands import what they need when they run, so that ``lanterne --help`` is quick and the collector's
light install works without the server extra.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lanterne import __version__
from lanterne.errors import LanterneError, MissingExtra, UsageError

app = typer.Typer(
    name="lanterne",
    help="Which rank, since when, why, what it costs, what to do: diagnosis for distributed PyTorch training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
policy_app = typer.Typer(help="Policies: what may be done, when, and how often.", no_args_is_help=True)
checkpoint_app = typer.Typer(help="Checkpoints: are all pieces there, and whole?", no_args_is_help=True)
probe_app = typer.Typer(help="The compiled CUDA and NCCL probes.", no_args_is_help=True)
token_app = typer.Typer(help="Access tokens of the server.", no_args_is_help=True)
for name, sub in (("policy", policy_app), ("checkpoint", checkpoint_app), ("probe", probe_app), ("token", token_app)):
    app.add_typer(sub, name=name)

Json = Annotated[bool, typer.Option("--json", help="Print the machine form on stdout and nothing else there.")]
Data = Annotated[str, typer.Option("--data", help="The server's data folder.", envvar="LANTERNE_DATA")]


def _need(module: str, extra: str = "server") -> Any:
    """Import a part of Lanterne, turning a missing dependency into the pip command that mends it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("lanterne"):
            raise
        raise MissingExtra(f"{error.name} is not installed; run: pip install 'lanterne[{extra}]'") from error


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _finish(report: dict[str, Any], as_json: bool) -> None:
    """Print a report and leave with its exit code."""
    if as_json:
        _print_json(report)
    else:
        from lanterne.cli_report import print_report

        print_report(report, Console())
    raise typer.Exit(0 if report.get("healthy") else 1)


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"lanterne {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


@app.command()
def demo(
    fault: Annotated[str, typer.Option(help="Which fault to inject for real, or `none`.")] = "slow-rank",
    rank: Annotated[int, typer.Option(help="The culprit.")] = 2,
    ranks: Annotated[int, typer.Option(help="World size.")] = 4,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 240,
    onset: Annotated[int, typer.Option(help="First faulty step.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of data and weights.")] = 1234,
    port: Annotated[int, typer.Option(help="Port of page and API; 0 = any free one.")] = 0,
    data: Annotated[str, typer.Option(help="Keep the store in this folder (default: a temporary one).")] = "",
    policy: Annotated[str, typer.Option(help="Ceiling: observe, suggest, approve or auto.")] = "auto",
    leave: Annotated[bool, typer.Option("--exit", help="Leave after the verdict instead of serving on.")] = False,
    as_json: Json = False,
) -> None:
    """Run a real 4-rank training job with a real fault in it and print the verdict.

    Example: `lanterne demo --fault slow-rank --rank 2 --exit --json`
    """
    _need("lanterne.backend.app")
    from lanterne.demo import Demo, DemoOptions

    options = DemoOptions(
        fault=fault, rank=rank, ranks=ranks, steps=steps, onset=onset, seed=seed, port=port, data=data,
        policy=policy, keep=not leave,
    )  # fmt: skip
    run = Demo(options)
    try:
        report = run.run()
    finally:
        run.clean()
    if not leave:
        raise typer.Exit(0 if report.get("healthy") else 1)
    _finish(report, as_json)


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to bind; loopback needs no token.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of page, API and OTLP/HTTP.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port of OTLP/gRPC; 0 = off.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder of the store.")] = None,
    config: Annotated[str, typer.Option(help="TOML file with a [server] section.")] = "",
    policy: Annotated[str | None, typer.Option(help="Ceiling: observe, suggest, approve or auto.")] = None,
    print_settings: Annotated[
        bool, typer.Option(help="Print the settings in force (secrets masked) and leave.")
    ] = False,
) -> None:
    """Serve OTLP, the REST API and the page; migrations are applied first.

    Example: `lanterne serve --port 4318 --data ./lanterne-data`
    """
    from dataclasses import asdict

    from lanterne.settings import ServerSettings, load

    settings = load(ServerSettings, file=config, host=host, port=port, grpc_port=grpc_port, data=data, policy=policy)
    if print_settings:
        shown = {k: "***" if k in {"token", "tls_key"} and v else v for k, v in asdict(settings).items()}
        if "@" in str(shown["control_url"]):
            shown["control_url"] = str(shown["control_url"]).split("://")[0] + "://***"
        _print_json(shown)
        return
    _need("lanterne.backend.app")
    import uvicorn

    from lanterne.serving import config as uvicorn_config

    ready = uvicorn_config(settings)
    scheme = "https" if settings.tls_certificate else "http"
    Console(stderr=True).print(
        f"lanterne {__version__}: {scheme}://{settings.host}:{settings.port}  data: {settings.data}"
    )
    server = uvicorn.Server(ready)
    server.run()
    if not server.started:
        raise LanterneError(f"could not bind {settings.host}:{settings.port}; is the port taken? try --port")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(context: typer.Context) -> None:
    """Run a training command with the collector attached, without touching its code.

    Example: `lanterne run -- torchrun --nproc-per-node 4 train.py`
    """
    command = [a for i, a in enumerate(context.args) if not (i == 0 and a == "--")]
    if not command:
        raise UsageError("run: no command; example: lanterne run -- torchrun --nproc-per-node 4 train.py")
    from lanterne.collector.integrations.launch import main as launch

    raise typer.Exit(launch(command))


@app.command()
def diagnose(
    paths: Annotated[list[Path], typer.Argument(help="Dumps, traces, logs or folders of a dead job.")],
    as_json: Json = False,
) -> None:
    """Say what happened to a job from the files that it left behind; no server needed.

    Reads Flight Recorder dumps, Kineto traces, NCCL and trainer logs, stderr of many ranks, spool and rings.

    Example: `lanterne diagnose /logs/job-17 --json`
    """
    missing = [str(p) for p in paths if not p.exists()]
    if missing:
        raise UsageError(f"diagnose: no such file or folder: {', '.join(missing)}")
    readers = _need("lanterne.backend.readers")
    from lanterne.nouns import to_json

    console = Console(stderr=True)
    with console.status(f"reading {len(paths)} path(s)"):
        report = readers.diagnose_paths(paths)
    _finish(to_json(report), as_json)


@app.command()
def simulate(
    fault: Annotated[list[str], typer.Option(help="KIND:RANK:STEP, may be repeated; none = healthy.")] = [],  # noqa: B006
    dp: Annotated[int, typer.Option(help="Data-parallel replicas.")] = 8,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel shards.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps.")] = 200,
    seed: Annotated[int, typer.Option(help="The same seed gives the same job.")] = 0,
    endpoint: Annotated[str, typer.Option(help="Send it to this server.")] = "http://127.0.0.1:4318",
    job: Annotated[str, typer.Option(help="Name of the job.")] = "simulated",
) -> None:
    """Simulate a job of any size with known faults and send it to a server as its ranks would.

    Example: `lanterne simulate --dp 64 --fault slow_compute:17:80`
    """
    from lanterne.collector.sim.send import send_simulated

    sent = send_simulated(faults=fault, shape=(dp, pp, tp), steps=steps, seed=seed, endpoint=endpoint, job=job)
    Console(stderr=True).print(f"sent {sent:,} events of {dp * pp * tp} ranks to {endpoint} as job {job}")


@app.command()
def sla(
    job: Annotated[str, typer.Argument(help="Job id.")],
    url: Annotated[str, typer.Option(help="The server.", envvar="LANTERNE_URL")] = "http://127.0.0.1:4318",
    as_json: Json = False,
) -> None:
    """Objectives, error budget, goodput and badput of a job.

    Example: `lanterne sla my-job --json`
    """
    httpx = _need("httpx")
    try:
        answer = httpx.get(f"{url}/api/v1/jobs/{job}/sla", timeout=30.0)
    except httpx.HTTPError as error:
        raise LanterneError(f"{url} does not answer ({error}); is `lanterne serve` running there?") from error
    if answer.status_code != 200:
        raise UsageError(f"sla: {answer.json().get('detail', answer.text)}")
    body = answer.json()
    if as_json:
        _print_json(body)
        return
    from lanterne.cli_report import print_sla

    print_sla(body, Console())


@app.command()
def migrate(data: Data = "lanterne-data", revision: str = "head") -> None:
    """Bring the stores in a data folder to this version (or to REVISION).

    Example: `lanterne migrate --data ./lanterne-data`
    """
    from lanterne.settings import ServerSettings, load

    _need("lanterne.backend.store.migrate").upgrade(load(ServerSettings, data=data), revision=revision)
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

    policy = _need("lanterne.backend.policy")
    rows = policy.replay_file(file, load(ServerSettings, data=data))
    if as_json:
        _print_json(rows)
        return
    console = Console()
    for row in rows:
        console.print(f"{row['incident']}  {row['policy']}: {row['choice']} — {row['why']}")
    if not rows:
        console.print("no stored incident matches; nothing would have been done")


@checkpoint_app.command("verify")
def checkpoint_verify(
    folder: Annotated[Path, typer.Argument(help="A checkpoint or a folder of checkpoints.", exists=True)],
    as_json: Json = False,
) -> None:
    """Check that every piece of a checkpoint is there and whole; nothing is unpickled.

    Example: `lanterne checkpoint verify /ckpt/step-4000`
    """
    checkpoints = _need("lanterne.backend.readers.checkpoints")
    from lanterne.nouns import to_json

    rows = [to_json(r) for r in checkpoints.verify(folder)]
    if as_json:
        _print_json(rows)
    else:
        console = Console()
        for row in rows:
            console.print(f"{'ok ' if row['ok'] else 'BAD'}  {row['path']}  {row['says']}")
    raise typer.Exit(0 if all(r["ok"] for r in rows) else 1)


@probe_app.command("build")
def probe_build(as_json: Json = False) -> None:
    """Compile the probes on this machine (needs a C++ compiler; nvcc is used where it is there).

    Example: `lanterne probe build`
    """
    from lanterne import cuda_probe

    result = cuda_probe.build()
    if as_json:
        _print_json(result)
    else:
        Console().print(cuda_probe.describe(result))
    raise typer.Exit(0 if result["built"] else 2)


@probe_app.command("status")
def probe_status(as_json: Json = False) -> None:
    """Say which probe collects, and why not where it does not.

    Example: `lanterne probe status --json`
    """
    from lanterne import cuda_probe

    result = cuda_probe.status()
    if as_json:
        _print_json(result)
    else:
        Console().print(cuda_probe.describe(result))


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

    tokens = _need("lanterne.backend.api.tokens")
    sys.stdout.write(tokens.create(load(ServerSettings, data=data), scope=scope, job=job, days=days) + "\n")


@app.command()
def export(
    target: Annotated[Path, typer.Argument(help="Folder to write Parquet files and the control tables to.")],
    data: Data = "lanterne-data",
    job: Annotated[str, typer.Option(help="Only this job.")] = "",
) -> None:
    """Write the store of a stopped server as Parquet and JSON: a backup that any tool can read.

    Example: `lanterne export ./backup --data ./lanterne-data`
    """
    from lanterne.settings import ServerSettings, load

    backup = _need("lanterne.backend.store.backup")
    rows = backup.export(load(ServerSettings, data=data), target, job=job)
    Console(stderr=True).print(f"wrote {rows:,} rows to {target}")


def main() -> None:
    """Entry point: turns our own errors into one line on stderr and their exit code."""
    try:
        app()
    except LanterneError as error:
        Console(stderr=True).print(f"lanterne: {error}", markup=False, highlight=False, style="red")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
