"""The compiled decoder gives the rows of the protobuf library, or leaves the body to it."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from backend_rows import bodies, events, identity
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otlp_bodies import REQUESTS, body, damaged

from lanterne import limits, native
from lanterne.backend.ingest import walker
from lanterne.backend.ingest.body import BodyRefused
from lanterne.backend.ingest.decode import SIGNALS, decode_long

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler here: the long way decodes all")
QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def compiled() -> walker.Walker:
    found = walker.load()
    assert found is not None
    return found


def bits(table: pa.Table) -> pa.Table:
    """The table with its numbers as bits, so that NaN equals NaN."""
    if "value" not in table.column_names:
        return table
    at = table.column_names.index("value")
    return table.set_column(at, "value", pa.array(table.column("value").to_numpy().view("int64")))


def same(compiled: walker.Walker, signal: str, raw: bytes) -> bool:
    """True when the compiled way took the body, and then with the rows of the long way; it may leave any body."""
    fast = compiled.admitted(SIGNALS[signal].table, raw)
    if fast is None:
        return False
    long = decode_long(signal, raw)
    assert (fast.refused, long.refused) == (0, 0), long.reasons
    assert fast.batch.table.schema.equals(long.batch.table.schema)
    assert bits(fast.batch.table).equals(bits(long.batch.table))
    assert list(fast.batch.runs) == list(long.batch.runs)
    assert list(fast.batch.identities) == list(long.batch.identities)
    fast.batch.table.validate(full=True)
    return True


def trial(compiled: walker.Walker, rng: random.Random, count: int) -> dict[str, int]:
    """How many of ``count`` bodies a signal the compiled way took; every second one is damaged too."""
    taken = dict.fromkeys(REQUESTS, 0)
    for n in range(count):
        for signal in REQUESTS:
            raw = body(signal, rng)
            taken[signal] += same(compiled, signal, raw)
            if n % 2:
                same(compiled, signal, damaged(raw, rng))
    return taken


def test_10_both_decoders_give_the_same_rows(compiled: walker.Walker) -> None:
    taken = trial(compiled, random.Random(20261129), 200)
    assert all(number > 30 for number in taken.values()), taken


@QUIET
@given(st.randoms(use_true_random=False), st.sampled_from(sorted(REQUESTS)))
def test_10_both_decoders_agree(compiled: walker.Walker, rng: random.Random, signal: str) -> None:
    raw = body(signal, rng)
    same(compiled, signal, raw)
    same(compiled, signal, damaged(raw, rng))


@QUIET
@given(st.binary(max_size=300), st.sampled_from(sorted(REQUESTS)))
def test_10_no_bytes_are_taken_that_protobuf_refuses(compiled: walker.Walker, raw: bytes, signal: str) -> None:
    same(compiled, signal, raw)


@pytest.mark.parametrize("signal", sorted(REQUESTS))
def test_our_own_bodies_go_the_fast_way_whole_and_no_cut_one_does(compiled: walker.Walker, signal: str) -> None:
    raw = bodies(identity(1), events(6))[signal]
    assert same(compiled, signal, raw)
    for end in range(1, len(raw)):
        same(compiled, signal, raw[:end])


def test_a_foreign_resource_is_told_on_each_row(compiled: walker.Walker) -> None:
    request = ExportTraceServiceRequest()
    block = request.resource_spans.add()
    for key, value in (("service.name", "shop"), ("host.name", "h"), ("cloud.zone", "z1")):
        block.resource.attributes.add(key=key).value.string_value = value
    for n in range(3):
        block.scope_spans.add().spans.add(name="GET", start_time_unix_nano=n, end_time_unix_nano=n + 1)
    assert same(compiled, "traces", request.SerializeToString())


def test_9_a_long_resource_is_not_multiplied_by_its_records(compiled: walker.Walker) -> None:
    request = ExportTraceServiceRequest()
    block = request.resource_spans.add()
    for n in range(90):
        block.resource.attributes.add(key=f"k{n}").value.string_value = "v" * 4_000
    spans = block.scope_spans.add().spans
    for _ in range(1 + limits.MAP_BYTES_PER_BODY_MAX // (90 * 4_000)):
        spans.add(name="s")
    raw = request.SerializeToString()
    assert len(raw) < 1 << 20
    assert compiled.admitted("spans", raw) is None
    with pytest.raises(BodyRefused, match="smaller batches") as refused:
        decode_long("traces", raw)
    assert refused.value.status == 413


def test_without_a_compiler_the_long_way_serves(tmp_path: Path) -> None:
    code = (
        "from lanterne.backend.ingest import walker; from lanterne.backend.ingest.decode import decode\n"
        "assert walker.load() is None\n"
        "from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest as R\n"
        "r = R(); r.resource_spans.add().scope_spans.add().spans.add(name='a')\n"
        "print(decode('traces', r.SerializeToString()).batch.rows)\n"
    )
    there = {**os.environ, "PATH": str(tmp_path), "CXX": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=there, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
    assert "no C++ compiler" in done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(4))
def test_10_both_decoders_agree_at_length(compiled: walker.Walker, seed: int) -> None:
    trial(compiled, random.Random(seed), 12_000)


@pytest.mark.heavy
def test_10_the_sanitizers_find_nothing(tmp_path: Path) -> None:
    """The fuzz once more against a build that traps on any read outside of bounds and any undefined step."""
    gcc = shutil.which("g++")
    if gcc is None:
        pytest.skip("the sanitizers' runtime is looked up through g++, which is not here")
    library = tmp_path / "walker.so"
    flags = [*walker.FLAGS, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    native.build(library, [*flags, str(walker.SOURCES[0])])
    runtimes = [  # the sanitizer must be first, and finds the functions that it stands before in the second
        subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    here = Path(__file__).parent
    code = (
        f"import random, sys; sys.path.insert(0, {str(here)!r})\n"
        f"from pathlib import Path; from lanterne.backend.ingest.walker import Walker; from test_walker import trial\n"
        f"print(trial(Walker(Path({str(library)!r})), random.Random(7), 4000))\n"
    )
    there = {**os.environ, "LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([sys.executable, "-c", code], env=there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
