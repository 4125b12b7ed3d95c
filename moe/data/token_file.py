"""Token files: a text that has been tokenised once, mapped by every run afterwards.

The layout is described in docs/formats/token_file.md. Writing needs constant memory. A file
appears under its name only when whole:

1. tokens go to `.NAME.PID.partial` beside it, borders of documents to an unnamed temporary file;
2. the borders are appended, then the header, which holds checksums of both, is written;
3. fsync of the partial file;
4. rename over NAME;
5. fsync of the directory.

A header is believed only if its checksum and the file's size agree with it, so a file of unknown
origin cannot make us allocate what it merely claims; tokens are mapped, never loaded.
"""

from __future__ import annotations

import os
import struct
import tempfile
from array import array
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from moe.data.source import TokenSource, iter_chunks, token_dtype
from ops.errors import DataError, StorageError

MAGIC = b"HDRTOKEN"
VERSION = 1
HEADER_BYTES = 128
_CHECKED_BYTES = HEADER_BYTES - 8
_HEADER = struct.Struct("<8sIIIIQQ16sQQ48x")
_BORDER_BYTES = 8
_BORDERS_BUFFERED = 8192
_WRITE_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class TokenFileHeader:
    """What the first 128 bytes of a token file say; see docs/formats/token_file.md."""

    token_bytes: int
    vocab_size: int
    separator: int
    num_tokens: int
    num_documents: int
    tokenizer_digest: bytes
    tokens_checksum: int
    borders_checksum: int

    @property
    def borders_offset(self) -> int:
        """Where the borders of documents begin, in bytes."""
        return HEADER_BYTES + _padded(self.num_tokens * self.token_bytes)

    @property
    def file_bytes(self) -> int:
        """The exact size of the file."""
        return self.borders_offset + self.num_documents * _BORDER_BYTES

    def pack(self) -> bytes:
        """The header's 128 bytes, checksum included."""
        body = _HEADER.pack(
            MAGIC,
            VERSION,
            self.token_bytes,
            self.vocab_size,
            self.separator,
            self.num_tokens,
            self.num_documents,
            self.tokenizer_digest,
            self.tokens_checksum,
            self.borders_checksum,
        )
        return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


class TokenFileWriter:
    """Writes one token file; use as a context manager and end with `publish`.

    Leaving the context without `publish` removes what was written and leaves an older file of
    that name as it was. Memory is constant. Not for several threads.
    """

    def __init__(
        self, path: Path, vocab_size: int, separator: int, tokenizer_digest: bytes = bytes(16)
    ) -> None:
        """Opens the partial file; raises `DataError` when that cannot be written."""
        self.path = path
        self.num_documents = 0
        self.num_tokens = 0
        self._vocab_size = vocab_size
        self._separator = separator
        self._tokenizer_digest = tokenizer_digest
        self._dtype = token_dtype(vocab_size)
        self._document_start = 0
        self._tokens_hasher = xxhash.xxh3_64()
        self._borders_hasher = xxhash.xxh3_64()
        self._borders = array("Q")
        self._partial = path.parent / f".{path.name}.{os.getpid()}.partial"
        _refuse_unrelated_file(path)
        try:
            self._file = open(self._partial, "wb", buffering=_WRITE_BUFFER_BYTES)  # noqa: SIM115
        except OSError as error:
            raise DataError(f"cannot write {path}: {error.strerror}") from error
        try:
            self._spool = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115
            self._file.write(bytes(HEADER_BYTES))
        except OSError as error:
            self.discard()
            raise DataError(f"cannot write {path}: {error.strerror}") from error

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()

    def append(self, tokens_N: npt.NDArray[np.integer[Any]]) -> None:
        """Add tokens [N] to the open document.

        Raises ValueError for a token outside of the vocabulary, `StorageError` when the disk
        refuses. May block.
        """
        if not len(tokens_N):
            return
        if int(tokens_N.max()) >= self._vocab_size or int(tokens_N.min()) < 0:
            raise ValueError(f"a token outside of the vocabulary of {self._vocab_size}")
        stored_N = np.ascontiguousarray(tokens_N, dtype=self._dtype)
        self._tokens_hasher.update(stored_N.view(np.uint8).data)
        try:
            self._file.write(stored_N.view(np.uint8).data)
        except OSError as error:
            raise self._write_failed(error) from error
        self.num_tokens += len(stored_N)

    def end_document(self) -> bool:
        """Close the open document with the separator; False (and nothing written) if empty."""
        if self.num_tokens == self._document_start:
            return False
        self.append(np.array([self._separator], dtype=np.int64))
        self._borders.append(self.num_tokens)
        self._document_start = self.num_tokens
        self.num_documents += 1
        if len(self._borders) >= _BORDERS_BUFFERED:
            self._spool_borders()
        return True

    def publish(self) -> TokenFileHeader:
        """Make the file durable and visible under its name (steps 2 to 5 of the module).

        Raises `DataError` when it holds no token, `StorageError` when the disk refuses. Blocks.
        """
        if self.num_documents == 0:
            raise DataError(f"no tokens to write to {self.path}: the text is empty")
        assert self.num_tokens == self._document_start, "publish inside of a document"
        try:
            self._spool_borders()
            tokens_bytes = self.num_tokens * self._dtype.itemsize
            self._file.write(bytes(_padded(tokens_bytes) - tokens_bytes))
            self._spool.seek(0)
            while piece := self._spool.read(_WRITE_BUFFER_BYTES):
                self._file.write(piece)
            header = TokenFileHeader(
                self._dtype.itemsize,
                self._vocab_size,
                self._separator,
                self.num_tokens,
                self.num_documents,
                self._tokenizer_digest,
                self._tokens_hasher.intdigest(),
                self._borders_hasher.intdigest(),
            )
            self._file.seek(0)
            self._file.write(header.pack())
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._partial, self.path)
            _fsync_directory(self.path.parent)
        except OSError as error:
            raise self._write_failed(error) from error
        return header

    def discard(self) -> None:
        """Close and remove what was not published; harmless after `publish`, never raises."""
        for name in ("_file", "_spool"):
            handle = getattr(self, name, None)
            try:
                if handle is not None:
                    handle.close()
            except OSError:
                # A full disk fails the flush of a file that is about to be removed anyway.
                continue
        self._partial.unlink(missing_ok=True)

    def _spool_borders(self) -> None:
        stored = np.array(self._borders, dtype="<u8").tobytes()
        self._borders_hasher.update(stored)
        try:
            self._spool.write(stored)
        except OSError as error:
            raise self._write_failed(error) from error
        self._borders = array("Q")

    def _write_failed(self, error: OSError) -> StorageError:
        return StorageError(
            f"cannot write the token file: {error.strerror}",
            path=str(self.path),
            offset=HEADER_BYTES + self.num_tokens * self._dtype.itemsize,
        )


