"""Attach without the user's code: wait for torch to be imported, then for the first sign of training.

Signs are ``torch.distributed.init_process_group``, the making of an optimizer (in a process that is alone)
and the first backward; a data-loader worker, a launcher or a script that only imports torch shows none and
is left alone. An optimizer's step hooks are no place to attach from: torch iterates over them just then.
In the torchrun agent the same hook notes how each worker ended. Standard library only until attaching.
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


def attach_once() -> None:
    """Attach this process, the first time it is asked to; never raises."""
    if _tried.is_set():
        return
    try:
        if _is_loader_worker():
            return
        _tried.set()
        from lanterne.collector import session

        session.attach()
    except Exception as error:
        _complain(error)


def _is_alone() -> bool:
    """Whether the launcher started one process only: otherwise the ranks first have to find each other."""
    return os.environ.get("WORLD_SIZE", "1") == "1" and os.environ.get("SLURM_NTASKS", "1") == "1"


def _after_optimizer(module: ModuleType) -> None:
    """An optimizer is made."""
    original = module.Optimizer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not _tried.is_set() and _is_alone():
            attach_once()

    module.Optimizer.__init__ = init


def _after_tensor(module: ModuleType) -> None:
    """The first backward of a process that showed no earlier sign (Horovod, MPI)."""
    original = module.Tensor.backward

    @functools.wraps(original)
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if module.Tensor.backward is backward:
            module.Tensor.backward = original
        attach_once()
        return original(self, *args, **kwargs)

    module.Tensor.backward = backward


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
    "torch._tensor": _after_tensor,
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
