"""The wire both ways, hostile bodies, and the public OTLP examples through a real server."""

from __future__ import annotations

import gzip
import json
import math
import random
import struct
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import zstandard
from backend_rows import PROTOBUF, bodies, events, identity, serving
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from otlp_bodies import body, damaged

from lanterne import limits, wire
from lanterne.backend.ingest.body import BodyRefused, inflate
from lanterne.backend.ingest.decode import SIGNALS, decode
from lanterne.nouns import Event, Identity, Kind

EXAMPLES = Path(__file__).parents[2] / "data" / "otlp"
JSON = {"content-type": "application/json"}
QUIET = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
counts = st.integers(0, 2**62)
own = st.dictionaries(
    words.map(lambda w: f"user.{w}"), st.one_of(words, st.booleans(), st.integers(-(2**63), 2**63 - 1)), max_size=4
)
made = st.builds(
    Event,
    kind=st.sampled_from(Kind),
    name=st.text("abcdefgh._", min_size=1, max_size=12),
    unix_ns=counts,
    duration_ns=st.integers(0, 2**40),
    monotonic_ns=counts,
    step=st.integers(-1, 2**53),
    sequence=counts,
    lamport=counts,
    value=st.floats(allow_nan=False),
    body=words,
    attributes=own,
)
who = st.builds(
    Identity,
    job=st.from_regex(limits.ID_PATTERN.replace("$", r"\Z"), fullmatch=True),
    attempt=st.integers(0, 2**31 - 1),
    rank=st.integers(0, 7),
    world_size=st.just(8),
    host=words,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("wire")) as client:
        yield client


def ask(client: httpx.Client, sql: str, job: str | None = None) -> list[list[Any]]:
    answer = client.post("/api/v1/query", json={"sql": sql, "job": job})
    assert answer.status_code == 200, answer.text
    rows: list[list[Any]] = answer.json()["rows"]
    return rows


def one(**more: Any) -> Event:
    return Event(**{"lamport": 1, "monotonic_ns": 1, **more})


def told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# --- both ways ---


@QUIET
@given(who, st.lists(made, max_size=12))
def test_what_is_encoded_comes_back(identity: Identity, sent: list[Event]) -> None:
    encoded = wire.encode(identity, sent)
    for route, kinds in (("traces", None), ("metrics", Kind.METRIC), ("logs", Kind.EVENT)):
        request = getattr(encoded, route)
        of_it = [e for e in sent if (e.kind == kinds if kinds else e.kind not in (Kind.METRIC, Kind.EVENT))]
        assert (request is None) == (not of_it)
        if request is None:
            continue
        columns = SIGNALS[route].columns(SIGNALS[route].request().FromString(request.SerializeToString()))
        by_sequence = sorted(zip(*columns.values(), strict=True), key=lambda row: row[3])
        for row, event in zip(by_sequence, sorted(of_it, key=lambda e: e.sequence), strict=True):
            got = dict(zip(columns, row, strict=True))
            assert (got["job"], got["attempt"], got["rank"]) == (identity.job, identity.attempt, identity.rank)
            assert (got["sequence"], got["host"]) == (event.sequence, identity.host)
        assert sorted(columns["step"]) == sorted(e.step for e in of_it)
        assert sorted(columns["lamport"]) == sorted(e.lamport for e in of_it)
        assert sorted(columns["monotonic_ns"]) == sorted(e.monotonic_ns for e in of_it)
        assert sorted(columns["name"]) == sorted(e.name for e in of_it)
        texts = [sorted((k, told(v)) for k, v in e.attributes.items()) for e in of_it]
        assert sorted(sorted(a.items()) for a in columns["attributes"]) == sorted(texts)


def test_the_hot_attributes_become_columns() -> None:
    call = {wire.GROUP: "0-3", wire.GROUP_SEQUENCE: 9, wire.BYTES: 64, wire.DTYPE: "bfloat16", "user.note": "x"}
    event = one(kind=Kind.COLLECTIVE, name="all_gather", unix_ns=5, duration_ns=7, step=3, sequence=1, attributes=call)
    request = wire.encode(identity(2), [event]).traces
    assert request is not None
    columns = wire.decode_traces(request)
    got = {name: column[0] for name, column in columns.items()}
    assert (got["kind"], got["name"], got["start_ns"], got["end_ns"]) == ("training.collective", "all_gather", 5, 12)
    assert (got["group_name"], got["group_sequence"], got["bytes"], got["dtype"]) == ("0-3", 9, 64, "bfloat16")
    assert got["attributes"] == {"user.note": "x"}
    assert got["trace_id"] == wire.trace_id("demo", 0, 3)
    assert got["span_id"] == wire.span_id(2, 1)


