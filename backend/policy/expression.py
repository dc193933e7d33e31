"""CEL (Common Expression Language) through cel-python: conditions and parameters of policies.

Expressions see plain data only, have no side effects and always end, so they may come from the outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

from lanterne.errors import UsageError

SOURCE_CHARS_MAX = 4_096


def _celpy() -> Any:
    return import_module("celpy")


@lru_cache(maxsize=1_024)
def _compiled(source: str) -> Any:
    environment = _celpy().Environment()
    return environment.program(environment.compile(source))


class Expression:
    """A compiled expression. Raises UsageError when the source is not CEL."""

    def __init__(self, source: str) -> None:
        celpy = _celpy()
        self.source = source
        if len(source) > SOURCE_CHARS_MAX:
            raise UsageError(f"expression longer than {SOURCE_CHARS_MAX} characters")
        try:
            self._program = _compiled(source)
        except (celpy.CELParseError, ValueError, RecursionError) as error:
            raise UsageError(f"not a CEL expression: {source!r}: {str(error).splitlines()[0]}") from error

    def __call__(self, view: Mapping[str, Any]) -> Any:
        """The value over ``view`` (plain data). Raises UsageError when it cannot be computed."""
        celpy = _celpy()
        try:
            value = self._program.evaluate({k: celpy.json_to_cel(v) for k, v in view.items()})
        except (celpy.CELEvalError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise UsageError(f"{self.source!r} cannot be computed: {error}") from error
        return plain(value)

    def true(self, view: Mapping[str, Any]) -> bool:
        """Is the condition met? What cannot be computed (a series that was never recorded) is not met."""
        try:
            return self(view) is True
        except UsageError:
            return False


def plain(value: Any) -> Any:
    """A CEL value as a Python value."""
    if isinstance(value, bool) or type(value).__name__ == "BoolType":
        return bool(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    return str(value)
