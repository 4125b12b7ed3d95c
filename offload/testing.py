"""Fakes for tests of the engine: a toy model whose compute is a few NumPy operations.

The toy's "loss" is a checksum of every weight it leased, in order, and its gradients are pure
functions of (weights, tensor name, step). So any byte that arrives late, stale or wrong changes a
number, at a thousandth of a real model's cost.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offload.activations import ActivationSpec, activation_bytes
from offload.blocks import TensorSpec, UnitLayout, UnitSpec
from offload.config import NvmeConfig, OffloadConfig, OptimizerConfig, TierConfig
from offload.engine import OffloadEngine
from offload.gradients import accumulator_bytes
from offload.nvme.aligned import AccessMode
from offload.nvme.files import OpenFile, open_os_file
from offload.nvme.store import NvmeStore
from offload.parts import EngineParts, StepOutcome
from offload.placement import Demands, MemoryPlan, plan_memory
from offload.schedule import Stage
from offload.shards import share_of
from offload.sharing import Sharing
from ops.comm.base import World
from ops.device import NumpyBackend
from ops.kernels.pool import KernelPool
from ops.units import round_up

HUGE_BYTES = 1 << 30


@dataclass(frozen=True)
class Toy:
    """Shape and behaviour of a toy model."""

    layers: int = 3
    experts: int = 4
    dense_size: int = 5000
    expert_size: int = 9001
    weight_dtype: str = "bfloat16"
    grad_dtype: str = "bfloat16"
    compute_dtype: str = "float32"
    micro_batches: int = 2
    needed: Callable[[int, int], list[int]] = lambda step, layer: [0, 1, 2, 3]
    overflow_steps: frozenset[int] = frozenset()
    frozen: frozenset[str] = frozenset()  # names of units
    workspace_bytes: int = 1 << 16
    # Several ranks: each makes the gradients of its micro-batches; rank r has the experts e with
    # e % expert_parallel == r % expert_parallel, and every unit is shared by all who have it.
    ranks: int = 1
    rank: int = 0
    expert_parallel: int = 1
    sharded: bool = True

    def units(self) -> list[UnitSpec]:
        """Units in forward order: embedding, layers with experts, norm."""

        def matrix(name: str, size: int, kept: bool = False) -> TensorSpec:
            return TensorSpec(name, (size,), kept, True, 0.02)

        units = [UnitSpec("embed", -1, None, (matrix("embed.w", 3000),))]
        for layer in range(self.layers):
            norm = TensorSpec(f"l{layer}.norm", (33,), True, False, None)
            dense = matrix(f"l{layer}.w", self.dense_size)
            router = matrix(f"l{layer}.router", 129, kept=True)
            units.append(UnitSpec(f"l{layer}", layer, None, (norm, dense, router)))
            for expert in self.own_experts():
                tensor = matrix(f"l{layer}.e{expert}.w", self.expert_size)
                units.append(UnitSpec(f"l{layer}.e{expert}", layer, expert, (tensor,)))
        norm = TensorSpec("norm", (65,), True, False, None)
        units.append(UnitSpec("norm", self.layers, None, (norm,)))
        return units

    def own_experts(self) -> list[int]:
        """The experts of this rank."""
        first = self.rank % self.expert_parallel
        return list(range(first, self.experts, self.expert_parallel))

    def shares(self, unit: UnitSpec) -> list[int]:
        """The ranks that share a unit."""
        if unit.expert is None:
            return list(range(self.ranks))
        return list(range(unit.expert % self.expert_parallel, self.ranks, self.expert_parallel))

    def layouts(self) -> list[UnitLayout]:
        """Layouts of the units, or of this rank's share of each."""
        return [self._layout(unit) for unit in self.units()]

    def _layout(self, unit: UnitSpec) -> UnitLayout:
        kinds = (self.weight_dtype, self.grad_dtype, self.compute_dtype)
        unit = replace(unit, frozen=unit.name in self.frozen)
        ranks = self.shares(unit)
        if self.sharded:
            return share_of(unit, *kinds, rank=ranks.index(self.rank), size=len(ranks))
        tensors = tuple(replace(tensor, replicas=len(ranks)) for tensor in unit.tensors)
        return share_of(replace(unit, tensors=tensors), *kinds)

    def sharing(self, world: World) -> dict[str, Sharing]:
        """The communicators of every unit; entered by all ranks."""
        dense = [list(range(self.ranks))]
        routed = [self.shares(UnitSpec("", 0, e, ())) for e in range(self.expert_parallel)]
        dense_ranks, expert_ranks = (
            Sharing(world.split(groups, f"{name} weights"), world.split(groups, f"{name} grads"))
            for groups, name in ((dense, "dense"), (routed, "expert"))
        )
        return {u.name: dense_ranks if u.expert is None else expert_ranks for u in self.units()}

    def stages(self) -> list[Stage]:
        """The access schedule of a step; the embedding is used at both ends (tied)."""
        stages = [Stage("fwd embed", ("embed",))]
        stages += self._layers("fwd", range(self.layers), False)
        stages += [Stage("fwd norm", ("norm",)), Stage("bwd head", ("embed",), None, True)]
        stages += [Stage("bwd norm", ("norm",), None, True)]
        stages += self._layers("bwd", range(self.layers - 1, -1, -1), True)
        return [*stages, Stage("bwd embed", ("embed",), None, True)]

    def _layers(self, kind: str, layers: range, gradient: bool) -> list[Stage]:
        stages = []
        for layer in layers:
            experts = tuple(f"l{layer}.e{expert}" for expert in self.own_experts())
            dense = Stage(f"{kind} l{layer}", (f"l{layer}",), None, gradient)
            routed = Stage(f"{kind} e{layer}", experts, f"experts {layer}", gradient)
            stages += [routed, dense] if gradient else [dense, routed]
        return stages

    def values(self, tensor: TensorSpec) -> np.ndarray:
        """Initial values of a tensor, or of a piece of one."""
        if tensor.piece_of is not None:
            whole = self.values(tensor.piece_of)
            return whole[tensor.flat0 : tensor.flat0 + tensor.size]
        if tensor.init_std is None:
            return np.ones(tensor.size, np.float32)
        seed = zlib.crc32(tensor.name.encode())
        values = np.random.default_rng(seed).standard_normal(tensor.size, np.float32)
        return values * np.float32(tensor.init_std)


