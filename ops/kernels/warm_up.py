"""Compile every kernel once, so that no step of a run pays for it.

Compiled code is cached on disk beside the sources (or in the user's cache folder), so only the
first process on a machine takes several seconds; later ones load the code in a fraction of one.
"""

from __future__ import annotations

import numpy as np

from ops.kernels import adamw, reduce, shuffle, split


def warm_up() -> None:
    """Call every public kernel function on a few elements with each dtype; blocks meanwhile."""
    size = 2
    master, target32 = np.zeros(size, np.float32), np.zeros(size, np.float32)
    weight, residual = np.zeros(size, np.uint16), np.zeros(size, np.int16)
    half, target64 = np.zeros(size, np.float16), np.zeros(size, np.float64)
    split.split_master(master, weight, residual)
    split.join_master(weight, residual, master)
    split.expand_bf16(weight, target32)
    split.expand_bf16_f64(weight, target64)
    split.round_bf16(master, weight)
    split.narrow_f16(master, half)

    exp_avg, exp_avg_sq = np.zeros(size, np.float32), np.zeros(size, np.float32)
    table = adamw.AdamW().table([(1, 0.0, 0.0)])
    row = table[0]
    for grad in (np.zeros(size, np.uint16), np.zeros(size, np.float32)):
        adamw.update_split(weight, residual, exp_avg, exp_avg_sq, grad, 1.0, row)
        adamw.update_master(master, exp_avg, exp_avg_sq, grad, 1.0, row)
        adamw.update_master_f16(master, half, exp_avg, exp_avg_sq, grad, 1.0, row)
        reduce.sum_squares(grad)
        reduce.all_finite(grad)
        reduce.accumulate(target32, grad)
    adamw.replay_split(weight, residual, exp_avg, exp_avg_sq, table)
    adamw.replay_master(master, exp_avg, exp_avg_sq, table)
    adamw.replay_master_f16(master, half, exp_avg, exp_avg_sq, table)

    planes = np.zeros(8, np.uint8)
    for item_bytes in shuffle.ITEM_BYTES:
        shuffle.shuffle(np.zeros(8, np.uint8), planes, item_bytes)
        shuffle.unshuffle(np.zeros(8, np.uint8), planes, item_bytes)
