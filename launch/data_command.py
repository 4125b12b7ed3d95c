"""`headrace data`: make token files from text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.terminal import byte_bar
from moe.data.encode import ByteEncoder, Encoder, TokenizerEncoder
from moe.data.prepare import PrepareReport, input_files, prepare_token_file
from ops.errors import DataError
from ops.units import format_bytes

app = typer.Typer(help="Prepare text for training.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Prepare text for training."""


@app.command()
def prepare(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Text files, .jsonl files or directories of them.", metavar="PATH..."),
    ],
    out: Annotated[Path, typer.Option("--out", help="The token file to write.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="A Hugging Face tokenizer.json; bytes without it."),
    ] = None,
    text_key: Annotated[
        str, typer.Option("--text-key", help="The key of the text in a JSON line.")
    ] = "text",
    separator: Annotated[
        str | None,
        typer.Option("--separator", help="The tokenizer's token that ends a document."),
    ] = None,
) -> None:
    """Tokenise text once, into a file that data.source can name.

    A text file is one document, a line of a .jsonl or .ndjson file is one. Memory stays constant
    however large the text is.
    """
    encoder = _encoder(tokenizer, separator)
    with byte_bar("tokenising") as begin:
        advance = begin(_total_bytes(paths, out))
        report = prepare_token_file(paths, out, encoder, text_key=text_key, advance=advance)
    for line in report_lines(report):
        typer.echo(line)


def report_lines(report: PrepareReport) -> list[str]:
    """What `headrace data prepare` prints when it is done."""
    lines = [
        f"{report.path}: {report.num_documents:,} documents, {report.num_tokens:,} tokens, "
        f"vocabulary of {report.vocab_size:,}, {format_bytes(report.file_bytes)}",
        f"rejected: {report.num_rejected:,}",
    ]
    lines += [f"  {reason}" for reason in report.reasons]
    if report.num_rejected > len(report.reasons):
        lines.append(f"  and {report.num_rejected - len(report.reasons):,} more")
    lines.append(
        f"to train on it set data.source: {report.path} "
        f"(model.vocab_size must be at least {report.vocab_size})"
    )
    return lines


def _encoder(tokenizer: Path | None, separator: str | None) -> Encoder:
    if tokenizer is not None:
        return TokenizerEncoder(tokenizer, separator)
    if separator is not None:
        raise DataError(
            f"--separator {separator!r} needs --tokenizer; bytes are always separated by token 256"
        )
    return ByteEncoder()


def _total_bytes(paths: list[Path], out: Path) -> int | None:
    """Bytes to read, for the progress bar; None when a path is missing (reported later)."""
    try:
        return sum(path.stat().st_size for path in input_files(paths, out))
    except (OSError, DataError):
        return None
