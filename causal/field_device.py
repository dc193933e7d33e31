"""Device rules over log facts and telemetry: Xid, ECC, lost and throttled devices, burn-in and node checks."""

from __future__ import annotations

from dataclasses import replace

from lanterne.causal import words as w
from lanterne.causal.facts import FactEvent
from lanterne.causal.words import Words, cause, evidence, line
from lanterne.nouns import Cause
from lanterne.nouns import CauseCategory as C

XID_APPLICATION = frozenset({13, 31, 43, 45, 68, 69, 109})
"""Xids that a program's own fault (or the clean-up after one) raises too: NVIDIA Xid catalogue."""
UNSURE = {"device_error_code": 0.6, "result_differs": 0.75}
"""Facts that speak of a device without proof: an error code of the runtime, a result that a second run did not give."""
THERMAL_MASK = 0x20 | 0x40
"""NVML clocks event reasons: software and hardware thermal slowdown (nvml.h)."""


def device(words: Words) -> list[Cause]:
    """Xid, ECC, lost GPU, faulty burn-in, wrong results: the physical device is the subject."""
    kernel = _xids(words)
    faults = [c for c in kernel if c.category is C.DEVICE_FAULT]
    if faults:
        felt = [e for e in words.said("gpu_lost", "ecc_error", "exception") if e.rank >= 0 and _of_device(e)]
        ranks = {e.rank for e in felt}
        if len(faults) == 1 and len(ranks) == 1 and faults[0].subject.rank is None:
            subject = replace(faults[0].subject, rank=felt[0].rank)
            return [replace(faults[0], subject=subject, evidence=(*faults[0].evidence, line(felt[0])))]
        return faults
    return [*kernel, *_device_words(words), *_node_checks(words)]


def _of_device(e: FactEvent) -> bool:
    """A rank's own CUDA error (not an allocation, not a peer's)."""
    said = w.text(e)
    return "cuda error" in said or e.name != "log.exception"


def _xids(words: Words) -> list[Cause]:
    """One cause a device; an Xid that a program's own fault raises too is an abstention."""
    out: dict[tuple[str, bool], Cause] = {}
    for e in words.said("xid", "sxid"):
        number, where = int(w.number(e, "xid")), str(e.attributes.get("device", ""))
        soft = e.name == "log.xid" and number in XID_APPLICATION
        says = f"kernel: Xid {number} on {where}" + (": a program's own fault raises it too" if soft else "")
        proof = [evidence(says, value=float(number), unit="Xid", ref=e.ref), line(e)]
        if soft:
            needs = ("the program's own error at that time", "a memory test of the device")
            found = cause(C.UNKNOWN, 0.5, proof, device=where, host=e.host, needs=needs)
        else:
            do = f"drain the device {where}: reset it, run diagnostics, exclude the node when it comes back"
            rank = _rank_of_device(words, where, e)
            found = cause(C.DEVICE_FAULT, 0.92, proof, device=where, host=e.host, rank=rank, do=do)
        out.setdefault((where, soft), found)
    return list(out.values())


def _device_words(words: Words) -> list[Cause]:
    out: dict[tuple[str, int, str], Cause] = {}
    for e in (*words.said("ecc_error", "gpu_lost", "burn_faulty", *UNSURE, "host_hardware"), *_remapped(words)):
        sure = UNSURE.get(e.name.removeprefix("log."), 0.9)
        where, host = _device(e) or _place_device(words, e.rank), e.host or _host(words, e.rank)
        needs = () if host else ("the host and device of that rank: the log does not name them",)
        after = [o for o in words.said("device_oom") if o.rank == e.rank or not o.host or o.host == e.host]
        effect = [f"an allocation fails later: it follows from the bad device: {w.quote(o)}" for o in after[:1]]
        proof = [line(e), *map(evidence, effect)]
        do = "exclude the node and check its device; do not shrink the batch: a failed allocation after it is an effect"
        found = cause(C.DEVICE_FAULT, sure, proof, rank=e.rank, host=host, device=where, needs=needs, do=do)
        out.setdefault((where or "", e.rank, host or ""), found)
    return list(out.values())


def _remapped(words: Words) -> list[FactEvent]:
    """Devices whose memory rows could not be remapped; the table names the device above its readings."""
    out, current = [], ""
    for e in words.facts.events:
        if e.name == "log.smi_device":
            current = str(e.attributes.get("device", ""))
        elif e.name == "log.remap_failed":
            out.append(replace(e, attributes={**e.attributes, **({"device": current} if current else {})}))
    return out