def budgets(
    directory: Path | Sequence[Path],
    *,
    device: int = HUGE_BYTES,
    host: int = HUGE_BYTES,
    **options: object,
) -> OffloadConfig:
    """An offload configuration with these capacities in bytes; one directory for each drive."""
    paths = [directory] if isinstance(directory, Path) else directory
    settings = {"prefetch_buffer_size": 1 << 17, "io_workers": 4, **options}
    return OffloadConfig(
        device=TierConfig(device),
        host=TierConfig(host),
        nvme=NvmeConfig(HUGE_BYTES, tuple(str(path) for path in paths)),
        **settings,  # type: ignore[arg-type]
    )


def toy_plan(toy: Toy, config: OffloadConfig, *, speculative: bool = False) -> MemoryPlan:
    """The plan of a toy under `config`."""
    layouts = toy.layouts()
    sizes = {x.name: round_up(x.gathered.accumulator_nbytes, 4096) for x in layouts}
    uses = {stage.units[0]: 1 for stage in toy.stages()} | {"embed": 2}
    demands = Demands(
        activation_bytes(ACTIVATIONS), accumulator_bytes(uses, sizes, False), toy.workspace_bytes
    )
    return plan_memory(layouts, config, demands, speculative=speculative)


ACTIVATIONS = (ActivationSpec("h", (256,), "float32", 2),)


def smallest_budgets(toy: Toy, config: OffloadConfig) -> OffloadConfig:
    """`config` with the least device and host capacity its plan accepts."""
    tight = replace(config, device=TierConfig(1), host=TierConfig(1))
    tiers = toy_plan(toy, tight).tiers
    return replace(
        config,
        device=TierConfig(tiers["device"].minimum_bytes),
        host=TierConfig(tiers["host"].minimum_bytes),
    )


