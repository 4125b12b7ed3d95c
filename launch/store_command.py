"""`headrace store`: look into a cold store, and verify every byte of its commits."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from launch.terminal import byte_bar, cells, say
from offload.nvme.inspect import InspectedStore, find_stores
from offload.nvme.recovery import FoundCommit
from offload.nvme.verify import Damage
from ops.errors import StorageError
from ops.units import format_bytes

app = typer.Typer(help="Look into a cold store.", no_args_is_help=True)

PathsArgument = Annotated[
    list[Path],
    typer.Argument(
        help="The path of the store (offload.nvme.path); all of them, if there are several.",
        metavar="PATH...",
    ),
]


@app.callback()
def _group() -> None:
    """Look into a cold store."""


@app.command("list")
def list_store(
    paths: PathsArgument,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Also list the blocks of the newest commit.")
    ] = False,
) -> None:
    """List the commits that a run could resume from. Exit: 0, 2 no store, 3 damaged manifests."""
    console = Console()
    damaged = False
    for directories in find_stores([str(path) for path in paths]):
        with closing(InspectedStore(directories)) as store:
            _print_head(console, store)
            if store.commits:
                console.print(_commit_table(store))
            if blocks and store.commits:
                console.print(_block_table(store.commits[0]))
            damaged = damaged or store.damaged
    if damaged:
        raise typer.Exit(StorageError.exit_code)


@app.command()
def verify(paths: PathsArgument) -> None:
    """Read every block of every retained commit. Exit: 0 whole, 2 no store, 3 damaged."""
    console = Console()
    damaged = False
    for directories in find_stores([str(path) for path in paths]):
        with closing(InspectedStore(directories)) as store:
            _print_head(console, store)
            found = _verify(console, store)
            damaged = damaged or store.damaged or bool(found)
    if damaged:
        raise typer.Exit(StorageError.exit_code)


def _verify(console: Console, store: InspectedStore) -> list[Damage]:
    total_bytes = sum(stored.nbytes for _, stored in store.versions)
    num_blocks, num_bytes, damage = 0, 0, []
    with byte_bar("verifying") as begin:
        advance = begin(total_bytes)
        for _, nbytes, found in store.verify():
            num_blocks += 1
            num_bytes += nbytes
            damage += found
            advance(nbytes)
    for item in damage:
        say(console, f"damaged: {item}")
    commits = ", ".join(str(commit.generation) for commit in store.commits) or "none"
    say(
        console,
        f"verified {num_blocks:,} blocks, {format_bytes(num_bytes)}, of commits {commits}: "
        + (f"{len(damage):,} chunks are damaged" if damage else "all whole"),
    )
    return damage


def _print_head(console: Console, store: InspectedStore) -> None:
    say(console, f"{', '.join(store.directories)}: store {store.store_id or 'without a commit'}")
    if store.is_owned:
        owner = store.owner or "another process"
        say(console, f"in use by {owner}: what is read here may be replaced meanwhile")
    for note in store.notes:
        say(console, note)


def _commit_table(store: InspectedStore) -> Table:
    table = Table("commit", "slot", "step", "blocks", "bytes")
    for commit in store.commits:
        table.add_row(
            str(commit.generation),
            str(commit.slot),
            _step(commit.meta),
            f"{len(commit.blocks):,}",
            format_bytes(sum(stored.nbytes for stored in commit.blocks.values())),
        )
    return table


def _block_table(commit: FoundCommit) -> Table:
    table = Table("block", "bytes", "version", "extents", title=f"commit {commit.generation}")
    for name, stored in sorted(commit.blocks.items()):
        row = (f"{stored.nbytes:,}", str(stored.version), str(len(stored.extents)))
        table.add_row(*cells(name, *row))
    return table


def _step(meta: Any) -> str:
    step = meta.get("step")
    return "" if step is None else str(step) if type(step) is int else "?"
