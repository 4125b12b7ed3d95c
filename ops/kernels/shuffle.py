"""Byte planes: the first bytes of all items together, then the second bytes, and so on.

The bytes of one significance resemble each other (the sign and exponent of neighbouring weights
hardly differ) while those of one number do not, so a plain compressor finds something to do only
after they have been sorted apart. The most significant byte's plane comes first: a compressor that
hurries through noise is still slow and careful there. Items are little endian.

Both functions take flat uint8 arrays of one length at any address, write in place, release the GIL
while they run and raise ValueError for wrong arguments. Source and target must not overlap. Bytes
behind the last whole item are copied as they are. This module knows nothing of compression.
"""

from __future__ import annotations

import numpy as np

from ops.kernels.arrays import U8, check_flat
from ops.kernels.intrinsics import kernel

ITEM_BYTES = (1, 2, 4)


def shuffle(source: U8, target: U8, item_bytes: int) -> None:
    """Sort the bytes of `source`, items of `item_bytes` (1, 2 or 4), into planes in `target`."""
    source = _checked(source, target, item_bytes)
    items = source.size // item_bytes
    whole = items * item_bytes
    if item_bytes == 4:
        _shuffle4(source, target, items)
    elif item_bytes == 2:
        _shuffle2(source, target, items)
    else:
        target[:whole] = source
    target[whole:] = source[whole:]


def unshuffle(source: U8, target: U8, item_bytes: int) -> None:
    """Undo `shuffle`: write the items whose planes are in `source` to `target`."""
    source = _checked(source, target, item_bytes)
    items = source.size // item_bytes
    whole = items * item_bytes
    if item_bytes == 4:
        _unshuffle4(source, target, items)
    elif item_bytes == 2:
        _unshuffle2(source, target, items)
    else:
        target[:whole] = source
    target[whole:] = source[whole:]


def _checked(source: U8, target: U8, item_bytes: int) -> U8:
    """`source` as a read-only view: for Numba that is a type, and one compilation is enough."""
    if item_bytes not in ITEM_BYTES:
        raise ValueError(f"items of {item_bytes} bytes; 1, 2 or 4 are possible")
    check_flat("source", source, np.uint8, size=source.size)
    check_flat("target", target, np.uint8, size=source.size, writes=True)
    view = source.view()
    view.flags.writeable = False
    return view


# One pass over the source for each plane: the loop has one strided load and one dense store, which
# vectorises; it is memory in the cache (a frame of 1 MiB) that is walked over again.


@kernel
def _shuffle4(source, target, items):  # type: ignore[no-untyped-def]
    for plane in range(4):
        column, row = source[3 - plane :], target[plane * items : (plane + 1) * items]
        for i in range(items):
            row[i] = column[4 * i]


@kernel
def _shuffle2(source, target, items):  # type: ignore[no-untyped-def]
    for plane in range(2):
        column, row = source[1 - plane :], target[plane * items : (plane + 1) * items]
        for i in range(items):
            row[i] = column[2 * i]


@kernel
def _unshuffle4(source, target, items):  # type: ignore[no-untyped-def]
    high, low = source[:items], source[3 * items : 4 * items]
    second, third = source[items : 2 * items], source[2 * items : 3 * items]
    for i in range(items):
        target[4 * i] = low[i]
        target[4 * i + 1] = third[i]
        target[4 * i + 2] = second[i]
        target[4 * i + 3] = high[i]


@kernel
def _unshuffle2(source, target, items):  # type: ignore[no-untyped-def]
    high, low = source[:items], source[items : 2 * items]
    for i in range(items):
        target[2 * i] = low[i]
        target[2 * i + 1] = high[i]
