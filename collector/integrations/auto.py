"""Attach without the user's code: wait for torch to be imported, then for the first sign of training.

Signs are ``torch.distributed.init_process_group`` and the first optimizer step; a data-loader worker, a
launcher or a script that only imports torch shows neither and is left alone. In the torchrun agent the
same hook notes how each worker ended. Standard library only until the moment of attaching.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_tried = threading.Event()


def _complain(error: BaseException) -> None:
    sys.stderr.write(f"lanterne: not attached ({type(error).__name__}: {error}); training goes on without\n")


def _is_loader_worker() -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def attach_once(optimizer: Any = None) -> None:
    """Attach this process, the first time it is asked to; never raises."""
    try:
        if _tried.is_set() or _is_loader_worker():
            return
        _tried.set()
        from lanterne.collector import session

        session.attach(optimizer=optimizer)
    except Exception as error:
        _complain(error)


def _after_optimizer(module: ModuleType) -> None:
    """First optimizer step of this process, before it runs."""

    def first_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        handle.remove()
        attach_once(optimizer)

    handle = module.register_optimizer_step_pre_hook(first_step)


def _after_c10d(module: ModuleType) -> None:
    """``init_process_group``, wherever it is imported from later."""
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        attach_once()
        return answer

    module.init_process_group = init_process_group  # type: ignore[attr-defined]


def note_exit(folder: str, pid: int, returncode: int) -> None:
    """Write ``<pid>.json`` with ``exit_code`` or ``signal`` (as subprocess tells them); never raises."""
    found = {"pid": pid, "signal": -returncode} if returncode < 0 else {"pid": pid, "exit_code": returncode}
    try:
        path = os.path.join(folder, f"{pid}.json")
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(found, file)
        os.replace(path + ".tmp", path)
    except OSError:
        pass


def _after_handler(module: ModuleType) -> None:
    """torchrun's agent: whoever asks a worker's Popen how it ended leaves a note of the answer."""
    folder = os.environ.get("LANTERNE_EXITS", "")
    if not folder:
        return
    original = module.SubprocessHandler.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.proc.poll = _noting(self.proc, self.proc.poll, folder)
        self.proc.wait = _noting(self.proc, self.proc.wait, folder)

    module.SubprocessHandler.__init__ = init


def _noting(process: Any, ask: Callable[..., int | None], folder: str) -> Callable[..., int | None]:
    @functools.wraps(ask)
    def asked(*args: Any, **kwargs: Any) -> int | None:
        answer = ask(*args, **kwargs)
        if answer is not None and not getattr(process, "_lanterne_noted", False):
            process._lanterne_noted = True
            note_exit(folder, process.pid, answer)
        return answer

    return asked


_WATCHED: Mapping[str, Callable[[ModuleType], None]] = {
    "torch.optim.optimizer": _after_optimizer,
    "torch.distributed.distributed_c10d": _after_c10d,
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler": _after_handler,
}


class _Watch(MetaPathFinder):
    """Finds only the watched modules, through the finders that would have found them, and acts after their import."""

    def __init__(self) -> None:
        self._within = threading.local()

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        act = _WATCHED.get(fullname)
        if act is None or getattr(self._within, "asking", False):
            return None
        self._within.asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._within.asking = False
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            try:
                act(module)
            except Exception as error:
                _complain(error)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Watch for torch in this process; when it is there already, act at once. Idempotent."""
    if any(isinstance(finder, _Watch) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Watch())
    for name, act in _WATCHED.items():
        module = sys.modules.get(name)
        if module is not None:
            act(module)
