"""Hostile and half-written files: no crash, a clear error that names the file, bounded memory."""

from __future__ import annotations

import gzip
import json
import pickle
import pickletools
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lanterne.backend.readers import diagnose_paths, flight_recorder, read
from lanterne.backend.readers.plain_pickle import CHILD_BYTES_MIN, FastReader, loads
from lanterne.errors import UnreadableInput
from tests.cases.evidence import dump, entry, watchdog

HEADS = (
    b"", b"\x80\x02", b"PAR1", b"LSP1", b"PK\x03\x04", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b'{"traceEvents": [',
    b'{"pg_config": {', b'{"resourceSpans": [', b"Process 1: python\nThread 1 (idle): ", b"# TYPE x gauge\n",
    b"index, clocks.sm [MHz]\n0, ", b'# TYPE x gauge\nDCGM_FI_DEV_XID_ERRORS{gpu="1"} ',
    b'{"header": {"rank": 1, "n_ranks": 4}, "coll_perf": {"coll_sn": ',
    b"step,loss\n", b'{"log_history": ', b"[rank0]: ", b'{"communicators": [', b"# nThread busbw\n",
)  # fmt: skip
SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def _read(data: bytes, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        refused = ""
        try:
            diagnose_paths([path])
        except UnreadableInput as error:
            refused = str(error)
        assert not refused or str(path) in refused


@SETTINGS
@given(
    head=st.sampled_from(HEADS),
    body=st.binary(max_size=400),
    name=st.sampled_from(["a.log", "_dump_3", "x.json", "y.csv", "z.pt", "e.seg"]),
)
def test_any_bytes(head: bytes, body: bytes, name: str) -> None:
    _read(head + body, name)


KERNEL = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 1, "dur": 2, "args": {"stream": 7}}
WHOLE = {
    "pickle": pickle.dumps(dump([entry(s, done=s < 5) for s in range(1, 7)], range(4)), protocol=2),
    "json": json.dumps(dump([entry(s, done=s < 5) for s in range(1, 7)], range(4))).encode(),
    "trace": json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": 1}, "traceEvents": [KERNEL] * 5}).encode(),
    "log": "\n".join(watchdog(r) for r in range(4)).encode(),
    "rows": b"".join(json.dumps({"step": i, "rank": i % 2, "loss": 1.0 / (i + 1)}).encode() + b"\n" for i in range(20)),
}  # fmt: skip


@SETTINGS
@given(
    kind=st.sampled_from(sorted(WHOLE)),
    cut=st.floats(0, 1),
    flip=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=6),
    packed=st.booleans(),
)
def test_cut_and_flipped_files(kind: str, cut: float, flip: list[tuple[float, int]], packed: bool) -> None:
    data = bytearray(WHOLE[kind][: int(cut * len(WHOLE[kind]))])
    for where, value in flip:
        if data:
            data[min(int(where * len(data)), len(data) - 1)] = value
    packed_data = gzip.compress(bytes(data))
    _read(packed_data[: int(len(packed_data) * 0.9)] if packed else bytes(data), "_dump_0")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=12), x, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(
    [
        "entries",
        "pg_config",
        "pg_status",
        "version",
        "traceEvents",
        "log_history",
        "resourceLogs",
        "resourceSpans",
        "resourceMetrics",
        "communicators",
        "missing_ranks",
        "header",
        "coll_perf",
        "coll_sn",
        "ranks",
        "loss",
        "step",
        "rank",
        "values",
    ]
)


@SETTINGS
@given(value=st.dictionaries(KEYS, json_values, max_size=5))
def test_any_json_shape(value: dict[str, object]) -> None:
    _read(json.dumps(value).encode(), "x.json")


def test_a_nine_byte_pickle_takes_no_memory() -> None:
    bomb = b"\x80\x02]r\xff\xff\xff\x7f."
    tracemalloc.start()
    assert loads(bomb, "bomb") == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("never",))


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_calls_is_refused(protocol: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnreadableInput, match="at byte"):
        loads(pickle.dumps({"entries": [_Evil()]}, protocol=protocol), "evil")
    assert capsys.readouterr().out == ""


@SETTINGS
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda x: st.lists(x, max_size=4) | st.tuples(x, x) | st.dictionaries(st.text(), x, max_size=4),
        max_leaves=20,
    ),
    protocol=st.integers(0, 5),
)
def test_plain_values_come_back(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol=protocol)
    if any(op.name == "GLOBAL" for op, _, _ in pickletools.genops(data)):
        return  # protocols below 3 write bytes as a call, which is refused
    assert loads(data, "x") == value


@pytest.mark.parametrize("header", ["step,loss", "index, clocks.sm [MHz]"])
def test_a_cell_beyond_the_limit_of_csv_spoils_nothing(tmp_path: Path, header: str) -> None:
    (tmp_path / "m.csv").write_text(f"{header}\n1,2\n2,{'9' * 200_000}\n")
    (tmp_path / "rank_0.log").write_text(watchdog(0) + "\n")
    assert any(e.name == "log.collective_timeout" for e in read([tmp_path]).events)


def test_large_dumps_go_through_the_child_and_hostile_ones_come_back(tmp_path: Path) -> None:
    good = dump([entry(s, done=s < 900) for s in range(1, 901)], range(4))
    bomb = b"\x80\x02]r\xff\xff\xff\x7f."
    evil = pickle.dumps({"entries": [_Evil()] * 2000, "pad": "x" * CHILD_BYTES_MIN})
    with FastReader() as reader:
        assert reader.loads(pickle.dumps(good, protocol=2), "good") == good
        with pytest.raises(UnreadableInput, match="at byte"):
            reader.loads(evil, "evil")
        assert reader.loads(bomb, "bomb") == []
        assert reader.loads(pickle.dumps(good, protocol=4), "again") == good


def test_one_bad_file_does_not_spoil_the_rest(tmp_path: Path) -> None:
    (tmp_path / "_dump_1").write_bytes(b"\x80\x02}q\x01X\x07\x00\x00\x00entriesc__builtin__\nexec\n.")
    (tmp_path / "rank_0.log").write_text(watchdog(0) + "\n")
    facts = read([tmp_path])
    assert any("_dump_1" in note and "refused" in note for note in facts.quality.notes)
    assert any(e.name == "log.collective_timeout" for e in facts.events)


def test_a_path_that_is_not_there_is_said() -> None:
    with pytest.raises(UnreadableInput, match="no such file"):
        read([Path("/nonexistent/x")])


def test_many_dumps_keep_their_last_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "CALLS_MAX", 400)
    for rank in range(4):
        calls = [entry(s, done=s < 300 or rank == 2) for s in range(1, 301 - (rank == 2))]
        (tmp_path / f"_dump_{rank}").write_bytes(pickle.dumps(dump(calls, range(4)), protocol=2))
    facts = read([tmp_path])
    assert len(facts.collectives) == 400
    assert any("the last 100 of each" in note for note in facts.quality.notes)
    cause = diagnose_paths([tmp_path]).incidents[0].causes[0]
    assert (cause.category, cause.subject.rank) == ("rank_hung", 2)
