"""Hugging Face ``Trainer``: one callback.

    trainer = Trainer(..., callbacks=[LanterneCallback()])

The collector's hooks see phases, loss, rate and norms by themselves; the callback attaches with the objects
that the Trainer made, names resumed steps rightly, marks evaluation, and passes on what the Trainer logs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from lanterne.collector.session import Session, attach
from lanterne.errors import MissingExtra

if TYPE_CHECKING:  # the package may be absent: types must not depend on it
    TrainerCallback = object
else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise MissingExtra("LanterneCallback needs transformers: pip install transformers") from error


class LanterneCallback(TrainerCallback):
    """Attaches when training begins, closes when it ends. ``arguments`` go to :func:`lanterne.attach`."""

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._eval: AbstractContextManager[None] | None = None
        self.session: Session | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Objects come from the Trainer: model, optimizer, lr_scheduler, train_dataloader."""
        optimizer, scheduler = given.get("optimizer"), given.get("lr_scheduler")
        self.session = attach(
            given.get("model"),
            getattr(optimizer, "optimizer", optimizer),  # Accelerate's wrappers are never stepped themselves
            scheduler=getattr(scheduler, "scheduler", scheduler),
            dataloader=given.get("train_dataloader"),
            start_step=int(state.global_step),
            **self._arguments,
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Numbers of the Trainer that the hooks cannot know (``eval_*``); its smoothed loss is left out."""
        if self.session is None or not logs:
            return
        found = {k: v for k, v in logs.items() if k.startswith("eval_") and isinstance(v, (int, float))}
        if found:
            self.session.log(**found)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.session is not None and self._eval is None:
            self._eval = self.session.phase("eval")
            self._eval.__enter__()

    def _end_eval(self) -> None:
        if self._eval is not None:
            self._eval.__exit__(None, None, None)
            self._eval = None

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end_eval()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self._end_eval()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end_eval()
        if self.session is not None:
            self.session.close()
            self.session = None
