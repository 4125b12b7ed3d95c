"""Where every block lives, and whether the budgets carry it: pure arithmetic, no I/O.

Bytes on the host, in order of claim (each is a term of the plan):

    activations, accumulators     fixed by model and batch
    gradients                     unspilled ones for a whole step; spilled ones pass two slots
    demand                        two update sets (double buffering at the smallest budget) and the
                                  largest lease, so that nobody ever waits in a circle
    stream                        read-ahead and write-behind of the rest
    homes                         blocks that stay: weights first (moved three times a step), then
                                  optimizer state, both in forward order, so that the start of a
                                  step, which waits first, reads least
    undo                          under `speculative`, a second copy of weights that stay while
                                  their state does not: the update may have to be undone

Bytes on nvme: the cold blocks, spilled gradients and writes in flight, and what commits hold. A
commit holds every block, those homed on the host too, and is given up only once the next one is
durable: (retained commits + 1 working) x state. `none` commits at exit only.

A static set of homes is what eviction by next use amounts to for a cyclic sweep: every step reads
exactly the cold remainder, never the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from offload.blocks import UnitLayout
from offload.config import OffloadConfig
from offload.shards import staging_bytes
from ops.units import format_bytes, round_up

ALIGN_BYTES = 4096


@dataclass(frozen=True)
class Term:
    """One summand of a tier's bytes."""

    name: str
    nbytes: int
    why: str


@dataclass(frozen=True)
class TierPlan:
    """A tier's capacity, the least it needs, and what this plan uses of it, in bytes."""

    tier: str
    capacity_bytes: int
    minimum_bytes: int
    used_bytes: int
    terms: tuple[Term, ...]
    minimum_terms: tuple[Term, ...]


@dataclass(frozen=True)
class Demands:
    """Bytes that do not belong to blocks: `activation` and `accumulator` on the host, the largest
    declared stage `workspace` on the device."""

    activation_bytes: int
    accumulator_bytes: int
    workspace_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """The answer of `plan_memory`; `homes` maps (unit, part) to `host` or `nvme`."""

    tiers: dict[str, TierPlan]
    components: dict[str, dict[str, int]]
    parameters: int
    state_bytes: int
    fits: bool
    problems: tuple[str, ...]
    remedies: tuple[str, ...]
    homes: dict[tuple[str, str], str] = field(repr=False)
    spilled: frozenset[str] = field(repr=False)
    undone: frozenset[str] = field(repr=False)
    update_slot_bytes: int
    lease_slot_bytes: int
    grad_slot_bytes: int
    stream_bytes: int
    read_ahead_bytes: int
    workspace_bytes: int
    staging_bytes: int
    ahead_bytes: int


def block_bytes(layout: UnitLayout, part: str) -> int:
    """Bytes a block occupies in a tier: its logical bytes rounded up to the I/O alignment."""
    return round_up(layout.nbytes(part), ALIGN_BYTES)


@dataclass
class _Sizes:
    """Sums and maxima over the units that the terms are made of."""

    layouts: Sequence[UnitLayout]

    def __post_init__(self) -> None:
        self.weight = {x.name: block_bytes(x, "weight") for x in self.layouts}
        self.state = {x.name: block_bytes(x, "state") for x in self.layouts}
        self.grad = {x.name: block_bytes(x, "grad") for x in self.layouts}
        names = [x.name for x in self.layouts]
        self.update_max = max(self.weight[n] + self.state[n] for n in names)
        self.update_grad_max = max(self.weight[n] + self.state[n] + self.grad[n] for n in names)
        self.weight_max = max(self.weight.values())
        self.grad_max = max(self.grad.values())
        self.all_grad = sum(self.grad.values())
        self.all_home = sum(self.weight.values()) + sum(self.state.values())


