"""One number for all weights, so that two runs can be compared at a glance.

xxh3-128 over the fp32 masters as little-endian bytes, in the order of their canonical Hugging Face
names sorted as UTF-8 (slices of one tensor by row), after pending replays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from moe.assemble import assemble
from offload.engine import OffloadEngine
from ops.comm.base import World


def weights_digest(engine: OffloadEngine, world: World | None = None) -> str:
    """The digest as 32 hexadecimal digits; drains the engine and reads every master once.

    With several ranks all of them call it and get the digest of the whole model.
    """
    digest = xxhash.xxh3_128()
    if world is None or world.size == 1:
        for _, values in engine.masters():
            _update(digest, values)
        return digest.hexdigest()
    for _, _, values in assemble(world, engine.tensors(), engine.masters()):
        _update(digest, values)
    found = np.frombuffer(digest.digest(), np.uint8).copy()
    world.broadcast(found, 0)
    return found.tobytes().hex()


def _update(digest: Any, values: np.ndarray) -> None:
    digest.update(np.ascontiguousarray(values, "<f4").data)
