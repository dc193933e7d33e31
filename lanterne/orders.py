"""Orders: the signed commands that backend and trainer exchange, and the closed list of what may be ordered.

An order is a JSON object: ``id job attempt action parameters ranks issued_ns expires_ns counter signature``.
The signature is Ed25519 (RFC 8032) over the canonical JSON (sorted keys, no spaces, UTF-8) of everything
but itself. Both ends read the same table of actions, so that an order out of bounds is refused twice.
``cryptography`` is imported only when a key is made, used or checked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lanterne import limits
from lanterne.errors import CommandRefused

FIELDS = ("id", "job", "attempt", "action", "parameters", "ranks", "issued_ns", "expires_ns", "counter")
CLOCK_TOLERANCE_NS = 30_000_000_000
"""How far the clocks of backend and trainer may differ before an order looks issued in the future."""

_ID = re.compile(limits.ID_PATTERN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of an action. ``low``/``high`` bound numbers; ``choices`` bound words."""

    kind: type
    low: float = -math.inf
    high: float = math.inf
    required: bool = True
    choices: tuple[str, ...] = ()
    says: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """``where``: trainer or launcher. ``numerics``: changes what is learned. ``immediate``: does not wait for a step.

    ``subset``: may be ordered for some ranks only; everything else concerns all ranks or none.
    """

    says: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    where: str = "trainer"
    numerics: bool = False
    immediate: bool = False
    subset: bool = False
    undoable: bool = False


def _number(low: float, high: float, says: str, *, required: bool = True, kind: type = float) -> Parameter:
    return Parameter(kind=kind, low=low, high=high, says=says, required=required)


ACTIONS: Mapping[str, Action] = {
    "set_lr": Action(
        says="set the learning rate, to a value or back to the planned rate of the step",
        parameters={
            "lr": _number(0.0, 100.0, "rate of the first parameter group; the others keep their ratio", required=False),
            "planned": Parameter(kind=bool, required=False, says="take the planned rate of the step where it is known"),
        },
        numerics=True,
        undoable=True,
    ),
    "scale_lr": Action(
        says="multiply the learning rate and its schedule",
        parameters={"factor": _number(limits.LR_FACTOR_MIN, limits.LR_FACTOR_MAX, "multiplier")},
        numerics=True,
        undoable=True,
    ),
    "clip_grad_norm": Action(
        says="clip the global gradient norm before each optimizer step",
        parameters={
            "max_norm": _number(1e-3, 1e4, "L2 norm over all gradients"),
            "steps": _number(1, 1_000_000, "for so many steps; without it until undone", required=False, kind=int),
        },
        numerics=True,
        undoable=True,
    ),
    "set_loss_scale": Action(
        says="set the loss scale of the GradScaler",
        parameters={
            "scale": _number(1.0, 2.0**24, "new scale"),
            "growth_interval": _number(1, 1_000_000, "steps between growths", required=False, kind=int),
        },
        numerics=True,
        undoable=True,
    ),
    "skip_batch": Action(
        says="drop the gradients of the next steps on all ranks (backward still runs, so collectives match)",
        parameters={"steps": _number(1, 100, "how many steps", kind=int)},
        numerics=True,
    ),
    "pause": Action(
        says="hold all ranks at one step boundary",
        parameters={"max_s": _number(1.0, 600.0, "goes on by itself after so many seconds")},
        undoable=True,
    ),
    "resume": Action(says="let a paused job go on"),
    "save_checkpoint": Action(says="keep a snapshot of model, optimizer, scheduler, scaler and generators now"),
    "rollback": Action(
        says="go back to the last good snapshot or checkpoint",
        parameters={"before_step": _number(0, limits.STEP_MAX, "the newest state older than this step", kind=int)},
        numerics=True,
        undoable=True,
    ),
    "set_precision": Action(
        says="change the dtype of the loop's autocast (needs guards.precision.Precision in the loop)",
        parameters={"dtype": Parameter(kind=str, choices=("float32", "bfloat16", "float16"))},
        numerics=True,
        undoable=True,
    ),
    "freeze": Action(
        says="stop training a module",
        parameters={"module": Parameter(kind=str, says="its name in model.named_modules()")},
        numerics=True,
        undoable=True,
    ),
    "unfreeze": Action(
        says="train a module again",
        parameters={"module": Parameter(kind=str, says="its name in model.named_modules()")},
        numerics=True,
        undoable=True,
    ),
    "empty_cache": Action(says="collect garbage and give cached device memory back", subset=True),
    "tune_gc": Action(
        says="move all living objects out of the garbage collector's sight, so that its pauses end",
        subset=True,
        undoable=True,
    ),
    "set_micro_batch": Action(
        says="split each batch into so many parts (needs guards.micro_batch.MicroBatch in the loop)",
        parameters={"parts": _number(1, 64, "parts a batch", kind=int)},
        undoable=True,
    ),
    "set_io_weight": Action(
        says="set the io.weight of the rank's cgroup v2, so that checkpoint traffic yields or comes first",
        parameters={"weight": _number(1, 10_000, "100 is the usual one", kind=int)},
        subset=True,
        undoable=True,
    ),
    "profile": Action(
        says="record the next steps with torch.profiler into the session folder",
        parameters={"steps": _number(1, 50, "how many steps", kind=int)},
        subset=True,
    ),
    "probe_device": Action(
        says="run a fixed matrix product and copy on each rank's device and tell how long they take, as the step ends",
        subset=True,
    ),
    "collect_stacks": Action(says="send the Python stacks of all threads", immediate=True, subset=True),
    "stop": Action(
        says="leave the training loop at one step boundary with an exit code",
        parameters={"exit_code": _number(0, 125, "exit code of every rank", kind=int)},
    ),
    "undo": Action(
        says="take back what an earlier order changed",
        parameters={"of": Parameter(kind=str, says="id of that order")},
        numerics=True,
    ),
    "restart": Action(
        says="stop all ranks and start the next attempt",
        parameters={
            "nccl_algo": Parameter(kind=str, required=False, choices=("Ring", "Tree"), says="NCCL_ALGO from then on"),
            "nccl_interface": Parameter(kind=str, required=False, says="NCCL_SOCKET_IFNAME from then on"),
            "nccl_ib_timeout": _number(1, 31, "NCCL_IB_TIMEOUT from then on", required=False, kind=int),
            "heartbeat_timeout_s": _number(
                10, 86_400, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC from then on", required=False, kind=int
            ),
            "micro_batch": _number(1, 64, "parts a batch for guards.micro_batch", required=False, kind=int),
        },
        where="launcher",
    ),
    "restart_without_node": Action(
        says="start the next attempt without one host",
        parameters={"host": Parameter(kind=str, says="host name")},
        where="launcher",
    ),
    "give_up": Action(says="stop the job and do not start it again", where="launcher"),
}
"""The closed list of actions (docs/actions.md is checked against it)."""


