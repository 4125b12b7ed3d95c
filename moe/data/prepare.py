"""`headrace data prepare`: text files and JSON lines to one token file, in constant memory.

A text file is one document; a line of a `.jsonl` or `.ndjson` file is one. Directories are walked
in sorted order, without hidden entries and links to directories. What cannot be a document (binary
file, damaged line, text without tokens) is counted as rejected with the first few reasons; what
cannot be read at all is an error, so that text is never left out unnoticed.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from moe.data.encode import PIECE_CHARS, Encoder
from moe.data.token_file import TokenFileWriter
from ops.errors import DataError

CHUNK_BYTES = 1 << 20
LINE_BYTES_MAX = 64 << 20
REASONS_MAX = 5
_LINE_SUFFIXES = frozenset({".jsonl", ".ndjson"})
_SNIFFED_BYTES = 8192
# Short texts that are encoded together.
_TEXTS_MAX = 4096
_TEXTS_BYTES_MAX = 1 << 20

Advance = Callable[[int], None]


@dataclass(frozen=True)
class PrepareReport:
    """What was written, and what was not: the first of `num_rejected` reasons."""

    path: Path
    num_documents: int
    num_tokens: int
    vocab_size: int
    file_bytes: int
    num_rejected: int
    reasons: tuple[str, ...]


@dataclass
class _Rejections:
    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, where: str, reason: str) -> None:
        self.count += 1
        if len(self.reasons) < REASONS_MAX:
            self.reasons.append(f"{where}: {reason}")


class _RejectedLine(Exception):
    """A line that is not a document; its message says why."""


def prepare_token_file(
    paths: Sequence[Path],
    out: Path,
    encoder: Encoder,
    *,
    text_key: str = "text",
    advance: Advance | None = None,
) -> PrepareReport:
    """Write the documents under `paths` to the token file `out`.

    `text_key` names the text in a JSON line. `advance` is told of bytes as they are read. Nothing
    appears at `out` unless all went well. Raises `DataError` for paths that do not exist, text
    without tokens and an `out` that cannot be written, `StorageError` for a full disk. Blocks.
    """
    advance = advance or (lambda nbytes: None)
    rejections = _Rejections()
    for path in paths:
        if not path.exists():
            raise DataError(f"there is no file or directory {path}")
    with TokenFileWriter(out, encoder.vocab_size, encoder.separator, encoder.digest) as writer:
        for path in input_files(paths, out):
            try:
                if path.suffix.lower() in _LINE_SUFFIXES:
                    _add_lines(path, writer, encoder, text_key, rejections, advance)
                else:
                    _add_file(path, writer, encoder, rejections, advance)
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}") from error
        if writer.num_documents == 0:
            raise DataError(_nothing_found(paths, rejections))
        header = writer.publish()
    return PrepareReport(
        out,
        header.num_documents,
        header.num_tokens,
        header.vocab_size,
        header.file_bytes,
        rejections.count,
        tuple(rejections.reasons),
    )


def input_files(paths: Iterable[Path], out: Path) -> Iterator[Path]:
    """The files that `paths` stand for, in order, without `out` itself; raises `DataError`."""
    out = out.absolute()
    for path in paths:
        if path.is_dir():
            yield from (found for found in _walk(path) if found.absolute() != out)
        elif path.is_file():
            yield path
        else:
            raise DataError(f"{path} is neither a file nor a directory")


def _walk(directory: Path) -> Iterator[Path]:
    try:
        with os.scandir(directory) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"cannot read the directory {directory}: {error.strerror}") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        elif entry.is_file():
            yield Path(entry.path)


def _add_file(
    path: Path,
    writer: TokenFileWriter,
    encoder: Encoder,
    rejections: _Rejections,
    advance: Advance,
) -> None:
    reason = _file_fault(path, encoder.needs_utf8)
    if reason:
        rejections.add(str(path), reason)
        advance(path.stat().st_size)
        return
    for tokens in encoder.encode(_chunks(path, advance)):
        writer.append(tokens)
    if not writer.end_document():
        rejections.add(str(path), "no tokens")


def _file_fault(path: Path, needs_utf8: bool) -> str | None:
    """Why the file is not a document; reads it once when it has to be UTF-8."""
    with path.open("rb") as file:
        if b"\0" in file.read(_SNIFFED_BYTES):
            return "a binary file"
    if not needs_utf8:
        return None
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in _chunks(path, lambda nbytes: None):
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "not UTF-8"
    return None


def _chunks(path: Path, advance: Advance) -> Iterator[bytes]:
    """The file's bytes in order, without a UTF-8 byte order mark."""
    with path.open("rb") as file:
        chunk = file.read(CHUNK_BYTES)
        advance(len(chunk))
        chunk = chunk.removeprefix(codecs.BOM_UTF8)
        while chunk:
            yield chunk
            chunk = file.read(CHUNK_BYTES)
            advance(len(chunk))