class ToyRun:
    """An engine with a toy model on it; it goes on from the commit the store was opened at."""

    def __init__(
        self,
        toy: Toy,
        config: OffloadConfig,
        optimizer: OptimizerConfig,
        store: NvmeStore | None,
        pool: KernelPool,
        **options: object,
    ) -> None:
        self.toy = toy
        plan = toy_plan(toy, config, speculative=optimizer.speculative)
        assert plan.fits, plan.problems
        parts = EngineParts(
            layouts=toy.layouts(),
            plan=plan,
            backend=NumpyBackend(),
            pool=pool,
            store=store,
            activations=ACTIVATIONS,
            gradient_uses={unit.name: 1 for unit in toy.units()} | {"embed": 2},
            loss_scaling=toy.compute_dtype == "float16",
            **options,  # type: ignore[arg-type]
        )
        self.store = store
        self.engine = OffloadEngine(parts, config, optimizer)
        self.outcomes: list[StepOutcome] = []
        self.resumed: Mapping[str, Any] | None = None  # what was handed to the commit
        try:
            if store is not None and store.recovered is not None:
                self.resumed = self.engine.restore()
            else:
                self.engine.initialize(toy.values)
        except BaseException:
            self.engine.close()
            raise

    def step(
        self, number: int, rate: float, commit: dict[str, Any] | None = None, sound: bool = True
    ) -> int:
        """One training step; returns its checksum "loss"."""
        engine, toy = self.engine, self.toy
        engine.begin(toy.stages())
        engine.begin_gradients(rate)
        loss = self._visit("fwd embed", "embed", 0)
        for layer in range(toy.layers):
            loss = self._visit(f"fwd l{layer}", f"l{layer}", loss)
            needed = self._needed(number, layer)
            engine.resolve(f"experts {layer}", [f"l{layer}.e{e}" for e in needed])
            engine.enter(f"fwd e{layer}")
            for expert in needed:
                loss = self._lease(f"l{layer}.e{expert}", loss)
        loss = self._visit("fwd norm", "norm", loss)
        loss = self._visit("bwd head", "embed", loss, number, use=0)
        loss = self._visit("bwd norm", "norm", loss, number)
        for layer in range(toy.layers - 1, -1, -1):
            engine.enter(f"bwd e{layer}")
            for expert in self._needed(number, layer):
                loss = self._lease(f"l{layer}.e{expert}", loss, number)
            loss = self._visit(f"bwd l{layer}", f"l{layer}", loss, number)
        loss = self._visit("bwd embed", "embed", loss, number, use=1)
        self.outcomes.append(engine.finish_step(rate, commit, sound=sound))
        return loss

    def evaluate(self) -> int:
        """A forward pass over all experts, outside training."""
        self.engine.drain()
        forward = [stage for stage in self.toy.stages() if stage.name.startswith("fwd")]
        self.engine.begin(forward, training=False)
        loss = self._visit("fwd embed", "embed", 0)
        for layer in range(self.toy.layers):
            loss = self._visit(f"fwd l{layer}", f"l{layer}", loss)
            names = [f"l{layer}.e{expert}" for expert in self.toy.own_experts()]
            self.engine.resolve(f"experts {layer}", names)
            self.engine.enter(f"fwd e{layer}")
            for name in names:
                loss = self._lease(name, loss)
        return self._visit("fwd norm", "norm", loss)

    def _needed(self, number: int, layer: int) -> list[int]:
        own = self.toy.own_experts()
        return [expert for expert in self.toy.needed(number, layer) if expert in own]

    def _visit(
        self, stage: str, unit: str, loss: int, number: int | None = None, use: int = 0
    ) -> int:
        self.engine.enter(stage)
        return self._lease(unit, loss, number, use)

    def _lease(self, unit: str, loss: int, number: int | None = None, use: int = 0) -> int:
        trained = number is not None and unit not in self.toy.frozen
        with self.engine.use(unit, gradient=trained, use=use) as held:
            for name, weight in sorted(held.weights.items()):
                array = np.asarray(weight)
                loss = zlib.crc32(array.tobytes(), loss)
                if number is not None and trained:
                    for micro in self._micro_batches(unit):
                        grad = self._gradient(name, array, number, micro + 10 * use)
                        held.add(name, grad)
        return loss

    def _micro_batches(self, unit: str) -> range:
        """The micro-batches whose gradients of a unit this rank makes."""
        spec = self.engine._shared.units[unit].layout.gathered.unit
        ranks = self.toy.shares(spec)
        return range(ranks.index(self.toy.rank), self.toy.micro_batches, len(ranks))

    def _gradient(self, name: str, weight: np.ndarray, number: int, part: int) -> np.ndarray:
        seed = zlib.crc32(f"{name}/{number}/{part}".encode())
        noise = np.random.default_rng(seed).standard_normal(weight.size, np.float32)
        grad = (weight.astype(np.float32).reshape(-1) + noise) * np.float32(1e-2)
        if number in self.toy.overflow_steps and name.endswith("e0.w"):
            grad[0] = np.inf
        return grad * np.float32(self.engine.scaler.scale)

    def check_buffers(self) -> None:
        """After a drain: every live buffer of both arenas has its owner, every slot is back."""
        engine = self.engine
        with engine._shared.changed:
            units = list(engine._shared.units.values())
            memory = engine._memory
            assert not any(x.state_dirty or x.pins or x.job or x.coming for x in units)
            owned: Sequence[object] = [
                *(unit.host_weight for unit in units),
                *(unit.host_state for unit in units),
                *(unit.host_grad for unit in units),
                *(unit.host_undo for unit in units),
                *memory.update_slots,
                *memory.grad_slots,
                memory.lease_slot,
            ]
            assert len(memory.update_slots) in (0, 2) and len(memory.grad_slots) in (0, 2)
            permanent = sum(spec.copies for spec in ACTIVATIONS) + 2  # the tied unit's two uses
            assert engine.host.num_buffers == permanent + sum(x is not None for x in owned)
            on_device = sum(unit.device is not None for unit in units)
            plan = engine._parts.plan
            extra = (plan.staging_bytes > 0) + (plan.ahead_bytes > 0)  # they last
            assert engine.device.num_buffers == on_device + extra

    def digest(self) -> int:
        """Checksum of all masters."""
        value = 0
        for tensor, values in self.engine.masters():
            value = zlib.crc32(values.tobytes(), zlib.crc32(tensor.name.encode(), value))
        return value


