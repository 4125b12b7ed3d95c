"""A whole optimizer step in memory, beside the same model in torch.

`compute_step` is the wall time of one step of `small-moe` (forward, backward, clip, update, all
applied) with budgets so large that nothing leaves memory, over that of `benchmarks/torch_moe.py`
(fp32, eager, fused AdamW, equal threads). Lower is better.

Each side lives in a process of its own and is stopped while the other is measured, so that neither
the other's idle threads nor its libraries disturb it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import compare, seconds_of

HUGE = "16GiB"


class Worker:
    """A process that runs one step per line of its standard input and answers with seconds."""

    def __init__(self, side: str, arguments: list[str], env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "benchmarks.bench_compute", "--side", side, *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.info: dict[str, Any] = self._answer()
        self._process.send_signal(signal.SIGSTOP)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the worker ended with code {self._process.wait()}")

    def step(self) -> float:
        """Seconds of one step."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds = float(self._answer()["seconds"])
        self._process.send_signal(signal.SIGSTOP)
        return seconds

    def close(self) -> None:
        """End the process."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _serve(step: Any, info: dict[str, Any]) -> None:
    step()
    print(json.dumps(info), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"seconds": seconds_of(step)}), flush=True)


def _config(preset: str) -> Any:
    from launch.config import load_config

    # Everything stays in memory, activations too: the peer recomputes nothing either.
    overrides = [f"offload.{tier}.capacity={HUGE}" for tier in ("device", "host")]
    overrides.append("train.recompute=none")
    return load_config(preset, overrides)


def _batch(config: Any) -> tuple[Any, Any]:
    import numpy as np

    shape = (config.train.batch_sequences, config.train.seq_len + 1)
    tokens = np.random.default_rng(1).integers(0, 256, shape).astype(np.int32)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def _torch_side(preset: str) -> None:
    from benchmarks.torch_moe import TorchStep

    config = _config(preset)
    peer = TorchStep(config.model, config.train, config.optimizer, config.runtime.num_threads)
    tokens, targets = _batch(config)
    _serve(lambda: peer(tokens, targets), {"parameters": peer.num_parameters})


def _our_side(preset: str) -> None:
    from launch import environment

    config = _config(preset)
    environment.prepare(config.runtime)
    from launch.build import compute_parts, initialize, make_engine, make_plan
    from moe.step import TrainingStep
    from ops.kernels.pool import KernelPool

    with ExitStack() as stack:
        plan = make_plan(config)
        backend, stages = compute_parts(config)
        pool = stack.enter_context(KernelPool(config.runtime.num_threads))
        engine = make_engine(config, plan, backend, pool, None)
        stack.callback(engine.close)
        initialize(config, engine)
        step = TrainingStep(config.model, config.train, engine, stages, backend)
        tokens, targets = _batch(config)

        def whole_step() -> None:
            step.train(tokens, targets, config.optimizer.learning_rate)
            engine.drain()

        _serve(whole_step, {"parameters": plan.parameters})


def main() -> None:
    """Measure and print one JSON line; without torch there is no peer and nothing to print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="small-moe")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--side", choices=("ours", "torch"))
    arguments = parser.parse_args()
    if arguments.side:
        {"ours": _our_side, "torch": _torch_side}[arguments.side](arguments.preset)
        return
    if importlib.util.find_spec("torch") is None:
        print("bench_compute: torch is not installed, so there is no peer", file=sys.stderr)
        return
    env = dict(os.environ, PYTHONPATH=str(Path(__file__).resolve().parents[1]))
    with ExitStack() as stack:
        workers = {}
        for side in ("ours", "torch"):
            workers[side] = Worker(side, ["--preset", arguments.preset], env)
            stack.callback(workers[side].close)
        compare(
            f"compute_step_{arguments.preset}",
            "s",
            workers["ours"].step,
            workers["torch"].step,
            "torch fp32 eager, fused AdamW",
            arguments.pairs,
            higher_is_better=False,
            parameters=workers["ours"].info["parameters"],
            reference_parameters=workers["torch"].info["parameters"],
        )


if __name__ == "__main__":
    main()
