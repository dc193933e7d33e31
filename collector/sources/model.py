"""What can be told about the model from outside: is it replicated, where does it stand in a mesh, which one is it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lanterne.collector.sources.patches import Patches
from lanterne.nouns import MESH_AXES

if TYPE_CHECKING:
    from lanterne.collector.sources.training import TrainingHooks


def is_replicated(model: Any, world_size: int) -> bool:
    """Do all ranks hold the same parameters? True only for DDP over the whole world, with no DTensor inside."""
    group = getattr(model, "process_group", None)
    if not hasattr(model, "reducer") or group is None or world_size < 2 or group.size() != world_size:
        return False
    return not any(hasattr(p, "to_local") for p in model.parameters())


def mesh_of(model: Any) -> dict[str, int]:
    """Coordinates of this rank by axis name, from the DeviceMesh of the first DTensor parameter; {} without one."""
    if model is None:
        return {}
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        names, coordinate = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
        return {name: int(at) for name, at in zip(names, coordinate, strict=False) if name in MESH_AXES}
    return {}


class ModelFinder:
    """Finds the model of a run that was attached without one: the outermost module in training whose parameters the
    optimizer steps. A hook on all modules does it until the first optimizer step, then it is gone."""

    def __init__(self, found: Callable[[Any], None], hooks: TrainingHooks) -> None:
        self.found, self.hooks = found, hooks
        self._candidates: dict[int, Any] = {}
        self._inside: Any = None
        self._handles: list[Any] = []
        self._compiling: Callable[[], bool] = bool

    def install(self, patches: Patches) -> None:
        import torch
        from torch.nn.modules import module as modules
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._compiling = torch.compiler.is_compiling
        # ours are gone after the first step, and firing twice does no harm
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning)
        self._handles = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_post_hook(self._stepped),
        ]
        self._patches = patches
        patches.add(self._remove)

    def _remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, module: Any, args: Any) -> None:
        if not self._compiling() and self._inside is None and module.training:
            self._inside = module
            self._candidates.setdefault(id(module), module)

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        if not self._compiling() and module is self._inside:
            self._inside = None

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._compiling() or (self.hooks.optimizer is not None and optimizer is not self.hooks.optimizer):
            return
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for module in self._candidates.values():
            if any(id(p) in stepped for p in module.parameters()):
                self._remove()
                self._candidates.clear()
                self.hooks.watch_model(module, self._patches)
                self.found(module)
                return
