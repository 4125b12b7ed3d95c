"""Units of a made-up model on any mesh, and commits of them in memory.

Every element of every component has a value that says which element it is, so a byte in the wrong
place shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from offload.arena import Buffer
from offload.blocks import TensorSpec, UnitLayout, UnitSpec
from offload.device_copy import field_view
from offload.nvme.extents import Extent
from offload.shards import share_of
from ops.checksum import CHUNK_BYTES

COMPONENTS = ("weight", "residual", "master", "master_split", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Whole:
    """A whole tensor; operator parallelism cuts it by `cut`: rows, columns or nothing."""

    rows: int
    cols: int
    kept: bool
    decay: bool
    cut: str


def unit_of(
    tensors: Sequence[Whole], op: int, index: int, frozen: bool = False, name: str = "u"
) -> UnitSpec:
    """The unit of one of `op` ranks that share every operator."""
    specs = []
    for number, whole in enumerate(tensors):
        rows, cols, tensor = whole.rows, whole.cols, f"t{number}"
        if whole.cut == "rows":
            each = rows // op
            spec = TensorSpec(tensor, (each, cols), whole.kept, whole.decay, 0.1, row0=index * each)
        elif whole.cut == "columns" and op > 1:
            each = cols // op
            shape, col0 = (rows, each), index * each
            spec = TensorSpec(tensor, shape, whole.kept, whole.decay, 0.1, col0=col0, num_cols=cols)
        else:
            spec = TensorSpec(tensor, (rows, cols), whole.kept, whole.decay, 0.1, replicas=op)
        specs.append(spec)
    return UnitSpec(name, 0, None, tuple(specs), frozen)


def mesh_layouts(
    tensors: Sequence[Whole],
    op: int,
    dp: int,
    kinds: tuple[str, str, str],
    frozen: bool = False,
    name: str = "u",
) -> list[UnitLayout]:
    """The layouts of the unit on each of dp * op ranks, operator index fastest."""
    return [
        share_of(unit_of(tensors, op, index, frozen, name), *kinds, rank=shard, size=dp)
        for shard in range(dp)
        for index in range(op)
    ]


def whole_index(spec: TensorSpec) -> np.ndarray:
    """i64 [size]: index in the whole tensor of each element of a tensor or piece, one by one."""
    block = spec.piece_of or spec
    rows, cols = block.shape if len(block.shape) == 2 else (1, block.size)
    stride = block.num_cols or cols
    grid = (block.row0 + np.arange(rows))[:, None] * stride + block.col0 + np.arange(cols)
    return grid.reshape(-1)[spec.flat0 : spec.flat0 + spec.size]


def value_of(component: str, name: str, index: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The value of elements of a component: what makes each of them unlike its neighbours."""
    seed = COMPONENTS.index(component) * 1009 + zlib.crc32(name.encode()) % 9973 * 101 + 7
    numbers = (index * 2654435761 + seed * 40503) % 65521
    if dtype.itemsize == 2:
        return numbers.astype(np.uint16).view(dtype)
    return (1.0 + numbers / 65536).astype(dtype)


def blocks_of(layout: UnitLayout) -> dict[str, np.ndarray]:
    """The weight and state block of a layout, u8, filled element by element."""
    found = {}
    for part in ("weight", "state"):
        array = np.zeros(layout.nbytes(part), np.uint8)
        buffer = Buffer(Extent(0, array.size), array)
        for field in layout.fields[part]:
            view = field_view(buffer, field)
            first = layout.num_split if field.component == "master" else 0
            for place in layout.places:
                spec = place.spec
                lo = place.start - first
                in_field = lo >= 0 and lo + spec.size <= field.count
                is_moment = field.component.startswith("exp_avg")
                if not spec.name or not (
                    is_moment or (in_field and _belongs(field.component, place.kept))
                ):
                    continue
                values = value_of(field.component, spec.name, whole_index(spec), view.dtype)
                view[lo : lo + spec.size] = values
        found[part] = array
    return found


def _belongs(component: str, kept: bool) -> bool:
    return kept == (component == "master")


@dataclass
class MemoryBlock:
    """A block of a commit."""

    data: np.ndarray
    version: int

    @property
    def nbytes(self) -> int:
        """Logical bytes."""
        return self.data.size


class MemoryPart:
    """A rank's part of a commit, in memory; counts how often each chunk was read."""

    def __init__(self, blocks: dict[str, MemoryBlock]) -> None:
        self.blocks = blocks
        self.reads: dict[tuple[str, int], int] = {}

    def expect(self, block: str, chunks: Sequence[int]) -> None:
        """As `offload.checkpoint.source.CommitPart`; nothing is read."""

    def read_chunks(self, block: str, chunks: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        """As `offload.checkpoint.source.CommitPart`."""
        for chunk in chunks:
            self.reads[block, chunk] = self.reads.get((block, chunk), 0) + 1
            data = self.blocks[block].data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
            yield chunk, data.copy().data


def part_of(layout: UnitLayout, version: int = 3) -> MemoryPart:
    """The commit of a rank that stores this layout."""
    return part_of_units([layout], version)


def part_of_units(layouts: Sequence[UnitLayout], version: int = 3) -> MemoryPart:
    """The commit of a rank that stores these units."""
    blocks = {}
    for layout in layouts:
        for part, data in blocks_of(layout).items():
            if part == "weight" or not layout.frozen:
                blocks[f"{layout.name}/{part}"] = MemoryBlock(data, version)
    return MemoryPart(blocks)
