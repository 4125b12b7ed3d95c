"""Units, their blocks, and where every component of a parameter's state lies inside a block.

A unit moves as one: a layer's dense weights, one expert, an embedding or head slice. On a rank it
has three blocks, the things a tier stores:

    weight   what a lease needs      compute weights (bf16/fp16) and the fp32 masters of tensors
                                     kept in fp32 (norms, router, or all with float32 weights)
    state    what only an update     residual (or the fp32 master of an fp16 weight), exp_avg,
             needs                   exp_avg_sq
    grad     this step's gradient    in the gradient dtype

Components used together are neighbours in one block, so a small norm never pays a transfer or an
alignment of its own. Flat element order of a unit: split tensors (stored in 16 bits) first, then
kept tensors (fp32); `exp_avg`, `exp_avg_sq` and `grad` cover all of them in that order.

A unit that several ranks share (`offload/shards.py`) has two layouts: that of the rank's share,
which the tiers store, and the gathered one, which a lease puts on the device.

Knows nothing of tiers, threads or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from ops.units import round_up

FIELD_ALIGN_BYTES = 64
PARTS = ("weight", "state", "grad")
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int16": 2}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor, or one slice of rows of a tensor, of a unit.

    `name` is the canonical Hugging Face name of the whole tensor, `row0` the first row held here.
    `kept` tensors keep an fp32 master as their weight; `decay` tensors take weight decay.
    `init_std` is the standard deviation of the initial values; None means ones. A rank that holds
    some columns only says which: `col0` is the first of them, `num_cols` how many the whole tensor
    has. `replicas` ranks hold the same elements and make the same update of them.

    A rank's share of a unit holds pieces of tensors: `piece_of` is then the tensor above, `flat0`
    the first of its elements, in row-major order, that this one-dimensional piece holds. A piece
    without a name pads the share; it is zero for ever.
    """

    name: str
    shape: tuple[int, ...]
    kept: bool
    decay: bool
    init_std: float | None
    row0: int = 0
    col0: int = 0
    num_cols: int | None = None
    replicas: int = 1
    piece_of: TensorSpec | None = None
    flat0: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def position(self) -> tuple[int, int, int]:
        """Its place among the parts of the whole tensor: first row, column, element of a piece."""
        return self.row0, self.col0, self.flat0


@dataclass(frozen=True)
class UnitSpec:
    """A unit: its name, layer (-1 before, num_layers after the layers), expert and tensors.

    A `frozen` unit is used but not trained: it has no state and no gradient in any tier.
    """

    name: str
    layer: int
    expert: int | None
    tensors: tuple[TensorSpec, ...]
    frozen: bool = False

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(tensor.size for tensor in self.tensors)


