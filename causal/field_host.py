"""Host, network and launch rules over log facts. Each rule hands back causes or nothing."""

from __future__ import annotations

from collections import Counter, defaultdict

from lanterne.causal import words as w
from lanterne.causal.facts import FactEvent
from lanterne.causal.words import Words, cause, evidence, line
from lanterne.nouns import Cause
from lanterne.nouns import CauseCategory as C

MEMLOCK_KBYTES_MIN = 1 << 20
CPU_BUSY_CORES = 64
LOCAL_INTERFACES = ("lo", "docker", "virbr", "veth", "br-", "cni", "flannel")


def launch(words: Words) -> list[Cause]:
    """Two ranks on one device, versions and environments that differ between ranks, impossible layouts."""
    out = []
    for e in words.said("duplicate_gpu")[:1]:
        a, b, where = int(w.number(e, "rank_a")), int(w.number(e, "rank_b")), str(e.attributes.get("device"))
        says = evidence(f"ranks {a} and {b} both use device {where}", ref=e.ref)
        do = "print (host, local rank, CUDA_VISIBLE_DEVICES) per rank; let the launcher set the device from LOCAL_RANK"
        out.append(cause(C.ENV_MISMATCH, 0.92, [says, line(e)], rank=b, device=where, do=do))
        out.append(cause(C.DEVICE_MISASSIGNED, 0.85, [says], rank=b, device=where, do=do))
    said = words.said("version_mismatch")[:1]
    out += [cause(C.VERSION_MISMATCH, 0.88, [line(e)], rank=e.rank, host=e.host) for e in said]
    out += _differs(words, "software_version", "software", "version", C.VERSION_MISMATCH) if not out else []
    out += _differs(words, "env_var", "variable", "setting", C.ENV_MISMATCH) if not out else []
    out += [cause(C.PARALLEL_CONFIG_INVALID, 0.9, [line(e)]) for e in words.said("parallel_invalid")[:1]]
    for e in words.said("invalid_device")[:1]:
        out.append(
            cause(
                C.ENV_MISMATCH,
                0.8,
                [line(e)],
                rank=e.rank,
                host=e.host,
                do="more local ranks than visible devices: print CUDA_VISIBLE_DEVICES per rank",
            )
        )
    return out


def _differs(words: Words, event: str, key: str, value: str, category: C) -> list[Cause]:
    """One setting with different values on ranks or hosts that should agree."""
    seen: dict[str, dict[str, FactEvent]] = defaultdict(dict)
    owners: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for e in words.said(event):
        name, has = str(e.attributes.get(key, "")), str(e.attributes.get(value, ""))
        if name in {"CUDA_VISIBLE_DEVICES", "MASTER_ADDR"} or name.startswith("NCCL_DEBUG"):
            continue
        owner = e.host or (f"rank {e.rank}" if e.rank >= 0 else e.ref.rpartition(":")[0])
        seen[name].setdefault(has, e)
        owners[name][has].add(owner)
    for name, values in seen.items():
        if len(values) < 2 or any(a & b for x, a in owners[name].items() for y, b in owners[name].items() if x != y):
            continue
        ordered = Counter({v: len(o) for v, o in owners[name].items()}).most_common()
        odd = values[ordered[-1][0]]
        tie = ordered[0][1] == ordered[-1][1]
        says = evidence(
            f"{name} is {ordered[-1][0]} on {', '.join(sorted(owners[name][ordered[-1][0]])[:4])} and "
            f"{ordered[0][0]} elsewhere",
            ref=odd.ref,
        )
        return [
            cause(
                category,
                0.8 if not tie else 0.7,
                [says],
                rank=None if tie else odd.rank,
                host=None if tie else odd.host,
                parameter=name,
            )
        ]
    return []


