"""Promise 1 at the engine's level: where bytes are never changes what is computed.

The toy model's loss is a checksum of every leased weight, so equality here is equality of every
weight at every use.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from offload.config import LossScaleConfig, OffloadConfig, OptimizerConfig
from offload.testing import RandomDelays, Toy, budgets, smallest_budgets, toy_run
from ops.kernels.adamw import AdamW

STEPS = 6
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=5.0)


def skewed(step: int, layer: int) -> list[int]:
    """Expert 3 idles most steps, expert 2 every other step."""
    needed = [0, 1]
    if (step + layer) % 2:
        needed.append(2)
    if step % 4 == 3:
        needed.append(3)
    return needed


def rate(step: int) -> float:
    return 1e-2 / step


def train(toy: Toy, config: OffloadConfig, steps: int = STEPS, optimizer=OPTIMIZER, **options):
    with toy_run(toy, config, optimizer, **options) as run:
        losses = [run.step(number, rate(number)) for number in range(1, steps + 1)]
        digest = run.digest()
        return losses, digest, [outcome.grad_norm for outcome in run.outcomes], run.engine


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory):
    config = budgets(tmp_path_factory.mktemp("none"))
    return {
        name: train(toy, config)[:3]
        for name, toy in {"plain": Toy(), "skewed": Toy(needed=skewed)}.items()
    }


@pytest.mark.parametrize("routing", ["plain", "skewed"])
@pytest.mark.parametrize("pipeline", ["overlap", "sync"])
@pytest.mark.parametrize("spill", ["auto", "always"])
def test_smallest_budgets_give_the_same_bits(tmp_path, in_memory, routing, pipeline, spill):
    toy = Toy(needed=skewed) if routing == "skewed" else Toy()
    config = budgets(tmp_path, pipeline=pipeline, gradient_spill=spill)
    config = smallest_budgets(toy, config)
    losses, digest, norms, engine = train(toy, config, verify_leases=True)
    assert (losses, digest, norms) == in_memory[routing]
    for tier, peak in engine.peak_bytes().items():
        assert peak <= getattr(config, tier).capacity


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_any_budget_between_gives_the_same_bits(tmp_path, in_memory, share):
    toy = Toy(needed=skewed)
    config = budgets(tmp_path)
    low = smallest_budgets(toy, config)
    with_room = budgets(
        tmp_path,
        device=low.device.capacity + int(share * 400_000),
        host=low.host.capacity + int(share * 2_000_000),
    )
    losses, digest, norms, engine = train(toy, with_room, verify_leases=True)
    assert (losses, digest, norms) == in_memory["skewed"]
    for tier, peak in engine.peak_bytes().items():
        assert peak <= getattr(with_room, tier).capacity


@pytest.mark.parametrize("seed", range(4))
def test_random_delays_in_every_lane_give_the_same_bits(tmp_path, in_memory, seed):
    """C25: a buffer reused while somebody still reads it shows as another checksum."""
    toy = Toy(needed=skewed)
    low = smallest_budgets(toy, budgets(tmp_path))
    room = 500_000 * (seed % 2)
    config = budgets(tmp_path, device=low.device.capacity + room, host=low.host.capacity + 2 * room)
    result = train(toy, config, delay=RandomDelays(seed), verify_leases=True)
    assert result[:3] == in_memory["skewed"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_weight_formats_keep_their_bits_through_every_tier(tmp_path, dtype):
    """C32: fp32 parameters among 16-bit ones keep their dtype; fp16 keeps a master beside."""
    compute = "float16" if dtype == "float16" else "float32"
    toy = Toy(needed=skewed, weight_dtype=dtype, compute_dtype=compute, grad_dtype="float32")
    optimizer = replace(OPTIMIZER, loss_scale=LossScaleConfig(initial=1024.0))
    wide = train(toy, budgets(tmp_path / "wide"), optimizer=optimizer)
    small = smallest_budgets(toy, budgets(tmp_path / "small"))
    tight = train(toy, small, optimizer=optimizer)
    assert tight[:3] == wide[:3]


def test_replay_equals_dense_and_skip_does_not(tmp_path, in_memory):
    toy = Toy(needed=skewed)
    results = {}
    for policy in ("dense", "replay", "skip"):
        config = smallest_budgets(toy, budgets(tmp_path / policy, idle_expert_policy=policy))
        results[policy] = train(toy, config)[:3]
    assert results["dense"] == results["replay"] == in_memory["skewed"]
    assert results["skip"][1] != results["dense"][1]


def test_two_hundred_idle_steps_replayed_equal_dense(tmp_path):
    toy = Toy(layers=1, experts=2, expert_size=4097, needed=lambda s, _: [0, 1] if s == 1 else [0])
    results = []
    for policy, lag in (("dense", 64), ("replay", 64), ("replay", 1000)):
        options = {} if policy == "dense" else {"replay_lag_max": lag}
        config = budgets(tmp_path / f"{policy}{lag}", idle_expert_policy=policy, **options)
        config = smallest_budgets(toy, config)
        results.append(train(toy, config, steps=201)[:2])
    assert results[0] == results[1] == results[2]


def test_idle_experts_cost_no_update_traffic(tmp_path):
    """Promise 4: under replay and skip an idle expert moves no byte for its update."""
    moved = {}
    for policy in ("dense", "replay", "skip"):
        toy = Toy(needed=lambda step, layer: [0])
        config = smallest_budgets(toy, budgets(tmp_path / policy, idle_expert_policy=policy))
        with toy_run(toy, config, OPTIMIZER) as run:
            run.step(1, rate(1))
            run.engine.drain()
            store = run.engine._parts.store
            moved[policy] = store.stats().read.payload_bytes
    state = 3 * 3 * 9001 * 10
    assert moved["dense"]["replay"] >= state
    assert moved["replay"]["replay"] == moved["skip"]["replay"] == 0
    assert moved["replay"]["update"] == moved["skip"]["update"]


@pytest.mark.parametrize("policy", ["replay", "dense", "skip"])
def test_an_expert_is_never_stepped_with_an_old_gradient(tmp_path, policy):
    """C23: no gradient in steps 2 and 4; the reference applies AdamW in memory."""
    toy = Toy(
        layers=1,
        experts=2,
        weight_dtype="float32",
        grad_dtype="float32",
        needed=lambda step, _: [0] if step in (2, 4) else [0, 1],
    )
    config = smallest_budgets(toy, budgets(tmp_path, idle_expert_policy=policy))
    seen: dict[int, np.ndarray] = {}
    with toy_run(toy, config, replace(OPTIMIZER, max_grad_norm=1e9)) as run:
        original = run._gradient

        def spy(name, weight, number, part):
            grad = original(name, weight, number, part)
            if name == "l0.e1.w":
                seen[number] = seen.get(number, 0) + grad
            return grad

        run._gradient = spy
        for number in range(1, 6):
            run.step(number, rate(number))
        masters = {tensor.name: values.copy() for tensor, values in run.engine.masters()}
        tensor = next(t for u in toy.units() for t in u.tensors if t.name == "l0.e1.w")
    adamw = AdamW(OPTIMIZER.beta1, OPTIMIZER.beta2, OPTIMIZER.eps)
    p = toy.values(tensor).astype(np.float64)
    m, v = np.zeros_like(p), np.zeros_like(p)
    for number in range(1, 6):
        if number in (2, 4) and policy == "skip":
            continue
        g = seen.get(number, np.zeros_like(p)).astype(np.float64)
        m = adamw.beta1 * m + (1 - adamw.beta1) * g
        v = adamw.beta2 * v + (1 - adamw.beta2) * g * g
        p -= rate(number) * OPTIMIZER.weight_decay * p
        bias1, bias2 = 1 - adamw.beta1**number, 1 - adamw.beta2**number
        p -= rate(number) / bias1 * m / (np.sqrt(v / bias2) + adamw.eps)
    assert set(seen) == {1, 3, 5}
    np.testing.assert_allclose(masters["l0.e1.w"], p, rtol=2e-5, atol=1e-7)


def test_evaluation_between_steps_changes_nothing(tmp_path, in_memory):
    """C30: a forward without a backward leaves schedule and ledger where they were."""
    toy = Toy(needed=skewed)
    config = smallest_budgets(toy, budgets(tmp_path))
    with toy_run(toy, config, OPTIMIZER) as run:
        losses, evals = [], []
        for number in range(1, STEPS + 1):
            losses.append(run.step(number, rate(number)))
            evals.append(run.evaluate())
            assert run.evaluate() == evals[-1]
        assert (losses, run.digest()) == in_memory["skewed"][:2]


def test_an_overflowing_step_touches_nothing_and_halves_the_scale(tmp_path):
    """C26, on one rank: inf in one expert; moments untouched; the next good step is right."""
    optimizer = replace(OPTIMIZER, loss_scale=LossScaleConfig(initial=1024.0))
    form = {"weight_dtype": "float16", "compute_dtype": "float16", "needed": skewed}
    toy = Toy(**form, overflow_steps=frozenset({2}))
    config = smallest_budgets(toy, budgets(tmp_path / "a", gradient_spill="always"))
    with toy_run(toy, config, optimizer) as run:
        run.step(1, rate(1))
        run.step(2, rate(2))
        assert not run.outcomes[1].applied and not run.outcomes[1].alarm
        assert run.engine.scaler.scale == 512.0
        assert run.engine.optimizer_step == 1
        run.step(3, rate(2))
        with_overflow = run.digest()
    toy = Toy(**form)
    with toy_run(
        toy, replace(config, nvme=replace(config.nvme, path=str(tmp_path / "b"))), optimizer
    ) as run:
        run.step(1, rate(1))
        run.step(3, rate(2))
        # Powers of two cancel exactly, so the scale itself changes no bit.
        assert run.digest() == with_overflow


def test_without_a_loss_scale_overflow_is_an_alarm(tmp_path):
    toy = Toy(overflow_steps=frozenset({1}))
    with toy_run(toy, budgets(tmp_path), OPTIMIZER) as run:
        before = run.digest()
        run.step(1, rate(1))
        assert run.outcomes[0].alarm and not run.outcomes[0].applied
        assert run.digest() == before
