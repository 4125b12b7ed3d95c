"""Whether all ranks were started with the same run, asked before anything is taken or discarded.

Nothing else would notice: ranks that begin from other seeds, or learn at other rates, exchange
their numbers all the same and train something that nobody has configured. Every rank tells a digest
of what it was given; only when those differ, what differs is looked for and refused on all.

`LOCAL_KEYS` may differ: they are about the memory, the drive and the cores of a rank's machine.
Budgets never change what is computed, and no rank opens another's store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from launch.compose import flatten
from launch.config import RunConfig
from launch.environment import versions
from launch.mesh_plan import as_ranges
from launch.origin import goes_on_in_own_store
from launch.world import RefusedByAll
from moe.data.source import TokenSource
from ops.comm.base import World

LOCAL_KEYS = frozenset(
    {
        "name",  # of the configuration's file, and of rank 0's report
        "offload.device.capacity",
        "offload.host.capacity",
        "offload.nvme.capacity",
        "offload.nvme.path",
        "offload.io_workers",
        "offload.io_request_size",
        "offload.codec",
        "data.source",  # what is in it is compared instead
        "runtime.collective_timeout",
        "runtime.threads",
    }
)
_PACKAGES = ("headrace", "mindspore", "numpy", "numba", "ml-dtypes")
_KEYS_SHOWN = 8
_VALUES_SHOWN = 3
_TEXT_MAX = 80
_ABSENT = "not given"


def require_same_settings(
    config: RunConfig, steps: int | None, resume: str | None, world: World
) -> None:
    """Raise RefusedByAll on every rank unless all have the same settings, `LOCAL_KEYS` aside.

    `steps` and `resume` are what the options of `train` say; package versions are compared too.
    Entered by all ranks of `world`, before anything else; blocks for them.
    """
    if world.size == 1:
        return
    given = {key: x for key, x in flatten(config.to_dict()).items() if key not in LOCAL_KEYS}
    given["--steps"] = steps
    given["--resume"] = resume
    if resume is not None:
        # Paths are those of a machine; what matters is whose store it is.
        own = goes_on_in_own_store(config, resume)
        given["--resume"] = "latest" if own else "a path that is not the run's own store"
    found = versions()
    given |= {f"the version of {name}": found.get(name) for name in _PACKAGES}
    _require_same(given, world, "start all of them with the same configuration and options")


def require_same_text(source: TokenSource, world: World) -> None:
    """Raise RefusedByAll on every rank unless all of them read the same tokens.

    Entered by all ranks of `world`; blocks for them.
    """
    given = {
        "the text of data.source (its digest)": source.digest,
        "the tokenizer of data.source (its digest)": source.tokenizer,
    }
    advice = (
        "give every rank the same text (that of `cpython` is another with every version of Python)"
    )
    _require_same(given, world, advice)


def _require_same(given: Mapping[str, Any], world: World, advice: str) -> None:
    """Raise RefusedByAll naming keys, ranks and values unless `given` is the same on all ranks."""
    if len(set(world.all_gather_object(_digest(given)))) == 1:
        return
    digests = world.all_gather_object({key: _digest(value) for key, value in given.items()})
    keys = dict.fromkeys(key for row in digests for key in row)
    differing = [key for key in keys if len({row.get(key) for row in digests}) > 1]
    shown = differing[:_KEYS_SHOWN]
    values = world.all_gather_object([_text(given.get(key)) for key in shown])
    said = [f"{key} is {_by_rank([row[at] for row in values])}" for at, key in enumerate(shown)]
    more = differing[_KEYS_SHOWN:]
    if more:
        said.append(f"and {', '.join(more)} differ too")
    raise RefusedByAll(f"the ranks were not started alike: {'; '.join(said)}; {advice}.")


def _by_rank(texts: list[str]) -> str:
    """`1 on ranks 0, 2-3 and 2 on rank 1`, of the text of every rank."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    parts = [
        f"{text} on rank{'s' if len(who) > 1 else ''} {as_ranges(who)}"
        for text, who in list(ranks.items())[:_VALUES_SHOWN]
    ]
    if len(ranks) > _VALUES_SHOWN:
        parts.append(f"{len(ranks) - _VALUES_SHOWN} more values on others")
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _text(value: Any) -> str:
    text = _ABSENT if value is None else str(value)
    # Texts that differ only behind the cut must not look alike.
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}... ({_digest(value)[:8]})"


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
