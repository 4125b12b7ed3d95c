"""Fused AdamW update in parameters per second, beside torch's fused AdamW.

Ours: bfloat16 weight + int16 residual with bfloat16 gradients (26 bytes moved per parameter), and
float32 masters with float32 gradients (28 bytes). Reference: `torch.optim.AdamW(fused=True)` on
float32 parameters and gradients (28 bytes), as many parameters and threads, its arrays in the same
kind of memory (page aligned, huge pages where ours have them). Also the replay of idle steps,
beside the same steps done one by one. Run from the repository root:

    python -m benchmarks.bench_update [--parameters 16777216] [--threads N] [--pairs 15]

torch comes with the `bench` extra; without it only the replay is measured.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import compare, seconds_of
from ops.kernels.adamw import AdamW, replay_split, update_master, update_split
from ops.kernels.pool import KernelPool
from ops.kernels.warm_up import warm_up

LR, WEIGHT_DECAY, IDLE_STEPS = 1e-3, 0.1, 32


class State:
    """Parameters in both storage forms with moments and gradients, page aligned as in the arena."""

    def __init__(self, size: int) -> None:
        rng = np.random.default_rng(0)
        self.weight = aligned(size, np.uint16)
        self.weight[:] = 0x3C23
        self.residual = aligned(size, np.int16)
        self.master = aligned(size, np.float32)
        self.master[:] = 0.01
        self.exp_avg, self.exp_avg_sq = aligned(size, np.float32), aligned(size, np.float32)
        self.grad32 = aligned(size, np.float32)
        rng.standard_normal(dtype=np.float32, out=self.grad32)
        self.grad32 *= 1e-3
        self.grad16 = aligned(size, np.uint16)
        self.grad16[:] = self.grad32.view(np.uint32) >> 16


def aligned(size: int, dtype: Any) -> Any:
    """Zeroed flat array of `size` items that starts on a page."""
    item_bytes = np.dtype(dtype).itemsize
    raw = np.zeros(size * item_bytes + 4096, np.uint8)
    offset = -raw.ctypes.data % 4096
    return raw[offset : offset + size * item_bytes].view(dtype)


def torch_step(size: int, threads: int) -> tuple[Callable[[], Any], str] | None:
    """One step of torch's fused AdamW over `size` float32 parameters; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    arrays = [torch.from_numpy(aligned(size, np.float32)) for _ in range(4)]
    parameter = torch.nn.Parameter(arrays[0].fill_(0.01))
    arrays[1].normal_(std=1e-3, generator=torch.Generator().manual_seed(0))
    parameter.grad = arrays[1]
    optimizer = torch.optim.AdamW([parameter], lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    optimizer.step()
    optimizer.state[parameter]["exp_avg"] = arrays[2]
    optimizer.state[parameter]["exp_avg_sq"] = arrays[3]
    return optimizer.step, f"torch {torch.__version__} AdamW(fused=True) fp32"


def compare_steps(state: State, pool: KernelPool, pairs: int, calls: int) -> None:
    """One step of each storage form beside one of torch's; says so where torch is missing."""
    size = state.master.size
    peer = torch_step(size, pool.threads)
    if peer is None:
        print("torch is not installed: the update has no peer to be measured beside")
        return
    step, peer_name = peer
    moments = (state.exp_avg, state.exp_avg_sq)
    row = AdamW().scalars(10, LR, WEIGHT_DECAY)

    def split_step() -> None:
        update_split(state.weight, state.residual, *moments, state.grad16, 1.0, row, pool=pool)

    def master_step() -> None:
        update_master(state.master, *moments, state.grad32, 1.0, row, pool=pool)

    for name, ours in (("update_bf16_split", split_step), ("update_fp32_master", master_step)):
        compare(
            name,
            "parameters/s",
            lambda ours=ours: size / seconds_of(ours, calls),
            lambda: size / seconds_of(step, calls),
            peer_name,
            pairs,
            parameters=size,
            threads=pool.threads,
        )


def compare_replay(state: State, pool: KernelPool, pairs: int) -> None:
    """Idle steps in one pass over memory beside as many dense steps of zero gradient."""
    size = state.master.size
    arrays = (state.weight, state.residual, state.exp_avg, state.exp_avg_sq)
    idle = np.zeros_like(state.grad16)
    table = AdamW().table([(step, LR, WEIGHT_DECAY) for step in range(10, 10 + IDLE_STEPS)])

    def dense() -> None:
        for row in table:
            update_split(*arrays, idle, 1.0, row, pool=pool)

    compare(
        f"update_replay_{IDLE_STEPS}_idle_steps",
        "parameter-steps/s",
        lambda: size * IDLE_STEPS / seconds_of(lambda: replay_split(*arrays, table, pool=pool)),
        lambda: size * IDLE_STEPS / seconds_of(dense),
        "the same steps one by one",
        pairs,
        parameters=size,
        threads=pool.threads,
    )


def main() -> None:
    """Parse the command line, run the comparisons, print one JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=1 << 24)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--calls", type=int, default=5, help="steps per measurement")
    args = parser.parse_args()
    warm_up()
    state = State(args.parameters)
    with KernelPool(args.threads) as pool:
        compare_steps(state, pool, args.pairs, args.calls)
        compare_replay(state, pool, args.pairs)


if __name__ == "__main__":
    main()
