"""A pickle interpreter that builds plain containers and nothing else.

``pickle.Unpickler`` is never used in this process: even with ``find_class`` refused it can be made to allocate
gigabytes (a nine-byte ``LONG_BINPUT``). Here :func:`pickletools.genops` decodes the opcodes and a dictionary holds the
memo, so memory is bounded by the file's size; any opcode that names, imports or calls something is refused.

Many or large dumps go through :class:`FastReader`: a child process with limits of its own, about thirty times
faster; what it does not take comes back to the machine here, which says what is wrong and where.
"""

from __future__ import annotations

import marshal
import pickletools
import struct
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from lanterne.errors import UnreadableInput

NODES_MAX = 20_000_000
CHILD_BYTES_MIN = 32 << 10

_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset(
    [
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
    ]
)
_EMPTY: dict[str, type] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_SET": set}
_SKIP = frozenset(["PROTO", "FRAME"])
_PUT = frozenset(["PUT", "BINPUT", "LONG_BINPUT"])
_GET = frozenset(["GET", "BINGET", "LONG_BINGET"])
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Mark:
    """The stack's mark object; never leaves this file."""


_MARK = _Mark()


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.nodes = 0

    def _cut(self) -> list[Any]:
        """Pop everything above the last mark, and the mark."""
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is _MARK:
                items = self.stack[at + 1 :]
                del self.stack[at:]
                return items
        raise ValueError("no mark on the stack")

    def step(self, op: str, argument: Any) -> None:
        """Run one opcode. Raises ValueError on one that is refused or does not fit the stack."""
        self.nodes += 1
        if self.nodes > NODES_MAX:
            raise ValueError(f"more than {NODES_MAX} opcodes")
        stack = self.stack
        if op in _LITERALS:
            stack.append(argument)
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _EMPTY:
            stack.append(_EMPTY[op]())
        elif op == "MARK":
            stack.append(_MARK)
        elif op == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif op in _PUT:
            self.memo[int(argument)] = stack[-1]
        elif op in _GET:
            stack.append(self.memo[int(argument)])
        elif op not in _SKIP:
            self._build(op)

    def _build(self, op: str) -> None:
        stack = self.stack
        if op in _TUPLES:
            n = _TUPLES[op]
            if len(stack) < n:
                raise ValueError("stack underflow")
            items = tuple(stack[-n:])
            del stack[-n:]
            stack.append(items)
        elif op == "TUPLE":
            stack.append(tuple(self._cut()))
        elif op == "LIST":
            stack.append(self._cut())
        elif op == "DICT":
            items2 = self._cut()
            stack.append(dict(zip(items2[::2], items2[1::2], strict=True)))
        elif op == "APPEND":
            item = stack.pop()
            self._expect(list).append(item)
        elif op == "APPENDS":
            many = self._cut()
            self._expect(list).extend(many)
        elif op == "SETITEM":
            value, key = stack.pop(), stack.pop()
            self._expect(dict)[key] = value
        elif op == "SETITEMS":
            pairs = self._cut()
            self._expect(dict).update(zip(pairs[::2], pairs[1::2], strict=True))
        elif op == "POP":
            stack.pop()
        elif op == "POP_MARK":
            self._cut()
        elif op == "DUP":
            stack.append(stack[-1])
        else:
            raise ValueError(f"opcode {op} is refused: a dump holds plain values only")

    def _expect(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"{kind.__name__} expected on the stack, {type(self.stack[-1]).__name__} found")
        return self.stack[-1]


class FastReader:
    """Reads pickles in a child process; a context manager. Falls back to :func:`loads` for what the child refuses."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FastReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def loads(self, data: bytes, path: str) -> Any:
        """As :func:`loads`. Pickles below ``CHILD_BYTES_MIN`` are read here until a child is there."""
        if len(data) < CHILD_BYTES_MIN and self._child is None:
            return loads(data, path)
        answer = self._ask(data)
        return loads(data, path) if answer is None else marshal.loads(answer)

    def _ask(self, data: bytes) -> bytes | None:
        if self._child is None:
            command = [sys.executable, "-I", str(Path(__file__).with_name("pickle_child.py"))]
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        sink, source = self._child.stdin, self._child.stdout
        if sink is None or source is None:
            return None
        try:
            sink.write(struct.pack("<Q", len(data)) + data)
            sink.flush()
            if source.read(1) == b"\1":
                return source.read(*struct.unpack("<Q", source.read(8)))
            if self._child.poll() is not None:
                self._end()
        except (OSError, struct.error):
            self._end()
        return None

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


def loads(data: bytes, path: str) -> Any:
    """Build the plain value a pickle describes. Raises UnreadableInput with the byte offset of the trouble."""
    machine, at = _Machine(), 0
    try:
        for opcode, argument, position in pickletools.genops(data):
            at = position or 0
            if opcode.name == "STOP":
                if len(machine.stack) != 1 or machine.stack[0] is _MARK:
                    raise ValueError("the stack does not hold exactly one value at the end")
                return machine.stack[0]
            machine.step(opcode.name, argument)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, AttributeError, UnicodeError) as error:
        raise UnreadableInput(
            path, f"not a plain pickle: {error}", offset=at, do="dump again, or give the JSON form"
        ) from error
    raise UnreadableInput(path, "the pickle ends before its STOP opcode", offset=at, do="the file is cut off")
