"""Tokens of a text with the borders of its documents, wherever they lie (array or mapped file).

A document ends with the separator token; `document_ends` points one past it, so documents tile
the tokens. Nothing here copies the tokens: everything is read in chunks of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ops.errors import DataError

BYTE_SEPARATOR = 256
BYTE_VOCAB_SIZE = 257
CHUNK_TOKENS = 1 << 20


@dataclass(frozen=True, eq=False)
class TokenSource:
    """A text as tokens.

    `tokens` is u16 or u32 [num_tokens], read-only, possibly a memory map. `document_ends` is
    u64 [num_documents], increasing, the last one equal to num_tokens. `vocab_size` bounds the
    tokens from above, `separator` ends each document. `digest` identifies the contents, so that
    a run is not resumed on another text, `tokenizer` what made tokens of it (32 hexadecimal digits;
    zeros: bytes as they are). `name` is what messages call it.
    """

    name: str
    tokens: npt.NDArray[np.unsignedinteger[Any]]
    document_ends: npt.NDArray[np.uint64]
    vocab_size: int
    separator: int
    digest: str
    tokenizer: str = bytes(16).hex()

    @property
    def num_tokens(self) -> int:
        """Number of tokens, separators included."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_ends)

    def describe(self) -> str:
        """One line for a report: name, documents, tokens, vocabulary."""
        return (
            f"{self.name}: {self.num_documents:,} documents, {self.num_tokens:,} tokens, "
            f"vocabulary of {self.vocab_size:,}"
        )


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest of little-endian u16 and u32 that holds every token of the vocabulary."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def source_from_documents(
    name: str, documents: Sequence[npt.NDArray[np.integer[Any]]], vocab_size: int, separator: int
) -> TokenSource:
    """A source in memory of documents (integers [n_i], without separators).

    Each document is followed by `separator`. Raises `DataError` when there is no document.
    """
    if not documents:
        raise DataError(f"{name} holds no documents")
    dtype = token_dtype(max(vocab_size, separator + 1))
    parts: list[npt.NDArray[Any]] = []
    end = np.array([separator], dtype=dtype)
    for document in documents:
        parts += [document.astype(dtype), end]
    tokens = np.concatenate(parts)
    lengths = np.array([len(document) + 1 for document in documents], dtype=np.uint64)
    ends = np.cumsum(lengths, dtype=np.uint64)
    tokens.flags.writeable = False
    ends.flags.writeable = False
    digest = contents_digest(tokens, ends)
    return TokenSource(name, tokens, ends, vocab_size, separator, digest)


def contents_digest(tokens: npt.NDArray[Any], document_ends: npt.NDArray[Any]) -> str:
    """xxh3-64 of tokens and document borders as 16 hex digits."""
    hasher = xxhash.xxh3_64()
    for array in (tokens, document_ends):
        hasher.update(f"{array.dtype.str} {len(array)} ".encode())
        for chunk in iter_chunks(array):
            hasher.update(np.ascontiguousarray(chunk).view(np.uint8).data)
    return hasher.hexdigest()


def iter_chunks(array: npt.NDArray[Any], size: int = CHUNK_TOKENS) -> Iterator[npt.NDArray[Any]]:
    """Consecutive slices of at most `size` elements."""
    for start in range(0, len(array), size):
        yield array[start : start + size]


def check_tokens(source: TokenSource, vocab_size: int) -> None:
    """Read all tokens in chunks and refuse the first one outside of [0, `vocab_size`).

    Raises `DataError` with position, token and vocab_size. Blocks for one pass over the tokens.
    """
    start = 0
    for chunk in iter_chunks(source.tokens):
        if int(chunk.max()) >= vocab_size:
            offset = int(np.argmax(chunk >= vocab_size))
            raise token_outside_vocabulary(source, start + offset, int(chunk[offset]), vocab_size)
        start += len(chunk)


def token_outside_vocabulary(
    source: TokenSource, position: int, token: int, vocab_size: int
) -> DataError:
    """The error for one token that the model has no embedding for."""
    needed = max(token + 1, source.vocab_size)
    return DataError(
        f"{source.name}: token {token} at position {position} is outside of the model's "
        "vocabulary; "
        f"model.vocab_size is {vocab_size} and must be at least {needed}"
    )
