"""Sizes and durations as people write them: `400GB`, `32MiB`, `1.5 s`."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")


def parse_bytes(text: str | int) -> int:
    """Bytes of a size like `32MiB`, `400GB` or a plain integer; raises ValueError otherwise."""
    if isinstance(text, bool):
        raise ValueError(f"{text!r} is not a size")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"{text} is negative")
        return text
    match = _SIZE.match(str(text))
    if match is None or match.group(2).upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size (examples: 32MiB, 400GB, 1048576)")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


def format_bytes(nbytes: int | float) -> str:
    """Bytes with a binary unit and at most one decimal: `1.5 GiB`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