def read_header(path: Path) -> TokenFileHeader:
    """The verified header of `path`; raises `DataError` with what is wrong and what to do."""
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
            file_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise DataError(
            f"there is no token file {path}; make one with "
            f"`headrace data prepare TEXT --out {path}`"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read the token file {path}: {error.strerror}") from error
    if raw[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path} is not a token file; if it is text, make one with "
            f"`headrace data prepare {path} --out {path.with_suffix('.tokens')}` "
            "and name that file in data.source"
        )
    if len(raw) < HEADER_BYTES:
        raise DataError(f"token file {path} is cut off inside of its header ({len(raw)} bytes)")
    if struct.unpack("<Q", raw[_CHECKED_BYTES:])[0] != xxhash.xxh3_64_intdigest(
        raw[:_CHECKED_BYTES]
    ):
        raise DataError(f"token file {path}: the header's checksum is wrong; prepare it again")
    _, version, *fields = _HEADER.unpack(raw[:_CHECKED_BYTES])
    if version != VERSION:
        raise DataError(
            f"token file {path} has version {version}, this program reads {VERSION}; "
            "prepare it again"
        )
    header = TokenFileHeader(*fields)
    _check_header(path, header, file_bytes)
    return header


def open_token_file(path: Path) -> TokenSource:
    """Map a token file after verifying header and size; raises `DataError`.

    Does not read the tokens: see `verify_token_file`.
    """
    header = read_header(path)
    tokens = np.memmap(
        path,
        dtype=f"<u{header.token_bytes}",
        mode="r",
        offset=HEADER_BYTES,
        shape=(header.num_tokens,),
    )
    ends = np.memmap(
        path, dtype="<u8", mode="r", offset=header.borders_offset, shape=(header.num_documents,)
    )
    if int(ends[-1]) != header.num_tokens:
        raise DataError(
            f"token file {path}: the last document ends at token {int(ends[-1])}, the file holds "
            f"{header.num_tokens}; prepare it again"
        )
    digest = header.pack()[_CHECKED_BYTES:].hex()
    return TokenSource(
        str(path),
        tokens,
        ends,
        header.vocab_size,
        header.separator,
        digest,
        header.tokenizer_digest.hex(),
    )


def verify_token_file(path: Path) -> None:
    """Read everything once and compare with the checksums; raises `DataError`. Blocks."""
    header = read_header(path)
    source = open_token_file(path)
    parts = (
        ("tokens", source.tokens, header.tokens_checksum, HEADER_BYTES),
        ("borders", source.document_ends, header.borders_checksum, header.borders_offset),
    )
    for name, stored, checksum, offset in parts:
        hasher = xxhash.xxh3_64()
        for chunk in iter_chunks(stored):
            hasher.update(chunk.view(np.uint8).data)
        if hasher.intdigest() != checksum:
            raise DataError(
                f"token file {path}: the checksum of its {name} (from byte {offset}) is wrong; "
                "prepare it again"
            )


def is_token_file(path: Path) -> bool:
    """Whether the file begins like a token file; False when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _check_header(path: Path, header: TokenFileHeader, file_bytes: int) -> None:
    sound = (
        header.token_bytes == token_dtype(header.vocab_size).itemsize
        and header.separator < header.vocab_size
        and 1 <= header.num_documents <= header.num_tokens
    )
    if not sound:
        raise DataError(f"token file {path}: its header contradicts itself ({header})")
    if file_bytes != header.file_bytes:
        raise DataError(
            f"token file {path} has {file_bytes} bytes, its header describes "
            f"{header.file_bytes}; prepare it again"
        )


def _refuse_unrelated_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"cannot write {path}: it is a directory")
    if path.exists() and not is_token_file(path):
        raise DataError(
            f"{path} exists and is not a token file, so it is not overwritten; "
            "choose another name for --out"
        )


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _BORDER_BYTES) * _BORDER_BYTES
