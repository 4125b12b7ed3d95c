"""Batches that broke other engines, on the real model under the smallest budgets."""

from __future__ import annotations

import numpy as np
import pytest

from launch.config import RunConfig
from tests.moe.harness import batch, make_config, run, smallest


def constant(config: RunConfig, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The same token everywhere: every position has the same hidden state, hence one routing."""
    shape = (config.train.batch_sequences, config.train.seq_len)
    tokens = np.full(shape, number % config.model.vocab_size, np.int32)
    return tokens, tokens.copy()


def test_all_tokens_to_one_expert(tmp_path):
    """C43: one expert of each layer gets every token, the others none."""
    options = {"model": {"num_experts_per_tok": 1, "n_shared_experts": 0}}
    config = smallest(tmp_path / "tight", **options)
    found = run(config, steps=3, batches=constant)
    idle_a_step = config.model.num_hidden_layers * (config.model.num_experts - 1)
    assert found.idle == 3 * idle_a_step
    wide = run(make_config(tmp_path / "wide", **options), steps=3, batches=constant)
    assert (found.losses, found.digest) == (wide.losses, wide.digest)


@pytest.mark.parametrize("seq_len", [1, pytest.param(2, marks=pytest.mark.long)])
def test_fewer_tokens_than_experts(tmp_path, seq_len):
    """C43: a micro-batch of one or two tokens and eight experts."""
    train = {"seq_len": seq_len, "micro_batch_size": 1, "gradient_accumulation_steps": 1}
    tight = run(smallest(tmp_path / "tight", train=train), steps=3)
    wide = run(make_config(tmp_path / "wide", train=train), steps=3)
    assert tight.idle > 0
    assert (tight.losses, tight.digest) == (wide.losses, wide.digest)


@pytest.mark.parametrize("tight", [True, pytest.param(False, marks=pytest.mark.long)])
def test_eight_micro_batches_are_one_batch_of_eight(tmp_path, tight):
    """C22: accumulated gradients are neither dropped nor counted twice, offloaded or not."""
    make = smallest if tight else make_config
    forms = []
    for name, size, parts in (("one", 8, 1), ("eight", 1, 8)):
        train = {"micro_batch_size": size, "gradient_accumulation_steps": parts}
        train |= {"weight_dtype": "float32", "grad_dtype": "float32"}
        forms.append(run(make(tmp_path / name, train=train), steps=1))
    one, eight = forms
    assert float.fromhex(one.losses[0]) == pytest.approx(float.fromhex(eight.losses[0]), rel=1e-5)
    assert one.norms[0] == pytest.approx(eight.norms[0], rel=1e-4)


def test_the_batches_of_the_harness_differ_from_step_to_step(tmp_path):
    config = make_config(tmp_path)
    assert (batch(config, 1)[0] != batch(config, 2)[0]).any()