# --- keys and signatures -------------------------------------------------------------------------


def canonical(order: Mapping[str, Any]) -> bytes:
    """The bytes that are signed: JSON with sorted keys and no spaces, without ``signature``."""
    plain = {key: value for key, value in order.items() if key != "signature"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def generate_key() -> tuple[str, str]:
    """A new key pair ``(private, public)``, each 32 bytes in hex."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    return key.private_bytes_raw().hex(), key.public_key().public_bytes_raw().hex()


def public_key(private: str) -> str:
    """The public half of a private key, in hex."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private)).public_key().public_bytes_raw().hex()


def sign(order: Mapping[str, Any], private: str) -> dict[str, Any]:
    """The order with its ``signature`` (hex). Raises CommandRefused when fields are missing."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    missing = [name for name in FIELDS if name not in order]
    if missing:
        raise CommandRefused(f"order cannot be signed: {', '.join(missing)} missing")
    plain = {name: order[name] for name in FIELDS}
    signature = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private)).sign(canonical(plain))
    return plain | {"signature": signature.hex()}


def verify(order: Mapping[str, Any], public: str) -> None:
    """Raise CommandRefused unless ``signature`` was made over this very order by the owner of ``public`` (hex)."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(str(order.get("signature", ""))), canonical(order))
    except InvalidSignature:
        raise CommandRefused("signature does not match: forged, altered, or signed for another job's key") from None
    except ValueError as error:
        raise CommandRefused(f"signature or key is not readable: {error}") from None


# --- bounds --------------------------------------------------------------------------------------


def check_parameters(action: str, parameters: Mapping[str, Any]) -> None:
    """Raise CommandRefused when the action is not in the list or a parameter is unknown, missing or out of bounds."""
    known = ACTIONS.get(action)
    if known is None:
        raise CommandRefused(f"action {action!r} is not one of {', '.join(sorted(ACTIONS))}")
    unknown = sorted(set(parameters) - set(known.parameters))
    if unknown:
        raise CommandRefused(f"{action}: unknown parameters {', '.join(unknown)}")
    for name, wanted in known.parameters.items():
        if name not in parameters:
            if wanted.required:
                raise CommandRefused(f"{action}: parameter {name} is missing")
            continue
        check_value(action, name, parameters[name])
    if action == "set_lr" and "lr" not in parameters and parameters.get("planned") is not True:
        raise CommandRefused("set_lr: give lr, or planned: true")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def check_value(action: str, parameter: str, value: Any) -> None:
    """Raise CommandRefused when ``value`` does not fit the type and bounds of one parameter of a known action."""
    name, wanted = f"{action}.{parameter}", ACTIONS[action].parameters[parameter]
    if wanted.kind in {int, float}:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _finite(value):
            raise CommandRefused(f"{name}: {str(value)[:40]} is not a finite number")
        if wanted.kind is int and value != int(value):
            raise CommandRefused(f"{name}: {value!r} is not a whole number")
        if not wanted.low <= value <= wanted.high:
            raise CommandRefused(f"{name}: {value!r} is outside {wanted.low:g} to {wanted.high:g}")
    elif not isinstance(value, wanted.kind):
        raise CommandRefused(f"{name}: {str(value)[:40]} is not a {wanted.kind.__name__}")
    elif wanted.choices and value not in wanted.choices:
        raise CommandRefused(f"{name}: {value!r} is not one of {', '.join(wanted.choices)}")
    elif isinstance(value, str) and len(value) > limits.ATTRIBUTE_VALUE_BYTES_MAX:
        raise CommandRefused(f"{name}: longer than {limits.ATTRIBUTE_VALUE_BYTES_MAX} characters")


def _check_ranks(order: Mapping[str, Any], known: Action) -> None:
    ranks = order["ranks"]
    if ranks == "all":
        return
    if not known.subset:
        raise CommandRefused(f"{order['action']}: concerns all ranks or none; ranks must be 'all'")
    good = isinstance(ranks, list) and ranks and all(isinstance(r, int) and not isinstance(r, bool) for r in ranks)
    if not good or not all(0 <= r < limits.RANKS_MAX for r in ranks):
        raise CommandRefused(f"ranks: {ranks!r} is neither 'all' nor a list of rank numbers")


def check_shape(order: Mapping[str, Any]) -> None:
    """Raise CommandRefused unless the fields are there, have their types, and the action is within bounds."""
    missing = [name for name in FIELDS if name not in order]
    if missing:
        raise CommandRefused(f"order has no {', '.join(missing)}")
    for name in ("id", "job", "action"):
        if not isinstance(order[name], str) or not _ID.match(order[name]):
            raise CommandRefused(f"{name}: {order[name]!r} does not match {limits.ID_PATTERN}")
    for name in ("attempt", "issued_ns", "expires_ns", "counter"):
        if isinstance(order[name], bool) or not isinstance(order[name], int) or order[name] < 0:
            raise CommandRefused(f"{name}: {order[name]!r} is not a whole number from 0")
    if not isinstance(order["parameters"], dict):
        raise CommandRefused("parameters: not an object")
    check_parameters(order["action"], order["parameters"])
    _check_ranks(order, ACTIONS[order["action"]])


def examine(
    order: Mapping[str, Any], *, public: str, job: str, attempt: int, now_ns: int, last_counter: int = -1
) -> None:
    """All checks of one order, in the order of trust: shape, signature, job, attempt, time, replay.

    ``now_ns`` is Unix time; ``last_counter`` the highest counter that was already carried out.
    Raises CommandRefused with the reason.
    """
    check_shape(order)
    verify(order, public)
    if order["job"] != job:
        raise CommandRefused(f"order is for job {order['job']!r}, this is {job!r}")
    if order["attempt"] != attempt:
        raise CommandRefused(f"order is for attempt {order['attempt']}, this is attempt {attempt}")
    life_ns = order["expires_ns"] - order["issued_ns"]
    if life_ns > limits.COMMAND_AGE_S_MAX * 1_000_000_000:
        raise CommandRefused(f"order lives {life_ns / 1e9:.0f} s, the bound is {limits.COMMAND_AGE_S_MAX} s")
    if now_ns > order["expires_ns"]:
        raise CommandRefused(f"order expired {(now_ns - order['expires_ns']) / 1e9:.1f} s ago")
    if order["issued_ns"] > now_ns + CLOCK_TOLERANCE_NS:
        raise CommandRefused(f"order was issued {(order['issued_ns'] - now_ns) / 1e9:.1f} s in the future")
    if order["counter"] <= last_counter:
        raise CommandRefused(f"order {order['counter']} is a replay: {last_counter} was already carried out")
