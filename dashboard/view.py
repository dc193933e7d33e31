"""What the page shows, as it stands in the URL: every view can be shared by its address."""

from __future__ import annotations

from dataclasses import dataclass, fields
from urllib.parse import parse_qsl, quote, urlencode

from lanterne import limits

HEAT_METRICS = ("lateness_ms", "busy_ms", "wait_ms", "step_ms", "data_wait_ms", "forward_ms", "backward_ms")
ORDERS = ("rank", "host", "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Windows are inclusive step and rank numbers, None = all. ``smooth`` is 0 to 0.99 as in TensorBoard."""

    from_step: int | None = None
    to_step: int | None = None
    from_rank: int | None = None
    to_rank: int | None = None
    smooth: float = 0.0
    log: bool = False
    axis: str = "step"
    heat: str = "lateness_ms"
    series: str = "median"
    find: str = ""
    state: str = ""
    sort: str = ""
    metric: str = ""
    group: str = ""
    jobs: str = ""

    def window(self) -> dict[str, int]:
        """The step window as query parameters of the API."""
        found = {"from_step": self.from_step, "to_step": self.to_step}
        return {k: v for k, v in found.items() if v is not None}


def _integer(text: str, most: int) -> int | None:
    try:
        return min(max(int(float(text)), 0), most)
    except (ValueError, OverflowError):
        return None


def _share(text: str) -> float:
    try:
        return min(max(float(text), 0.0), 0.99)
    except ValueError:
        return 0.0


def parse(search: str | None) -> View:
    """The view that a query string asks for; what it does not understand is left at its default."""
    found = dict(parse_qsl((search or "").lstrip("?"), max_num_fields=64)) if search else {}
    heat, axis, series = found.get("heat", ""), found.get("axis", ""), found.get("series", "")
    return View(
        from_step=_integer(found.get("from", ""), limits.STEP_MAX),
        to_step=_integer(found.get("to", ""), limits.STEP_MAX),
        from_rank=_integer(found.get("from_rank", ""), limits.RANKS_MAX),
        to_rank=_integer(found.get("to_rank", ""), limits.RANKS_MAX),
        smooth=_share(found.get("smooth", "0")),
        log=found.get("log") == "1",
        axis=axis if axis in {"step", "time"} else "step",
        heat=heat if heat in HEAT_METRICS else "lateness_ms",
        series=series if series in {"median", "max", "ranks"} else "median",
        find=found.get("find", "")[:128],
        state=found.get("state", "")[:16],
        sort=found.get("sort", "")[:32],
        metric=found.get("metric", "")[:128],
        group=found.get("group", "")[:256],
        jobs=found.get("jobs", "")[:1024],
    )


def job_url(job: str, *rest: object) -> str:
    """The address of a job's page or of one below it; ids are quoted, also their slashes."""
    return "/".join(["/jobs", quote(job, safe=""), *(quote(str(part), safe="") for part in rest)])


def incident_url(incident: str) -> str:
    """The address of an incident's page."""
    return f"/incidents/{quote(incident, safe='')}"


_NAMES = {"from_step": "from", "to_step": "to"}
_DEFAULT = View()


def link(pathname: str, view: View) -> str:
    """The address of a page with a view; what is at its default is left out."""
    found = {
        _NAMES.get(f.name, f.name): value
        for f in fields(View)
        if (value := getattr(view, f.name)) != getattr(_DEFAULT, f.name)
    }
    found = {k: "1" if v is True else v for k, v in found.items()}
    return f"{pathname}?{urlencode(found)}" if found else pathname
