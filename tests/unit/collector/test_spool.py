"""The spool: order, bounds, counted loss, and no sequence used twice whatever is killed or full."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.collector.spool import Part, Spool, read_parts
from lanterne.quality import Quality


def part(n: int, size: int = 100) -> Part:
    return Part("logs", "none", f"{n:08d}".encode().ljust(size, b"."), 1)


def number(found: Part) -> int:
    return int(found.body[:8])


def drain(spool: Spool) -> list[int]:
    out = []
    while (found := spool.next()) is not None:
        out.append(number(found[1]))
        spool.acknowledge(found[0])
    return out


def test_parts_come_out_in_order_and_once(tmp_path: Path) -> None:
    spool = Spool(tmp_path, quality=Quality())
    for n in range(0, 30, 3):
        spool.append([part(n), part(n + 1), part(n + 2)], {"n": n})
    assert spool.unsent_events() == 30
    assert drain(spool) == list(range(30))
    assert spool.next() is None
    assert spool.unsent_events() == 0


def test_asking_again_gives_the_same_part_and_old_acknowledgements_are_ignored(tmp_path: Path) -> None:
    spool = Spool(tmp_path, quality=Quality())
    spool.append([part(0), part(1)], {})
    first = spool.next()
    assert first is not None
    assert spool.next() == first
    spool.acknowledge(first[0])
    spool.acknowledge(first[0])
    assert drain(spool) == [1]


def test_a_new_spool_on_the_same_folder_goes_on(tmp_path: Path) -> None:
    spool = Spool(tmp_path, quality=Quality())
    for n in range(5):
        spool.append([part(n)], {"sequence": n + 1})
    found = spool.next()
    assert found is not None
    spool.acknowledge(found[0])
    again = Spool(tmp_path, quality=Quality())
    assert again.state == {"sequence": 5}
    again.append([part(5)], {"sequence": 6})
    assert drain(again) == [1, 2, 3, 4, 5]
    assert Spool(tmp_path, quality=Quality()).state == {"sequence": 6}


def test_a_write_cut_short_is_dropped_and_the_state_before_it_holds(tmp_path: Path) -> None:
    spool = Spool(tmp_path, quality=Quality())
    for n in range(3):
        spool.append([part(n)], {"sequence": n + 1})
    (segment,) = tmp_path.glob("*.seg")
    segment.write_bytes(segment.read_bytes()[:-7])
    again = Spool(tmp_path, quality=Quality())
    assert again.state == {"sequence": 2}
    again.append([part(2)], {"sequence": 3})
    assert drain(again) == [0, 1, 2]


def test_a_flipped_bit_costs_what_stands_behind_it_and_nothing_else(tmp_path: Path) -> None:
    spool = Spool(tmp_path, quality=Quality())
    for n in range(3):
        spool.append([part(n)], {"sequence": n + 1})
    (segment,) = tmp_path.glob("*.seg")
    raw = bytearray(segment.read_bytes())
    raw[len(raw) // 2] ^= 0x40
    segment.write_bytes(raw)
    again = Spool(tmp_path, quality=Quality())
    again.append([part(9)], {"sequence": 10})
    assert drain(again) == [0, 9]


def test_beyond_the_bound_the_oldest_go_and_are_counted(tmp_path: Path) -> None:
    quality = Quality()
    spool = Spool(tmp_path, quality=quality, bytes_max=64 << 10, segment_bytes=8 << 10)
    for n in range(500):
        spool.append([part(n, 400)], {"sequence": n + 1})
        assert sum(p.stat().st_size for p in tmp_path.glob("*.seg")) <= 64 << 10
    left = drain(spool)
    assert left == list(range(500 - len(left), 500))
    assert quality.counts()["spool_dropped"] == 500 - len(left)
    assert 0 < len(left) < 500


def test_acknowledged_segments_leave_the_disk(tmp_path: Path) -> None:
    spool = Spool(tmp_path, quality=Quality(), segment_bytes=8 << 10)
    for n in range(200):
        spool.append([part(n, 1000)], {"sequence": n + 1})
        drain(spool)
    assert len(list(tmp_path.glob("*.seg"))) <= 2
    assert Spool(tmp_path, quality=Quality()).state == {"sequence": 200}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["append", "send", "restart"]), max_size=60))
def test_any_order_of_appends_sends_and_restarts_loses_and_repeats_nothing(
    tmp_path_factory: pytest.TempPathFactory, moves: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder, quality=Quality(), segment_bytes=4 << 10)
    appended, sent = 0, []
    for move in moves:
        if move == "append":
            spool.append([part(appended, 700), part(appended + 1, 700)], {"n": appended})
            appended += 2
        elif move == "restart":
            spool.close()
            spool = Spool(folder, quality=Quality(), segment_bytes=4 << 10)
        elif (found := spool.next()) is not None:
            sent.append(number(found[1]))
            spool.acknowledge(found[0])
    assert sent + drain(spool) == list(range(appended))


FULL_DISK = """
    import resource, signal, sys
    from pathlib import Path
    from lanterne.collector.spool import Part, Spool
    from lanterne.quality import Quality
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    folder = Path(sys.argv[1])
    spool = Spool(folder, quality=Quality())
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    for n in range(4000):
        spool.append([Part("logs", "none", b"%08d" % n + b"." * 400, 1)], {"sequence": n + 1})
        if n == 2500:
            seen = []
            while (found := spool.next()) is not None:
                seen.append(int(found[1].body[:8]))
                spool.acknowledge(found[0])
            print(seen == sorted(set(seen)), seen[-1], flush=True)
    import os; os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_disk_that_takes_nothing_more_stops_neither_events_nor_numbers(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes every write beyond 200 kB fail; then the process is killed and the spool opened again."""
    spool = tmp_path / "spool"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(spool)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.split() == ["True", "2500"]
    assert Spool(spool, quality=Quality()).state == {"sequence": 4000}


NOTHING_FITS = """
    import os, resource, signal, sys
    from pathlib import Path
    from lanterne.collector.spool import Part, Spool
    from lanterne.quality import Quality
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    quality = Quality()
    spool = Spool(Path(sys.argv[1]), quality=quality)
    resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, 70_000))
    for n in range(200):
        spool.append([Part("logs", "none", b"%08d" % n + b"." * 100_000, 1)], {"sequence": n + 1})
    seen = []
    while len(seen) < 20:
        place, part = spool.next()
        seen.append(int(part.body[:8]))
        spool.acknowledge(place)
    print(seen[0] + len(seen) - 1 == seen[-1], seen[0] == quality.counts()["spool_dropped"], spool.size() < 9 << 20)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_where_no_record_fits_on_disk_memory_holds_a_bounded_number(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NOTHING_FITS), str(spool)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.split() == ["True", "True", "True"]
    assert Spool(spool, quality=Quality()).state == {"sequence": 200}


def test_offline_readers_find_what_was_never_sent(tmp_path: Path) -> None:
    spool = Spool(tmp_path, quality=Quality())
    for n in range(4):
        spool.append([part(n)], {})
    assert [number(p) for p in read_parts(tmp_path)] == [0, 1, 2, 3]