def network(words: Words) -> list[Cause]:
    """Fabric faults during a run, and wrong interfaces, names and transports at its start."""
    out = []
    errors = words.said("ib_error")
    downs = list(words.said("link_down"))
    started = bool(len(words.facts.steps)) or any(w.number(e, "sequence") > 1 for e in words.said("collective_timeout"))
    gid = words.said("bad_gid", "no_interface")
    if gid and not started:
        out.append(cause(C.INTERFACE_MISCONFIGURED, 0.85, map(line, gid[:2]), rank=gid[0].rank, host=gid[0].host))
    elif errors or downs:
        peers = Counter(str(e.attributes.get("peer", "")) for e in errors)
        peer = peers.most_common(1)[0][0] if peers else ""
        first = (downs or errors)[0]
        proof = [line(e) for e in (*errors[:2], *downs[:2], *words.said("port_counter")[:2])]
        if peer:
            proof.insert(
                0,
                evidence(
                    f"{len(errors)} completions with error {int(w.number(errors[0], 'error'))}, most of them from "
                    f"peer {peer}: retries ran out",
                    value=float(len(errors)),
                    unit="errors",
                    ref=errors[0].ref,
                ),
            )
        host = downs[0].host if downs and downs[0].host else None
        one = {e.host for e in (*errors, *downs) if e.host}
        out.append(
            cause(
                C.NETWORK_FAILURE,
                0.88 if downs or len(errors) > 1 else 0.8,
                proof,
                host=host or (one.pop() if len(one) == 1 else None),
                rank=first.rank if len({e.rank for e in errors}) == 1 else None,
                do="read the port counters (perfquery, ethtool -S) of both ends of that link",
                needs=() if downs or words.said("port_counter") else ("port counters of both ends",),
            )
        )
    elif words.said("port_counter"):
        out.append(
            cause(
                C.NETWORK_FAILURE,
                0.7,
                map(line, words.said("port_counter")[:3]),
                host=words.said("port_counter")[0].host,
                needs=("the same counters some minutes later: only growth counts",),
            )
        )
    return out or _bootstrap(words) or transport(words) or rendezvous(words)


def _bootstrap(words: Words) -> list[Cause]:
    """Several hosts, and NCCL's bootstrap on an interface that does not leave the host."""
    rows = words.said("bootstrap_interface")
    inner = [e for e in rows if str(e.attributes.get("interface", "")).startswith(LOCAL_INTERFACES)]
    if not inner or len({e.host for e in rows if e.host}) < 2:
        return []
    names = {str(e.attributes["interface"]) for e in inner}
    hosts = {e.host for e in inner}
    says = (
        f"bootstrap uses {', '.join(sorted(names))}, which does not leave its host, on {', '.join(sorted(hosts)[:4])}"
    )
    do = "set NCCL_SOCKET_IFNAME (and GLOO_SOCKET_IFNAME) to the interface that the hosts share"
    one = hosts.pop() if len(hosts) == 1 else None
    proof = [evidence(says, ref=inner[0].ref), *map(line, inner[:2])]
    return [cause(C.INTERFACE_MISCONFIGURED, 0.88, proof, host=one, do=do)]


