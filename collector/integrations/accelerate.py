"""Accelerate: attach with what ``Accelerator.prepare`` returned.

model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
session = attach_prepared(accelerator, model, optimizer, scheduler=scheduler, dataloader=loader)
"""

from __future__ import annotations

from typing import Any

from lanterne.collector.session import Session, attach


def attach_prepared(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    *,
    scheduler: Any = None,
    dataloader: Any = None,
    **arguments: Any,
) -> Session:
    """Attach to prepared objects: the wrappers are taken off, the accelerator's scaler is found.

    ``arguments`` go to :func:`lanterne.attach`. A step skipped by gradient accumulation is no step, as the
    wrapped optimizer is not called then. Raises :class:`lanterne.errors.UsageError` on wrong settings.
    """
    return attach(
        model,
        getattr(optimizer, "optimizer", optimizer),
        scheduler=getattr(scheduler, "scheduler", scheduler),
        scaler=getattr(accelerator, "scaler", None),
        dataloader=dataloader,
        **arguments,
    )
