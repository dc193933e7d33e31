"""Lightning (``lightning`` or ``pytorch_lightning``): one callback.

trainer = Trainer(..., callbacks=[LanterneCallback()])
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from lanterne.collector.session import Session, attach
from lanterne.errors import MissingExtra

if TYPE_CHECKING:  # the package may be absent: types must not depend on it
    Callback = object
else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        try:
            from pytorch_lightning.callbacks import Callback
        except ImportError as error:
            raise MissingExtra("LanterneCallback needs lightning: pip install lightning") from error


class LanterneCallback(Callback):
    """Attaches when fitting begins, closes when it ends. ``arguments`` go to :func:`lanterne.attach`.

    Validation counts as the phase ``eval``; steps, losses, rates and norms are seen by the collector's hooks.
    """

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._eval: AbstractContextManager[None] | None = None
        self.session: Session | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.session = attach(
            None,  # Lightning calls training_step, not the module: the one that is really called is found at work
            trainer.optimizers[0] if trainer.optimizers else None,
            scheduler=schedulers[0] if schedulers else None,
            dataloader=trainer.train_dataloader,
            start_step=int(trainer.global_step),
            **self._arguments,
        )

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.session is not None and not trainer.sanity_checking:
            self._eval = self.session.phase("eval")
            self._eval.__enter__()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._eval is not None:
            self._eval.__exit__(None, None, None)
            self._eval = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning swallows some exceptions (KeyboardInterrupt): say what it was while the session is open."""
        if self.session is not None:
            self.session.put_event(
                "exception", attributes={"type": type(exception).__name__, "message": str(exception)[:1000]}
            )
        self._close()

    def _close(self) -> None:
        self.on_validation_end(None, None)
        if self.session is not None:
            self.session.close()
            self.session = None