@dataclass(frozen=True)
class Field:
    """A typed run of elements inside a block: byte offset, dtype name, element count."""

    component: str
    offset: int
    dtype: str
    count: int

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self.count * self.item_bytes


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor's elements are: `start` in the unit's flat order, split or kept."""

    spec: TensorSpec
    start: int
    kept: bool


class UnitLayout:
    """Byte layout of one unit's blocks and of its device copy.

    `weight_dtype` bfloat16 | float16 | float32, `grad_dtype` bfloat16 | float32, `compute_dtype`
    float32 | float16. With float32 weights every tensor is kept.
    """

    def __init__(
        self,
        unit: UnitSpec,
        weight_dtype: str,
        grad_dtype: str,
        compute_dtype: str,
        shares: int = 1,
    ) -> None:
        """`shares`: split and kept elements are each padded with zeros to a multiple of it."""
        self.unit = unit
        self.gathered = self  # what a lease puts on the device; see `offload/shards.py`
        self.name = unit.name
        self.frozen = unit.frozen
        self.weight_dtype = weight_dtype
        self.grad_dtype = grad_dtype
        self.compute_dtype = compute_dtype
        all_kept = weight_dtype == "float32"
        split = [t for t in unit.tensors if not (t.kept or all_kept)]
        kept = [t for t in unit.tensors if t.kept or all_kept]
        self.num_split = round_up(sum(t.size for t in split), shares)
        self.num_kept = round_up(sum(t.size for t in kept), shares)
        self.size = self.num_split + self.num_kept
        places = []
        for tensors, start in ((split, 0), (kept, self.num_split)):
            for tensor in tensors:
                places.append(TensorPlace(tensor, start, tensor.kept or all_kept))
                start += tensor.size
        self.places = tuple(places)

    @cached_property
    def fields(self) -> dict[str, tuple[Field, ...]]:
        """The fields of each block, in order of their byte offset."""
        split_state = (
            ("master_split", "float32") if self.weight_dtype == "float16" else ("residual", "int16")
        )
        wanted = {
            "weight": [
                ("weight", self.weight_dtype, self.num_split),
                ("master", "float32", self.num_kept),
            ],
            "state": [
                (*split_state, self.num_split),
                ("exp_avg", "float32", self.size),
                ("exp_avg_sq", "float32", self.size),
            ],
            "grad": [("grad", self.grad_dtype, self.size)],
        }
        if self.frozen:
            wanted["state"] = wanted["grad"] = []
        return {part: _lay_out(rows) for part, rows in wanted.items()}

    def field(self, part: str, component: str) -> Field:
        """The named field of a block; KeyError when this unit does not have it."""
        for item in self.fields[part]:
            if item.component == component:
                return item
        raise KeyError(f"{self.name} has no {component} in its {part} block")

    def nbytes(self, part: str) -> int:
        """Logical bytes of a block, a multiple of 64; 0 for what a frozen unit does not have."""
        if not self.fields[part]:
            return 0
        last = self.fields[part][-1]
        return round_up(last.offset + last.nbytes, FIELD_ALIGN_BYTES)

    @cached_property
    def device_fields(self) -> tuple[Field, ...]:
        """The device copy of the weights: split tensors in compute dtype, kept ones in fp32."""
        return _lay_out(
            [
                ("weight", self.compute_dtype, self.num_split),
                ("master", "float32", self.num_kept),
            ]
        )

    @cached_property
    def device_nbytes(self) -> int:
        """Bytes of the device copy of the weights."""
        last = self.device_fields[-1]
        return round_up(last.offset + last.nbytes, FIELD_ALIGN_BYTES)

    @cached_property
    def accumulator_nbytes(self) -> int:
        """Bytes of an fp32 gradient accumulator of the whole unit; 0 when it is frozen."""
        return 0 if self.frozen else round_up(4 * self.size, FIELD_ALIGN_BYTES)

    @cached_property
    def num_parameters(self) -> int:
        """Parameters in it, without what pads a share."""
        return sum(place.spec.size for place in self.places if place.spec.name)

    def runs_by_replicas(self) -> list[tuple[int, int, int]]:
        """(lo, hi, replicas): the flat order in runs that equally many ranks hold."""
        runs: list[tuple[int, int, int]] = []
        for place in self.places:
            lo, hi, replicas = place.start, place.start + place.spec.size, place.spec.replicas
            if runs and runs[-1][1:] == (lo, replicas):
                runs[-1] = (runs[-1][0], hi, replicas)
            else:
                runs.append((lo, hi, replicas))
        return runs

    def component_bytes(self) -> dict[str, int]:
        """Payload bytes by component of the design (`weight, residual, master, …, grad`)."""
        totals: dict[str, int] = {}
        for part in PARTS:
            for item in self.fields[part]:
                component = "master" if item.component == "master_split" else item.component
                totals[component] = totals.get(component, 0) + item.nbytes
        return totals


def _lay_out(rows: list[tuple[str, str, int]]) -> tuple[Field, ...]:
    fields, offset = [], 0
    for component, dtype, count in rows:
        item = Field(component, offset, dtype, count)
        fields.append(item)
        offset = round_up(offset + item.nbytes, FIELD_ALIGN_BYTES)
    return tuple(fields)
