"""DeepSpeed: attach to the engine that ``deepspeed.initialize`` returned.

    engine, _, loader, _ = deepspeed.initialize(...)
    session = attach_engine(engine, dataloader=loader)

The engine's own optimizer (ZeRO) is not a torch optimizer and averages gradients itself; the collector's
hooks sit on the torch optimizer inside it. Norm, loss scale and steps are asked of the engine at each of its steps.
"""

from __future__ import annotations

import functools
from typing import Any

from lanterne.collector.session import Session, attach


def _torch_optimizer(engine: Any) -> Any:
    """The innermost optimizer: ZeRO and the mixed-precision wrappers hold it as ``optimizer``."""
    found = engine.optimizer
    for _ in range(4):
        inner = getattr(found, "optimizer", None)
        if inner is None or inner is found:
            break
        found = inner
    return found


def attach_engine(engine: Any, *, dataloader: Any = None, **arguments: Any) -> Session:
    """Attach to a ``DeepSpeedEngine``. ``arguments`` go to :func:`lanterne.attach`.

    At each boundary of gradient accumulation the engine's global gradient norm (L2, before clipping) and loss
    scale are reported. Raises :class:`lanterne.errors.UsageError` on wrong settings.
    """
    session = attach(
        engine.module,
        _torch_optimizer(engine),
        scheduler=getattr(engine, "lr_scheduler", None),
        dataloader=dataloader,
        start_step=int(engine.global_steps),
        **arguments,
    )
    if session.enabled:
        _watch_steps(engine, session)
    return session


def _watch_steps(engine: Any, session: Session) -> None:
    """Wrap ``engine.step`` of this engine: its numbers exist right after it, so the step ends there."""
    original = engine.step
    if session._hooks is not None:
        session._hooks.driven = True

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        answer = original(*args, **kwargs)
        if engine.global_steps != before:
            _report(engine, session)
            session.step()
        return answer

    engine.step = step


def _report(engine: Any, session: Session) -> None:
    norm = engine.get_global_grad_norm()
    scale = getattr(engine.optimizer, "cur_scale", None) or getattr(engine.optimizer, "loss_scale", None)
    values: dict[str, Any] = {}
    if norm is not None:
        values["grad_norm"] = norm
    if isinstance(scale, (int, float)):
        values["loss_scale"] = float(scale)
    if values:
        session.log(**values)
