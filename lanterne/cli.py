"""The command line. stdout carries data, stderr talk; exit 0 = healthy, 1 = an incident was found, 2 = usage.

Commands import what they need when they run, so that ``lanterne --help`` is quick and the collector's
light install works without the server extra.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lanterne import __version__
from lanterne.cli_admin import register
from lanterne.cli_base import Json, finish, need, print_json
from lanterne.errors import LanterneError, UsageError

app = typer.Typer(
    name="lanterne",
    help="Which rank, since when, why, what it costs, what to do: diagnosis for distributed PyTorch training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    steps: Annotated[int, typer.Option(help="Optimizer steps; 0 = as many as the fault needs.")] = 0,
    onset: Annotated[int, typer.Option(help="First faulty step.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of data and weights.")] = 1234,
    port: Annotated[int, typer.Option(help="Port of page and API; 0 = any free one.")] = 0,
    data: Annotated[str, typer.Option(help="Keep the store in this folder (default: a temporary one).")] = "",
    policy: Annotated[str, typer.Option(help="Ceiling: observe, suggest, approve or auto (mend it).")] = "",
    leave: Annotated[bool, typer.Option("--exit", help="Leave after the verdict instead of serving on.")] = False,
    as_json: Json = False,
) -> None:
    """Run a real 4-rank training job with a real fault in it and print the verdict.

    With `--policy auto` the run goes on until a remedy is verified, through a restart if need be.

    Example: `lanterne demo --fault slow-rank --rank 2 --exit --json`
    """
    need("lanterne.backend.app")
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
    finish(report, as_json)


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
        if shown["lake"]:
            shown["lake"] = "postgres:***|" + str(shown["lake"]).partition("|")[2]
        if "@" in str(shown["control_url"]):
            shown["control_url"] = str(shown["control_url"]).split("://")[0] + "://***"
        print_json(shown)
        return
    need("lanterne.backend.app")
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
    readers = need("lanterne.backend.readers")
    from lanterne.nouns import to_json

    with Console(stderr=True).status("reading") as status:

        def progress(done: int, total: int, name: str) -> None:
            status.update(f"read {done} of {total} files: {name[-80:]}")

        report = readers.diagnose_paths(paths, workers=min(8, os.cpu_count() or 1), progress=progress)
    finish(to_json(report), as_json)


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
    job: Annotated[str, typer.Argument(help="Job id; left out: the whole fleet.")] = "",
    url: Annotated[str, typer.Option(help="The server.", envvar="LANTERNE_URL")] = "http://127.0.0.1:4318",
    since: Annotated[str, typer.Option("--from", help="RFC 3339 or Unix seconds; default the beginning.")] = "",
    until: Annotated[str, typer.Option("--to", help="The same; default now.")] = "",
    as_json: Json = False,
) -> None:
    """Objectives, error budget, goodput and badput of a job, or of all jobs.

    Example: `lanterne sla my-job --json`
    """
    httpx = need("httpx")
    window = {name: value for name, value in (("from", since), ("to", until)) if value}
    try:
        answer = httpx.get(f"{url}/api/v1/{f'jobs/{job}/' if job else ''}sla", params=window, timeout=30.0)
    except httpx.HTTPError as error:
        raise LanterneError(f"{url} does not answer ({error}); is `lanterne serve` running there?") from error
    if answer.status_code != 200:
        raise UsageError(f"sla: {answer.json().get('detail', answer.text)}")
    body = answer.json()
    if as_json:
        print_json(body)
        return
    from lanterne.cli_report import print_sla

    print_sla(body, Console())


register(app)


def main() -> None:
    """Entry point: turns our own errors into one line on stderr and their exit code."""
    try:
        app()
    except LanterneError as error:
        Console(stderr=True).print(f"lanterne: {error}", markup=False, highlight=False, style="red")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
