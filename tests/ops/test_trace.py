"""The trace: whole JSON at any instant, no overlap on a thread, no harm to the run."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops import trace as module
from ops.clock import seconds
from ops.errors import ConfigError
from ops.trace import NO_TRACE, NUM_SUBTRACKS_MAX, TRACKS, NoTrace, Trace, TraceReader


class Clock:
    """Seconds that stand still until told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, "seconds", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def load(path: Path) -> list[dict[str, Any]]:
    """Strict JSON: no NaN, nothing missing."""
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def spans_by_thread(events: list[dict[str, Any]]) -> dict[int, list[tuple[int, int]]]:
    """Start and end of the events of each thread, in whole nanoseconds, sorted."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
            found[event["tid"]].append((start, start + length))
    return {tid: sorted(spans) for tid, spans in found.items()}


def overlaps(events: list[dict[str, Any]]) -> list[int]:
    """Threads on which two events overlap."""
    return [
        tid
        for tid, spans in spans_by_thread(events).items()
        if any(one[1] > two[0] for one, two in itertools.pairwise(spans))
    ]


def thread_names(events: list[dict[str, Any]]) -> dict[str, int]:
    names = [event for event in events if event["name"] == "thread_name"]
    return {event["args"]["name"]: event["tid"] for event in names}


def test_every_kind_of_event_has_the_fields_that_viewers_ask_for(tmp_path, clock):
    trace = Trace(tmp_path / "t.json")
    with trace.span("compute", "attention", layer=3):
        clock.now += 0.25
    trace.complete("nvme read", "read", 1000.5, 1000.625, bytes=np.int64(4096), unit="a/b")
    trace.instant("commit", "published", ratio=float("inf"))
    trace.counter("host bytes", used=5, free=2.5)
    trace.close()
    attention, read, mark, counter = [e for e in load(trace.path) if e["ph"] != "M"]
    assert (attention["ph"], attention["ts"], attention["dur"]) == ("X", 0, 250_000)
    assert attention["args"] == {"layer": 3}
    assert (read["ts"], read["dur"]) == (500_000, 125_000)
    assert read["args"] == {"bytes": 4096, "unit": "a/b"}
    assert (mark["ph"], mark["ts"], mark["args"]) == ("i", 250_000, {"ratio": "inf"})
    assert (counter["ph"], counter["args"]) == ("C", {"used": 5, "free": 2.5})
    assert {event["pid"] for event in load(trace.path)} == {1}


def test_tracks_are_shown_in_the_order_of_a_step_whatever_comes_first(tmp_path, clock):
    trace = Trace(tmp_path / "t.json")
    others = ("zebra", "compute experts")
    for name in (*others, *reversed(TRACKS)):
        trace.instant(name, "x")
    trace.close()
    events = load(trace.path)
    tids = thread_names(events)
    shown = sorted(tids, key=lambda name: tids[name])
    assert [name for name in shown if name not in others] == list(TRACKS)
    assert shown[-1] == "zebra"
    assert set(shown[2:4]) == {"compute", "compute experts"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert sorted(order, key=lambda tid: order[tid]) == sorted(tids.values())


def test_a_lane_of_eight_workers_needs_eight_threads_and_none_of_them_overlaps(tmp_path, clock):
    rng = random.Random(7)
    trace = Trace(tmp_path / "t.json")
    free = [1000.0] * 8
    events = []
    for _ in range(2000):
        worker = min(range(8), key=lambda w: free[w])
        start = free[worker] + rng.choice([0.0, rng.random() * 1e-4])
        free[worker] = start + rng.random() * rng.choice([1e-5, 1e-3])
        events.append((free[worker], start))
    for end, start in sorted(events):
        trace.complete("nvme read", "r", start, end)
    trace.close()
    found = load(trace.path)
    assert len(spans_by_thread(found)) == 8
    assert sum(len(spans) for spans in spans_by_thread(found).values()) == 2000
    assert not overlaps(found)
    assert set(thread_names(found)) == {"nvme read", *(f"nvme read {i}" for i in range(2, 9))}


def test_events_reported_in_any_order_do_not_overlap_and_take_bounded_memory(tmp_path, clock):
    rng = random.Random(3)
    trace = Trace(tmp_path / "t.json")
    for _ in range(3000):
        start = 1000 + rng.random()
        trace.complete("update", "u", start, start + rng.random())
    trace.complete("update", "backwards, and before the opening", 999.0, 998.0)
    trace.close()
    found = load(trace.path)
    assert not overlaps(found)
    assert len(spans_by_thread(found)) == NUM_SUBTRACKS_MAX


def test_spans_of_many_threads_are_all_there_and_do_not_overlap(tmp_path):
    trace = Trace(tmp_path / "t.json")
    barrier = threading.Barrier(6)

    def work(number: int) -> None:
        barrier.wait(30)
        for index in range(400):
            with trace.span("nvme write", f"{number}.{index}", bytes=index):
                trace.counter("queue", depth=index)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    found = load(trace.path)
    drawn = {event["name"] for event in found if event["ph"] == "X"}
    assert drawn == {f"{n}.{i}" for n in range(6) for i in range(400)}
    assert not overlaps(found)


def test_a_span_is_drawn_when_its_block_fails(tmp_path, clock):
    trace = Trace(tmp_path / "t.json")
    with pytest.raises(KeyError), trace.span("stall", "lease"):
        clock.now += 1
        raise KeyError("x")
    trace.close()
    assert TraceReader(trace.path).busy_s("stall") == pytest.approx(1)


def test_the_file_is_whole_before_the_end_and_holds_what_is_older_than_a_second(tmp_path, clock):
    trace = Trace(tmp_path / "t.json")
    assert load(trace.path)
    size = 0
    for index in range(1000):
        trace.complete("compute", f"stage {index}", clock.now, clock.now)
        if trace.path.stat().st_size != size:
            size = trace.path.stat().st_size
            load(trace.path)
    assert size > 0
    clock.now += 2
    trace.instant("compute", "last")
    assert load(trace.path)[-1]["name"] == "last"
    trace.close()
    trace.instant("compute", "too late")
    trace.close()
    assert load(trace.path)[-1]["name"] == "last"


KILLED = """
import sys
from pathlib import Path
from ops.trace import Trace
trace = Trace(Path(sys.argv[1]))
for index in range(10**9):
    with trace.span("compute", "stage", index=index):
        pass
    if index == 5000:
        print("running", flush=True)
