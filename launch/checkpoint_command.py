"""`headrace checkpoint`: which checkpoints there are, verified, copied and deleted."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table

from launch.export_command import export, import_checkpoint
from launch.signals import terminate_as_interrupt
from launch.terminal import byte_bar, say
from offload.checkpoint.catalog import Checkpoint, find_checkpoints
from offload.checkpoint.copy import choose_source, copy_checkpoint
from offload.checkpoint.removal import delete_checkpoint
from offload.checkpoint.sizes import sizes_of
from offload.nvme.hold import Hold
from offload.nvme.inspect import InspectedStore
from offload.nvme.verify import Damage
from ops.errors import ConfigError, StorageError
from ops.units import format_bytes

app = typer.Typer(help="List, verify, copy, exchange and delete checkpoints.", no_args_is_help=True)
app.command("export")(export)
app.command("import")(import_checkpoint)

PathsArgument = Annotated[
    list[Path],
    typer.Argument(
        help="Where they are: the paths of a store (offload.nvme.path), or a copy.",
        metavar="PATH...",
    ),
]


@app.callback()
def _group(context: typer.Context) -> None:
    """List, verify, copy, exchange and delete checkpoints."""
    context.with_resource(terminate_as_interrupt())


@app.command("list")
def list_checkpoints(paths: PathsArgument) -> None:
    """List checkpoints, newest first. Exit: 0, 2 there is none, 3 damaged record."""
    console = Console()
    found = find_checkpoints(_texts(paths))
    table = Table("step")
    for name in ("committed", "ranks", "size", "shared", "state"):
        table.add_column(name, no_wrap=True)
    for checkpoint, size in zip(found, sizes_of(found)):
        shared = "" if checkpoint is found[0] else format_bytes(size.shared_bytes)
        table.add_row(
            _step(checkpoint),
            _when(checkpoint.written_s),
            str(checkpoint.num_ranks),
            format_bytes(size.nbytes),
            shared,
            "complete" if checkpoint.is_complete else "incomplete",
        )
    console.print(table)
    for checkpoint in found:
        for clause in checkpoint.missing:
            say(console, f"step {_step(checkpoint)} is incomplete: {clause}")
        for note in checkpoint.notes:
            say(console, note)


@app.command()
def verify(paths: PathsArgument) -> None:
    """Read every block of every checkpoint. Exit: 0 whole, 2 none or incomplete, 3 damaged."""
    console = Console()
    found = find_checkpoints(_texts(paths))
    damage = _verify(console, found)
    incomplete = [x for x in found if x.missing]
    for checkpoint in incomplete:
        for clause in checkpoint.missing:
            say(console, f"step {_step(checkpoint)} is incomplete: {clause}")
    notes = [note for checkpoint in found for note in checkpoint.notes]
    for note in notes:
        say(console, f"damaged: {note}")
    if damage or notes:
        raise typer.Exit(StorageError.exit_code)
    if incomplete:
        raise typer.Exit(ConfigError.exit_code)


@app.command()
def copy(
    paths: PathsArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A free directory.")],
    step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--step", help="Which one; default: the newest that is complete."),
    ] = None,
) -> None:
    """Copy a checkpoint as it is; run again, it goes on. Exit: 0, 2 refused or parts missing, 3."""
    console = Console()
    source = choose_source(_texts(paths), str(out), step)
    with byte_bar("copying") as begin:
        done = copy_checkpoint(source, str(out), begin)
    kept = f", {format_bytes(done.kept_bytes)} were there and whole" if done.kept_bytes else ""
    say(
        console,
        f"step {_step(source)}: copied {format_bytes(done.written_bytes)} to {out}, every chunk "
        f"verified{kept}",
    )
    if done.missing:
        ranks = ", ".join(map(str, done.missing))
        raise ConfigError(
            f"the copy in {out} is not complete: the parts of rank{'s' * (len(done.missing) > 1)} "
            f"{ranks} are missing ({'; '.join(source.missing) or 'damaged'}); run the same command "
            "where they are, with the same --out"
        )


@app.command()
def delete(
    paths: PathsArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a store or a copy with all its checkpoints. Exit: 0, 2 refused, 3 not removed."""
    texts = _texts(paths)
    if not yes:
        _ask(texts)
    delete_checkpoint(texts)
    say(Console(), f"deleted {', '.join(texts)}")


def _ask(paths: list[str]) -> None:
    try:
        found = find_checkpoints(paths)
        steps = ", ".join(map(_step, found))
        plural = "s" if len(found) > 1 else ""
        what = f"the checkpoint{plural} of step {steps}"
    except StorageError as error:
        what = f"what is damaged there ({error})"
    except ConfigError as error:
        if "is no store" in str(error):
            raise
        what = "what is left of it"
    try:
        agreed = typer.confirm(f"Delete {what} in {', '.join(paths)}?")
    except typer.Abort:
        raise ConfigError("nothing is deleted: nobody answered; --yes does not ask.") from None
    if not agreed:
        raise typer.Exit(ConfigError.exit_code)


def _verify(console: Console, found: list[Checkpoint]) -> list[Damage]:
    """Verify what is here of `found`, each stored version once, and say what came of it."""
    newest: dict[tuple[int, str], int] = {}
    for checkpoint in found:
        for rank in checkpoint.present:
            key = (rank, checkpoint.stores[rank])
            newest[key] = max(newest.get(key, 0), checkpoint.generations[rank])
    damage: list[Damage] = []
    num_blocks = num_bytes = 0
    with ExitStack() as stack:
        stores = []
        for (rank, _), generation in sorted(newest.items()):
            directories = found[0].directories(rank)
            # Whoever trains on keeps it while there is room; what he replaces is no damage.
            with suppress(OSError):
                stack.callback(Hold.place(directories[0], generation).release)
            stores.append(stack.enter_context(closing(InspectedStore(directories, generation))))
        begin = stack.enter_context(byte_bar("verifying"))
        tell = begin(sum(stored.nbytes for store in stores for _, stored in store.versions))
        for store in stores:
            for _, nbytes, bad in store.verify():
                num_blocks += 1
                num_bytes += nbytes
                damage += bad
                tell(nbytes)
    for item in damage:
        say(console, f"damaged: {item}")
    if not newest:
        say(console, "nothing is here that could be verified")
        return damage
    say(
        console,
        f"verified {num_blocks:,} blocks, {format_bytes(num_bytes)}: "
        + (f"{len(damage):,} chunks are damaged" if damage else "all whole"),
    )
    return damage


def _texts(paths: list[Path]) -> list[str]:
    return [str(path) for path in paths]


def _step(checkpoint: Checkpoint) -> str:
    return "?" if checkpoint.step is None else str(checkpoint.step)


def _when(written_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_s)) if written_s else "?"
