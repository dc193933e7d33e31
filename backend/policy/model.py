"""Policies as data: what a YAML file may say, checked when it is read (docs/policies.md is the reference)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lanterne import orders
from lanterne.backend.policy.expression import Expression
from lanterne.errors import CommandRefused, UnreadableInput, UsageError
from lanterne.nouns import CauseCategory

MODES = ("observe", "suggest", "approve", "auto")
RADII = ("rank", "host", "job")
WANTS = ("fall", "rise", "below", "above", "near")
REDUCTIONS = ("median", "max", "spread")
FILE_BYTES_MAX = 1 << 20
NAME = re.compile(r"^[a-z0-9][a-z0-9-]{0,79}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One order of a policy. A parameter that starts with ``=`` is a CEL expression."""

    action: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ranks: str = "all"
    """``all``, or ``culprit`` for actions that may be ordered for some ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """What must improve. Each value is the median over ranks of the last ``settle`` steps after the action.

    ``fall``/``rise``: to ``by`` times the value at the decision; ``below``/``above``: of ``level``; ``near``:
    within ``by`` (relative) of ``level``. ``level`` may be a CEL expression (``=``), read at the decision.
    ``reduce`` may be ``max`` or ``spread`` (over ranks, last step) instead of the median; ``missing`` is the
    value of a series that was not recorded since. ``no_worse`` bounds other series by a multiple of their value
    at the decision. When it is not reached ``within_steps`` after the action, the action is undone.
    """

    metric: str
    want: str
    by: float = 1.0
    level: float | str = 0.0
    settle: int = 5
    within_steps: int = 60
    reduce: str = "median"
    missing: float | None = None
    no_worse: Mapping[str, float] = field(default_factory=dict)
    within_s: float = 900.0
    """For launcher actions: how long the next attempt may take to get past step ``level`` (metric ``progress``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One rule. ``budget`` actions in ``budget_s`` a job; ``cool_down_s`` after each; two tries a signature."""

    name: str
    says: str = ""
    version: int = 1
    enabled: bool = True
    causes: Sequence[str] = ()
    """Categories it speaks about; empty = any."""
    when: str = "true"
    jobs: str = "*"
    """Glob over job names."""
    mode: str = "suggest"
    steps: Sequence[Step] = ()
    confidence: float = 0.6
    budget: int = 2
    budget_s: float = 3600.0
    cool_down_s: float = 60.0
    blast_radius: str = "job"
    tries: int = 2
    verify: Verify | None = None
    undo: bool = True
    expires_s: float = 60.0
    priority: int = 0
    """The highest wins among those that match; defaults are 0."""


def _refuse(where: str, why: str) -> UsageError:
    return UsageError(f"{where}: {why}; see docs/policies.md")


def _number(where: str, body: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = body.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise _refuse(f"{where}.{key}", f"{value!r} is not a number from {low:g} to {high:g}")
    return float(value)


def _word(where: str, body: Mapping[str, Any], key: str, default: str, choices: Sequence[str]) -> str:
    value = body.get(key, default)
    if value not in choices:
        raise _refuse(f"{where}.{key}", f"{value!r} is not one of {', '.join(choices)}")
    return str(value)


def _known(where: str, body: Any, keys: Iterable[str]) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise _refuse(where, "is not a mapping")
    unknown = sorted(map(str, set(body) - set(keys)))
    if unknown:
        raise _refuse(where, f"unknown keys {', '.join(unknown)}")
    return body


def _expression(where: str, source: Any) -> str:
    if not isinstance(source, str):
        raise _refuse(where, f"{source!r} is not a CEL expression")
    try:
        Expression(source.removeprefix("="))
    except UsageError as error:
        raise _refuse(where, str(error)) from error
    return source


def _step(where: str, raw: Any) -> Step:
    body = _known(where, raw, ("action", "parameters", "ranks"))
    action = str(body.get("action", ""))
    if action not in orders.ACTIONS:
        raise _refuse(f"{where}.action", f"{action!r} is not one of {', '.join(sorted(orders.ACTIONS))}")
    parameters = body.get("parameters", {})
    known = orders.ACTIONS[action].parameters
    _known(f"{where}.parameters", parameters, known)
    computed = False
    try:
        for key, value in parameters.items():
            if isinstance(value, str) and value.startswith("="):
                _expression(f"{where}.parameters.{key}", value)
                computed = True
            else:
                orders.check_value(action, key, value)
        if not computed:
            orders.check_parameters(action, parameters)
    except CommandRefused as error:
        raise _refuse(f"{where}.parameters", str(error)) from error
    ranks = _word(where, body, "ranks", "all", ("all", "culprit"))
    if ranks == "culprit" and not orders.ACTIONS[action].subset:
        raise _refuse(f"{where}.ranks", f"{action} concerns all ranks or none")
    return Step(action=action, parameters=dict(parameters), ranks=ranks)


def _verify(where: str, raw: Any) -> Verify | None:
    if raw is None:
        return None
    body = _known(
        where,
        raw,
        ("metric", "want", "by", "level", "settle", "within_steps", "within_s", "reduce", "missing", "no_worse"),
    )
    level = body.get("level", 0.0)
    if isinstance(level, str):
        _expression(f"{where}.level", level)
    elif isinstance(level, bool) or not isinstance(level, (int, float)):
        raise _refuse(f"{where}.level", f"{level!r} is neither a number nor an expression")
    no_worse = body.get("no_worse", {})
    if not isinstance(no_worse, dict) or not all(isinstance(v, (int, float)) and v > 0 for v in no_worse.values()):
        raise _refuse(f"{where}.no_worse", "is not a mapping of series to factors")
    if not body.get("metric"):
        raise _refuse(f"{where}.metric", "is missing")
    return Verify(
        metric=str(body["metric"]),
        want=_word(where, body, "want", "fall", WANTS),
        by=_number(where, body, "by", 1.0, 0.0, 1e6),
        level=level,
        settle=int(_number(where, body, "settle", 5, 1, 1000)),
        within_steps=int(_number(where, body, "within_steps", 60, 1, 1_000_000)),
        reduce=_word(where, body, "reduce", "median", REDUCTIONS),
        missing=None if body.get("missing") is None else _number(where, body, "missing", 0.0, -1e12, 1e12),
        no_worse={str(k): float(v) for k, v in no_worse.items()},
        within_s=_number(where, body, "within_s", 900.0, 1.0, 1e6),
    )


_KEYS = (
    "name", "says", "version", "enabled", "causes", "when", "jobs", "mode", "action", "parameters", "ranks", "steps",
    "confidence", "budget", "budget_s", "cool_down_s", "blast_radius", "tries", "verify", "undo", "expires_s",
    "priority",
)  # fmt: skip


def parse(raw: Any, where: str = "policy") -> Policy:
    """One policy from plain data. Raises UsageError naming the key, the value and the bound."""
    body = _known(where, raw, _KEYS)
    name = body.get("name", "")
    if not isinstance(name, str) or not NAME.match(name):
        raise _refuse(f"{where}.name", f"{name!r} does not match {NAME.pattern}")
    where = f"policy {name}"
    causes = body.get("causes", [])
    unknown = [c for c in causes if c not in set(CauseCategory)] if isinstance(causes, list) else [causes]
    if unknown:
        raise _refuse(f"{where}.causes", f"{unknown[0]!r} is not a cause category")
    if "steps" in body and "action" in body:
        raise _refuse(where, "give action or steps, not both")
    single = {k: body[k] for k in ("action", "parameters", "ranks") if k in body}
    raw_steps = body.get("steps", [single] if single else [])
    if not isinstance(raw_steps, list) or len(raw_steps) > 5:
        raise _refuse(f"{where}.steps", "is not a list of at most 5 orders")
    return Policy(
        name=name,
        says=str(body.get("says", "")),
        version=int(_number(where, body, "version", 1, 1, 1e9)),
        enabled=body.get("enabled", True) is True,
        causes=tuple(causes),
        when=_expression(f"{where}.when", body.get("when", "true")),
        jobs=str(body.get("jobs", "*")),
        mode=_word(where, body, "mode", "suggest", MODES),
        steps=tuple(_step(f"{where}.steps[{i}]", s) for i, s in enumerate(raw_steps)),
        confidence=_number(where, body, "confidence", 0.6, 0.0, 1.0),
        budget=int(_number(where, body, "budget", 2, 0, 1000)),
        budget_s=_number(where, body, "budget_s", 3600.0, 1.0, 1e9),
        cool_down_s=_number(where, body, "cool_down_s", 60.0, 0.0, 1e9),
        blast_radius=_word(where, body, "blast_radius", "job", RADII),
        tries=int(_number(where, body, "tries", 2, 1, 2)),
        verify=_verify(f"{where}.verify", body.get("verify")),
        undo=body.get("undo", True) is True,
        expires_s=_number(where, body, "expires_s", 60.0, 1.0, 900.0),
        priority=int(_number(where, body, "priority", 0, -1000, 1000)),
    )


def parse_text(text: str, where: str) -> list[Policy]:
    """Policies of a YAML text: a list, or ``{policies: [...]}``. Raises UnreadableInput or UsageError."""
    import yaml

    if len(text) > FILE_BYTES_MAX:
        raise UnreadableInput(where, f"larger than {FILE_BYTES_MAX} bytes")
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UnreadableInput(where, f"not YAML: {error}", do="see docs/policies.md for an example") from error
    listed = raw.get("policies") if isinstance(raw, dict) else raw
    if not isinstance(listed, list):
        raise UnreadableInput(where, "holds no list of policies", do="see docs/policies.md for an example")
    found = [parse(item, f"{where}[{i}]") for i, item in enumerate(listed)]
    names = [p.name for p in found]
    doubled = sorted({n for n in names if names.count(n) > 1})
    if doubled:
        raise _refuse(where, f"policy {doubled[0]} stands there twice")
    return found


def read(path: Path) -> list[Policy]:
    """Policies of a YAML file."""
    try:
        return parse_text(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableInput(str(path), str(error)) from error


def body_of(policy: Policy) -> dict[str, Any]:
    """The plain data of a policy: ``parse(body_of(p)) == p``."""
    from dataclasses import asdict

    body = {k: v for k, v in asdict(policy).items() if v is not None}
    return body | {"causes": list(policy.causes), "steps": [dict(s) for s in body["steps"]]}
