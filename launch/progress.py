"""What a run shows: a live display on a terminal, plain lines elsewhere, a summary at the end.

An `Observer` is handed to the trainer, which tells it what happened as plain dictionaries; the
keys are those of `launch/report.py` and of the docstrings below. Observers never change a run.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from launch.terminal import cells, say
from ops.units import format_bytes

LANE_LABELS = {
    "nvme_read_bytes": "nvme→host",
    "nvme_write_bytes": "host→nvme",
    "h2d_bytes": "host→device",
    "d2h_bytes": "device→host",
}
RATE_WINDOW_STEPS = 20


class Observer(Protocol):
    """What a trainer tells its surroundings; called from the trainer's thread, must not block."""

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Before the first step: name, steps, first_step, parameters, state_bytes,
        tokens_per_step, tiers {tier: {capacity_bytes}}."""

    def on_step(self, record: Mapping[str, Any]) -> None:
        """After each step: the record of `steps.jsonl`."""

    def on_eval(self, record: Mapping[str, Any]) -> None:
        """After each evaluation: step, loss, perplexity."""

    def on_message(self, text: str) -> None:
        """A sentence for the user."""

    def on_end(self, report: Mapping[str, Any]) -> None:
        """After the last step: the report."""

    def close(self) -> None:
        """The run is over, well or badly: give back terminal and files."""


class Observers:
    """Several observers as one; they are told in order and closed in reverse."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def on_start(self, info: Mapping[str, Any]) -> None:
        for observer in self._observers:
            observer.on_start(info)

    def on_step(self, record: Mapping[str, Any]) -> None:
        for observer in self._observers:
            observer.on_step(record)

    def on_eval(self, record: Mapping[str, Any]) -> None:
        for observer in self._observers:
            observer.on_eval(record)

    def on_message(self, text: str) -> None:
        for observer in self._observers:
            observer.on_message(text)

    def on_end(self, report: Mapping[str, Any]) -> None:
        for observer in self._observers:
            observer.on_end(report)

    def close(self) -> None:
        for observer in reversed(self._observers):
            observer.close()


class RunConsole(Console):
    """A console whose reader may go away (`| head`): the run goes on in silence, its files tell."""

    def on_broken_pipe(self) -> None:
        """Write nowhere from now on; rich's own answer would end the process."""
        self.quiet = True
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self.file.fileno())
        os.close(devnull)


