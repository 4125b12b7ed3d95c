"""One number for all weights, so that two runs can be compared at a glance.

xxh3-128 over the fp32 masters as little-endian bytes, in the order of their canonical Hugging Face
names sorted as UTF-8 (slices of one tensor by row), after pending replays.
"""

from __future__ import annotations

import numpy as np
import xxhash

from offload.engine import OffloadEngine


def weights_digest(engine: OffloadEngine) -> str:
    """The digest as 32 hexadecimal digits; drains the engine and reads every master once."""
    digest = xxhash.xxh3_128()
    for _, values in engine.masters():
        digest.update(np.ascontiguousarray(values, "<f4").data)
    return digest.hexdigest()
