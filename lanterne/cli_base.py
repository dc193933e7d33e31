"""What the commands share: option types, printing, and imports that turn into advice."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from lanterne.errors import MissingExtra

Json = Annotated[bool, typer.Option("--json", help="Print the machine form on stdout and nothing else there.")]
Data = Annotated[str, typer.Option("--data", help="The server's data folder.", envvar="LANTERNE_DATA")]


def need(module: str, extra: str = "server") -> Any:
    """Import a part of Lanterne, turning a missing dependency into the pip command that mends it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("lanterne"):
            raise
        raise MissingExtra(f"{error.name} is not installed; run: pip install 'lanterne[{extra}]'") from error


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def finish(report: dict[str, Any], as_json: bool) -> None:
    """Print a report and leave with its exit code."""
    if as_json:
        print_json(report)
    else:
        from lanterne.cli_report import print_report

        print_report(report, Console())
    raise typer.Exit(0 if report.get("healthy") else 1)