def _node_checks(words: Words) -> list[Cause]:
    out = []
    for e in words.fact("wrong_results")[:1]:
        wrong = evidence("a collective gave wrong results", value=w.number(e, "count"), unit="elements", ref=e.ref)
        out.append(cause(C.DEVICE_FAULT, 0.7, [wrong]))
    for e in words.said("diagnostic_failed")[:8]:
        where = _device(e)
        needs = ("a second run of the failed check",) + (() if where else ("the device: the table names none",))
        out.append(cause(C.DEVICE_FAULT, 0.8, [line(e)], host=e.host, device=where, needs=needs))
    for e in words.fact("node_defect")[:8]:
        details = str(e.attributes.get("details", ""))
        says = evidence(f"node check of {e.host}: {e.attributes.get('category')}: {details[:160]}", ref=e.ref)
        where, needs = _defect_device(details), ("a second run of the failed check",)
        out.append(cause(C.DEVICE_FAULT, 0.65, [says], host=e.host, device=where, needs=needs))
    return out


def _defect_device(details: str) -> str | None:
    numbers = {
        part.split(":")[1].split("_")[0].split("(")[0] for part in details.split(",") if ":" in part.split("(")[0]
    }
    return numbers.pop() if len(numbers) == 1 else None


def _device(e: FactEvent) -> str | None:
    value = e.attributes.get("device")
    return str(value) if value is not None else None


def _host(words: Words, rank: int) -> str | None:
    place = words.facts.places.get(rank)
    return place.host if place and place.host else None


def _place_device(words: Words, rank: int) -> str | None:
    place = words.facts.places.get(rank)
    return place.device if place and place.device else None


def _rank_of_device(words: Words, where: str, e: FactEvent) -> int | None:
    """The rank on that PCI bus, by NCCL's init lines."""
    bus = where.lower().removeprefix("pci:").replace("0000:", "").replace(":", "").replace(".", "")
    for init in words.said("comm_init"):
        have = str(init.attributes.get("bus", "")).lower()
        if (
            have
            and bus.startswith(have[:2])
            and have.rstrip("0")[:2] == bus.rstrip("0")[:2]
            and (not e.host or not init.host or e.host == init.host)
        ):
            return init.rank
    return e.rank if e.rank >= 0 else None


def thermal(words: Words) -> list[Cause]:
    """A device with a thermal slowdown flag."""
    hot: dict[str, FactEvent] = {}
    current = ""
    for e in words.facts.events:
        if e.name == "log.smi_device":
            current = str(e.attributes.get("device", ""))
        elif e.name == "log.thermal_throttle" or (
            e.name == "log.throttle_mask" and int(str(e.attributes.get("mask", "0x0")), 16) & THERMAL_MASK
        ):
            hot.setdefault(str(e.attributes.get("device", current)), e)
    out = [_throttled(words, e) for e in words.fact("device_state") if w.number(e, "hot") > 0][:4]
    for where, e in list(hot.items())[:4]:
        clock = [x for x in words.said("smi_clock", "smi_temperature") if x.host == e.host]
        proof = [
            evidence(f"device {where or '?'} reports a slowdown: {w.quote(e)}", ref=e.ref),
            *map(line, clock[:2]),
        ]
        out.append(cause(C.THERMAL_THROTTLE, 0.9, proof, device=where or None, host=e.host or None, rank=e.rank))
    return out


def _throttled(words: Words, e: FactEvent) -> Cause:
    """A device whose telemetry flags a thermal slowdown."""
    peers = [
        w.number(p, "clock_mhz")
        for p in words.fact("device_state")
        if not w.number(p, "hot") and w.number(p, "clock_mhz") > 0
    ]
    where, low = str(e.attributes.get("device")), w.number(e, "lowest_mhz")
    share = w.number(e, "hot") / max(1.0, w.number(e, "samples"))
    says = f"device {where} flags a thermal slowdown in {share:.0%} of {w.number(e, 'samples'):.0f} samples"
    proof = [evidence(says, value=100 * share, unit="%", baseline=0.0, ref=e.ref)]
    if low and peers:
        usual = sorted(peers)[len(peers) // 2]
        proof.append(evidence(f"its clock goes down to {low:.0f} MHz", value=low, unit="MHz", baseline=usual))
    if w.number(e, "celsius"):
        proof.append(evidence(f"it is {w.number(e, 'celsius'):.0f} C warm", value=w.number(e, "celsius"), unit="C"))
    needs = () if e.rank >= 0 else ("which rank ran on that device: NCCL_DEBUG=INFO or the launcher's list",)
    return cause(C.THERMAL_THROTTLE, 0.9, proof, device=where, host=e.host, rank=e.rank, needs=needs)