def plan_memory(
    layouts: Sequence[UnitLayout],
    config: OffloadConfig,
    demands: Demands,
    *,
    speculative: bool = False,
    resumed: bool = False,
    retained_bytes: int = 0,
) -> MemoryPlan:
    """Place every block of `layouts` (forward order) under the budgets of `config`.

    `speculative` is the update schedule; `resumed`: the run starts from a commit, which has to be
    kept until the next one and takes `retained_bytes`, if that is more than a commit of the units
    (another mesh made it). Always returns a plan; `fits` is False and `problems`, `remedies` say
    why when it cannot run.
    """
    sizes = _Sizes(layouts)
    host = _plan_host(sizes, config, demands, speculative)
    device_minimum = _device_minimum(layouts, demands)
    device_need = sum(term.nbytes for term in device_minimum)
    commit_bytes = max(sizes.all_home, retained_bytes)
    nvme_terms = _nvme_terms(sizes, host, config, speculative, resumed, commit_bytes)
    window = min(config.window_bytes, max(config.device.capacity - device_need, 0))
    ahead = window // ALIGN_BYTES * ALIGN_BYTES if _gathers(layouts) else 0
    device_terms = device_minimum
    if window:
        device_terms = (*device_minimum, Term("window", window, "offload.prefetch_buffer_size"))
    tiers = {
        "device": _tier(
            "device", config.device.capacity, device_minimum, device_terms, config.device.capacity
        ),
        "host": _tier("host", config.host.capacity, host.minimum, host.terms),
        "nvme": _tier("nvme", config.nvme.capacity, nvme_terms, nvme_terms),
    }
    problems, remedies = _problems(tiers)
    if config.gradient_spill == "never" and host.problem:
        problems.append(host.problem)
        remedies.append("set offload.gradient_spill to auto")
    return MemoryPlan(
        tiers=tiers,
        components=_components(layouts, host, demands),
        parameters=sum(x.num_parameters for x in layouts),
        state_bytes=state_bytes(layouts),
        fits=not problems,
        problems=tuple(problems),
        remedies=tuple(remedies),
        homes=host.homes,
        spilled=host.spilled,
        undone=host.undone,
        update_slot_bytes=host.update_slot,
        lease_slot_bytes=host.lease_slot,
        grad_slot_bytes=host.grad_slot,
        stream_bytes=host.stream,
        read_ahead_bytes=host.read_ahead,
        workspace_bytes=demands.workspace_bytes,
        staging_bytes=round_up(staging_bytes(layouts), ALIGN_BYTES),
        ahead_bytes=ahead,
    )


def _gathers(layouts: Sequence[UnitLayout]) -> bool:
    return any(x.gathered is not x for x in layouts)


@dataclass
class _HostPlan:
    homes: dict[tuple[str, str], str]
    spilled: frozenset[str]
    undone: frozenset[str]
    update_slot: int
    lease_slot: int
    grad_slot: int
    stream: int
    read_ahead: int
    terms: tuple[Term, ...]
    minimum: tuple[Term, ...]
    problem: str = ""


def _minimum_host(sizes: _Sizes, config: OffloadConfig, demands: Demands) -> tuple[Term, ...]:
    fixed = _fixed_terms(demands)
    everything = (
        *fixed,
        Term("gradients", sizes.all_grad, "all units, nothing spilled"),
        Term("homes", sizes.all_home, "all weights and optimizer state"),
    )
    never = config.gradient_spill == "never"
    cold: tuple[Term, ...] = (
        *fixed,
        Term("gradients", sizes.all_grad, "offload.gradient_spill is never")
        if never
        else Term("gradient slots", 2 * sizes.grad_max, "two of the largest, on their way to nvme"),
        Term(
            "update slots",
            2 * (sizes.update_max if never else sizes.update_grad_max),
            "weights, state and gradient of two units",
        ),
        Term("lease slot", sizes.weight_max, "the largest unit's weights"),
    )
    if config.gradient_spill == "always":
        return cold  # gradients pass the slots even where all of them would fit
    return min(everything, cold, key=lambda terms: sum(t.nbytes for t in terms))


def _fixed_terms(demands: Demands) -> tuple[Term, ...]:
    terms = [Term("activations", demands.activation_bytes, "checkpoints of one step")]
    if demands.accumulator_bytes:
        terms.append(
            Term("accumulators", demands.accumulator_bytes, "fp32 gradients of several uses")
        )
    return tuple(terms)


