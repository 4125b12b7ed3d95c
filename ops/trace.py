"""A picture of a run in time: a Chrome trace that https://ui.perfetto.dev opens.

One track per lane and per kind of compute stage. Viewers want the events of one thread never to
overlap, but a lane has several workers: so a track has numbered sub-tracks (`nvme read`,
`nvme read 2`, …), each shown as a thread, and an event goes to one that is free at its start.
Events arrive when they end; taking the free sub-track that was busy last then needs no more
sub-tracks than the most events at once.

Invariants: the file is whole JSON between any two writes, because each goes over the closing
bracket and brings its own (a process killed inside one leaves a torn last line, which viewers and
`TraceReader` tolerate); memory is bounded (what is not yet written, one number a sub-track);
nothing here raises after opening, so a full disk ends the trace, not the run. Thread-safe; a call
may block for the write of a few KiB to the page cache.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import logging
import os
import stat
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from ops.clock import seconds
from ops.errors import ConfigError

# The order in which viewers show the tracks. A track belongs to the first name it begins with
# ("compute attention" is shown with "compute"); others come after all of these.
TRACKS = (
    "start-up",
    "step",
    "compute",
    "stall",
    "update",
    "nvme read",
    "nvme write",
    "host to device",
    "device to host",
    "commit",
)
BUFFER_BYTES = 16 << 10
FLUSH_INTERVAL_S = 1.0
# Only events reported long after their end, in no order, could ask for as many.
NUM_SUBTRACKS_MAX = 256
_TIDS_PER_GROUP = 100_000
_OPENING = b'[\n{"name":"process_name","ph":"M","pid":1,"args":{"name":"headrace"}}'
_CLOSING = b"\n]\n"
_log = logging.getLogger(__name__)


def _plain(value: Any) -> Any:
    """NumPy's scalars as numbers, everything else JSON does not know as text."""
    return value.item() if hasattr(value, "item") else str(value)


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_plain).encode


