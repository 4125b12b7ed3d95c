"""Engines of several ranks that share their units: the same weights as one rank alone.

Ranks are threads here (`ops/comm/local.py`); each has an engine and a store of its own. With one
micro-batch a rank the sum over ranks is the sum over micro-batches, in the same order, so all
weights of a unit with a single use are equal to those of one rank bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from offload.arena import Buffer
from offload.blocks import UnitLayout
from offload.config import OffloadConfig, OptimizerConfig
from offload.engine import OffloadEngine
from offload.testing import RandomDelays, Toy, budgets, smallest_budgets, toy_run
from ops.comm.base import World
from ops.comm.local import run_local

STEPS = 4
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e9)
Budgets = Callable[[Path, Toy], OffloadConfig]


@dataclass
class Trained:
    """What one rank knows at the end."""

    losses: list[int]
    norms: list[float]
    pieces: list[tuple[str, int, np.ndarray]]
    applied: list[bool]
    peak: int
    gathers: list[str]


def skewed(step: int, layer: int) -> list[int]:
    """Expert 3 idles most steps, expert 2 every other step; in step 3 half of the ranks' idle."""
    if step == 3:
        return [0, 2]
    return [0, 1] + ([2] if (step + layer) % 2 else []) + ([3] if step % 4 == 2 else [])


def roomy(path: Path, toy: Toy) -> OffloadConfig:
    return budgets(path)


def least(path: Path, toy: Toy) -> OffloadConfig:
    return smallest_budgets(toy, budgets(path))


def synchronous(path: Path, toy: Toy) -> OffloadConfig:
    return smallest_budgets(toy, budgets(path, pipeline="sync"))


def spilling(path: Path, toy: Toy) -> OffloadConfig:
    return smallest_budgets(toy, budgets(path, gradient_spill="always"))


def with_window(path: Path, toy: Toy) -> OffloadConfig:
    """A little more than the least device memory: room for some gathers ahead."""
    config = least(path, toy)
    device = replace(config.device, capacity=config.device.capacity + (96 << 10))
    return replace(config, device=device)


def roomy_host(path: Path, toy: Toy) -> OffloadConfig:
    """The least device memory, and a host that holds everything: nothing is cold."""
    return replace(least(path, toy), host=roomy(path, toy).host)


def uneven(path: Path, toy: Toy) -> OffloadConfig:
    """Each rank of a group has budgets of its own."""
    return (roomy, least, with_window, roomy_host)[toy.rank](path, toy)


def note_gathers(engine: OffloadEngine) -> list[str]:
    """The units that the engine gathers from now on, in the order in which it begins to."""
    gathers, begun = engine._pipeline._gathers, []
    gather = gathers.gather

    def noted(layout: UnitLayout, name: str, source: Buffer, target: Buffer) -> None:
        begun.append(name)
        gather(layout, name, source, target)

    gathers.gather = noted  # type: ignore[method-assign]
    return begun


def one_rank(
    world: World,
    toy: Toy,
    path: Path,
    config: Budgets,
    optimizer: OptimizerConfig,
    seed: int | None,
    evaluate: bool,
) -> Trained:
    toy = replace(toy, ranks=world.size, rank=world.rank)
    sharing = toy.sharing(world) if world.size > 1 else {}
    options = {} if seed is None else {"delay": RandomDelays(seed + world.rank)}
    settings = config(path / f"rank{world.rank}", toy)
    (path / f"rank{world.rank}").mkdir(parents=True, exist_ok=True)
    with toy_run(
        toy, settings, optimizer, sharing=sharing, everyone=world, verify_leases=True, **options
    ) as run:
        losses, gathers = [], note_gathers(run.engine)
        for number in range(1, STEPS + 1):
            losses.append(run.step(number, 1e-2 / number))
            if evaluate and number % 2:
                losses.append(run.evaluate())
        pieces = [
            (tensor.name, tensor.flat0, np.array(values)) for tensor, values in run.engine.masters()
        ]
        run.engine.drain()
        run.check_buffers()
        peak = run.engine.peak_bytes()["device"]
        assert peak <= settings.device.capacity
        outcomes = run.outcomes
        norms, applied = [x.grad_norm for x in outcomes], [x.applied for x in outcomes]
        return Trained(losses, norms, pieces, applied, peak, gathers)


