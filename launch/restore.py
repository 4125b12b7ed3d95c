"""Values of another store's commit, or another mesh's, into this run's engine.

Every rank reads the parts that it can read, and gets from others the chunks of the rest that it
needs. A unit is put together in the memory it will live in, so that restoring takes no more than
training does.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

from launch.config import RunConfig
from launch.origin import Origin
from launch.sighting import fail_together
from moe.checkpoint import SavedRun, saved_ledger
from offload.blocks import UnitLayout
from offload.checkpoint.read_ahead import ReadAhead
from offload.checkpoint.source import CommitPart
from offload.checkpoint.spool import Needed, ToldPart, exchange, tell_blocks
from offload.checkpoint.units import SavedPart, UnitReader
from offload.engine import OffloadEngine
from offload.ledger import Ledger
from offload.nvme.directory import rank_directory
from ops.comm.base import World
from ops.errors import HeadraceError, StorageError
from ops.kernels.pool import KernelPool


def restore_from(
    origin: Origin,
    engine: OffloadEngine,
    config: RunConfig,
    world: World,
    pool: KernelPool,
    directory: str,
) -> None:
    """Fill `engine` from `origin`; entered by all ranks.

    Raises on every rank what one meets before the parts have been exchanged; StorageError where a
    chunk does not verify. What others send is kept in `directory` meanwhile.
    """
    run = origin.run()
    if run.num_ranks != len(origin.stores):
        raise StorageError(
            f"the commit has {len(origin.stores)} parts, its mesh {run.num_ranks} ranks"
        )
    layouts = engine.layouts()
    with ExitStack() as stack:
        parts, error = _open_mine(origin, stack)
        fail_together(error, world, "rank {} cannot read the commit: ")
        ledger = _ledger(origin, run, parts, world)
        everything = _with_others(
            origin, run, parts, ledger, layouts, config, world, pool, directory, stack
        )
        reader = _reader(run, everything, ledger, config, pool)
        meta = dict(origin.meta)
        meta["engine"] = {**meta["engine"], "ledger": ledger.to_json()}
        reader.expect(layouts)
        engine.restore_from(meta, reader.fill)


def _open_mine(
    origin: Origin, stack: ExitStack
) -> tuple[dict[int, CommitPart], HeadraceError | None]:
    """The parts that this rank reads; they are closed with `stack`."""
    parts: dict[int, CommitPart] = {}
    ahead = ReadAhead()
    try:
        for saved in sorted(origin.mine):
            directories = [rank_directory(path, saved) for path in origin.paths]
            # In this run's own store the commit is kept already.
            hold = not origin.is_own
            part = CommitPart(directories, origin.generations[saved], hold=hold, read_ahead=ahead)
            parts[saved] = stack.enter_context(closing(part))
    except HeadraceError as error:
        return parts, error
    return parts, None


def _ledger(origin: Origin, run: SavedRun, parts: Mapping[int, CommitPart], world: World) -> Ledger:
    """The ledger of all parts."""
    mine = {
        saved: part.meta.get("engine", {}).get("ledger")
        for saved, part in parts.items()
        if origin.readers[saved] == world.rank
    }
    told = world.all_gather_object(list(mine.items()))
    metas = {saved: {"engine": {"ledger": x}} for rows in told for saved, x in rows}
    return saved_ledger(run, metas)


def _with_others(
    origin: Origin,
    run: SavedRun,
    parts: Mapping[int, CommitPart],
    ledger: Ledger,
    layouts: list[UnitLayout],
    config: RunConfig,
    world: World,
    pool: KernelPool,
    directory: str,
    stack: ExitStack,
) -> dict[int, SavedPart]:
    """All parts, own ones first; those of others hold what this rank needs of them."""
    known: dict[int, SavedPart] = dict(parts)
    absent = set(range(run.num_ranks)) - parts.keys()
    if not any(world.all_gather_object(bool(absent))):
        return known
    mine = {x: part for x, part in parts.items() if origin.readers[x] == world.rank}
    told = tell_blocks(world, mine)
    known.update((saved, told[saved]) for saved in sorted(absent))
    needed = _needed(_reader(run, known, ledger, config, pool), layouts, absent)
    came = exchange(world, parts, origin.readers, told, needed, directory, stack.callback)
    nothing = ToldPart({})
    known.update((saved, came.get(saved, nothing)) for saved in sorted(absent))
    return known


def _needed(reader: UnitReader, layouts: list[UnitLayout], absent: set[int]) -> Needed:
    found: dict[tuple[int, str], Any] = {}
    for layout in layouts:
        for (saved, block), chunks in reader.needed(layout).items():
            if saved in absent:
                found[saved, block] = chunks
    return found


def _reader(
    run: SavedRun,
    parts: Mapping[int, SavedPart],
    ledger: Ledger,
    config: RunConfig,
    pool: KernelPool,
) -> UnitReader:
    return UnitReader(
        parts,
        run.layouts,
        ledger,
        run.optimizer.weight_decay,
        pool,
        replays=run.idle_expert_policy != "skip",
    )
