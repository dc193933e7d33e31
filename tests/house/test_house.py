"""The house keeps its own rules: sizes, import directions, no bare folder imports, nothing left to do."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("collector", "cuda_probe", "backend", "causal", "dashboard", "migrations")
LINES_PER_FILE = 500
LINES_PER_FUNCTION = 60


def tracked(*suffixes: str) -> list[Path]:
    """Files that git tracks or would track, links left out."""
    out = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    paths = [ROOT / line for line in out.splitlines() if line.endswith(suffixes)]
    return [p for p in paths if p.is_file() and not p.is_symlink()]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    return {p: p.read_text(encoding="utf-8") for p in tracked(".py")}


def test_files_stay_small(sources: dict[Path, str]) -> None:
    native = {p: p.read_text(encoding="utf-8") for p in tracked(".cpp", ".cu", ".h", ".hpp")}
    long = {str(p.relative_to(ROOT)): n for p, t in (sources | native).items() if (n := t.count("\n")) > LINES_PER_FILE}
    assert not long


def test_functions_stay_small(sources: dict[Path, str]) -> None:
    long = [
        f"{path.relative_to(ROOT)}:{f.lineno} {f.name}: {length} lines"
        for path, text in sources.items()
        if path.parent.name != "versions"  # a migration is a list of statements
        for f in functions(ast.parse(text))
        if (length := (f.end_lineno or f.lineno) - f.lineno + 1) > LINES_PER_FUNCTION
    ]
    assert not long


def test_folders_are_imported_through_lanterne_only(sources: dict[Path, str]) -> None:
    bare = re.compile(rf"^\s*(?:from|import)\s+({'|'.join(FOLDERS)})\b", re.MULTILINE)
    found = [f"{p.relative_to(ROOT)}: {m.group(0).strip()}" for p, t in sources.items() for m in bare.finditer(t)]
    assert not found


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_stand(folder: str) -> None:
    link = ROOT / "lanterne" / folder
    assert link.is_symlink()
    assert link.resolve() == ROOT / folder


def test_nothing_is_left_to_do(sources: dict[Path, str]) -> None:
    words = re.compile(r"#\s*(?:TODO|FIXME|XXX|HACK)\b")
    found = [
        f"{p.relative_to(ROOT)}:{t[: m.start()].count(chr(10)) + 1}"
        for p, t in sources.items()
        for m in words.finditer(t)
    ]
    assert not found


def test_every_package_folder_is_a_package() -> None:
    for path in tracked(".py"):
        folder = path.parent
        if folder.relative_to(ROOT).parts[:1] and folder.relative_to(ROOT).parts[0] in FOLDERS:
            assert (folder / "__init__.py").exists() or folder.name == "versions", folder


def test_settings_are_documented() -> None:
    from dataclasses import fields

    from lanterne.settings import CollectorSettings, ServerSettings

    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    missing = [
        f.name
        for kind in (CollectorSettings, ServerSettings)
        for f in fields(kind)
        if f"`LANTERNE_{f.name.upper()}`" not in page
    ]
    assert not missing


def test_cause_categories_are_documented() -> None:
    from lanterne.nouns import CauseCategory

    page = (ROOT / "docs" / "causes.md").read_text(encoding="utf-8")
    assert [c.value for c in CauseCategory if f"### {c.value}" not in page] == []


def test_counters_of_loss_are_a_closed_table() -> None:
    from lanterne.quality import COUNTERS, Quality

    with pytest.raises(KeyError):
        Quality().add("something else")
    assert all(c.severity in {"info", "notice", "data_loss", "error"} and c.advice for c in COUNTERS.values())


def test_the_command_line_is_pinned() -> None:
    from typer.main import get_command

    from lanterne.cli import app

    group = get_command(app)
    assert set(group.commands) == {  # type: ignore[attr-defined]
        "agent", "causes", "checkpoint", "check", "demo", "diagnose", "export", "import", "inject", "migrate", "plan",
        "policy", "probe", "run", "serve", "simulate", "sla", "token",
    }  # fmt: skip


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports the test files of folders that are no packages by their bare name: two of one name break it."""
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py") if not (p.parent / "__init__.py").exists()]
    assert sorted(n for n in set(names) if names.count(n) > 1) == []


def test_make_bench_runs_benchmarks_that_take_its_options() -> None:
    (names,) = re.findall(r"^BENCHMARKS := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    for name in names.split():
        text = (ROOT / "benchmarks" / f"{name}.py").read_text()
        assert '"--quick"' in text, name
        assert '"--json"' in text, name
