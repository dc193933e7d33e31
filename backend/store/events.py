"""The event store: one DuckDB file, one writer thread, readers as cursors of the same process.

Batches wait in a queue bounded by bytes; a full queue refuses at once. What ingest hands in (``accept``) goes to
the journal first, many batches a write, and is answered when that is on the disk: a commit of DuckDB stands still
while it folds its log into the file. The writer takes what is there (up to ``COMMIT_ROWS_MAX`` rows) and inserts it
in one transaction. After a failed commit the file is opened anew, and what the journal holds is stored then;
meanwhile new batches are refused with :class:`StoreUnavailable`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from lanterne import limits
from lanterne.backend.store import batch as batches
from lanterne.backend.store import migrate
from lanterne.backend.store.batch import SIGNALS, Batch
from lanterne.backend.store.changes import Changes
from lanterne.backend.store.connection import Opened, connect
from lanterne.backend.store.journal import Journal
from lanterne.backend.store.lake import Lake
from lanterne.backend.store.scribe import Order, Scribe
from lanterne.backend.store.views import create_views
from lanterne.backend.store.writing import Counters, Receipt, Writing
from lanterne.clock import Clock, SystemClock
from lanterne.errors import LanterneError, StoreUnavailable
from lanterne.quality import Quality
from lanterne.settings import ServerSettings

log = logging.getLogger(__name__)

Callback = Callable[[Sequence[Batch]], None]
QUERY_TIMEOUT_S = 30.0
FRESH_S = 5.0
"""A query waits at most so long for rows that were acknowledged before it and are not in the tables yet."""
RETRY_S = 0.5
_BAD_ROWS = (duckdb.ConversionException, duckdb.ConstraintException, duckdb.InvalidInputException, pa.ArrowInvalid)


class QueueFull(LanterneError):
    """The bytes waiting for the writer are at their bound; try again in a moment."""


class EventStore:
    """Append-only events with columns of ``wire``; see docs/api.md for the SQL views on it."""

    def __init__(
        self, file: Path, *, queue_bytes: int, memory_limit: str = "4GB", clock: Clock | None = None, lake: str = ""
    ) -> None:
        self.file = file
        self.tier = file.parent / "tier"
        self.adhoc = file.parent / "adhoc"
        self.clock: Clock = clock or SystemClock()
        self.quality = Quality()
        self.counters = Counters()
        self._changes = Changes()
        self.recovered = ""
        self.failure = ""
        self._memory_limit, self._queue_bytes = memory_limit, queue_bytes
        self._lock = threading.Lock()
        self._queued = 0
        self.lake = Lake(lake, file) if lake else None
        self._newest_ns = 0
        self._queue: queue.Queue[Order | None] = queue.Queue()
        self._held: list[Order] = []
        self._callbacks: list[Callback] = []
        self._closing = False
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._writing: Writing | None = None
        self._journal = Journal(file.parent / "journal")
        self._scribe = Scribe(self._journal, self._journal_holds, self._release)
        self._journaled = self._stored = 0
        self._fresh = threading.Condition()
        self._reopen()
        self._replay()
        self._thread = threading.Thread(target=self._run, name="lanterne-writer", daemon=True)
        self._thread.start()
        self._scribe.start()

    @classmethod
    def open(cls, settings: ServerSettings, *, clock: Clock | None = None) -> EventStore:
        """Open (and migrate) the store of ``settings.data``. Raises :class:`StoreUnavailable`."""
        return cls(
            migrate.events_file(settings),
            queue_bytes=settings.queue_bytes,
            memory_limit=settings.memory_limit,
            clock=clock,
            lake=settings.lake,
        )

    # --- writing ---

    def accept(self, batch: Batch) -> Future[None]:
        """Queue a batch; the future ends when it is in the journal, on the disk. Queries wait for it (``FRESH_S``).

        Raises :class:`LanterneError` for rows that the tables refuse, :class:`QueueFull` when the queue's bytes are
        used up and :class:`StoreUnavailable` when the store is closed or its disk refuses.
        """
        why = batches.fault(batch)
        if why:
            raise LanterneError(f"rows refused by the event store: {why}")
        if self._connection is None:
            raise StoreUnavailable(f"the event store: {self.failure or 'closed'}")
        return self._put(Order(Future(), batch.nbytes, batch=batch), self._scribe.put)

    def submit(self, batch: Batch) -> Future[Receipt]:
        """Queue a batch; the future ends after the commit that holds it.

        Raises :class:`QueueFull` when the queue's bytes are used up and :class:`StoreUnavailable` when closed.
        """
        return self._put(Order(Future(), batch.nbytes, batch=batch))

    def append(self, signal: str, columns: Mapping[str, list[Any]]) -> Receipt:
        """Store decoded columns (``spans``, ``points`` or ``logs``) and wait for the commit."""
        return self.submit(batches.from_columns(signal, columns)).result()

    def append_waits(self, rows: batches.Derived) -> None:
        """Store aligned collectives, one row a member: ``DERIVED["waits"]`` (``op`` may be left out); waits.

        The same rows feed the roll-up ``rank_steps`` with lateness_ms (worst of the step), wait_ms and
        transfer_ms (sums). A (job, attempt, step, rank) should be written once.
        """
        self._append("waits", rows)

    def append_clocks(self, rows: batches.Derived) -> None:
        """Store clock offsets: ``DERIVED["clocks"]``; the newest ``at_ns`` of a rank is shown by the API."""
        self._append("clocks", rows)

    def _append(self, table: str, rows: batches.Derived) -> None:
        found = batches.derived(table, rows)
        self._put(Order(Future(), max(1024, int(found.nbytes)), table=table, rows=found)).result()

    def work(self, task: Callable[[duckdb.DuckDBPyConnection], Any]) -> Any:
        """Run ``task(connection)`` on the writer's thread between commits (retention, back-up); its result."""
        return self._put(Order(Future(), work=task)).result()

    def _put(self, order: Order, line: Callable[[Order], None] | None = None) -> Future[Any]:
        with self._lock:
            if self._closing:
                raise StoreUnavailable("the event store is closed")
            if order.nbytes and self._queued + order.nbytes > self._queue_bytes:
                raise QueueFull(f"{self._queued} of {self._queue_bytes} bytes wait for the writer")
            self._queued += order.nbytes
            (line or self._queue.put)(order)
        return order.future

    @property
    def queued_bytes(self) -> int:
        return self._queued

    # --- reading ---

    @property
    def changes(self) -> Changes:
        """Which jobs got rows since when, up to what was acknowledged before."""
        self._wait_fresh()
        return self._changes

    @contextlib.contextmanager
    def cursor(self, catalog: str = "") -> Iterator[duckdb.DuckDBPyConnection]:
        """A cursor that sees what was acknowledged before; unqualified names are those of ``catalog``.

        Raises :class:`StoreUnavailable` when the store is closed or recovering.
        """
        self._wait_fresh()
        connection = self._connection
        if connection is None:
            raise StoreUnavailable(f"the event store: {self.failure or 'closed'}")
        cursor = connection.cursor()
        try:
            if catalog:
                cursor.execute(f"USE {catalog}")
            yield cursor
        finally:
            cursor.close()

    def query(
        self,
        sql: str,
        params: Sequence[Any] | Mapping[str, Any] = (),
        *,
        timeout_s: float = QUERY_TIMEOUT_S,
        catalog: str = "",
    ) -> pa.Table:
        """Rows of one query on a cursor of its own; interrupted after ``timeout_s``.

        Raises :class:`StoreUnavailable` when the store is closed, recovering, or too slow.
        """
        try:
            with self.cursor(catalog) as cursor:
                timer = threading.Timer(timeout_s, cursor.interrupt)
                timer.daemon = True
                timer.start()
                try:
                    return cursor.sql(sql, params=params or None).to_arrow_table()
                finally:
                    timer.cancel()
        except duckdb.InterruptException as error:
            raise StoreUnavailable(f"the query took longer than {timeout_s:g} s; ask for a smaller range") from error
        except (duckdb.FatalException, duckdb.ConnectionException, duckdb.IOException) as error:
            raise StoreUnavailable(f"the event store: {error}") from error

    def _wait_fresh(self) -> None:
        """Wait until what had been acknowledged before is in the tables, or ``FRESH_S`` have passed."""
        goal = self._journaled
        if self._stored < goal and threading.current_thread() is not self._thread:
            with self._fresh:
                self._fresh.wait_for(lambda: self._stored >= goal or self._connection is None, FRESH_S)

    def version(self, job: str, attempt: int) -> int:
        """:meth:`Changes.version` once what had been acknowledged before is in the tables."""
        self._wait_fresh()
        return self._changes.version(job, attempt)

    def rows(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[dict[str, Any]]:
        """:meth:`query` as dictionaries, for small answers."""
        found: list[dict[str, Any]] = self.query(sql, params).to_pylist()
        return found

    def holds(self, job: str) -> bool:
        """Has this backend itself stored a span, point or log of the job that it has not moved away since?"""
        found = " UNION ALL ".join(f"(SELECT 1 FROM {signal} WHERE job = $job LIMIT 1)" for signal in SIGNALS)
        return bool(self.query(f"SELECT 1 FROM ({found})", {"job": job}).num_rows)

    def copy_out(self, select: str, params: Mapping[str, Any], target: Path, *, catalog: str = "") -> int:
        """Write the rows of ``select`` as Parquet to ``target`` (below ``tier`` or ``adhoc``); how many there were."""
        quoted = str(target.absolute()).replace("'", "''")
        try:
            with self.cursor(catalog) as cursor:
                cursor.execute(f"COPY ({select}) TO '{quoted}' (FORMAT parquet, COMPRESSION zstd)", params or None)
                row = cursor.fetchone()
        except duckdb.Error as error:
            raise StoreUnavailable(f"the event store could not write {target.name}: {error}") from error
        return int(row[0]) if row else 0

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call ``callback(batches)`` after each commit, on the writer's thread: hand over and return at once.

        Repeated rows may be among the batches' rows. Returns the function that ends the subscription.
        """
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    # --- life ---

    @property
    def ready(self) -> bool:
        return not self.trouble

    @property
    def trouble(self) -> str:
        """Why nothing is taken now; empty when the store is ready."""
        closed = self._connection is None or self._closing
        return self.failure or self._scribe.failure or ("the event store is closed" if closed else "")

    def close(self) -> None:
        """Store what is queued, checkpoint, close. Safe to call twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._scribe.close()
        self._queue.put(None)
        self._thread.join(timeout=60)
        connection, self._connection = self._connection, None
        folded = False
        if connection is not None:
            with contextlib.suppress(duckdb.Error):
                connection.execute("CHECKPOINT")
                folded = not self._held and not self._thread.is_alive()
            connection.close()
        self._journal.close(stored_all=folded)

    def _reopen(self) -> None:
        lake = self.lake
        folders = [self.tier, self.adhoc, *([] if lake is None else [lake.folder])]
        attach = None if lake is None else lake.attach
        opened: Opened = connect(self.file, memory_limit=self._memory_limit, folders=folders, attach=attach)
        connection = opened.connection
        try:
            migrate.migrate_events(connection)
            create_views(connection, self.tier)
            if lake is not None:
                lake.widen(connection)
        except duckdb.Error as error:
            connection.close()
            raise StoreUnavailable(f"{self.file}: {error}") from error
        if opened.recovered:
            self.recovered = opened.recovered
            log.error("event store: %s", opened.recovered)
        self._writing = Writing(connection.cursor(), self.quality)
        if lake is not None:
            self._newest_ns = self._writing.newest_ns()
        self._connection = connection
        self._changes.forget()
        self.failure = ""

    def _replay(self) -> None:
        """Store what the journal holds and the tables lack, as after a crash. Raises :class:`StoreUnavailable`."""
        writing = self._writing
        assert writing is not None
        self._stored = writing.journaled()
        pieces: list[Batch] = []
        last = before = self._stored
        try:
            for last, batch in self._journal.after(self._stored):
                pieces.append(batch)
                if sum(b.rows for b in pieces) >= limits.COMMIT_ROWS_MAX:
                    writing.commit(pieces, (), self._now_ns(), last)
                    pieces = []
            if pieces:
                writing.commit(pieces, (), self._now_ns(), last)
        except (duckdb.Error, OSError, pa.ArrowException) as error:
            raise StoreUnavailable(f"{self._journal.folder}: {error}") from error
        self._stored = self._journaled = last
        self._changes.forget()
        if last > before:
            log.warning("event store: %d batches were stored from the journal", last - before)
        if self._journal.damage:
            self.recovered = "; ".join(filter(None, (self.recovered, self._journal.damage)))
            log.error("event store: %s", self._journal.damage)

    def _fail(self, error: Exception) -> None:
        """After an error of the database itself: close, so that the next order opens it anew."""
        self.failure = f"{type(error).__name__}: {error}"
        self.counters.failures += 1
        log.error("event store: %s", self.failure)
        connection, self._connection, self._writing = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(duckdb.Error):
                connection.close()
        with self._fresh:
            self._fresh.notify_all()

    # --- between journal and writer ---

    def _journal_holds(self, orders: Sequence[Order]) -> None:
        for order in orders:
            self._queue.put(order)
        self._journaled = orders[-1].number

    def _release(self, orders: Sequence[Order]) -> None:
        with self._lock:
            self._queued -= sum(o.nbytes for o in orders)

    # --- the writer's thread ---

    def _run(self) -> None:
        while True:
            orders = self._take()
            if orders is None:
                return
            try:
                self._carry_out(orders)
            except BaseException as error:  # the one writer must outlive whatever one batch does
                log.exception("event store: the writer failed")
                for order in orders:
                    if not order.future.done():
                        order.future.set_exception(StoreUnavailable(f"the event store: {error}"))

    def _take(self) -> list[Order] | None:
        """Orders for one commit; none of them after a wait, when the file has to be opened again; None at the end."""
        try:
            first = self._queue.get(timeout=RETRY_S if self._writing is None else None)
        except queue.Empty:
            return []
        if first is None:
            return None
        orders, rows = [first], first.batch.rows if first.batch else 0
        while rows < limits.COMMIT_ROWS_MAX and first.work is None:
            try:
                following = self._queue.get_nowait()
            except queue.Empty:
                break
            if following is None:
                self._queue.put(None)
                break
            orders.append(following)
            if following.work is not None:
                break
            rows += following.batch.rows if following.batch else 0
        return orders

    def _carry_out(self, orders: list[Order]) -> None:
        """Commit and work. After a failure answered batches are held for the next try, all others are told."""
        orders, self._held = [*self._held, *orders], []
        left = list(orders)
        try:
            if self._writing is None:
                self._reopen()
            self._commit([o for o in orders if o.work is None], left)
            for order in [o for o in orders if o.work is not None]:
                self._work(order)
        except LanterneError as error:
            self._held = [o for o in left if o.number]
            for order in left:
                if not order.future.done():
                    order.future.set_exception(error)
        finally:
            held = set(map(id, self._held))
            self._release([o for o in orders if id(o) not in held])

    def _work(self, order: Order) -> None:
        writing = self._writing
        if writing is None or order.work is None:
            raise StoreUnavailable(f"the event store: {self.failure or 'closed'}")
        try:
            found = order.work(writing.cursor)
            self._changes.forget()
            order.future.set_result(found)
        except duckdb.FatalException as error:
            self._fail(error)
            order.future.set_exception(StoreUnavailable(f"the event store: {error}"))
        except Exception as error:
            order.future.set_exception(error)

    def _commit(self, orders: list[Order], left: list[Order]) -> None:
        """Store ``orders`` in one transaction and take them out of ``left``."""
        if not orders:
            return
        writing = self._writing
        if writing is None:
            raise StoreUnavailable(f"the event store: {self.failure or 'closed'}")
        now, began = self._now_ns(), self.clock.monotonic_ns()
        found = [o.batch for o in orders if o.batch is not None]
        derived = [(o.table, o.rows) for o in orders if o.rows is not None]
        number = max(o.number for o in orders)
        try:
            receipts = iter(writing.commit(found, derived, now, number))
        except _BAD_ROWS as error:
            if len(orders) > 1:
                for order in orders:  # one bad batch must not fail the others
                    self._commit([order], left)
                return
            self._refuse(orders[0], error)
            left.remove(orders[0])
            return
        except (duckdb.Error, OSError) as error:
            self._fail(error)
            raise StoreUnavailable(f"the event store could not commit: {error}") from error
        self._changes.note(found, derived)
        self.counters.commits += 1
        self.counters.commit_seconds += (self.clock.monotonic_ns() - began) / 1e9
        for order in orders:
            left.remove(order)
            receipt = None if order.batch is None else next(receipts)
            if order.batch is not None and receipt is not None:
                self.counters.rows[order.batch.signal] += receipt.stored
            if not order.number:
                order.future.set_result(receipt)
        self._now_stored(number)
        self._tell(found)

    def _now_ns(self) -> int:
        """``received_ns`` of the next commit, above all others though the clock step back: readers go on from there."""
        self._newest_ns = max(self.clock.unix_ns(), self._newest_ns + 1)
        return self._newest_ns

    def _refuse(self, order: Order, error: Exception) -> None:
        says = f"rows refused by the event store: {error}"
        if order.number and order.batch is not None:  # answered before; the checks at the door make this our own bug
            self.quality.add("record_refused", order.batch.rows)
            log.error("event store: record %d of the journal: %s", order.number, says)
            self._now_stored(order.number)
        else:
            order.future.set_exception(LanterneError(says))

    def _now_stored(self, number: int) -> None:
        if number <= self._stored:
            return
        with self._fresh:
            self._stored = number
            self._fresh.notify_all()
        with contextlib.suppress(OSError):
            self._journal.release(number)

    def _tell(self, found: list[Batch]) -> None:
        if not found:
            return
        for callback in list(self._callbacks):
            try:
                callback(found)
            except Exception:
                log.exception("event store: a subscriber failed")