@contextmanager
def toy_run(
    toy: Toy,
    config: OffloadConfig,
    optimizer: OptimizerConfig | None = None,
    *,
    threads: int = 2,
    open_file: OpenFile = open_os_file,
    access: AccessMode | None = None,
    store_options: Mapping[str, Any] | None = None,
    delete: bool = True,
    **options: object,
) -> Iterator[ToyRun]:
    """A toy run with the store its plan needs, closed at the end; `open_file` may be faulty.

    `store_options` go to the store (`resume`, `directory_files`, ...); without `delete` what it has
    committed stays, to be resumed. `options` go to `EngineParts`.
    """
    optimizer = optimizer or OptimizerConfig()
    with ExitStack() as stack:
        store = None
        if toy_plan(toy, config, speculative=optimizer.speculative).tiers["nvme"].used_bytes:
            store = NvmeStore(
                config.nvme.paths,
                config.nvme.capacity,
                workers=config.io_workers,
                keep_commits=config.keep_in_store,
                codec=config.codec,
                access=access,
                open_file=open_file,
                **(store_options or {}),
            )
            stack.callback(store.close, delete=delete)
        pool = stack.enter_context(KernelPool(threads))
        run = ToyRun(toy, config, optimizer, store, pool, **options)
        stack.callback(run.engine.close)
        yield run


class RandomDelays:
    """Delays lanes by a random, seeded number of yields and short waits on an event."""

    def __init__(self, seed: int, seconds_max: float = 0.002) -> None:
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._never = threading.Event()
        self._seconds_max = seconds_max

    def __call__(self, lane: str) -> None:
        """Delay this transfer."""
        with self._lock:
            seconds = float(self._random.random()) * self._seconds_max
        self._never.wait(seconds)