def _plan_host(
    sizes: _Sizes, config: OffloadConfig, demands: Demands, speculative: bool
) -> _HostPlan:
    names = [x.name for x in sizes.layouts]
    capacity = config.host.capacity
    fixed = _fixed_terms(demands)
    fixed_bytes = sum(t.nbytes for t in fixed)
    minimum = _minimum_host(sizes, config, demands)
    spill = _choose_spill(sizes, config, capacity - fixed_bytes)
    in_memory = fixed_bytes + sizes.all_grad + sizes.all_home
    if in_memory <= capacity and not spill:
        homes = {(n, part): "host" for n in names for part in ("weight", "state")}
        grads = Term("gradients", sizes.all_grad, "all units, nothing spilled")
        stay = Term("homes", sizes.all_home, "all weights and optimizer state")
        nobody: frozenset[str] = frozenset()
        return _HostPlan(homes, nobody, nobody, 0, 0, 0, 0, 0, (*fixed, grads, stay), minimum)
    update_slot = sizes.update_grad_max if spill else sizes.update_max
    grad_slot = sizes.grad_max if spill else 0
    grad_bytes = sum(sizes.grad[n] for n in names if n not in spill)
    demand = 2 * update_slot + sizes.weight_max + 2 * grad_slot
    left = capacity - fixed_bytes - grad_bytes - demand
    problem = ""
    if left < 0:
        problem = f"the host budget lacks {format_bytes(-left)} for unspilled gradients and demand"
    stream = min(max(left, 0) // 2, max(config.window_bytes, 4 * update_slot))
    homes, undone, home_bytes = _choose_homes(sizes, max(left, 0) - stream, speculative)
    cold_weights = sum(sizes.weight[n] for n in names if homes[n, "weight"] == "nvme")
    # Weights that compute waits for come through the stream too: leave room for their window.
    read_ahead = stream - min(config.window_bytes, cold_weights, stream // 2)
    terms = [
        *fixed,
        Term("gradients", grad_bytes, f"{_num_unspilled(sizes, spill)} unspilled units"),
    ]
    if spill:
        terms.append(Term("gradient slots", 2 * grad_slot, "two of the largest"))
    terms += [
        Term("update slots", 2 * update_slot, "two units' update sets"),
        Term("lease slot", sizes.weight_max, "the largest unit's weights"),
        Term("stream", stream, "read-ahead and write-behind"),
        Term("homes", home_bytes, "blocks that stay in host memory"),
    ]
    if undone:
        undo_bytes = sum(sizes.weight[name] for name in undone)
        terms.append(Term("undo", undo_bytes, "weights as they were before the norm is known"))
    slots = (update_slot, sizes.weight_max, grad_slot, stream, read_ahead)
    return _HostPlan(homes, frozenset(spill), undone, *slots, tuple(terms), minimum, problem)


def _num_unspilled(sizes: _Sizes, spill: set[str]) -> int:
    return sum(1 for name, nbytes in sizes.grad.items() if nbytes and name not in spill)


def _choose_spill(sizes: _Sizes, config: OffloadConfig, room: int) -> set[str]:
    names = [x.name for x in sizes.layouts]
    names = [name for name in names if sizes.grad[name]]  # frozen units have none
    if config.gradient_spill == "always":
        return set(names)
    plain_demand = 2 * sizes.update_max + sizes.weight_max
    fits_plain = sizes.all_grad + min(plain_demand, sizes.all_home) <= room
    if config.gradient_spill == "never" or fits_plain:
        return set()
    room -= 2 * sizes.update_grad_max + sizes.weight_max + 2 * sizes.grad_max
    spilled, kept = set(), 0
    # Backward makes the last layers' gradients first and the update needs them last: spill those.
    for name in names:
        if kept + sizes.grad[name] <= room:
            kept += sizes.grad[name]
        else:
            spilled.add(name)
    return spilled


def _choose_homes(
    sizes: _Sizes, room: int, speculative: bool
) -> tuple[dict[tuple[str, str], str], frozenset[str], int]:
    """Homes, the units that need an undo copy, and the bytes of the homes alone.

    A weight that stays while its state is cold costs its undo copy too; once its state stays as
    well, the copy is given back.
    """
    homes, used, undone = {}, 0, set()
    for part, table in (("weight", sizes.weight), ("state", sizes.state)):
        for layout in sizes.layouts:
            name = layout.name
            cost = table[name]
            if speculative and not layout.frozen:
                if part == "weight":
                    cost += sizes.weight[name]
                elif name in undone:
                    cost -= sizes.weight[name]
            stays = used + cost <= room
            homes[name, part] = "host" if stays else "nvme"
            if not stays:
                continue
            used += cost
            if part == "state":
                undone.discard(name)
            elif speculative and not layout.frozen:
                undone.add(name)
    undo_bytes = sum(sizes.weight[name] for name in undone)
    return homes, frozenset(undone), used - undo_bytes


def _device_minimum(layouts: Sequence[UnitLayout], demands: Demands) -> tuple[Term, ...]:
    whole = [x.gathered for x in layouts]
    lease = max(
        round_up(x.device_nbytes, ALIGN_BYTES) + round_up(x.accumulator_nbytes, ALIGN_BYTES)
        for x in whole
    )
    terms = [
        Term("workspace", demands.workspace_bytes, "activations and temporaries of one stage"),
        Term("lease", lease, "the largest unit's weights and fp32 gradients"),
    ]
    staging = round_up(staging_bytes(layouts), ALIGN_BYTES)
    if staging:
        terms.append(Term("staging", staging, "16-bit weights of one unit being gathered"))
    return tuple(terms)


def _nvme_terms(
    sizes: _Sizes,
    host: _HostPlan,
    config: OffloadConfig,
    speculative: bool,
    resumed: bool,
    commit_bytes: int,
) -> tuple[Term, ...]:
    table = {"weight": sizes.weight, "state": sizes.state}
    cold = sum(table[part][name] for (name, part), home in host.homes.items() if home == "nvme")
    spill = sum(sizes.grad[name] for name in host.spilled)
    every_step = config.durability == "step"
    terms = []
    if cold:
        terms.append(Term("cold state", cold, "blocks homed on nvme"))
    if cold < sizes.all_home:
        when = "at exit" if config.durability == "none" else "in every commit"
        terms.append(Term("committed", sizes.all_home - cold, f"blocks homed on host, {when}"))
    kept = int(resumed) if config.durability == "none" else config.keep_in_store
    if kept:
        why = f"{kept} x the whole state, kept until the next commit is durable"
        terms.append(Term("retained commits", kept * commit_bytes, why))
    if speculative and cold and not every_step:
        # With a commit every step the old versions are those of the retained commit.
        terms.append(Term("old versions", cold, "until the norm of the step is known"))
    if spill:
        terms.append(Term("spilled gradients", spill, "this step only"))
    if cold or spill:
        # Out-of-place writes need a new extent before the old one is free; sizes differ, so some
        # room is lost between extents.
        flight = host.stream + 2 * host.update_slot + 2 * host.grad_slot
        terms.append(Term("working", flight + sizes.update_max, "out-of-place writes in flight"))
        terms.append(Term("fragmentation", round_up((cold + spill) // 20, ALIGN_BYTES), "5 %"))
    return tuple(terms)


def _tier(
    tier: str,
    capacity: int,
    minimum: tuple[Term, ...],
    terms: tuple[Term, ...],
    cap_used: int | None = None,
) -> TierPlan:
    used = sum(t.nbytes for t in terms)
    if cap_used is not None:
        used = min(used, cap_used)
    return TierPlan(tier, capacity, sum(t.nbytes for t in minimum), used, terms, minimum)


def _problems(tiers: dict[str, TierPlan]) -> tuple[list[str], list[str]]:
    problems, remedies = [], []
    for tier in tiers.values():
        # The host plan shrinks to its minimum by itself; the others have nothing to give up.
        need = tier.minimum_bytes
        if need > tier.capacity_bytes:
            sums = " + ".join(f"{t.name} {format_bytes(t.nbytes)}" for t in tier.minimum_terms)
            problems.append(
                f"offload.{tier.tier}.capacity = {format_bytes(tier.capacity_bytes)} is below the "
                f"minimum of {format_bytes(need)} ({need} B = {sums})"
            )
            remedies.append(f"set offload.{tier.tier}.capacity to at least {_as_written(need)}")
    return problems, remedies


def _as_written(nbytes: int) -> str:
    """The size a user would write for at least `nbytes`: whole MiB, or KiB when it is small."""
    unit, power = ("MiB", 1 << 20) if nbytes >= 1 << 20 else ("KiB", 1 << 10)
    return f"{-(-nbytes // power)}{unit}"


def _components(
    layouts: Sequence[UnitLayout], host: _HostPlan, demands: Demands
) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}

    def add(component: str, tier: str, nbytes: int) -> None:
        row = table.setdefault(component, {"device": 0, "host": 0, "nvme": 0})
        row[tier] += nbytes

    for layout in layouts:
        for part in ("weight", "state"):
            for item in layout.fields[part]:
                name = "master" if item.component == "master_split" else item.component
                add(name, host.homes[layout.name, part], item.nbytes)
        grad_home = "nvme" if layout.name in host.spilled else "host"
        add("grad", grad_home, sum(item.nbytes for item in layout.fields["grad"]))
    add("activation", "host", demands.activation_bytes)
    add("workspace", "device", demands.workspace_bytes)
    return table


def state_bytes(layouts: Sequence[UnitLayout]) -> int:
    """Bytes of masters and moments of these units."""
    return sum(
        item.nbytes for x in layouts for part in ("weight", "state") for item in x.fields[part]
    )
