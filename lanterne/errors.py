"""Errors that a user may see. Each says what was wrong, where, and what to do."""

from __future__ import annotations


class LanterneError(Exception):
    """Base of all errors that Lanterne raises on purpose. ``exit_code`` is what the CLI returns."""

    exit_code = 2


class UsageError(LanterneError):
    """A wrong argument, setting or file name: value, bound, and the way out."""


class UnreadableInput(LanterneError):
    """A file that no reader can use. ``path`` and ``offset`` (bytes, -1 = not known) say where."""

    def __init__(self, path: str, why: str, *, offset: int = -1, do: str = "") -> None:
        self.path, self.why, self.offset, self.do = path, why, offset, do
        where = f"{path}" if offset < 0 else f"{path} at byte {offset}"
        super().__init__(f"{where}: {why}" + (f"; {do}" if do else ""))

    def __reduce__(self) -> tuple[object, ...]:
        return _unreadable, (self.path, self.why, self.offset, self.do)


def _unreadable(path: str, why: str, offset: int, do: str) -> UnreadableInput:
    return UnreadableInput(path, why, offset=offset, do=do)


class LimitExceeded(LanterneError):
    """Input beyond a bound of ``lanterne/limits.py``."""


class StoreUnavailable(LanterneError):
    """The event store cannot take or answer now (full disk, closed, recovering)."""


class CommandRefused(LanterneError):
    """A command that is forged, replayed, expired, for another job or attempt, or out of bounds."""


class MissingExtra(LanterneError):
    """An optional part is not installed; the message gives the pip command."""
