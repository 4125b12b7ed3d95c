"""What commands beside training show: lines as they are, and a bar for bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

Advance = Callable[[int], None]
"""Called with the bytes that were done since the last call."""


def say(console: Console, text: str) -> None:
    """One line as it is: no wrapping; names in brackets or colons are neither markup nor emoji."""
    console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)


def cells(*texts: str) -> list[Text]:
    """The cells of a table's row as they are: names in brackets are not markup."""
    return [Text(text) for text in texts]


@contextmanager
def byte_bar(what: str) -> Iterator[Callable[[int | None], Advance]]:
    """A progress bar on stderr, if that is a terminal.

    It is told the bytes in all (None: not known), then those that are done.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:

        def begin(total_bytes: int | None) -> Advance:
            task = progress.add_task(what, total=total_bytes)
            return lambda nbytes: progress.advance(task, nbytes)

        yield begin
