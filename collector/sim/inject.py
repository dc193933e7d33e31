"""Real faults for a real run: each is switched on in the process of one rank, from one step on.

Nothing is simulated here: a slow rank really computes more, a hung rank really blocks, a slow link is the
kernel pacing the sockets of that rank. ``Injector`` is a set of hooks that a training loop calls; a rank
that is not the culprit gets hooks that do nothing.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lanterne.errors import UsageError

if TYPE_CHECKING:
    import torch

KINDS = (
    "none", "slow-rank", "slow-data", "slow-backward", "hang", "crash", "bad-batch", "lr-jump", "nan", "overflow",
    "leak", "oom", "checkpoint-stall", "checkpoint-corrupt", "mismatch", "seed-mismatch", "gc", "slow-link",
    "replica-divergence",
)  # fmt: skip

RIGHT_CAUSE = {
    "none": None,
    "slow-rank": "slow_compute",
    "slow-data": "data_stall",
    "slow-backward": "slow_compute",
    "hang": "rank_hung",
    "crash": "rank_crashed",
    "bad-batch": "bad_batch",
    "lr-jump": "lr_misconfigured",
    "nan": "nonfinite_values",
    "overflow": "fp16_overflow",
    "leak": "memory_leak",
    "oom": "out_of_memory",
    "checkpoint-stall": "checkpoint_stall",
    "checkpoint-corrupt": "checkpoint_corrupt",
    "mismatch": "collective_mismatch",
    "seed-mismatch": "seed_mismatch",
    "gc": "gc_pause",
    "slow-link": "slow_link",
    "replica-divergence": "replica_divergence",
}
"""The right first cause of each fault (category); the subject is the rank, but for lr-jump."""

SO_MAX_PACING_RATE = 47
PACED_BYTES_PER_S = 3_000_000
LEAK_BYTES_PER_STEP = 24 << 20
GARBAGE_OBJECTS = 1_500_000
LR_JUMP = 12.0
CHECKPOINT_STALL_S = 8.0


@dataclass
class Injector:
    """Hooks of one fault. ``delay_s`` is what the slow faults add a step; ``onset`` the first faulty step."""

    kind: str
    rank: int
    onset: int
    delay_s: float = 0.12
    me: int = 0
    _leaked: list[Any] = field(default_factory=list)
    _heap: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"fault {self.kind!r} is unknown; choose one of {', '.join(KINDS)}")

    def on(self, kind: str, step: int) -> bool:
        """Is this fault active in this rank at this step?"""
        return self.kind == kind and self.me == self.rank and step >= self.onset

    # --- hooks, in the order of a step -----------------------------------------------------------

    def seed(self, base: int) -> int:
        """The seed that this rank uses for everything that should be equal on all ranks."""
        return base + 7919 if self.kind == "seed-mismatch" and self.me == self.rank else base

    def loading(self, step: int) -> None:
        """Inside the data set, while a sample is made."""
        if self.on("slow-data", step):
            time.sleep(self.delay_s)

    def batch(self, step: int, inputs: torch.Tensor) -> torch.Tensor:
        """The batch as it leaves the loader; floats ``[samples, tokens, width]``."""
        if self.on("bad-batch", step) and step == self.onset:
            return inputs * 400.0
        return inputs

    def forward(self, step: int, model: torch.nn.Module) -> None:
        """At the start of the forward pass, inside the model's forward."""
        if self.on("slow-rank", step):
            _compute(self.delay_s)
        if self.on("hang", step):
            threading.Event().wait()
        if self.on("crash", step):
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.on("gc", step):
            self._collect_garbage()
        if self.on("leak", step):
            self._leak()
        if self.on("oom", step):
            _exhaust_memory()
        if self.on("slow-link", step) and step == self.onset:
            pace_sockets(PACED_BYTES_PER_S)
        del model

    def loss(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        """The loss before backward."""
        if self.on("slow-backward", step):
            loss.register_hook(lambda grad: self._late(step, grad))  # type: ignore[no-untyped-call]
        if self.on("overflow", step):
            return loss * 3e4
        return loss

    def _late(self, step: int, grad: torch.Tensor) -> torch.Tensor:
        self.backward(step)
        return grad

    def backward(self, step: int) -> None:
        """At the start of the backward pass."""
        if self.on("slow-backward", step):
            _compute(self.delay_s)

    def gradients(self, step: int, model: torch.nn.Module) -> None:
        """Once, before the first step: hooks on a parameter's gradient, before the reduction."""
        if self.kind != "nan" or self.me != self.rank or step != 0:
            return
        parameter = list(model.parameters())[-1]
        state = {"step": 0}

        def poison(grad: torch.Tensor) -> torch.Tensor:
            state["step"] += 1
            return grad * float("nan") if state["step"] == self.onset + 1 else grad

        parameter.register_hook(poison)  # type: ignore[no-untyped-call]

    def collective(self, step: int) -> int:
        """Extra elements in this rank's next hand-made all-reduce (a wrong shape in the same slot)."""
        return 64 if self.on("mismatch", step) else 0

    def after_step(self, step: int, model: torch.nn.Module, scheduler: Any) -> None:
        """After the optimizer step: a learning rate that jumps on all ranks, or a parameter that drifts on one."""
        if self.kind == "lr-jump" and step == self.onset:
            scheduler.base_lrs = [lr * LR_JUMP for lr in scheduler.base_lrs]
            for group in scheduler.optimizer.param_groups:
                group["lr"] *= LR_JUMP
        if self.on("replica-divergence", step) and step == self.onset:
            import torch

            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.view(-1)[:1].add_(1e-3)

    def while_saving(self, step: int) -> None:
        """Inside the checkpoint phase, before the file is written."""
        if self.on("checkpoint-stall", step):
            time.sleep(CHECKPOINT_STALL_S)

    def saved(self, step: int, path: Path) -> None:
        """After the file is written: the storage flips bytes behind the trainer's back."""
        if self.on("checkpoint-corrupt", step):
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(b"\xff" * 4096)

    # --- the faults that need more than a line ---------------------------------------------------

    def _collect_garbage(self) -> None:
        if not self._heap:
            self._heap = [[i] for i in range(GARBAGE_OBJECTS)]
        gc.collect()

    def _leak(self) -> None:
        import torch

        self._leaked.append(torch.ones(LEAK_BYTES_PER_STEP // 4))


def _compute(seconds: float) -> None:
    """Really compute for ``seconds``: small matrix products on this rank's core."""
    import torch

    left = torch.randn(96, 96)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        left = torch.tanh(left @ left)


def _exhaust_memory() -> None:
    """Cap the address space a little above what is used and allocate until the allocator refuses."""
    import torch

    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), hard))
    held = []
    while True:
        held.append(torch.ones(16 << 20))


def _tcp_sockets() -> Iterator[socket.socket]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue
        if found.family in {socket.AF_INET, socket.AF_INET6} and found.type == socket.SOCK_STREAM:
            yield found
        else:
            found.close()


def pace_sockets(bytes_per_s: int) -> int:
    """Let the kernel pace all TCP sockets of this process to ``bytes_per_s``; returns how many it took."""
    paced = 0
    for sock in _tcp_sockets():
        try:
            sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
            paced += 1
        except OSError:
            continue
        finally:
            sock.close()
    return paced
