"""One rank of the cases that need several real ranks and an engine, but no command line.

    mpirun -n 4 python -m tests.launch.mesh_case_ranks FOLDER

Ranks 0 and 2, and ranks 1 and 3, hold the same experts (data_parallel 4, expert_parallel 2). All
communicators are checked. Prints the name of each case that passed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import moe.forward
from launch.build import initialize, make_engine, make_plan, open_store
from launch.config import RunConfig
from launch.ranks import detect_ranks
from launch.world import shared_world
from moe.digest import weights_digest
from moe.memory import stage_dims
from moe.mesh import Mesh
from moe.parallel import ParallelGroups, open_groups
from moe.step import StepResult, TrainingStep
from offload.engine import OffloadEngine
from offload.parts import UnitUse
from offload.schedule import Stage
from ops.backend import MindSporeBackend
from ops.comm.base import World
from ops.comm.collectives import Collectives
from ops.comm.single import SingleRank
from ops.kernels.pool import KernelPool
from ops.kernels.warm_up import warm_up
from ops.nn.dims import StageDims
from ops.nn.stages import Stages
from tests.launch.mesh_ranks import Case, batch, make_config

RANKS = 4
MESH = {"data_parallel": 4, "expert_parallel": 2}
SECONDS_MAX = 300.0
ROOMY = 1 << 28
WINDOW = 1 << 16
STREAM = 280_000  # host memory beyond the least: some for read-ahead, and some weights are cold
FORM = {"weight_dtype": "float16", "compute_dtype": "float16", "grad_dtype": "float32"}
MODEL = {"num_experts": 16, "num_hidden_layers": 3}
SCALE = {"loss_scale": {"initial": 1024.0}}


def case_of(name: str, parallel: dict[str, int] = MESH) -> Case:
    """A case; all have one form, so that each rank compiles its stages once."""
    return Case(name, parallel, MODEL, FORM, optimizer=SCALE)


@dataclass
class Run:
    """One rank's engine and step."""

    config: RunConfig
    groups: ParallelGroups
    engine: OffloadEngine
    step: TrainingStep

    def train(self, number: int) -> StepResult:
        """Step on this rank's rows of batch `number`."""
        count, index = self.config.train.batch_sequences, self.groups.share.at.dp
        rows = slice(index * count, (index + 1) * count)
        tokens, targets = batch(self.config, number)
        return self.step.train(tokens[rows], targets[rows], 1e-2 / number)


class Bench:
    """What all cases of this process share."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.backend = MindSporeBackend()
        self.backend.configure(1)
        warm_up()
        self._stages: dict[StageDims, Stages] = {}
        self._num_stores = 0

    @contextmanager
    def run(self, case: Case, world: World | None = None, **budgets: int) -> Iterator[Run]:
        """This rank of a run from its initial values; `budgets` as in `make_config`."""
        world = world or self.world
        self._num_stores += 1
        config = make_config(case, self.folder / f"store-{self._num_stores}", **budgets)
        groups = open_groups(Mesh(config.parallel), world, config.model)
        plan = make_plan(config, rank=world.rank)
        assert plan.fits, plan.problems
        dims = stage_dims(config.model, config.train, groups.share)
        if dims not in self._stages:
            self._stages[dims] = Stages(dims, config.train.compute_dtype)
        store = open_store(config, plan, rank=world.rank)
        try:
            with KernelPool(1) as pool:
                engine = make_engine(config, plan, self.backend, pool, store, groups)
                initialize(config, engine)
                step = TrainingStep(
                    config.model, config.train, engine, self._stages[dims], self.backend, groups
                )
                yield Run(config, groups, engine, step)
                engine.close()
        finally:
            store.close(delete=True)

    def least(self, case: Case) -> dict[str, int]:
        """The least budgets that the plans of all ranks accept."""
        plans = [
            make_plan(make_config(case, self.folder, 1, 1), rank=rank).tiers
            for rank in range(RANKS)
        ]
        return {
            name: max(plan[name].minimum_bytes for plan in plans) for name in ("device", "host")
        }


# ---- C26


@contextmanager
def one_infinite_gradient(wanted: bool) -> Iterator[list[str]]:
    """On a rank where it is `wanted`, one number of one expert's gradient is infinite."""
    original, hit = UnitUse.add, list[str]()

    def add(self: UnitUse, name: str, gradient: np.ndarray) -> None:
        if wanted and not hit and ".experts." in name:
            hit.append(name)
            gradient = np.array(gradient)
            gradient.reshape(-1)[7] = np.inf
        original(self, name, gradient)

    UnitUse.add = add  # type: ignore[method-assign]
    try:
        yield hit
    finally:
        UnitUse.add = original  # type: ignore[method-assign]