def transport(words: Words) -> list[Cause]:
    """A silent fall-back to TCP: the chosen transport per rank, at init."""
    chosen: dict[str, list[FactEvent]] = defaultdict(list)
    for e in words.said("transport"):
        name = str(e.attributes.get("network", "")).lower()
        chosen["socket" if name == "socket" else "fast"].append(e)
    via = [
        e for e in words.said("channel_transport") if str(e.attributes.get("via", "")).lower().startswith("net/socket")
    ]
    sockets = chosen["socket"]
    if not sockets and not via:
        return []
    hosts = {e.host for e in words.facts.events if e.host} | {p.host for p in words.facts.places.values() if p.host}
    slow = [
        e
        for e in words.said("bandwidth")
        if w.number(e, "gbps") > 0 and w.number(e, "baseline") > 1.4 * w.number(e, "gbps")
    ]
    absent = words.said("no_ib_device")
    broken = [e for e in absent if "failed" in e.attributes]
    mixed = bool(chosen["fast"]) and bool(
        {e.rank for e in sockets} - {e.rank for e in chosen["fast"]}
        or {e.host for e in sockets} - {e.host for e in chosen["fast"]}
    )
    if not (via or mixed or slow or broken or len(hosts) > 1):
        return []
    first = (via or sockets)[0]
    odd = {e.host for e in sockets if e.host} - {e.host for e in chosen["fast"]}
    proof = [
        evidence(f"transport is NET/Socket, not NET/IB: {w.quote(first)}", ref=first.ref),
        *map(line, (*(broken or absent)[:1], *slow[:2])),
    ]
    ranks = {e.rank for e in sockets if e.rank >= 0} - {e.rank for e in chosen["fast"]}
    one_host = odd.pop() if mixed and len(odd) == 1 else None
    one_rank = ranks.pop() if mixed and len(ranks) == 1 else None
    return [
        cause(
            C.INTERFACE_MISCONFIGURED,
            0.85 if via or mixed or slow or absent else 0.6,
            proof,
            host=one_host,
            rank=one_rank,
            do="before blaming compute: make NCCL find the IB devices (driver, container devices, NCCL_IB_HCA, plugin)",
        )
    ]


def rendezvous(words: Words) -> list[Cause]:
    """Nobody reaches step 0: names, addresses, interfaces."""
    rows = words.said("rendezvous_failed")
    failed = [
        e
        for e in words.said("connect_failed")
        if "refused" in w.text(e) or "no route" in w.text(e) or "timed out" in w.text(e)
    ]
    inits = words.said("no_interface", "bad_gid")
    trained = bool(len(words.facts.steps)) or words.said("collective_timeout", "collective_progress")
    if trained or not (rows or inits or failed):
        return []
    if words.said("terminated"):
        return []
    proof = [line(e) for e in (*rows[:3], *inits[:2], *failed[:2])]
    ends = {str(e.attributes.get("endpoint", "")) for e in rows if e.attributes.get("endpoint")}
    if ends:
        proof.insert(
            0,
            evidence(
                f"ranks could not reach the master at {', '.join(sorted(ends)[:3])}; no step was made", ref=rows[0].ref
            ),
        )
    named = bool(inits) or any(
        x in w.text(e)
        for e in rows
        for x in ("client socket", "name or service", "gai error", "resolution", "rendezvousconnection")
    )
    return [
        cause(
            C.INTERFACE_MISCONFIGURED,
            0.82 if named else 0.6,
            proof,
            host=(inits or [rows[0] if rows else failed[0]])[0].host if inits else None,
            do="resolve the master's name on every node and see that it is an address of the node that serves",
        )
    ]


def host(words: Words) -> list[Cause]:
    """Host set-up: locked memory, fabric manager; host load: too many threads."""
    out = []
    locked = [
        e
        for e in words.said("memlock_limit")
        if "cannot allocate" in w.text(e) or 0 < w.number(e, "kbytes") < MEMLOCK_KBYTES_MIN
    ]
    if locked:
        stated = next((e for e in locked if w.number(e, "kbytes")), None)
        limit = w.number(stated, "kbytes") / (1024 if "bytes" in stated.body.split() else 1) if stated else None
        proof = [line(e) for e in locked[:3]]
        if limit:
            proof.insert(
                0,
                evidence(f"locked-memory limit is {limit:.0f} kbytes where the rank runs", value=limit, unit="kbytes"),
            )
        out.append(
            cause(
                C.HOST_MISCONFIGURED,
                0.88,
                proof,
                rank=next((e.rank for e in locked if e.rank >= 0), -1),
                host=next((e.host for e in locked if e.host), None),
                do="print the limit from the rank itself (the shell's may differ) and raise memlock in the launcher",
            )
        )
    fabric = words.said("fabric_manager")
    if fabric:
        out.append(
            cause(
                C.HOST_MISCONFIGURED,
                0.88,
                map(line, fabric[:2]),
                host=fabric[0].host,
                rank=fabric[0].rank,
                do="start nvidia-fabricmanager in the driver's version, then check nvidia-smi topo -m",
            )
        )
    hung_experiment = words.said("p2p_experiment")
    if not out and hung_experiment:
        found = first_collective(words, 1)
        out += [found] if found is not None else []
    return out or _contention(words)


