"""Shapes of the API's answers, for OpenAPI. Times are RFC 3339 in UTC; durations say their unit."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

T = TypeVar("T")


class Shape(BaseModel):
    model_config = ConfigDict(extra="allow")


class Page(Shape, Generic[T]):
    items: list[T]
    next: str | None = None
    """Give it as ``cursor`` for the following page; null on the last one."""


class Job(Shape):
    id: str
    state: str
    attempt: int
    attempts: int
    world_size: int
    ranks_seen: int
    host_count: int
    first_seen: str
    last_seen: str
    step: int | None
    step_ms: float | None
    throughput: float | None
    loss: float | None
    goodput: float | None
    ettr: float | None
    open_incidents: int
    gpu_hours_lost: float
    verdict: str


class JobDetail(Job):
    attached: dict[str, str]
    mesh: dict[str, int]
    hosts: list[str]


class ClockShape(Shape):
    offset_ns: int
    error_ns: int


class Rank(Shape):
    rank: int
    local_rank: int
    host: str
    device: str
    pid: int
    mesh: dict[str, int]
    state: str
    step: int
    phase: str | None
    last_seen: str
    clock: ClockShape | None
    exit_code: int | None
    dropped: int


class Key(Shape):
    job: str
    algorithm: str
    key: str


class Clock(Shape):
    received_ns: int
    sent_ns: int


class Series(Shape):
    rank: int
    label: str
    step: list[int]
    time: list[str]
    value: list[float | None]


class MetricName(Shape):
    name: str
    unit: str
    ranks: int
    points: int


class Metrics(Shape):
    """With a name: ``unit`` and ``series``. Without: ``names``."""

    name: str | None = None
    unit: str | None = None
    series: list[Series] | None = None
    names: list[MetricName] | None = None


class HeatMap(Shape):
    metric: str
    unit: str
    ranks: list[int]
    steps: list[int]
    values: list[list[float | None]] | dict[str, str]
    pooled_by: str


class StepRow(Shape):
    step: int
    start: str
    duration_ms: float | None
    slowest_rank: int | None
    wait_ms: float | None
    phases: dict[str, float | None]


class CollectiveRow(Shape):
    group: str
    sequence: int
    op: str
    step: int
    bytes: int
    members: int
    last_rank: int | None
    skew_ms: float | None
    transfer_ms: float | None
    bus_bandwidth: float | None
    """GB/s (10^9 bytes a second)."""


class Event(Shape):
    rank: int
    name: str
    step: int
    time: str
    severity: int
    body: str
    host: str
    attributes: dict[str, str]


class Result(Shape):
    columns: list[str]
    rows: list[list[Any]]
    truncated: bool


class Problem(Shape):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str | None = None