def an_infinite_gradient_of_one_expert_on_one_rank(bench: Bench) -> None:
    """C26: no rank takes the step, all halve the scale, and the next good step is right."""
    world = bench.world
    case = case_of("overflow")

    def after_the_overflow(run: Run) -> tuple[float, str]:
        """Loss of step 3 and the weights; the scale alone remembers step 2."""
        run.engine.scaler.update(False)
        loss = float(run.train(3).loss)
        return loss, weights_digest(run.engine, run.groups.world)

    with bench.run(case) as run:
        assert run.train(1).outcome.applied
        with one_infinite_gradient(wanted=world.rank == 1) as hit:
            outcome = run.train(2).outcome
        assert world.all_gather_object(len(hit)) == [0, 1, 0, 0]
        assert not outcome.applied and not outcome.alarm
        assert (run.engine.scaler.scale, run.engine.optimizer_step) == (512.0, 1)
        result = run.train(3)
        assert result.outcome.applied and result.outcome.loss_scale == 512.0
        found = float(result.loss), weights_digest(run.engine, world)
    with bench.run(case) as run:  # step 2 was never there: moments as after step 1
        run.train(1)
        assert after_the_overflow(run) == found
    if world.rank == 0:
        with bench.run(case_of("alone", {}), SingleRank()) as run:
            run.train(1)
            np.testing.assert_allclose(after_the_overflow(run)[0], found[0], rtol=1e-3)
    world.barrier()


# ---- C40, C44


@contextmanager
def ranks_choose(
    experts: Callable[[int], Sequence[int]], step: Callable[[], int]
) -> Iterator[None]:
    """All tokens of this rank go to `experts(step)`."""
    original = moe.forward.choose_experts
    moe.forward.choose_experts = lambda logits, k: np.tile(
        np.int32(experts(step())), (len(logits), 1)
    )
    try:
        yield
    finally:
        moe.forward.choose_experts = original


@contextmanager
def recorded_collectives() -> Iterator[dict[str, list[str]]]:
    """What this rank enters, by the name of the group; "compute" holds those of one thread."""
    original, seen = Collectives._collective, defaultdict[str, list[str]](list)

    def collective(self: Collectives, kind: str, detail: str) -> Any:
        seen[self.name].append(f"{kind} {detail}")
        if not self.name.startswith("weights"):
            seen["compute"].append(f"{self.name}: {kind} {detail}")
        return original(self, kind, detail)

    Collectives._collective = collective  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Collectives._collective = original  # type: ignore[method-assign]


def buffers_without_owner(engine: OffloadEngine) -> tuple[int, int]:
    """How many buffers of host and device belong to no unit and no slot, after a drain."""
    memory = engine._memory
    with engine._shared.changed:
        units = list(engine._shared.units.values())
        assert not any(x.state_dirty or x.pins or x.job or x.coming for x in units)
        owned = [
            *(x for unit in units for x in (unit.host_weight, unit.host_state)),
            *(x for unit in units for x in (unit.host_grad, unit.host_undo)),
            *memory.update_slots,
            *memory.grad_slots,
            memory.lease_slot,
        ]
        on_device = sum(unit.device is not None for unit in units)
        num_owned = sum(x is not None for x in owned)
        return engine.host.num_buffers - num_owned, engine.device.num_buffers - on_device


def bytes_without_units(engine: OffloadEngine) -> tuple[int, int]:
    """Bytes of host and device in use, less weights that lie there for a time only.

    What is read ahead for the next step is on its way even after a drain.
    """
    with engine._shared.changed:
        units = list(engine._shared.units.values())
        cached = [x.host_weight for x in units if x.weight_on_nvme and x.host_weight is not None]
        on_device = [x.device for x in units if x.device is not None]
        return (
            engine.host.used_bytes - sum(x.nbytes for x in cached),
            engine.device.used_bytes - sum(x.nbytes for x in on_device),
        )


def drop_caches(engine: OffloadEngine) -> None:
    """Evict the cached weights that nobody holds."""
    with engine._shared.changed:
        for unit in engine._shared.units.values():
            if unit.evictable_host_weight():
                engine._memory.drop_weight(unit.name)


