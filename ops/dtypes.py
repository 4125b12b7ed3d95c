"""Names of the floating-point formats a block can have, their sizes and NumPy storage.

NumPy has no bfloat16, so its bits are stored as `uint16`; the other formats are stored as
themselves. This module knows nothing of conversions (see `ops/kernels/split.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ops.errors import ConfigError

_STORAGE: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

FLOAT_NAMES: tuple[str, ...] = tuple(_STORAGE)


def storage_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype that holds format `name` in memory; `bfloat16` is held as `uint16`.

    Raises ConfigError for a name outside `FLOAT_NAMES`.
    """
    try:
        return _STORAGE[name]
    except KeyError:
        raise ConfigError(
            f"dtype {name!r} is not supported; use one of {', '.join(FLOAT_NAMES)}"
        ) from None


def item_bytes(name: str) -> int:
    """Bytes of one element of format `name`; raises ConfigError for an unknown name."""
    return storage_dtype(name).itemsize


def name_of_storage(dtype: np.dtype[Any] | type[Any]) -> str:
    """The format stored as NumPy `dtype`: the inverse of `storage_dtype`.

    Raises ConfigError when no format is stored that way (byte-swapped dtypes included).
    """
    wanted = np.dtype(dtype)
    for name, stored in _STORAGE.items():
        if stored == wanted:
            return name
    raise ConfigError(
        f"NumPy dtype {wanted.str!r} stores no supported format; "
        f"use one of {', '.join(str(stored) for stored in _STORAGE.values())}"
    )