def train(
    size: int,
    toy: Toy,
    path: Path,
    config: Budgets = roomy,
    optimizer: OptimizerConfig = OPTIMIZER,
    seed: int | None = None,
    evaluate: bool = False,
) -> list[Trained]:
    return run_local(size, one_rank, toy, path, config, optimizer, seed, evaluate)


def weights(ranks: list[Trained]) -> dict[str, np.ndarray]:
    """The whole tensors of all ranks' pieces; replicas must agree."""
    pieces: dict[str, dict[int, np.ndarray]] = {}
    for rank in ranks:
        for name, first, values in rank.pieces:
            found = pieces.setdefault(name, {})
            assert first not in found or (found[first] == values).all(), name
            found[first] = values
    return {name: np.concatenate([p[k] for k in sorted(p)]) for name, p in sorted(pieces.items())}


def assert_same(ranks: list[Trained], alone: list[Trained]) -> None:
    """All weights equal bit for bit, but the tied embedding, whose sums are in another order."""
    found, wanted = weights(ranks), weights(alone)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        if name == "embed.w":
            np.testing.assert_allclose(found[name], values, rtol=0, atol=2e-4)
        else:
            assert (found[name] == values).all(), name


@pytest.mark.parametrize("config", [roomy, least, synchronous, spilling, with_window])
@pytest.mark.parametrize("experts", ["shared by all", "apart"])
def test_two_ranks_make_the_weights_of_one(tmp_path, config, experts):
    toy = Toy(needed=skewed, grad_dtype="float32")
    alone = train(1, toy, tmp_path / "alone")
    split = replace(toy, expert_parallel=2 if experts == "apart" else 1)
    ranks = train(2, split, tmp_path / "ranks", config, evaluate=True)
    if experts == "shared by all":
        assert_same(ranks, alone)
    else:  # one rank makes all gradients of its experts: both micro-batches, the same sum
        assert_same(ranks, alone)
    for rank in ranks:
        assert rank.norms == ranks[0].norms
        np.testing.assert_allclose(rank.norms, alone[0].norms, rtol=1e-6)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (3, "bfloat16"),
        (4, "float16"),
        *(
            pytest.param(*other, marks=pytest.mark.long)
            for other in [(3, "float32"), (3, "float16"), (4, "bfloat16"), (4, "float32")]
        ),
    ],
)
def test_budgets_and_delays_change_no_bit_on_several_ranks(tmp_path, size, dtype):
    compute = "float16" if dtype == "float16" else "float32"
    toy = Toy(
        needed=skewed,
        weight_dtype=dtype,
        compute_dtype=compute,
        micro_batches=size,
        expert_parallel=2 if size == 4 else 1,
    )
    expected = train(size, toy, tmp_path / "first", evaluate=True)
    for number, config in enumerate((least, with_window, synchronous)):
        found = train(size, toy, tmp_path / f"{number}", config, seed=number, evaluate=True)
        for one, other in zip(found, expected):
            assert one.losses == other.losses and one.norms == other.norms
        assert {n: w.tobytes() for n, w in weights(found).items()} == {
            n: w.tobytes() for n, w in weights(expected).items()
        }


@pytest.mark.parametrize("schedule", ["chased", "speculative"])
@pytest.mark.parametrize(
    ("size", "expert_parallel"), [(2, 1), pytest.param(3, 1, marks=pytest.mark.long), (4, 2)]
)
def test_ranks_of_a_group_may_have_different_budgets(tmp_path, size, expert_parallel, schedule):
    """Device and host of each rank are its own affair: all enter the same gathers in one order.

    What a rank keeps, reads ahead, spills or gathers early depends on its budgets. If a gather did,
    others would wait for one that this rank does not enter, or enters in place of another.
    """
    toy = Toy(needed=skewed, micro_batches=size, expert_parallel=expert_parallel)
    optimizer = replace(OPTIMIZER, update_schedule=schedule)
    alike = train(size, toy, tmp_path / "alike", roomy, optimizer, evaluate=True)
    for seed in (1, 2):
        folder = tmp_path / f"uneven {seed}"
        ranks = train(size, toy, folder, uneven, optimizer, seed=seed, evaluate=True)
        assert len({rank.peak for rank in ranks}) > 1
        for rank, (found, wanted) in enumerate(zip(ranks, alike)):
            assert found.gathers == wanted.gathers, f"rank {rank}"
            assert found.losses == wanted.losses and found.norms == wanted.norms
        for first, found in enumerate(ranks):
            twin = ranks[(first + expert_parallel) % size]
            assert found.gathers == twin.gathers and len(found.gathers) > STEPS
        assert {n: w.tobytes() for n, w in weights(ranks).items()} == {
            n: w.tobytes() for n, w in weights(alike).items()
        }


