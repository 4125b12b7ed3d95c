"""Files of unknown origin: plain ones only, bounded, and JSON without surprises.

What lies in a directory of weights was made by somebody else. A pipe would keep its reader waiting
for ever and a device would never end, so neither is read. A link to a plain file is one: caches
are made of them.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from math import isfinite
from typing import Any

_READ_BYTES = 1 << 20
_DIGITS_MAX = 100


def open_plain(path: str) -> int:
    """A descriptor of the plain file `path`, for reading; raises OSError. Does not wait."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a plain file", path)
    return fd


def read_plain(path: str, bytes_max: int) -> bytes:
    """The content of the plain file `path`; OSError, also when it has more than `bytes_max`."""
    with os.fdopen(open_plain(path), "rb", buffering=0) as file:
        data = bytearray()
        # What the system says of its length is not believed: it may grow, or not be told.
        while len(data) <= bytes_max:
            part = file.read(min(_READ_BYTES, bytes_max + 1 - len(data)))
            if not part:
                return bytes(data)
            data += part
    raise OSError(errno.EFBIG, f"larger than {bytes_max} bytes", path)


def parse_json(data: bytes) -> Any:
    """The value of JSON; ValueError or RecursionError for anything that is none.

    So are a key that appears twice in an object, and numbers that are not finite or of more digits
    than can be told.
    """
    return json.loads(
        data,
        object_pairs_hook=_unique,
        parse_constant=_refuse,
        parse_float=_finite,
        parse_int=_short,
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name[:100]!r} appears twice")
            seen.add(name)
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _short(text: str) -> int:
    if len(text) > _DIGITS_MAX:  # Python prints no product of a few of them
        raise ValueError(f"{text[:20]}... has {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:100]} is no finite number")
    return value
