"""Checks shared by the kernels' public functions: flat, contiguous, right dtype, same length.

A kernel reads and writes memory without bounds checks, so every public function passes its
arguments through here once per call (not per chunk).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I16 = npt.NDArray[np.int16]
U16 = npt.NDArray[np.uint16]
U8 = npt.NDArray[np.uint8]


def check_flat(name: str, array: Array, *dtypes: Any, size: int, writes: bool = False) -> None:
    """Require a one-dimensional C-contiguous array of `size` elements and one of `dtypes`.

    `writes` requires it to be writeable too. Raises ValueError naming the argument, what it is
    and what was wanted.
    """
    if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(
            f"{name} has shape {array.shape} and strides {array.strides}; "
            "a flat contiguous aligned array is needed"
        )
    if array.dtype not in dtypes:
        wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise ValueError(f"{name} is {array.dtype}, {wanted} is needed")
    if array.size != size:
        raise ValueError(f"{name} has {array.size} elements, {size} are needed")
    if writes and not array.flags.writeable:
        raise ValueError(f"{name} is read-only and would be written")
