"""A small stand-in for the REST API with the shapes of docs/seams.md: for rendering pages without a store.

Whole-system tests use the real server (tests/e2e).
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
from fastapi import FastAPI
from fastapi.responses import JSONResponse

EVIL = '<img src=x onerror="window.pwned=1"><b>bold</b>'
LATE = 3


def job(name: str = "llama", **more: Any) -> dict[str, Any]:
    return {
        "id": name, "state": "running", "attempt": 0, "attempts": 1, "world_size": 8, "ranks_seen": 8, "host_count": 2,
        "first_seen": "2026-11-29T12:00:00Z", "last_seen": "2026-11-29T12:09:00Z", "step": 400, "step_ms": 131.0,
        "throughput": 244.2, "loss": 2.31, "goodput": 0.71, "ettr": 0.7, "open_incidents": 1, "gpu_hours_lost": 0.21,
        "verdict": f"rank {LATE} computes slowly {EVIL}", "attached": {}, "mesh": {"dp_replicate": 8},
        "hosts": ["a", "b"],
    } | more  # fmt: skip


def incident(key: str = "inc-1", **more: Any) -> dict[str, Any]:
    cause = {
        "category": "slow_compute", "subject": {"rank": LATE, "host": "node-1"}, "since_step": 118, "confidence": 0.93,
        "cost": {"slowdown": 1.41, "gpu_hours": 0.21, "saving_ms_per_step": 38.0},
        "evidence": [
            {"says": f"its own work takes 120 ms, its peers' 82 ms {EVIL}", "value": 120.0, "unit": "ms",
             "baseline": 82.0, "ref": "busy_ms"},
            {"says": "last to arrive in 275 of 282 all_reduce", "value": 0.975, "unit": "1",
             "baseline": 0.125, "ref": "lateness"},
        ],
        "remedy": {"action": "profile", "says": "Profile rank 3, then look at its host", "parameters": {"steps": 3}},
        "needs": [],
    }  # fmt: skip
    return {
        "id": key, "job": "llama", "attempt": 0, "kind": "straggler", "severity": "P1", "status": "diagnosed",
        "opened_step": 124, "opened_at": "2026-11-29T12:04:11Z",
        "ledger": {"onset": "2026-11-29T12:04:10.500Z", "detected": "2026-11-29T12:04:11Z",
                   "diagnosed": "2026-11-29T12:04:12Z"},
        "causes": [cause, cause | {"category": "slow_link", "confidence": 0.04}],
        "symptoms": [{"kind": "wait", "subject": {"rank": 0}, "says": "waits 38 ms a step for rank 3"}],
        "decision": {"policy": "slow-rank", "chose": "hold", "says": "confidence is below 0.95"},
        "commands": [
            {"id": "cmd-1", "action": "scale_lr", "parameters": {"factor": 0.5}, "state": "proposed", "reason": EVIL,
             "results": []}
        ],
        "notes": [{"note": EVIL, "at": "2026-11-29T12:05:00Z"}],
    } | more  # fmt: skip


GRAPH = {
    "nodes": [
        {"id": "c", "label": f"rank 3 computes slowly {EVIL}", "role": "cause", "rank": 3, "metric": "busy_ms"},
        {"id": "l", "label": "rank 3 enters all_reduce late", "role": "link", "rank": 3, "metric": "lateness_ms"},
        {"id": "w", "label": "7 ranks wait", "role": "effect", "rank": None, "metric": "wait_ms"},
        {"id": "s", "label": "step time +38 ms", "role": "effect", "rank": None, "metric": "step_ms"},
        {"id": "n", "label": "slow link?", "role": "ruled_out", "rank": None, "metric": "transfer_ms"},
    ],
    "edges": [
        {"source": "c", "target": "l", "kind": "causes", "weight": 0.9, "says": "moves with it", "lag": 0,
         "statistic": 0.97, "p_value": 1e-9, "samples": 282, "refused": None},
        {"source": "l", "target": "w", "kind": "waits", "weight": 0.9, "says": "waits for it", "lag": 0,
         "statistic": 0.96, "p_value": 1e-9, "samples": 282, "refused": None},
        {"source": "w", "target": "s", "kind": "adds", "weight": 0.9, "says": "adds to it", "lag": 0,
         "statistic": 0.99, "p_value": 1e-9, "samples": 282, "refused": None},
        {"source": "n", "target": "w", "kind": "causes", "weight": 0.1, "says": "transfer time unchanged", "lag": 0,
         "statistic": 0.02, "p_value": 0.7, "samples": 282, "refused": "statistic"},
    ],
}  # fmt: skip


def metric(name: str, aggregate: str = "median") -> dict[str, Any]:
    ranks = range(4) if aggregate == "none" else [-1]
    steps = list(range(0, 400, 2))
    return {
        "name": name,
        "unit": "ms" if name == "step_ms" else "1",
        "series": [
            {
                "rank": r,
                "label": "",
                "step": steps,
                "time": [f"2026-11-29T12:{s // 60:02d}:{s % 60:02d}Z" for s in steps],
                "value": [None if s == 40 else 2.0 + math.exp(-s / 80) + 0.1 * math.sin(s + r) for s in steps],
            }
            for r in ranks
        ],
    }


def heatmap(name: str = "lateness_ms", ranks: int = 8, steps: int = 200) -> dict[str, Any]:
    values = [
        [None if (r, s) == (1, 7) else 40.0 * (r == LATE and s > 59) + (r * 7 + s * 3) % 5 for s in range(steps)]
        for r in range(ranks)
    ]
    return {
        "metric": name, "unit": "ms", "ranks": list(range(ranks)), "steps": list(range(0, 2 * steps, 2)),
        "values": values, "pooled_by": "max",
    }  # fmt: skip


def step(n: int = 200, ranks: int = 8) -> dict[str, Any]:
    def lane(r: int) -> dict[str, Any]:
        busy = 120.0 if r == LATE else 82.0
        spans = [
            {"kind": "training.phase", "name": "forward", "start_ms": 1.0, "duration_ms": busy / 3},
            {"kind": "training.phase", "name": "backward", "start_ms": 1.0 + busy / 3, "duration_ms": 125 - busy / 3},
            {"kind": "training.collective", "name": "all_reduce", "start_ms": busy, "duration_ms": 126.0 - busy,
             "group": "0-7", "sequence": n, "bytes": 1 << 20, "waited_for": None if r == LATE else LATE,
             "wait_ms": 120.0 - busy},
        ]  # fmt: skip
        return {"rank": r, "error_ns": 41_000, "spans": spans}

    path = [
        {"rank": LATE, "name": "backward", "start_ms": 1.0, "duration_ms": 119.0},
        {"rank": LATE, "name": "all_reduce", "start_ms": 120.0, "duration_ms": 6.0},
    ]
    repairs = {"step_ms": 126.0, "all_normal_ms": 88.0, "stages": [], "phases": []}
    repairs["ranks"] = [{"rank": LATE, "step_ms": 88.0, "saving_ms": 38.0}]
    waited = [{"rank": r, "waited_for": LATE, "wait_ms": 38.0, "calls": 1} for r in range(ranks) if r != LATE]
    return {
        "waits": waited,
        "what_if": repairs,
        "truncated": False,
        "step": n,
        "job_start_ns": 0,
        "lanes": [lane(r) for r in range(ranks)],
        "critical_path": path,
    }


def rank(r: int) -> dict[str, Any]:
    return {
        "rank": r, "local_rank": r % 4, "host": EVIL if r == 5 else "node-0", "device": "cpu", "pid": 100 + r,
        "mesh": {"dp_replicate": r}, "state": "running", "step": 400, "phase": "backward",
        "last_seen": "2026-11-29T12:09:00Z", "clock": {"offset_ns": 0, "error_ns": 41_000}, "exit_code": None,
        "dropped": 0,
    }  # fmt: skip


def _more(app: FastAPI) -> None:
    @app.get("/api/v1/jobs/{name}/events")
    def events(name: str) -> Any:
        one = {
            "rank": 3,
            "name": "stall",
            "step": 7,
            "time": "2026-11-29T12:00:00Z",
            "body": EVIL,
            "attributes": {"a": EVIL},
        }
        return {"items": [one], "next": None}

    @app.get("/api/v1/jobs/{name}/communication")
    def communication(name: str) -> Any:
        group = {"group": "0-7", "op": "all_reduce", "alpha_us": 12.0, "beta_gbps": 4.0, "samples": 20}
        return {"groups": [group | {"best_bus_gbps": 5.0, "last_bus_gbps": 2.0}]}

    @app.get("/api/v1/jobs/{name}/collectives")
    def collectives(name: str) -> Any:
        call = {"group": "0-7", "sequence": 1, "op": "all_reduce", "step": 1, "bytes": 1 << 20, "members": 8}
        return {
            "items": [call | {"last_rank": LATE, "skew_ms": 38.0, "transfer_ms": 6.0, "bus_bandwidth": 1.0}],
            "next": None,
        }


def _levels(app: FastAPI) -> None:
    @app.get("/api/v1/alerts")
    def alerts() -> Any:
        target = {"format": "slack", "host": EVIL, "severities": ["P0"]}
        return {"targets": [target], "sent": 2, "failed": 0, "silenced": 1, "dropped": 0, "errors": [EVIL]}

    @app.get("/api/v1/jobs/{name}/sla")
    def sla(name: str) -> Any:
        objective = {
            "name": "ettr",
            "level": None,
            "target": 0.95,
            "value": 0.7,
            "error_budget": 0.0,
            "burn_rate": 6.0,
            "met": False,
        }
        good = {"productive_s": 700.0, "badput": {"straggler": 300.0}}
        return {"objectives": [objective], "goodput": good, "mtbf_s": None, "mttr_s": 8.3, "ettr": 0.7}


def _administration(app: FastAPI) -> None:
    @app.get("/api/v1/policies")
    def policies() -> Any:
        policy = {
            "name": "lr",
            "version": 1,
            "enabled": True,
            "mode": "auto",
            "says": EVIL,
            "steps": [{"action": "set_lr"}],
        }
        return {
            "items": [
                policy | {"budget": 2, "budget_s": 3600.0, "state": {"used": 0, "breaker": "closed", "last": None}}
            ]
        }

    @app.get("/api/v1/policies/{name}/replay")
    def replay(name: str) -> Any:
        row = {"incident": "inc-1", "job": "llama", "category": "lr_misconfigured", "policy": name, "choice": "act"}
        return {"items": [row | {"why": EVIL}]}

    @app.get("/api/v1/decisions")
    def decisions() -> Any:
        row = {"incident": "inc-1", "job": "llama", "policy": "lr", "chose": "hold", "says": EVIL}
        return {"items": [row | {"at": "2026-11-29T12:04:13Z"}], "next": None}

    @app.get("/api/v1/jobs/{name}/breakers")
    def breakers(name: str) -> Any:
        row = {"group": "0-7", "state": "open", "since_step": 12, "opened_times": 1, "why": EVIL}
        return {"items": [row], "changes": [], "rules": []}

    @app.get("/api/v1/silences")
    def silences() -> Any:
        row = {"id": 4, "job": "llama", "fingerprint": EVIL, "until": "2026-11-29T16:00:00Z", "author": "local"}
        return {"items": [row | {"says": EVIL}], "next": None}

    @app.get("/api/v1/jobs/{name}/waits")
    def waits(name: str) -> Any:
        cells = np.full((8, 8), np.nan)
        cells[:, LATE] = 38.0
        cells[LATE, LATE] = np.nan
        pairs = [{"rank": 0, "for": LATE, "ms": 38.0, "calls": 100}]
        data = base64.b64encode(cells.astype("<f4").tobytes()).decode()
        found = {"dtype": "f4", "bdata": data, "shape": "8,8"}
        return {"unit": "ms", "steps": [301, 400], "ranks": list(range(8)), "values": found, "pairs": pairs}

    @app.get("/api/v1/jobs/{name}/steps")
    def steps(name: str, from_step: int = 0) -> Any:
        slow = from_step >= 118
        row = {"duration_ms": 170.0 if slow else 130.0, "phases": {"forward": 60.0 if slow else 40.0, "backward": 60.0}}
        return {"items": [row | {"step": n} for n in range(from_step, from_step + 20)], "next": None}

    @app.get("/api/v1/tokens")
    def tokens() -> Any:
        return {"items": [{"id": "ab", "scopes": ["read"], "label": EVIL}], "next": None}


def create(jobs: int = 3) -> FastAPI:
    """The stand-in; unknown jobs and incidents are 404 problems."""
    app = FastAPI()
    found = {f"{'llama' if n == 0 else f'job-{n}'}": job("llama" if n == 0 else f"job-{n}") for n in range(jobs)}

    def missing(what: str) -> JSONResponse:
        return JSONResponse({"title": "Not Found", "status": 404, "detail": f"there is no {what}"}, 404)

    @app.get("/api/v1/jobs")
    def list_jobs() -> Any:
        return {"items": list(found.values()), "next": None}

    @app.get("/api/v1/jobs/{name}")
    def one_job(name: str) -> Any:
        return found.get(name) or missing(f"job {name}")

    @app.get("/api/v1/jobs/{name}/incidents")
    @app.get("/api/v1/incidents")
    def incidents(name: str = "") -> Any:
        return {"items": [incident()] if jobs else [], "next": None}

    @app.get("/api/v1/jobs/{name}/metrics")
    def metrics(name: str, aggregate: str = "none") -> Any:
        return metric("training.loss", aggregate) | {
            "names": [{"name": "training.loss", "unit": "1", "ranks": 8, "points": 3}]
        }

    @app.get("/api/v1/jobs/{name}/heatmap")
    def heat(name: str, metric: str) -> Any:
        return heatmap(metric)

    @app.get("/api/v1/jobs/{name}/ranks")
    def ranks(name: str) -> Any:
        return {"items": [rank(r) for r in range(8)], "next": None}

    @app.get("/api/v1/jobs/{name}/steps/{n}")
    def one_step(name: str, n: int) -> Any:
        return step(n)

    @app.get("/api/v1/incidents/{key}")
    def one_incident(key: str) -> Any:
        return incident() if key == "inc-1" else missing(f"incident {key}")

    @app.get("/api/v1/incidents/{key}/graph")
    def graph(key: str) -> Any:
        return GRAPH

    for part in (_more, _levels, _administration):
        part(app)
    return app