def ranks_with_other_budgets_route_to_disjoint_experts(bench: Bench) -> None:
    """C40, C44: for 50 steps, each rank alone with its experts, and every guess is wrong.

    Rank 0 holds everything in memory, rank 2, which shares its experts, nothing; their lanes run
    apart, and still all ranks enter the same collectives.
    """
    world, steps = bench.world, 50
    case = case_of("disjoint")
    least = bench.least(case)
    budgets = [
        {"device": ROOMY, "host": ROOMY},
        {"device": least["device"] + WINDOW, "host": least["host"] + STREAM},
        least,
        {"device": least["device"], "host": ROOMY},
    ][world.rank]
    number = 0

    def chosen(step: int) -> list[int]:
        """Two experts of the lower half in even steps, of the upper half in odd ones."""
        first = 8 * (step % 2) + 2 * ((world.rank + step // 2) % RANKS)
        return [first, first + 1]

    with (
        recorded_collectives() as seen,
        bench.run(case, **budgets) as run,
        ranks_choose(chosen, lambda: number),
    ):
        engine, left = run.engine, list[Any]()
        for number in range(1, steps + 1):
            run.train(number)
            if number % 5 == 0:
                engine.drain()
                left.append((buffers_without_owner(engine), bytes_without_units(engine)))
        entered = {name: list(calls) for name, calls in seen.items()}
        on_nvme = [x.name for x in engine._shared.units.values() if x.weight_on_nvme]
        wrong = engine.stats.snapshot().wrong_guess_bytes
        groups = run.groups
    assert all(found == left[0] for found in left), left
    assert world.all_gather_object(bool(on_nvme)) == [False, True, True, False]
    guessed = world.all_gather_object(wrong)
    assert guessed[1] > 0, guessed
    for group in (world, groups.dp, groups.ep, groups.edp, groups.weights_dp, groups.weights_edp):
        calls = entered[group.name]
        assert len(calls) > steps, (group.name, calls)
        told = world.all_gather_object(calls)
        assert all(told[rank] == calls for rank in group.ranks), group.name
    # One thread enters all that is not weights: in one order on ranks that share experts.
    told = world.all_gather_object(entered["compute"])
    assert all(told[rank] == entered["compute"] for rank in groups.edp.ranks)


# ---- C46


def cold_layers_in_a_row_are_on_their_way_together(bench: Bench) -> None:
    """C46: before compute asks for the first of them, this rank's part of each is there."""
    case = replace(case_of("cold"), offload={"prefetch_buffer_size": 1 << 18})
    least = bench.least(case)
    with bench.run(case, device=least["device"], host=least["host"] + STREAM) as run:
        engine = run.engine
        run.train(1)
        engine.drain()
        units = engine._shared.units
        engine.begin([])  # else weights of the next step are on their way already
        with engine._shared.changed:
            idle = engine._shared.changed.wait_for(
                lambda: not any(unit.host_reading for unit in units.values()), SECONDS_MAX
            )
        assert idle
        drop_caches(engine)
        layers = [f"layers.{number}" for number in range(run.config.model.num_hidden_layers)]
        cold = [name for name in layers if units[name].weight_on_nvme]
        assert len(cold) >= 2
        assert not any(units[name].host_weight for name in cold)
        engine.begin([Stage(name, (name,)) for name in cold])
        with engine._shared.changed:
            arrived = engine._shared.changed.wait_for(
                lambda: engine._shared.failed or all(units[name].host_ready for name in cold),
                SECONDS_MAX,
            )
        assert arrived and not engine._shared.failed
        for name in cold:
            engine.enter(name)
            with engine.use(name):
                pass
        bench.world.barrier()


CASES: tuple[Callable[[Bench], None], ...] = (
    an_infinite_gradient_of_one_expert_on_one_rank,
    ranks_with_other_budgets_route_to_disjoint_experts,
    cold_layers_in_a_row_are_on_their_way_together,
)


def main() -> None:
    """Run all cases, or those named after FOLDER."""
    names = sys.argv[2:] or [case.__name__ for case in CASES]
    with shared_world(detect_ranks(), SECONDS_MAX, checked=True) as world:
        assert world.size == RANKS
        bench = Bench(world, Path(sys.argv[1]))
        for case in CASES:
            if case.__name__ in names:
                case(bench)
                if world.rank == 0:
                    print(case.__name__, flush=True)


if __name__ == "__main__":
    main()
