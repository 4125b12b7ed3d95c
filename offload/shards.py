"""Units that several ranks share: every rank's tiers hold one part, a lease gathers all of them.

The gathered layout of a unit pads its split and its kept elements each to a multiple of the number
of ranks; rank r has the r-th part of both. A part is a layout of its own, of pieces of
tensors, so that tiers, updates and commits know nothing of sharing. What pads is zero in weights,
moments and gradients, and stays zero.

Pure: no I/O, no communication.
"""

from __future__ import annotations

from collections.abc import Iterable

from offload.blocks import TensorPlace, TensorSpec, UnitLayout, UnitSpec


def share_of(
    unit: UnitSpec,
    weight_dtype: str,
    grad_dtype: str,
    compute_dtype: str,
    *,
    rank: int = 0,
    size: int = 1,
) -> UnitLayout:
    """The layout of what rank `rank` of `size` stores of `unit`; its `gathered` is the whole."""
    kinds = (weight_dtype, grad_dtype, compute_dtype)
    whole = UnitLayout(unit, *kinds, shares=size)
    if size == 1:
        return whole
    pieces: list[TensorSpec] = []
    for kept, first, count in (
        (False, 0, whole.num_split // size),
        (True, whole.num_split, whole.num_kept // size),
    ):
        lo = first + rank * count
        pieces += _pieces([p for p in whole.places if p.kept is kept], lo, lo + count, kept)
    share = UnitLayout(
        UnitSpec(unit.name, unit.layer, unit.expert, tuple(pieces), unit.frozen), *kinds
    )
    share.gathered = whole
    return share


def _pieces(places: list[TensorPlace], lo: int, hi: int, kept: bool) -> list[TensorSpec]:
    """Pieces of the tensors at `places` that cover the flat range [lo, hi), padded at its end."""
    pieces, reached = [], lo
    for place in places:
        begin, end = max(place.start, lo), min(place.start + place.spec.size, hi)
        if begin < end:
            pieces.append(piece(place.spec, begin - place.start, end - begin))
            reached = end
    if reached < hi:
        pieces.append(TensorSpec("", (hi - reached,), kept, False, 0.0))
    return pieces


def piece(tensor: TensorSpec, flat0: int, count: int) -> TensorSpec:
    """The elements flat0 .. flat0 + count of `tensor`, in row-major order."""
    return TensorSpec(
        tensor.name,
        (count,),
        tensor.kept,
        tensor.decay,
        tensor.init_std,
        row0=tensor.row0,
        col0=tensor.col0,
        num_cols=tensor.num_cols,
        replicas=tensor.replicas,
        piece_of=tensor,
        flat0=flat0,
    )


def staging_bytes(layouts: Iterable[UnitLayout]) -> int:
    """Device bytes that gathering needs besides the unit: the largest 16-bit weight, as stored."""
    return max(
        (
            2 * x.gathered.num_split
            for x in layouts
            if x.gathered is not x and x.weight_dtype == "bfloat16"
        ),
        default=0,
    )