def test_replicas_stay_equal_and_make_the_weights_of_one_rank(tmp_path):
    """`optimizer_parallel: false`: every rank holds all, gradients are summed."""
    toy = Toy(needed=skewed, grad_dtype="float32")
    alone = train(1, toy, tmp_path / "alone")
    ranks = train(2, replace(toy, sharded=False), tmp_path / "ranks", least)
    assert_same(ranks, alone)
    np.testing.assert_allclose(ranks[0].norms, alone[0].norms, rtol=1e-6)


def test_a_frozen_unit_is_gathered_and_nothing_is_reduced(tmp_path):
    toy = Toy(frozen=frozenset({"l1", "l0.e1"}), grad_dtype="float32")
    assert_same(train(2, toy, tmp_path / "ranks", least), train(1, toy, tmp_path / "alone"))


@pytest.mark.parametrize("schedule", ["chased", "speculative"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path, schedule):
    """C26: the gradient of one expert on one rank has an infinity; moments stay untouched."""
    toy = Toy(
        weight_dtype="float16",
        compute_dtype="float16",
        overflow_steps=frozenset({2}),
        expert_parallel=2,
    )
    optimizer = replace(OPTIMIZER, update_schedule=schedule)
    ranks = train(2, toy, tmp_path, least, optimizer)
    for rank in ranks:
        assert rank.applied == [True, False, True, True]


def test_clipping_uses_the_norm_of_all_ranks(tmp_path):
    toy = Toy(grad_dtype="float32")
    optimizer = replace(OPTIMIZER, max_grad_norm=0.5)
    alone = train(1, toy, tmp_path / "alone", optimizer=optimizer)
    for schedule in ("chased", "speculative"):
        ranks = train(
            2,
            toy,
            tmp_path / schedule,
            least,
            replace(optimizer, update_schedule=schedule),
        )
        assert min(alone[0].norms) > 0.5  # every step is clipped
        for name, values in weights(alone).items():
            np.testing.assert_allclose(weights(ranks)[name], values, rtol=1e-5, atol=2e-5)


def test_every_rank_holds_its_part_of_the_state(tmp_path):
    toy = Toy(dense_size=40_000, expert_size=40_000)
    whole = sum(x.nbytes("state") for x in toy.layouts())
    for size in (2, 4):
        parts = [
            sum(x.nbytes("state") for x in replace(toy, ranks=size, rank=rank).layouts())
            for rank in range(size)
        ]
        assert max(parts) <= 1.02 * whole / size


def gathered_ahead(world: World, toy: Toy, path: Path) -> list[str]:
    """What lies ready before compute has asked for anything."""
    toy = replace(toy, ranks=world.size, rank=world.rank)
    folder = path / str(world.rank)
    folder.mkdir()
    with toy_run(toy, budgets(folder), sharing=toy.sharing(world), everyone=world) as run:
        engine, wanted = run.engine, ["embed", "l0"]
        shared = engine._shared

        def ahead() -> list[str]:
            return [name for name, unit in shared.units.items() if unit.is_ahead and unit.device]

        engine.begin(toy.stages())
        with shared.changed:
            shared.changed.wait_for(lambda: ahead() == wanted or shared.failed, timeout=30)
            found = ahead()
        for stage, unit in (("fwd embed", "embed"), ("fwd l0", "l0")):
            engine.enter(stage)
            with engine.use(unit):
                pass
        assert ahead() == []  # a gathered copy serves one use
        return found


def test_units_are_gathered_ahead_up_to_the_first_routing_that_is_not_known(tmp_path):
    for found in run_local(2, gathered_ahead, Toy(), tmp_path):
        assert found == ["embed", "l0"]