class Trace:
    """Writes events to the file at `path` as they come; see the module for the invariants."""

    def __init__(self, path: Path) -> None:
        """Open the file; an older trace there is replaced.

        Raises ConfigError when it cannot be written, or when something else than a trace is there.
        """
        self.path = path
        self._lock = threading.Lock()
        self._tracks: dict[str, _Track] = {}
        self._num_tracks = [0] * (len(TRACKS) + 1)
        self._pending: list[str] = []
        self._pending_bytes = 0
        self._file: int | None = _open(path)
        self._end_offset = len(_OPENING)
        self._start_s = self._flushed_s = seconds()

    def span(self, track: str, name: str, **args: Any) -> AbstractContextManager[None]:
        """Time the block and draw it on `track`; `args` are shown when it is clicked."""
        return _Span(self, track, name, args)

    def complete(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Draw what ran from `start_s` to `end_s`, both by `ops.clock.seconds`."""
        start_us, end_us = self._since_opening_us(start_s), self._since_opening_us(end_s)
        end_us = max(start_us, end_us)
        with self._lock:
            if self._file is None:
                return
            tid = self._place(track, start_us, end_us)
            if tid is not None:
                event = {"ph": "X", "name": name, "cat": track, "tid": tid, "ts": start_us}
                self._add(event | {"dur": round(end_us - start_us, 3)}, args)

    def instant(self, track: str, name: str, **args: Any) -> None:
        """Draw a mark on `track`, now."""
        now_us = self._since_opening_us(seconds())
        with self._lock:
            if self._file is not None:
                tid = self._track(track).tid
                event = {"ph": "i", "s": "t", "name": name, "cat": track, "tid": tid, "ts": now_us}
                self._add(event, args)

    def counter(self, name: str, **values: float) -> None:
        """Draw the values, now, as curves of the graph `name`."""
        now_us = self._since_opening_us(seconds())
        with self._lock:
            if self._file is not None:
                self._add({"ph": "C", "name": name, "tid": 0, "ts": now_us}, values)

    def close(self) -> None:
        """Write what is left; later calls do nothing. Idempotent."""
        with self._lock:
            self._flush()
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _since_opening_us(self, at_s: float) -> float:
        return round(max(0.0, at_s - self._start_s) * 1e6, 3)

    # ---- tracks (lock held)

    def _track(self, name: str) -> _Track:
        track = self._tracks.get(name)
        if track is None:
            group = next((i for i, known in enumerate(TRACKS) if name.startswith(known)), -1)
            group %= len(TRACKS) + 1
            tid = group * _TIDS_PER_GROUP + self._num_tracks[group] * NUM_SUBTRACKS_MAX + 2
            self._num_tracks[group] += 1
            track = self._tracks[name] = _Track(tid)
            self._name_thread(tid, name)
        return track

    def _place(self, name: str, start_us: float, end_us: float) -> int | None:
        """The thread of the free sub-track that was busy last; a new one when none is free."""
        track = self._track(name)
        index = track.place(start_us, end_us)
        if index is None:
            _log.debug("an event of %s is not in the trace: too many at once", name)
            return None
        if index == track.num_named:
            track.num_named += 1
            self._name_thread(track.tid + index, f"{name} {index + 1}")
        return track.tid + index

    def _name_thread(self, tid: int, name: str) -> None:
        self._add({"ph": "M", "name": "thread_name", "tid": tid}, {"name": name})
        self._add({"ph": "M", "name": "thread_sort_index", "tid": tid}, {"sort_index": tid})

    # ---- the file (lock held)

    def _add(self, event: dict[str, Any], args: dict[str, Any]) -> None:
        event["pid"] = 1
        if args:
            event["args"] = args
        try:
            text = _encode(event)
        except ValueError:  # JSON has no infinity
            text = _encode(event | {"args": {key: str(value) for key, value in args.items()}})
        self._pending.append(text)
        self._pending_bytes += len(text)
        now = seconds()
        if self._pending_bytes >= BUFFER_BYTES or now - self._flushed_s >= FLUSH_INTERVAL_S:
            self._flush()
            self._flushed_s = now

    def _flush(self) -> None:
        """Write whole events and the bracket, over the bracket before; end the trace on failure."""
        if self._file is None or not self._pending:
            return
        chunk = "".join(f",\n{event}" for event in self._pending).encode()
        self._pending.clear()
        self._pending_bytes = 0
        try:
            _write_all(self._file, chunk + _CLOSING, self._end_offset)
        except OSError as error:
            reason = error.strerror or str(error)
            _log.warning("the trace %s ends here, training goes on: %s", self.path, reason)
            with suppress(OSError):  # what stood here before fits again
                os.ftruncate(self._file, self._end_offset)
                _write_all(self._file, _CLOSING, self._end_offset)
            os.close(self._file)
            self._file = None
            return
        self._end_offset += len(chunk)


class NoTrace:
    """Draws nothing, at the price of a call."""

    def span(self, track: str, name: str, **args: Any) -> AbstractContextManager[None]:
        """One shared context that does nothing."""
        return _NOTHING

    def complete(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Nothing."""

    def instant(self, track: str, name: str, **args: Any) -> None:
        """Nothing."""

    def counter(self, name: str, **values: float) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


Tracer: TypeAlias = Trace | NoTrace
NO_TRACE = NoTrace()
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class _Span:
    __slots__ = ("_args", "_name", "_start_s", "_trace", "_track")

    def __init__(self, trace: Trace, track: str, name: str, args: dict[str, Any]) -> None:
        self._trace = trace
        self._track = track
        self._name = name
        self._args = args
        self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = seconds()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._trace.complete(self._track, self._name, self._start_s, seconds(), **self._args)


class _Track:
    """The sub-tracks of one track: when each becomes free, sorted, and which it is."""

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self.num_named = 1
        self._free_us: list[tuple[float, int]] = [(0.0, 0)]

    def place(self, start_us: float, end_us: float) -> int | None:
        """Occupy a sub-track for an event; None when all of NUM_SUBTRACKS_MAX are taken."""
        at = bisect.bisect_right(self._free_us, (start_us, NUM_SUBTRACKS_MAX)) - 1
        if at >= 0:
            index = self._free_us.pop(at)[1]
        elif len(self._free_us) < NUM_SUBTRACKS_MAX:
            index = len(self._free_us)
        else:
            return None
        bisect.insort(self._free_us, (end_us, index))
        return index


class TraceReader:
    """What a trace says about time: how busy each track was, and what overlapped.

    A track here is the whole of its sub-tracks. All times are seconds since the trace was opened.
    """

    def __init__(self, path: Path) -> None:
        """Read the file at `path`; a missing end is tolerated, as viewers do."""
        text = path.read_text(encoding="utf-8")
        try:
            self.events: list[dict[str, Any]] = json.loads(text)
        except json.JSONDecodeError:
            lines = text.splitlines()[1:-1]  # the last line may be torn
            self.events = [json.loads(line.rstrip(",")) for line in lines]
        self._busy: dict[str, list[tuple[float, float]]] = {}
        for event in self.events:
            if event["ph"] == "X":
                start = event["ts"] / 1e6
                span = (start, start + event["dur"] / 1e6)
                self._busy.setdefault(event["cat"], []).append(span)
        self._busy = {track: _union(spans) for track, spans in self._busy.items()}

    def tracks(self) -> list[str]:
        """Names of the tracks on which something was drawn, sorted."""
        return sorted(self._busy)

    def busy_s(self, track: str) -> float:
        """Seconds in which at least one event of the track ran."""
        return sum(stop - start for start, stop in self._busy.get(track, ()))

    def duration_s(self) -> float:
        """Seconds from the start of the first event of any track to the end of the last."""
        spans = [span for busy in self._busy.values() for span in (busy[0], busy[-1])]
        if not spans:
            return 0.0
        return max(stop for _, stop in spans) - min(start for start, _ in spans)

    def busy_share(self, track: str, within: str | None = None) -> float:
        """The part of the duration in which the track was busy, 0 to 1.

        With `within`, the part of the time in which that track was busy.
        """
        if within is None:
            busy, whole = self.busy_s(track), self.duration_s()
        else:
            busy, whole = self.overlap_s(track, within), self.busy_s(within)
        return busy / whole if whole else 0.0

    def overlap_s(self, track: str, other: str) -> float:
        """Seconds in which both tracks were busy at once."""
        both, mine, theirs = 0.0, self._busy.get(track, []), self._busy.get(other, [])
        i = j = 0
        while i < len(mine) and j < len(theirs):
            start = max(mine[i][0], theirs[j][0])
            stop = min(mine[i][1], theirs[j][1])
            both += max(0.0, stop - start)
            if mine[i][1] < theirs[j][1]:
                i += 1
            else:
                j += 1
        return both


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans as disjoint ones, sorted."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _open(path: Path) -> int:
    """A file that holds an empty trace; ConfigError when it cannot be made."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise _refusal(path, "it is not a regular file")
        if os.pread(file, len(_OPENING), 0) not in (b"", _OPENING):
            raise _refusal(path, "a file that is not a trace is there")
        os.ftruncate(file, 0)
        _write_all(file, _OPENING + _CLOSING, 0)
    except OSError as error:
        os.close(file)
        raise _refusal(path, error.strerror or str(error)) from None
    except ConfigError:
        os.close(file)
        raise
    return file


def _refusal(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"a trace cannot be written to {path}: {reason}; choose another file.")


def _write_all(file: int, data: bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)
