"""The session: what ``lanterne.attach`` gives. One a process; it observes, and nothing it does is felt by the trainer.

The files of the session folder are made first (the black box), then the hooks, then the helpers outside the hot path
(shipper, command channel). Whatever fails is left out and counted; training goes on.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic_ns
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from lanterne.collector import core as cores
from lanterne.collector import identity as identities
from lanterne.collector.core import DATA_WAIT, PHASES
from lanterne.collector.overhead import OverheadMeter
from lanterne.collector.ring import Ring
from lanterne.collector.sources.checkpoint import CheckpointSource
from lanterne.collector.sources.collectives import Collectives
from lanterne.collector.sources.compile import CompileSource
from lanterne.collector.sources.dataloader import DataLoaderSource, sampler_facts
from lanterne.collector.sources.environment import environment_facts, seed_facts
from lanterne.collector.sources.gradients import Gradients
from lanterne.collector.sources.liveness import (
    Exceptions,
    GarbageCollections,
    WorkerServer,
    install_oom_observer,
    register_stacks,
)
from lanterne.collector.sources.memory import CUDA_EVERY, cuda_sample
from lanterne.collector.sources.model import ModelFinder, is_replicated, mesh_of
from lanterne.collector.sources.nccl import NcclSource
from lanterne.collector.sources.patches import Patches
from lanterne.collector.sources.probe import ProbeSource
from lanterne.collector.sources.training import TrainingHooks
from lanterne.collector.steps import Recorder
from lanterne.errors import LanterneError
from lanterne.nouns import AttributeValue, EventName, Identity, Phase
from lanterne.settings import CollectorSettings, load
from lanterne.wire import UNITS

T = TypeVar("T")
_PHASE_INDEX = {phase.value: i for i, phase in enumerate(PHASES)}
_lock = threading.RLock()
_session: Session | None = None


class Session:
    """Observes one rank. Made by :func:`attach`; ``identity``, ``settings`` and ``folder`` may be read.

    ``model``, ``optimizer``, ``scaler`` and ``scheduler`` are the user's objects as far as they are known.
    """

    def __init__(self, settings: CollectorSettings, identity: Identity, *, start_step: int = 0, **objects: Any) -> None:
        self.settings, self.identity = settings, identity
        self.enabled, self.closed = False, False
        self.model: Any = objects.get("model")
        self.scaler: Any = objects.get("scaler")
        self.dataloader: Any = objects.get("dataloader")
        self.folder = Path()
        self._patches = Patches()
        self._pid = os.getpid()
        self._first_step = start_step
        self._given = objects
        self._hooks: TrainingHooks | None = None
        self._worker_server: WorkerServer | None = None
        self._told_data = False
        self._agent: Any = None
        self._ends = threading.Event()
        self._seed_told = False

    # --- starting ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the black box and put the hooks in place. Raises OSError where the session folder cannot be made."""
        settings, rank = self.settings, self.identity.rank
        self.folder = identities.session_dir(settings, self.identity)
        ring = self.ring = Ring(self.folder, rank, settings.ring_records)
        collectives = self.collectives = Collectives(self.folder, rank, ring, settings.tap)
        core = self.core = cores.make(
            ring, collectives.tap, first_step=self._first_step, window=settings.spikeness_window,
            compiled=settings.tap != "python",
        )  # fmt: skip
        for name in ("flops_per_step", "flops_per_sample", "peak_flops"):
            setattr(core, name, float(self._given.get(name) or 0.0))
        meter = self.meter = OverheadMeter(ring, core, settings.overhead_budget)
        recorder = self.recorder = Recorder(ring, core, meter)
        self._install(recorder, meter)
        self._write_about()
        self.enabled = True
        self._tell_attached()
        self.on_step_boundary(self._tell_seed_once)
        self._try("collectives", collectives.start)
        self._try("process groups", collectives.name_groups)
        self._start_helpers()
        atexit.register(self.close)

    def _install(self, recorder: Recorder, meter: OverheadMeter) -> None:
        given, patches = self._given, self._patches
        gradients = self.gradients = Gradients(
            recorder, meter, self.collectives.tap, self.model,
            every=self.settings.grad_norm_every, replicated=is_replicated(self.model, self.identity.world_size),
        )  # fmt: skip
        hooks = self._hooks = TrainingHooks(
            recorder, gradients, optimizer=given.get("optimizer"), scheduler=given.get("scheduler")
        )  # fmt: skip
        self._data = DataLoaderSource(recorder, meter)
        self._checkpoints = CheckpointSource(recorder)
        self._exceptions = Exceptions(recorder)
        self._kernels = ProbeSource(
            recorder.ring, every=self.settings.kernels_every, cupti=self.settings.probe_cupti
        )  # fmt: skip
        nccl = NcclSource(recorder.ring, every=self.settings.kernels_every)
        compiles = CompileSource(recorder, patches)
        recorder.at_boundary += [self.collectives.look, self._kernels.boundary, nccl.boundary, compiles.look]
        recorder.now_and_then += [self._checkpoints.look, self._every_so_often]
        self._try("compile", compiles.look)
        self._try("training hooks", lambda: hooks.install(patches, self.model))
        self._try("data loader", lambda: self._data.install(patches))
        self._try("checkpoints", lambda: self._checkpoints.install(patches))
        self._try("exceptions", lambda: self._exceptions.install(patches))
        self._try("garbage collection", lambda: GarbageCollections(recorder).install(patches))
        self._try("out of memory", lambda: install_oom_observer(recorder))
        if self.model is None:
            self._try("model", lambda: ModelFinder(self._found_model, hooks).install(patches))
        else:
            self._inject()

    def _found_model(self, model: Any) -> None:
        """The model was not given to ``attach`` and has just been seen at work."""
        self.model = model
        self.gradients.follow(model, replicated=is_replicated(model, self.identity.world_size))
        self._inject()

    def _inject(self) -> None:
        """A game day (``lanterne inject``): hang the fault on this run once its model is known."""
        if "LANTERNE_INJECT" in os.environ:
            from lanterne.collector.sim import game

            self._try("inject", lambda: game.from_environment(cast(game.Attached, self), self.identity.rank))

    def _write_about(self) -> None:
        """``rank-N.json``: who this is, and the doors by which the shipper may look in."""
        rank = self.identity.rank
        stacks = self._try("stacks", lambda: register_stacks(self.folder / f"rank-{rank}.stacks")) or 0
        server = self._worker_server = WorkerServer(self.folder, rank) if self.identity.world_size > 1 else None
        public = {k: v for k, v in asdict(self.settings).items() if k != "token"}
        about = {
            "identity": asdict(self.identity), "pid": self._pid, "endpoint": self.settings.endpoint, "settings": public,
            "clock": {"monotonic_ns": self.ring.clock_pair[0], "unix_ns": self.ring.clock_pair[1]},
            "stacks_signal": stacks, "worker_server": server.path if server is not None else "",
        }  # fmt: skip
        path = self.folder / f"rank-{rank}.json"
        temporary = path.with_suffix(f".{self._pid}")
        with open(temporary, "w", encoding="utf-8", opener=lambda p, f: os.open(p, f, 0o600)) as file:
            json.dump(about, file, default=str)
        os.replace(temporary, path)

    def _tell_attached(self) -> None:
        def tell() -> None:
            optimizer, model = self.optimizer, self.model
            facts = environment_facts()
            facts |= {
                "world_size": self.identity.world_size,
                "host": self.identity.host,
                "device": self.identity.device,
            }
            facts |= {"optimizer": type(optimizer).__name__} if optimizer is not None else {}
            if model is not None:
                facts["model"] = type(model).__name__
                facts["parameters"] = sum(p.numel() for p in model.parameters())
            if self.scheduler is not None:
                facts["scheduler"] = type(self.scheduler).__name__
            facts["script"] = sys.argv[0] if sys.argv else ""
            self.put_event(EventName.ATTACHED, attributes=facts)

        self._try("attached", tell)

    def _start_helpers(self) -> None:
        if self.settings.shipper != "none":
            from lanterne.collector import shipper

            self._try("shipper", lambda: shipper.ensure_running(self.folder, self.settings))
            self._try("keeper", lambda: shipper.keep_running(self.folder, self.settings, self._ends))
        if self.settings.commands:
            from lanterne.collector import commands

            self._agent = self._try("commands", lambda: commands.start(cast(commands.Host, self)))

    def _try(self, what: str, call: Callable[[], T]) -> T | None:
        """Do it; a failure is counted and noted, and training goes on without that part."""
        try:
            return call()
        except Exception as error:
            self.recorder.failed(what, error)
            return None

    def _every_so_often(self, step: int) -> None:
        if step % CUDA_EVERY == 0:
            at = monotonic_ns()
            for metric, value, label in cuda_sample():
                self.ring.metric(metric, step, at, value, label)

    # --- what the user calls ----------------------------------------------------------------------

    def steps(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over ``loader``, timing the wait for data and the steps. Yields the batches unchanged.

        Where an optimizer is known, a step ends at the first new batch after it stepped: micro-batches of an
        accumulated gradient belong to one step. Otherwise each batch is a step.
        """
        if not self.enabled:
            yield from loader
            return
        hooks, recorder, data = self._hooks, self.recorder, self._data
        assert hooks is not None
        hooks.driven = True
        if not self._told_data:
            self._told_data = True
            self._try("data", lambda: self._tell_data(loader))
        iterator = iter(loader)
        while True:
            began = recorder.enter(DATA_WAIT)
            data.outer = True
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                data.outer = False
                recorder.leave(DATA_WAIT, began)
            data.took(batch, iterator)
            try:
                yield batch
            finally:  # also when the user leaves the loop after a step
                if hooks.stepped or hooks.optimizer is None:
                    hooks.end_step()

    def step(self) -> None:
        """End the step here: for loops that do not use :meth:`steps` and want to say it themselves."""
        if self.enabled and self._hooks is not None:
            self._hooks.driven = True
            self._hooks.end_step()

    @property
    def step_number(self) -> int:
        """The step that is under way."""
        return self.recorder.step if self.enabled else self._first_step

    def log(self, **values: Any) -> None:
        """Report values of the current step. Tensors (0-dim) are kept and read later, off the hot path.

        ``loss``, ``grad_norm``, ``samples`` and ``tokens`` have their meaning; other names become metrics of the job,
        with the prefix ``training.`` where that is a known metric. What is neither number nor tensor is counted as an
        error of the collector and left out.
        """
        if not self.enabled:
            return
        recorder = self.recorder
        try:
            for name, value in values.items():
                if name == "loss":
                    recorder.core.loss(value if hasattr(value, "detach") else float(value), True)
                elif name in {"samples", "tokens"}:
                    setattr(recorder.core, name, int(value))
                elif name == "grad_norm" and self._hooks is not None:
                    self._hooks.took_norm(value)
                else:
                    known = f"training.{name}"
                    kept = value.detach() if hasattr(value, "detach") else float(value)
                    recorder.logged.append((known if known in UNITS else name, kept))
        except Exception as error:
            recorder.failed("log", error)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase that the hooks cannot see: ``data_wait h2d checkpoint eval compile other …`` (nouns.Phase).

        A name that is no phase is timed as ``other``. What happens inside belongs to this phase alone.
        """
        if not self.enabled:
            yield
            return
        recorder = self.recorder
        index = _PHASE_INDEX.get(name, _PHASE_INDEX[Phase.OTHER.value])
        before, recorder.core.user_phase = recorder.core.user_phase, index
        began = recorder.enter(index)
        try:
            yield
        finally:
            recorder.core.user_phase = before
            if before < 0:
                recorder.leave(index, began)

    def adopt(self, scaler: Any, start_step: int) -> None:
        """What a script's own ``attach`` knows, where ``lanterne run`` has attached this process before it."""
        self.scaler = self.scaler if scaler is None else scaler
        if self.enabled and start_step and self.recorder.step == self._first_step:
            self._first_step = start_step
            self.recorder.begin_at(start_step)
            self.collectives.tap.tell_step(start_step)

    def on_step_boundary(self, call: Callable[[int], None], /) -> None:
        """Call ``call(step)`` at each step boundary, on the training thread, with the step that begins."""
        if self.enabled:
            self.recorder.at_boundary.append(call)

    def put_event(
        self, name: EventName | str, /, body: str = "", attributes: Mapping[str, AttributeValue] | None = None
    ) -> None:
        """Write an event of this rank, from any thread. Never raises."""
        if self.enabled:
            self._try(
                "event", lambda: self.ring.note(str(name), self.recorder.step, monotonic_ns(), attributes or {}, body)
            )

    def trace_kernels(self, steps: int = 1) -> bool:
        """Record the device's kernels of the next ``steps`` steps. True where the probe is at work already."""
        if not self.enabled:
            return False
        self._kernels.trigger(steps)
        return self._kernels.collects

    def checkpoint_saved(self, path: str | os.PathLike[str], *, duration_ms: float = 0.0) -> None:
        """Tell that a checkpoint lies at ``path`` (file or folder); needed only for savers other than torch's."""
        if self.enabled:
            self._checkpoints.saved(path, took_ns=int(duration_ms * 1e6))

    def on_save(self, saver: Callable[[int], None]) -> None:
        """Call ``saver(step)`` on every rank, at one step boundary, when ``save_checkpoint`` is ordered.

        It should write elsewhere than the regular checkpoints, and must not wait for other ranks.
        """
        if self._agent is not None:
            self._agent.actions.on_save(saver)

    @property
    def optimizer(self) -> Any:
        return self._hooks.optimizer if self._hooks is not None else self._given.get("optimizer")

    @property
    def scheduler(self) -> Any:
        return self._hooks.scheduler if self._hooks is not None else self._given.get("scheduler")

    def planned_lr(self, step: int) -> float | None:
        """The rate that the scheduler's plan has for ``step``, None where no plan is known."""
        plan = self._hooks.plan if self._hooks is not None else None
        if plan is None:
            return None
        rate = plan.rate(ahead=step - self.recorder.step)
        return rate if rate == rate else None

    def _tell_data(self, loader: Any) -> None:
        if loader is not self.dataloader:
            self.dataloader = loader
            if self._seed_told:
                self._tell_seed()

    def _tell_seed_once(self, _step: int) -> None:
        """At the first boundary: only then has the loop surely seeded everything that it seeds."""
        if not self._seed_told:
            self._tell_seed()

    def _tell_seed(self) -> None:
        self._seed_told = True
        self.put_event(EventName.SEED, attributes=seed_facts() | sampler_facts(self.dataloader))

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye, give every hook back. Idempotent, also called at exit, never raises."""
        global _session
        if self.closed:
            return
        self.closed = True
        self._ends.set()
        if not self.enabled or os.getpid() != self._pid:
            return
        try:
            self._try("last values", self.recorder.finish)
            self._kernels.close()
            self._try("checkpoints", self._checkpoints.finish)
            self._try("hooks", self._patches.undo)
            self._try("collectives", self.collectives.stop)
            if self._worker_server is not None:
                self._try("worker server", self._worker_server.stop)
            self.put_event(EventName.CLOSED, attributes={"step": self.recorder.step, "failed": self._exceptions.seen})
            self.ring.say_closed()
            self.enabled = False
            atexit.unregister(self.close)
        except Exception as error:
            sys.stderr.write(f"lanterne: closing failed ({type(error).__name__}: {error})\n")
        finally:
            with _lock:
                if _session is self:
                    _session = None


def attach(
    model: Any = None,
    optimizer: Any = None,
    *,
    scaler: Any = None,
    scheduler: Any = None,
    dataloader: Any = None,
    endpoint: str | None = None,
    job: str | None = None,
    start_step: int = 0,
    flops_per_step: float | None = None,
    flops_per_sample: float | None = None,
    peak_flops: float | None = None,
    **settings: Any,
) -> Session:
    """Observe this process's training; returns its :class:`Session`, the same one on every further call.

    All arguments may be left out: model, optimizer and scheduler are then found at the first step. ``start_step``
    is the number of the next step of a resumed run. With ``flops_per_step`` (or ``flops_per_sample``, floating-point
    operations of forward and backward on this rank) and ``peak_flops`` (of its device, per second) the model's FLOPS
    utilisation is reported. Other keywords are fields of ``lanterne.settings.CollectorSettings``.

    Raises :class:`lanterne.errors.UsageError` on unknown or wrong settings, and nothing else: a collector that cannot
    work here says so on stderr once and returns a session that does nothing.
    """
    global _session
    with _lock:
        if _session is not None and not _session.closed and _session._pid == os.getpid():
            _session.adopt(scaler, start_step)
            return _session
        found = load(CollectorSettings, endpoint=endpoint, job=job, **settings)
        session = Session(
            found, _identity(found, model), start_step=start_step, model=model, optimizer=optimizer, scaler=scaler,
            scheduler=scheduler, dataloader=dataloader, flops_per_step=flops_per_step,
            flops_per_sample=flops_per_sample, peak_flops=peak_flops,
        )  # fmt: skip
        _session = session
        if found.disabled:
            return session
        try:
            _check_endpoint(found.endpoint)
            session.start()
        except Exception as error:
            session.enabled = False
            session._patches.undo()
            sys.stderr.write(f"lanterne: not attached ({type(error).__name__}: {error}); training goes on without\n")
        return session


def _check_endpoint(endpoint: str) -> None:
    """Say at once what would otherwise only stand in the shipper's log; the run is recorded all the same."""
    if not endpoint.startswith(("http://", "https://")) or not urlsplit(endpoint).hostname:
        sys.stderr.write(
            f"lanterne: the endpoint {endpoint!r} is no http(s)://host:port; nothing can be sent, events stay on disk\n"
        )


def current() -> Session | None:
    """The session of this process, None where nothing is attached."""
    return _session if _session is not None and _session.enabled else None


def _identity(settings: CollectorSettings, model: Any) -> Identity:
    """Identity from the environment, completed by torch.distributed where that is up."""
    found = identities.identity_from_environment(settings.job)
    dist = _distributed()
    if dist is not None:
        found = replace(found, rank=dist.get_rank(), world_size=dist.get_world_size(), backend=str(dist.get_backend()))
        if not settings.job and not identities.named_job(os.environ):
            found = replace(found, job=_agreed_job(dist, found.job))
    device = next((str(p.device) for p in model.parameters()), "") if model is not None else ""
    return replace(found, device=device, mesh=mesh_of(model) or found.mesh)


def _distributed() -> Any:
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is None or not torch_distributed.is_available() or not torch_distributed.is_initialized():
        return None
    return torch_distributed


def _agreed_job(dist: Any, candidate: str) -> str:
    """One invented id for all ranks: the first to ask sets it in the job's store. Nobody waits for anybody."""
    try:
        store = dist.distributed_c10d._get_default_store()
        return str(store.compare_set("lanterne/job", "", candidate).decode())
    except (RuntimeError, AttributeError, LanterneError):
        return candidate
