"""Draws what the trainer's records say into a trace: steps, evaluations, bytes moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ops.clock import seconds
from ops.trace import Tracer


class TraceObserver:
    """Observer that draws each step as it ends; the engine draws what happens within."""

    def __init__(self, trace: Tracer) -> None:
        self._trace = trace

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Nothing: start-up draws itself."""

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Draw the step, and the bytes it moved in each lane."""
        now = seconds()
        shown = {key: record[key] for key in ("loss", "tokens", "stall_seconds", "experts_idle")}
        name = f"step {record['step']}"
        self._trace.complete("step", name, now - record["seconds"], now, **shown)
        for lane, nbytes in record["lanes"].items():
            self._trace.counter(lane.replace("_", " ") + " in a step", bytes=nbytes)

    def on_eval(self, record: Mapping[str, Any]) -> None:
        """Mark the end of the evaluation."""
        self._trace.instant("step", f"evaluated after step {record['step']}", loss=record["loss"])

    def on_message(self, text: str) -> None:
        """Mark the message."""
        self._trace.instant("step", text)

    def on_end(self, report: Mapping[str, Any]) -> None:
        """Mark the end."""
        self._trace.instant("step", "end", reason=report["exit_reason"])

    def close(self) -> None:
        """Nothing: who opened the trace closes it."""