# --- the public examples ---


@pytest.mark.parametrize(
    ("file", "route", "sql", "expected"),
    [
        (
            "trace.json", "traces",
            "SELECT kind, attributes['my.span.attr'], hex(trace_id), (end_ns - start_ns) // 1000000 FROM spans",
            [["I'm a server span", "some value", "5B8EFFF798038103D269B633813FC60C", 1000]],
        ),
        (
            "metrics.json", "metrics", "SELECT name, value FROM points ORDER BY name",
            [
                ["my.counter", 5.0], ["my.exponential.histogram.count", 3.0], ["my.exponential.histogram.max", 5.0],
                ["my.exponential.histogram.min", 0.0], ["my.exponential.histogram.sum", 10.0], ["my.gauge", 10.0],
                ["my.histogram.count", 2.0], ["my.histogram.max", 2.0], ["my.histogram.min", 0.0],
                ["my.histogram.sum", 2.0],
            ],
        ),
        (
            "logs.json", "logs",
            "SELECT body, severity, attributes['int.attribute'], attributes['array.attribute'],"
            " attributes['map.attribute'], attributes['boolean.attribute'] FROM logs WHERE severity = 10",
            [["Example log record", 10, "10", '["many", "values"]', '{"some.map.key": "some value"}', "true"]],
        ),
        (
            "events.json", "logs",
            "SELECT name, json_extract_string(body, '$.title'), attributes['event.attribute'] FROM logs"
            " WHERE name <> ''",
            [["browser.page_view", "Free Online GUID Generator", "some event attribute"]],
        ),
    ],
)  # fmt: skip
def test_public_examples_are_taken_and_can_be_asked(
    server: httpx.Client, file: str, route: str, sql: str, expected: list[list[Any]]
) -> None:
    answer = server.post(f"/v1/{route}", content=(EXAMPLES / file).read_bytes(), headers=JSON)
    assert (answer.status_code, answer.json()) == (200, {})
    assert ask(server, sql, "my.service") == expected
    assert "my.service" in [job["id"] for job in server.get("/api/v1/jobs").json()["items"]]


# --- hostile bodies ---


def refuses_or_admits(signal: str, body: bytes, *, is_json: bool = False) -> None:
    try:
        rows, says, status = decode(signal, body, is_json=is_json).batch.rows, "", 400
    except BodyRefused as error:
        rows, says, status = 0, str(error), error.status
    assert status in (400, 413)
    assert len(says) < 1_000
    assert rows <= len(body)


@QUIET
@given(st.sampled_from(sorted(SIGNALS)), st.binary(max_size=400))
@example("traces", b"\x0a" * 300)
@example("logs", b"\xff" * 20)
def test_10_any_bytes_raise_nothing_but_ours(signal: str, body: bytes) -> None:
    refuses_or_admits(signal, body)
    for encoding in ("gzip", "zstd"):
        with pytest.raises(BodyRefused):
            inflate(body, encoding)


@QUIET
@given(
    st.sampled_from(sorted(SIGNALS)),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), words),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(
                    ["resourceSpans", "resource", "attributes", "scopeSpans", "spans", "resourceMetrics",
                     "scopeMetrics", "metrics", "gauge", "dataPoints", "asInt", "asDouble",
                     "resourceLogs", "scopeLogs", "logRecords",
                     "key", "value", "stringValue", "intValue", "arrayValue", "values", "traceId", "timeUnixNano"]
                ), inner, max_size=4,
            ),
        ), max_leaves=30,
    ),
)  # fmt: skip
def test_10_any_json_raises_nothing_but_ours(signal: str, value: Any) -> None:
    refuses_or_admits(signal, json.dumps(value).encode(), is_json=True)