class ConsoleObserver:
    """Observer that shows the run on a console.

    On a terminal one display is redrawn in place; elsewhere a plain line is printed at most once
    per `interval_s`, and always for the first and the last step. `resume_command` is what continues
    the run, said after the summary, in one line. `clock` gives seconds.
    """

    def __init__(
        self,
        console: Console,
        report_path: Path,
        *,
        resume_command: str = "",
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._report_path = report_path
        self._resume_command = resume_command
        self._interval_s = interval_s
        self._clock = clock
        self._printed_at = -math.inf
        self._live: Live | None = None
        self._window: deque[tuple[float, float, float]] = deque(maxlen=RATE_WINDOW_STEPS)
        self._name = ""
        self._first_step = 0
        self._steps = 0
        self._done = 0
        self._eval: Mapping[str, Any] | None = None

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Say what is trained, and begin the display."""
        self._name = str(info["name"])
        self._first_step = int(info.get("first_step", 0))
        self._steps = int(info["steps"])
        tiers = ", ".join(
            f"{tier} {format_bytes(numbers['capacity_bytes'])}"
            for tier, numbers in info.get("tiers", {}).items()
        )
        self._say(
            f"{self._name}: {info['parameters']:,} parameters, "
            f"{format_bytes(info['state_bytes'])} of state; budgets: {tiers}"
        )
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Redraw the display, or print a line when one is due."""
        self._window.append((record["seconds"], record["stall_seconds"], record["tokens"]))
        self._done += 1
        if self._live is not None:
            self._live.update(self._display(record), refresh=True)
            return
        now = self._clock()
        is_last = self._done >= self._steps - self._first_step
        if is_last or now - self._printed_at >= self._interval_s:
            self._printed_at = now
            self._say(self._line(record))

    def on_eval(self, record: Mapping[str, Any]) -> None:
        """Show the evaluation."""
        self._eval = record
        self._say(
            f"step {record['step']}: held-out loss {record['loss']:.4f}, "
            f"perplexity {record['perplexity']:.2f}"
        )

    def on_message(self, text: str) -> None:
        """Show the sentence."""
        self._say(text)

    def on_end(self, report: Mapping[str, Any]) -> None:
        """End the display and print the summary."""
        self.close()
        self._console.print(summary_table(report, self._report_path))
        if self._resume_command and report["commits"]["last_step"] is not None:
            self._say(f"to go on: {self._resume_command}")  # in one line, as a shell takes it

    def close(self) -> None:
        """End the display; the terminal is as before."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, text: str) -> None:
        say(self._console, text)

    def _rates(self) -> tuple[float, float, float]:
        """Tokens per second, stall share and seconds per step over the last steps."""
        seconds = sum(item[0] for item in self._window)
        if seconds <= 0:
            return 0.0, 0.0, 0.0
        stall = sum(item[1] for item in self._window)
        tokens = sum(item[2] for item in self._window)
        return tokens / seconds, stall / seconds, seconds / len(self._window)

    def _cells(self, record: Mapping[str, Any]) -> dict[str, str]:
        tokens_per_s, stall_share, step_s = self._rates()
        left = max(0, self._steps - self._first_step - self._done)
        found = {
            "step": f"{self._first_step + self._done}/{self._steps}",
            "loss": f"{record['loss']:.4f}",
            "tokens/s": f"{tokens_per_s:,.0f}",
            "stall": f"{100 * stall_share:.1f} %",
        }
        for lane, label in LANE_LABELS.items():
            found[label] = format_bytes(record["lanes"][lane])
        found["ETA"] = format_duration(left * step_s)
        return found

    def _line(self, record: Mapping[str, Any]) -> str:
        return "  ".join(f"{label} {text}" for label, text in self._cells(record).items())

    def _display(self, record: Mapping[str, Any]) -> Table:
        shown = self._cells(record)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(no_wrap=True)
        total = max(1, self._steps - self._first_step)
        table.add_row(*cells(self._name), ProgressBar(total=total, completed=self._done, width=40))
        for label in ("step", "loss", "tokens/s", "stall"):
            table.add_row(label, shown[label])
        lanes = "   ".join(f"{label} {shown[label]}" for label in LANE_LABELS.values())
        table.add_row("per step", lanes)
        if self._eval is not None:
            table.add_row("held-out", f"{self._eval['loss']:.4f} at step {self._eval['step']}")
        table.add_row("ETA", shown["ETA"])
        return table


def summary_table(report: Mapping[str, Any], report_path: Path) -> Table:
    """The end of a run in a few rows: quality, speed, memory, where the report is."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(*cells("steps", f"{report['steps']} ({report['exit_reason']})"))
    if report["eval"]:
        last = report["eval"][-1]
        quality = f"{last['loss']:.4f} nats per token, perplexity {last['perplexity']:.2f}"
        table.add_row("held-out loss", quality)
    bigram = report.get("bigram_loss")
    if bigram is not None:
        table.add_row("bigram reference", f"{bigram:.4f} nats per token")
    table.add_row("speed", f"{report['tokens_per_s']:,.0f} tokens/s")
    table.add_row("stall share", f"{100 * report['stall_share']:.1f} %")
    for tier, numbers in report["tiers"].items():
        peak, capacity = numbers["peak_bytes"], numbers["capacity_bytes"]
        table.add_row(f"{tier} peak", f"{format_bytes(peak)} of {format_bytes(capacity)}")
    commits = report["commits"]
    if commits["published"]:
        stall = f"{commits['stall_seconds']:.2f} s ({commits['stall_seconds_max']:.2f} s at most)"
        table.add_row("saves", f"{commits['published']}, compute stood still for {stall}")
    last_step = commits["last_step"]
    if last_step is None:
        table.add_row("last commit", "none: this run cannot be resumed")
    else:
        table.add_row("last commit", f"step {last_step}")
    table.add_row(*cells("report", str(report_path)))
    return table


def format_duration(seconds: float) -> str:
    """`1:02:03` or `2:03`; `?` when it is not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
