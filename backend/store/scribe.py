"""The thread that writes the journal: batches come in one by one, and go to the disk as many at once as wait."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from lanterne.backend.store.batch import Batch
from lanterne.backend.store.journal import Journal
from lanterne.errors import StoreUnavailable

log = logging.getLogger(__name__)

BYTES_AT_ONCE = 8 << 20


@dataclass(slots=True, eq=False)
class Order:
    """One thing for the store's writer: a batch, rows of a derived table, or a piece of work on its connection.

    ``number`` is its record in the journal, 0 = none: such a batch has been answered and must be stored.
    """

    future: Future[Any]
    nbytes: int = 0
    batch: Batch | None = None
    number: int = 0
    table: str = ""
    rows: pa.Table | None = None
    work: Callable[[duckdb.DuckDBPyConnection], Any] | None = None


class Scribe:
    """Writes batches to the journal, hands them to ``passed``, and then answers.

    When the disk refuses, the orders end with :class:`StoreUnavailable`, ``refused`` hears of them, and ``failure``
    says why until a write succeeds again.
    """

    def __init__(
        self, journal: Journal, passed: Callable[[Sequence[Order]], None], refused: Callable[[Sequence[Order]], None]
    ) -> None:
        self._journal, self._passed, self._refused = journal, passed, refused
        self._line: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lanterne-journal", daemon=True)
        self.failure = ""

    def start(self) -> None:
        self._thread.start()

    def put(self, order: Order) -> None:
        """Take an order with a batch; it is answered from the thread."""
        self._line.put(order)

    def close(self) -> None:
        """Write what waits; nothing may be put any more."""
        self._line.put(None)
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while (first := self._line.get()) is not None:
            orders, size, last = [first], first.nbytes, False
            while size < BYTES_AT_ONCE and not self._line.empty():
                following = self._line.get()
                if following is None:
                    last = True
                    break
                orders.append(following)
                size += following.nbytes
            self._write(orders)
            if last:
                return

    def _write(self, orders: Sequence[Order]) -> None:
        try:
            number = self._journal.append([order.batch for order in orders if order.batch is not None])
        except Exception as error:
            self.failure = f"the journal cannot be written: {error}"
            log.error("event store: %s", self.failure)
            self._refused(orders)
            for order in orders:
                order.future.set_exception(StoreUnavailable(f"the event store: {self.failure}"))
            return
        self.failure = ""
        for n, order in enumerate(orders):
            order.number = number - len(orders) + 1 + n
        self._passed(orders)
        for order in orders:
            order.future.set_result(None)