def _contention(words: Words) -> list[Cause]:
    count = max((w.number(e, "count") for e in words.said("cpu_count")), default=0.0)
    load = max((w.number(e, "load1") for e in words.said("load_average")), default=0.0)
    busy = max(
        (max(w.number(e, "cores"), w.number(e, "runqueue"), w.number(e, "threads")) for e in words.said("cpu_busy")),
        default=0.0,
    )
    unset = any("not set" in w.text(e) or "unset" in w.text(e) for e in words.said("cpu_busy"))
    if (
        (count and max(load, busy) > 1.5 * count)
        or (not count and max(load, busy) >= CPU_BUSY_CORES)
        or (unset and max(load, busy) > 0)
    ):
        rows = words.said("load_average", "cpu_busy")
        says = evidence(
            f"{max(load, busy):.0f} threads want to run" + (f" on {count:.0f} cores" if count else ""),
            value=max(load, busy),
            unit="threads",
            baseline=count or None,
            ref=rows[0].ref,
        )
        return [
            cause(
                C.HOST_CONTENTION,
                0.8,
                [says, *map(line, rows[:2])],
                host=rows[0].host,
                do="set OMP_NUM_THREADS in the launcher to cores / local ranks",
            )
        ]
    return []


def first_collective(words: Words, sequence: int) -> Cause | None:
    """A deadlock of the very first collective with every rank in it: peer-to-peer through a PCIe switch."""
    if sequence > 1 and not words.said("p2p_experiment"):
        return None
    cures = [
        e
        for e in words.said("p2p_experiment")
        if str(e.attributes.get("setting")) == "1"
        and not str(e.attributes.get("outcome", "")).lower().startswith(("hang", "fail", "dead"))
    ]
    variables = {str(e.attributes.get("variable")).removeprefix("NCCL_") for e in cures}
    pair = words.said("gpu_pair")
    acs = words.said("acs_iommu")
    p2p = [e for e in words.said("channel_transport") if str(e.attributes.get("via", "")).upper().startswith("P2P")]
    rows = [
        *cures[:2],
        *pair[:1],
        *acs[:1],
        *p2p[:1],
        *[e for e in words.said("gpu_utilization") if w.number(e, "percent") >= 99][:1],
    ]
    proof = [evidence("the first collective hangs with every rank in it"), *map(line, rows)]
    if (pair or "SHM_DISABLE" in variables) and not acs:
        where = str(pair[0].attributes.get("a", "")) + "," + str(pair[0].attributes.get("b", "")) if pair else None
        return cause(
            C.UNKNOWN,
            0.55,
            proof,
            device=where,
            needs=(
                "which of card, bridge or slot: swap one card of the pair and repeat",
                "a two-GPU bandwidth test of that pair and of each with another card",
            ),
            do="the pair is isolated, the part is not: test each card of it with another partner",
        )
    if acs or "P2P_DISABLE" in variables:
        return cause(
            C.HOST_MISCONFIGURED,
            0.85,
            proof,
            host=next((e.host for e in rows if e.host), None),
            do="run a two-GPU bandwidth test; switch off ACS/IOMMU redirection; NCCL_P2P_DISABLE=1 is a stop-gap only",
        )
    if p2p:
        return cause(
            C.HOST_MISCONFIGURED,
            0.6,
            proof,
            do="run a two-GPU bandwidth test and look for ACS (lspci -vvv) and IOMMU on that host",
            needs=("lspci -vvv | grep ACSCtl", "one run with NCCL_P2P_DISABLE=1"),
        )
    return None