"""


def test_the_trace_of_a_killed_process_can_be_read(tmp_path):
    path = tmp_path / "t.json"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "running\n"
    child.send_signal(signal.SIGKILL)
    child.wait(60)
    child.stdout.close()
    assert len(TraceReader(path).events) > 4000


@pytest.mark.parametrize("cut", [1, 2, 30, 100])
def test_a_torn_end_costs_the_last_events_only(tmp_path, clock, cut):
    trace = Trace(tmp_path / "t.json")
    for index in range(20):
        trace.complete("compute", f"stage {index}", 1000.0 + index, 1000.5 + index)
    trace.close()
    os.truncate(trace.path, trace.path.stat().st_size - cut)
    assert TraceReader(trace.path).busy_s("compute") >= 9.0


def test_a_full_disk_ends_the_trace_with_one_warning_and_a_whole_file(
    tmp_path, clock, monkeypatch, caplog
):
    trace = Trace(tmp_path / "t.json")
    room = 40_000
    real = os.pwrite

    def pwrite(file: int, data: bytes, offset: int) -> int:
        if offset + len(data) <= room:
            return real(file, data, offset)
        if offset >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data[: room - offset], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    for index in range(2000):
        trace.complete("compute", f"stage {index}", 1000.0 + index, 1000.5 + index)
    trace.close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(trace.path) in record.message and "No space left" in record.message
    assert trace.path.stat().st_size <= room
    drawn = [event["name"] for event in load(trace.path) if event["ph"] == "X"]
    assert drawn == [f"stage {i}" for i in range(len(drawn))] and len(drawn) > 100


def test_a_path_that_cannot_hold_a_trace_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("[\n my only copy")
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "t.json", "No such file or directory"),
        (tmp_path / "thesis.txt" / "t.json", "Not a directory"),
        (tmp_path / "thesis.txt", "a file that is not a trace is there"),
        (Path("/dev/null"), "it is not a regular file"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Trace(path)
    assert (tmp_path / "thesis.txt").read_text() == "[\n my only copy"


def test_an_older_trace_is_replaced(tmp_path, clock):
    for names in (["a"] * 50, ["b"]):
        trace = Trace(tmp_path / "t.json")
        for name in names:
            trace.instant("compute", name)
        trace.close()
    assert [event["name"] for event in load(trace.path) if event["ph"] == "i"] == ["b"]


def test_no_trace_costs_one_call_and_no_memory():
    trace = NoTrace()
    assert trace.span("compute", "a") is NO_TRACE.span("update", "b", unit="x")

    def use(times: int) -> int:
        before = sys.getallocatedblocks()
        for _ in range(times):
            with trace.span("compute", "stage"):
                pass
            trace.complete("update", "u", 0.0, 1.0)
            trace.instant("commit", "c")
            trace.counter("host", used=1)
        trace.close()
        return sys.getallocatedblocks() - before

    use(10)
    assert use(10_000) < 100


def test_a_reader_measures_how_busy_tracks_are_and_what_overlaps(tmp_path, clock):
    trace = Trace(tmp_path / "t.json")
    for start, stop in ((0, 4), (1, 2), (3, 6)):  # two workers: busy 0-6
        trace.complete("nvme read", "r", 1000 + start, 1000 + stop)
    for start, stop in ((5, 7), (8, 10)):
        trace.complete("compute", "c", 1000 + start, 1000 + stop)
    trace.close()
    reader = TraceReader(trace.path)
    assert reader.tracks() == ["compute", "nvme read"]
    assert reader.busy_s("nvme read") == pytest.approx(6)
    assert reader.busy_share("compute") == pytest.approx(0.4)
    assert reader.overlap_s("compute", "nvme read") == pytest.approx(1)
    assert reader.overlap_s("nvme read", "compute") == pytest.approx(1)
    assert reader.busy_share("nvme read", within="compute") == pytest.approx(0.25)
    assert reader.busy_share("nvme read", within="commit") == 0
    assert reader.busy_share("commit") == reader.overlap_s("commit", "compute") == 0


def test_an_empty_trace_has_no_duration(tmp_path):
    trace = Trace(tmp_path / "t.json")
    trace.close()
    assert TraceReader(trace.path).busy_share("compute") == 0


def test_times_are_those_of_the_one_clock(tmp_path):
    trace = Trace(tmp_path / "t.json")
    before = seconds()
    with trace.span("compute", "outer"):
        pass
    trace.complete("compute", "all", before, seconds())
    trace.close()
    outer, whole = [event for event in load(trace.path) if event["ph"] == "X"]
    assert whole["ts"] <= outer["ts"]
    assert outer["ts"] + outer["dur"] <= whole["ts"] + whole["dur"]