@QUIET
@given(st.sampled_from(["traces", "metrics", "logs"]), st.data())
def test_10_flipped_bytes_of_a_real_body(route: str, data: st.DataObject) -> None:
    body = bytearray(bodies(identity(), events(2, now_ns=10**18))[route])
    for _ in range(data.draw(st.integers(1, 6))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    refuses_or_admits(route, bytes(body[: data.draw(st.integers(0, len(body)))]))


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_9_bombs_are_refused_within_their_bound(encoding: str) -> None:
    pack = gzip.compress if encoding == "gzip" else zstandard.ZstdCompressor().compress
    bomb, bound = pack(bytes(64 << 20)), 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(BodyRefused) as refused:
            inflate(bomb, encoding, bound)
        assert tracemalloc.get_traced_memory()[1] < 3 * bound + len(bomb)
    finally:
        tracemalloc.stop()
    assert refused.value.status == 413


def test_9_deep_values_and_many_records() -> None:
    deep = '{"arrayValue":{"values":[' * 200 + '{"intValue":1}' + "]}}" * 170
    record = '{"attributes":[{"key":"k","value":%s}]}'
    body = '{"resourceLogs":[{"scopeLogs":[{"logRecords":[%s]}]}]}'
    with pytest.raises(BodyRefused) as refused:
        decode("logs", (body % (record % deep)).encode(), is_json=True)
    assert refused.value.status == 400
    shallow = '{"arrayValue":{"values":[' * 17 + '{"intValue":1}' + "]}}" * 17
    kept = decode("logs", (body % (record % shallow)).encode(), is_json=True)
    assert "…" in kept.batch.table.column("attributes").to_pylist()[0][0][1]
    empty = b"\x12\x00" * (limits.RECORDS_PER_BODY_MAX + 1)  # log_records of length 0
    scope = b"\x12" + varint(len(empty)) + empty
    with pytest.raises(BodyRefused) as refused:
        decode("logs", b"\x0a" + varint(len(scope)) + scope)
    assert refused.value.status == 413


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


# --- numbers and names ---


def test_11_numbers_out_of_bounds_are_refused_and_the_others_stored(server: httpx.Client) -> None:
    good = events(1)
    bad = [
        one(kind=Kind.METRIC, name="m", unix_ns=1, step=2**60, sequence=900),
        one(kind=Kind.METRIC, name="m", unix_ns=2**63, sequence=901),
        one(kind=Kind.METRIC, name="m", unix_ns=1, sequence=-7),
        one(kind=Kind.METRIC, name="m", unix_ns=1, sequence=902, attributes={wire.STEP: "three"}),
    ]
    body = bodies(identity(job="odd"), good + bad)["metrics"]
    answer = server.post("/v1/metrics", content=body, headers=PROTOBUF)
    assert answer.status_code == 200
    partial = ExportMetricsServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_data_points == len(bad)
    assert "lanterne.step" in partial.error_message
    assert ask(server, "SELECT name FROM points WHERE job = 'odd'") == [["training.loss"]]
    outside = bodies(identity(9, job="odd"), good)["metrics"]  # a rank outside of its world of four
    answer = server.post("/v1/metrics", content=outside, headers=PROTOBUF)
    partial = ExportMetricsServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_data_points == 1
    assert "rank 9" in partial.error_message


def test_11_nan_and_infinity(server: httpx.Client) -> None:
    values = [math.nan, math.inf, -math.inf, 1e308, 5e-324]
    found = [one(kind=Kind.METRIC, name="m", unix_ns=n + 1, step=n, sequence=n, value=v) for n, v in enumerate(values)]
    body = bodies(identity(job="nan"), found)["metrics"]
    assert server.post("/v1/metrics", content=body, headers=PROTOBUF).content == b""
    rows = ask(
        server, "SELECT step, isnan(value), isinf(value), value > 0 FROM points WHERE job = 'nan' "
        "ORDER BY step",
    )  # fmt: skip
    assert [r[1] for r in rows] == [True, False, False, False, False]
    assert [r[2] for r in rows][1:] == [True, True, False, False]
    assert [r[3] for r in rows][1:] == [True, False, True, True]
    answer = server.get("/api/v1/jobs/nan/metrics", params={"name": "m"})
    assert answer.status_code == 200
    shown = json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert shown["series"][0]["step"] == [0, 1, 2, 3, 4]


def test_11_many_keys_are_cut_and_many_names_refused(server: httpx.Client) -> None:
    many = {f"k{n}": "v" * 10_000 for n in range(300)}
    body = bodies(identity(job="keys"), [one(kind=Kind.EVENT, name="wide", unix_ns=1, sequence=1, attributes=many)])
    assert server.post("/v1/logs", content=body["logs"], headers=PROTOBUF).status_code == 200
    rows = ask(
        server, "SELECT cardinality(attributes), length(attributes['k0']), attributes['lanterne.cut'] FROM logs "
        "WHERE job = 'keys'",
    )  # fmt: skip
    assert rows[0][:2] == [limits.ATTRIBUTES_MAX, limits.ATTRIBUTE_VALUE_BYTES_MAX]
    assert int(rows[0][2]) > 200
    names = [
        one(kind=Kind.METRIC, name=f"m{n}", unix_ns=1, sequence=n) for n in range(limits.SERIES_NAMES_PER_JOB_MAX + 1)
    ]
    answer = server.post("/v1/metrics", content=bodies(identity(job="names"), names)["metrics"], headers=PROTOBUF)
    assert answer.status_code == 429
    assert "retry-after" in answer.headers
    assert ask(server, "SELECT count(*) FROM points WHERE job = 'names'") == [[0]]


def test_11_a_number_where_text_is_due_is_text() -> None:
    event = one(kind=Kind.METRIC, name="m", unix_ns=1, sequence=0, attributes={wire.LABEL: 7})
    request = wire.encode(identity(), [event]).metrics
    assert request is not None
    assert wire.decode_metrics(request)["label"] == ["7"]


@pytest.mark.parametrize(
    "job", ["../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%252e%252e%252f", "..%5c..%5c", "a%00b", "a\u202eb"]
)
def test_13_paths_in_ids_open_nothing(server: httpx.Client, job: str) -> None:
    for path in (f"/api/v1/jobs/{job}", f"/api/v1/jobs/{job}/export/spans", f"/api/v1/incidents/{job}"):
        answer = server.get(path)
        assert answer.status_code in (404, 422), (path, answer.status_code)
        assert "root:" not in answer.text
    body = bodies(identity(job=job), events(1))["traces"]
    assert server.post("/v1/traces", content=body, headers=PROTOBUF).status_code in (200, 400)
    assert ask(server, "SELECT count(*) FROM spans WHERE job LIKE '%passwd%' OR job LIKE '%..%'") == [[0]]


def test_span_ids_are_of_rank_and_sequence() -> None:
    assert struct.unpack(">iI", wire.span_id(-1, 2**33 + 5)) == (-1, 5)


# --- many hostile bodies at a server ---


def hostile(rng: random.Random) -> tuple[str, dict[str, str], bytes]:
    """A route, headers and a body of a sender that means no good, or whose memory is broken."""
    signal = rng.choice(sorted(SIGNALS))
    raw = rng.choice((lambda: body(signal, rng), lambda: damaged(body(signal, rng), rng), lambda: rng.randbytes(200)))()
    kind = rng.choice((PROTOBUF, PROTOBUF, PROTOBUF, JSON))
    if kind is JSON:
        raw = rng.choice((raw, b'{"resourceSpans":' + b"[" * rng.randrange(3_000), b'{"resourceLogs":[{"a":1e999}]}'))
    encoding = rng.choice(("", "", "gzip", "zstd", "br"))
    if encoding == "gzip":
        raw = gzip.compress(raw, 1)
    elif encoding == "zstd":
        raw = zstandard.ZstdCompressor().compress(raw)
    if encoding and rng.random() < 0.3:
        raw = damaged(raw, rng)
    return f"/v1/{signal}", {**kind, "content-encoding": encoding}, raw


def bombard(client: httpx.Client, rng: random.Random, count: int) -> Counter[int]:
    """How often each status came."""
    return Counter(client.post(p, content=c, headers=h).status_code for p, h, c in (hostile(rng) for _ in range(count)))


def test_10_hostile_bodies_give_no_error_of_the_server(server: httpx.Client) -> None:
    found = bombard(server, random.Random(5), 300)
    assert set(found) <= {200, 400, 413, 415, 429}, found
    assert min(found[200], found[400]) > 30, found
    assert server.get("/readyz").status_code == 200


@pytest.mark.heavy
@pytest.mark.timeout(7200)
def test_10_a_hundred_thousand_hostile_bodies_and_no_growth(server: httpx.Client) -> None:
    memory = psutil.Process().memory_info
    bombard(server, random.Random(6), 5_000)
    before, found = memory().rss, Counter[int]()
    for n in range(19):
        found += bombard(server, random.Random(100 + n), 5_000)
    assert set(found) <= {200, 400, 413, 415, 429}, found
    assert memory().rss - before < 256 << 20, f"grew by {memory().rss - before} bytes: {found}"
