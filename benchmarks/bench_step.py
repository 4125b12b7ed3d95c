"""An offloaded optimizer step beside the bound its schedule promises, on `small-moe`.

    make bench-step

Lines named `bound_chased` and `bound_speculative`: the median step time over

    chased        1.15 T_b + max(T_f, IO - H / BW)
    speculative   1.25 max(T_f + T_b, IO)

T_f and T_b are forward and backward (with everything behind it) of the same model in a process
whose budgets are so large that nothing moves; IO is the time of a raw replay of one step's own
reads and writes, in order, with the same workers and request size, without compute; H is the host
memory for read-ahead and write-behind; BW is the step's bytes over IO. The two processes run in
alternating blocks, one stopped while the other is measured, and the replay follows each block of
steps.

Further lines: bytes of a step by cause and per cold parameter, the kernel's count of the same bytes
(`/proc/self/io`), `pipeline: sync` beside `overlap`, what `durability: step` costs beyond the time
of the bytes it adds, and how traffic falls with the host budget.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.step_side import DISCARDED, offload_overrides
from benchmarks.workers import Worker

HUGE = "16GiB"


def bound(schedule: str, t_f: float, t_b: float, io: float, hidden: float) -> float:
    """Seconds a step may take."""
    if schedule == "chased":
        return 1.15 * t_b + max(t_f, io - hidden)
    return 1.25 * max(t_f + t_b, io)


def measure(schedule: str, host_bytes: int, rounds: int, steps: int, memory: Worker) -> None:
    """Print the lines of one update schedule."""
    with ExitStack() as stack:
        ours = stack.enter_context(_worker(schedule, "overlap", host_bytes))
        sync = None
        if schedule == "chased":
            sync = stack.enter_context(_worker(schedule, "sync", host_bytes))
        found: list[dict[str, Any]] = []
        for number in range(rounds):
            sides = {"memory": memory, "ours": ours, "sync": sync}
            names = list(sides) if number % 2 else list(reversed(sides))
            blocks = {
                name: side.call("block", DISCARDED + steps)
                for name in names
                if (side := sides[name]) is not None
            }
            found.append({**blocks, "replay": ours.call("replay")})
        _report(schedule, ours.call("info"), found)


@contextmanager
def _worker(schedule: str, pipeline: str, host_bytes: int, *overrides: str) -> Iterator[Worker]:
    folder = tempfile.mkdtemp(prefix="bench-step-", dir=os.environ.get("HEADRACE_BENCH_DIR"))
    try:
        side = [*offload_overrides(host_bytes, schedule, pipeline, folder), *overrides]
        with Worker("benchmarks.step_side", ["--side", json.dumps([side, folder])]) as worker:
            yield worker
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _median_step(blocks: list[dict[str, Any]]) -> float:
    whole = [f + r for x in blocks for f, r in zip(x["forward_s"], x["rest_s"])]
    return statistics.median(whole)


def _report(schedule: str, info: dict[str, Any], rounds: list[dict[str, Any]]) -> None:
    """The lines of a schedule: ratios are medians over rounds, each with its own bound."""
    rows = [_round(schedule, info, found) for found in rounds]
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    ratios = [row["step_s"] / row["bound_s"] for row in rows]
    _line(f"bound_{schedule}", statistics.median(ratios), "x", ratios=ratios, **middle, **info)
    if "sync_s" in middle:
        gain = statistics.median(row["sync_s"] / row["step_s"] for row in rows)
        _line(f"sync_over_overlap_{schedule}", gain, "x", sync_s=middle["sync_s"])
    block = rounds[-1]["ours"]
    moved, steps = block["moved"], block["steps"]
    per_step = {way: {c: n / steps for c, n in causes.items()} for way, causes in moved.items()}
    _line(
        f"bytes_{schedule}",
        sum(sum(causes.values()) for causes in per_step.values()) / info["parameters"],
        "B/parameter/step",
        read=per_step["read"],
        written=per_step["written"],
        **_per_parameter(per_step, info),
    )
    for way in ("read", "written"):
        counted = sum(moved[way].values())
        seen = block["kernel"][way]
        _line(f"kernel_{way}_{schedule}", seen / counted, "x", counted=counted, kernel=seen)


def _round(schedule: str, info: dict[str, Any], found: dict[str, Any]) -> dict[str, float]:
    memory, ours, io = found["memory"], found["ours"], found["replay"]
    t_f, t_b = (statistics.median(memory[key]) for key in ("forward_s", "rest_s"))
    hidden = info["stream_bytes"] / (io["bytes"] / io["seconds"])
    row = {
        "step_s": _median_step([ours]),
        "bound_s": bound(schedule, t_f, t_b, io["seconds"], hidden),
        "forward_s": t_f,
        "backward_s": t_b,
        "io_s": io["seconds"],
        "hidden_s": hidden,
        "bytes_per_s": io["bytes"] / io["seconds"],
        "stall_s": statistics.median(ours["stall_s"]),
        "own_forward_s": statistics.median(ours["forward_s"]),
        "own_backward_s": statistics.median(ours["rest_s"]),
    }
    if "sync" in found:
        row["sync_s"] = _median_step([found["sync"]])
    return row


def _per_parameter(per_step: dict[str, dict[str, float]], info: dict[str, Any]) -> dict[str, Any]:
    """Bytes beyond the 10 + 10 of every cold parameter, per parameter whose weight is cold too.

    Promise 4: at most 10 read + 10 written where the weight stays in host, 14 + 12 where it does
    not.
    """
    cold, coldest = info["cold_parameters"], info["cold_weight_parameters"]
    read = per_step["read"]["update"] + per_step["read"]["weight"]
    written = per_step["written"]["update"]
    return {
        "read_per_cold_parameter": read / cold,
        "written_per_cold_parameter": written / cold,
        "promised_read": 10 + 4 * coldest / cold,
        "promised_written": 10 + 2 * coldest / cold,
    }


def durability(host_bytes: int, rounds: int, steps: int) -> None:
    """What `durability: step` costs beyond the time of the bytes it adds (at most 3 %)."""
    with ExitStack() as stack:
        none, step = (
            stack.enter_context(_worker("chased", "overlap", host_bytes, f"offload.durability={x}"))
            for x in ("none", "step")
        )
        plain, durable, raw = [], [], []
        for _ in range(rounds):
            plain.append(none.call("block", DISCARDED + steps))
            durable.append(step.call("block", DISCARDED + steps))
            added = durable[-1]["moved"]["written"]["commit"] // durable[-1]["steps"]
            raw.append(step.call("write", added))
        without, with_commits = _median_step(plain), _median_step(durable)
        extra = statistics.median(raw)
        _line(
            "durability_step",
            (with_commits - without - extra) / without,
            "share of a step",
            none_s=without,
            step_s=with_commits,
            added_bytes=added,
            added_bytes_s=extra,
        )


def _line(name: str, value: float, unit: str, **extra: Any) -> None:
    record = {"name": name, "value": value, "unit": unit, **extra}
    print(json.dumps({key: _short(item) for key, item in record.items()}), flush=True)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [_short(item) for item in value]
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return value


def proportion(host_shares: tuple[float, ...], state_bytes: int) -> None:
    """How the bytes of a step fall as the host budget grows (`durability: none`)."""
    for share in host_shares:
        with _worker("chased", "overlap", int(share * state_bytes)) as worker:
            info, block = worker.call("info"), worker.call("block", DISCARDED + 1)
        per_step = sum(sum(causes.values()) for causes in block["moved"].values()) / block["steps"]
        _line(
            "traffic",
            per_step,
            "B/step",
            host_share=share,
            cold_share=info["cold_parameters"] / info["parameters"],
            bytes_per_cold_parameter=per_step / max(info["cold_parameters"], 1),
        )


def main() -> None:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", default="chased,speculative")
    parser.add_argument("--host-share", type=float, default=0.4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--parts", default="schedules,durability,proportion")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    huge = [f"offload.{tier}.capacity={HUGE}" for tier in ("device", "host")]
    huge.append("offload.nvme.capacity=18GiB")
    with Worker("benchmarks.step_side", ["--side", json.dumps([huge, None])]) as memory:
        state_bytes = memory.call("info")["state_bytes"]
        host_bytes = int(arguments.host_share * state_bytes)
        for schedule in arguments.schedules.split(",") if "schedules" in parts else ():
            measure(schedule, host_bytes, arguments.rounds, arguments.steps, memory)
    if "durability" in parts:
        durability(host_bytes, arguments.rounds, arguments.steps)
    if "proportion" in parts:
        proportion((0.4, 0.5, 0.75), state_bytes)


if __name__ == "__main__":
    main()
