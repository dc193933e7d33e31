"""Run by every Python under ``lanterne run`` at its start: make room for the site's own, then watch for torch.

Nothing here may fail loudly: this also runs in interpreters that have nothing to do with training.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _chain() -> None:
    """Run the ``sitecustomize`` that would have run without us."""
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.getcwd()) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None or os.path.dirname(os.path.abspath(spec.origin or "")) == _HERE:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _watch() -> None:
    if os.environ.get("LANTERNE_AUTO_ATTACH") != "1":
        return
    held = os.environ.get("LANTERNE_HOLD", "")
    root = os.environ.get("LANTERNE_ROOT", "")
    if root and importlib.util.find_spec("lanterne") is None:
        sys.path.append(root)
    try:
        from lanterne.collector.integrations import auto

        auto.install()
        if held:
            from lanterne.collector.integrations import standby

            standby.hold()
    except Exception as error:
        if "RANK" in os.environ:
            sys.stderr.write(f"lanterne: this interpreter cannot attach ({error}); training goes on without\n")


try:
    _chain()
finally:
    _watch()
