"""Declared device memory of each stage, as arithmetic the planner can use without MindSpore."""

from __future__ import annotations


def query_block(seq_len: int) -> int:
    """Return the queries a score block holds: 256, or an eighth of a longer sequence."""
    return min(seq_len, max(256, -(-seq_len // 8)))