def _add_lines(
    path: Path,
    writer: TokenFileWriter,
    encoder: Encoder,
    text_key: str,
    rejections: _Rejections,
    advance: Advance,
) -> None:
    def flush() -> None:
        for number, tokens in zip(numbers, encoder.encode_texts(texts)):
            writer.append(tokens)
            if not writer.end_document():
                rejections.add(f"{path}:{number}", "no tokens")
        numbers.clear()
        texts.clear()

    numbers: list[int] = []
    texts: list[bytes] = []
    num_bytes = 0
    with path.open("rb") as file:
        for number, line in _lines(file, advance):
            try:
                text = _line_text(line, text_key)
            except _RejectedLine as error:
                rejections.add(f"{path}:{number}", str(error))
                continue
            is_long = len(text) > PIECE_CHARS
            num_bytes += len(text)
            if is_long or num_bytes > _TEXTS_BYTES_MAX or len(texts) == _TEXTS_MAX:
                flush()
                num_bytes = len(text)
            if is_long:
                _add_long_text(f"{path}:{number}", text, writer, encoder, rejections)
                num_bytes = 0
            else:
                numbers.append(number)
                texts.append(text)
        flush()


def _add_long_text(
    where: str, text: bytes, writer: TokenFileWriter, encoder: Encoder, rejections: _Rejections
) -> None:
    for tokens in encoder.encode([text]):
        writer.append(tokens)
    if not writer.end_document():
        rejections.add(where, "no tokens")


def _lines(file: BinaryIO, advance: Advance) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines that are not blank; None for one longer than `LINE_BYTES_MAX`."""
    number = 0
    while line := file.readline(LINE_BYTES_MAX + 1):
        number += 1
        advance(len(line))
        if len(line) > LINE_BYTES_MAX:
            while line and not line.endswith(b"\n"):
                line = file.readline(CHUNK_BYTES)
                advance(len(line))
            yield number, None
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, line


def _line_text(line: bytes | None, text_key: str) -> bytes:
    if line is None:
        raise _RejectedLine(f"longer than {LINE_BYTES_MAX} bytes")
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise _RejectedLine("not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise _RejectedLine(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise _RejectedLine("not a JSON object")
    if text_key not in record:
        raise _RejectedLine(f"no key {text_key!r}")
    text = record[text_key]
    if not isinstance(text, str):
        raise _RejectedLine(f"{text_key!r} is not a string")
    if not text:
        raise _RejectedLine("no tokens")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise _RejectedLine(f"{text_key!r} holds half of a surrogate pair") from None


def _nothing_found(paths: Sequence[Path], rejections: _Rejections) -> str:
    where = ", ".join(str(path) for path in paths)
    if not rejections.count:
        return f"no text found in {where}"
    return f"no tokens in {where}: {rejections.count} rejected, first {rejections.reasons[0]}"
