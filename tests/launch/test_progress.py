"""What a run shows on a terminal and elsewhere."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from launch.progress import ConsoleObserver, Observers, format_duration
from tests.launch.helpers import MIB, run_report, step_record

INFO = {
    "name": "tiny-moe",
    "steps": 10,
    "first_step": 0,
    "parameters": 2**20,
    "state_bytes": 12 * MIB,
    "tokens_per_step": 512,
    "tiers": {"device": {"capacity_bytes": 4 * MIB}},
}


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


def plain_observer(clock: FakeClock) -> tuple[ConsoleObserver, io.StringIO]:
    """An observer whose console is not a terminal, and its text."""
    text = io.StringIO()
    console = Console(file=text, width=200, force_terminal=False)
    return ConsoleObserver(console, Path("run/report.json"), clock=clock), text


def test_plain_lines_come_at_most_once_per_interval_and_for_first_and_last_step() -> None:
    clock = FakeClock()
    observer, text = plain_observer(clock)
    observer.on_start(INFO)
    for step in range(1, 11):
        observer.on_step(step_record(step))
        clock.now_s += 1.0
    steps = [line for line in text.getvalue().splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/10", "6/10", "10/10"]


def test_a_line_shows_loss_rates_lanes_and_time_left() -> None:
    observer, text = plain_observer(FakeClock())
    observer.on_start(INFO)
    observer.on_step(step_record(1))
    first, line = text.getvalue().splitlines()
    assert first == ("tiny-moe: 1,048,576 parameters, 12.0 MiB of state; budgets: device 4.0 MiB")
    assert line == (
        "step 1/10  loss 2.5000  tokens/s 1,024  stall 20.0 %  nvme→host 1.0 MiB  "
        "host→nvme 2.0 MiB  host→device 3.0 MiB  device→host 4.0 MiB  ETA 0:04"
    )


def test_messages_are_never_read_as_markup() -> None:
    observer, text = plain_observer(FakeClock())
    observer.on_start(INFO)
    observer.on_message("O_DIRECT refused on [red]/tmp[/red]")
    assert "[red]/tmp[/red]" in text.getvalue()


def test_the_summary_names_quality_speed_memory_and_the_report() -> None:
    observer, text = plain_observer(FakeClock())
    observer.on_start(INFO)
    observer.on_eval({"step": 2, "loss": 2.0, "perplexity": 7.389})
    observer.on_end(run_report())
    shown = text.getvalue()
    assert "step 2: held-out loss 2.0000, perplexity 7.39" in shown
    for part in (
        "2 (done)",
        "2.0000 nats per token, perplexity 7.39",
        "2.4000 nats per token",
        "1,024 tokens/s",
        "20.0 %",
        "3.0 MiB of 4.0 MiB",
        "3, compute stood still for 0.25 s (0.12 s at most)",
        "step 2",
        "run/report.json",
    ):
        assert part in shown


def test_the_summary_says_how_to_go_on_or_that_nothing_can() -> None:
    for last_step, wanted in ((7, "step 7"), (None, "none: this run cannot be resumed")):
        text = io.StringIO()
        console = Console(file=text, width=200)
        observer = ConsoleObserver(console, Path("r.json"), resume_command="headrace train x")
        commits = run_report()["commits"] | {"published": 0, "last_step": last_step}
        observer.on_end(run_report(commits=commits))
        assert wanted in text.getvalue() and "saves" not in text.getvalue()
        assert ("headrace train x" in text.getvalue()) is (last_step is not None)


def test_names_of_the_user_are_no_markup_and_the_command_is_one_line() -> None:
    """A run on two paths (`offload.nvme.path=[/x/A,/x/B]`) trained, committed and ended with a
    MarkupError; and a long command was folded within a word, where no shell reads on."""
    command = shlex.join(
        ["headrace", "train", "small.yaml", "--set", f"offload.nvme.path=[/x/A,/x/{'B' * 150}]"]
    )
    for is_terminal in (False, True):
        text = io.StringIO()
        console = Console(file=text, width=60, force_terminal=is_terminal, color_system=None)
        observer = ConsoleObserver(console, Path("[/x]/r.json"), resume_command=command)
        observer.on_start(INFO | {"name": "[/bold] moe :on:"})
        observer.on_step(step_record(1))
        observer.on_end(run_report(exit_reason="[/done]"))
        shown = text.getvalue()
        assert "[/bold] moe :on:" in shown and "[/x]/r.json" in shown and "[/done]" in shown
        (line,) = (line for line in shown.splitlines() if "headrace train" in line)
        assert line == f"to go on: {command}"


def test_after_a_resume_steps_and_time_left_are_those_of_the_whole_run() -> None:
    observer, text = plain_observer(FakeClock())
    observer.on_start(INFO | {"first_step": 8})
    observer.on_step(step_record(9))
    assert "step 9/10" in text.getvalue() and text.getvalue().rstrip().endswith("ETA 0:00")


def test_the_summary_of_a_run_without_evaluation_or_reference() -> None:
    observer, text = plain_observer(FakeClock())
    observer.on_end(run_report(eval=[], bigram_loss=None, exit_reason="stopped", steps=0))
    assert "held-out" not in text.getvalue()
    assert "bigram" not in text.getvalue()
    assert "0 (stopped)" in text.getvalue()


def test_a_terminal_is_redrawn_in_place_and_given_back() -> None:
    text = io.StringIO()
    console = Console(file=text, width=120, force_terminal=True)
    observer = ConsoleObserver(console, Path("r.json"))
    observer.on_start(INFO)
    observer.on_step(step_record(1))
    observer.on_eval({"step": 1, "loss": 2.0, "perplexity": 7.389})
    observer.on_step(step_record(2))
    observer.close()
    observer.close()
    shown = text.getvalue()
    assert "\x1b[?25l" in shown, "the cursor is hidden while the display lives"
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "and shown again"
    assert "2.0000 at step 1" in shown


def test_steps_without_time_do_not_divide_by_zero() -> None:
    observer, text = plain_observer(FakeClock())
    observer.on_start(INFO)
    observer.on_step(step_record(1, seconds=0.0, stall_seconds=0.0))
    assert "tokens/s 0" in text.getvalue()


class Recorder:
    """Observer that remembers the calls."""

    def __init__(self, name: str, calls: list[tuple[str, str]]) -> None:
        self._name = name
        self._calls = calls

    def __getattr__(self, method: str) -> object:
        return lambda *arguments: self._calls.append((self._name, method))


def test_observers_are_told_in_order_and_closed_in_reverse() -> None:
    calls: list[tuple[str, str]] = []
    both = Observers([Recorder("a", calls), Recorder("b", calls)])  # type: ignore[list-item]
    both.on_start({})
    both.on_step({})
    both.on_eval({})
    both.on_message("")
    both.on_end({})
    both.close()
    told = ["on_start", "on_step", "on_eval", "on_message", "on_end"]
    assert calls == [(name, method) for method in told for name in "ab"] + [
        ("b", "close"),
        ("a", "close"),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (125, "2:05"), (3723, "1:02:03"), (float("nan"), "?")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
