"""Text to tokens: bytes as they are, or a Hugging Face `tokenizer.json`.

An encoder turns the pieces of one document into arrays of tokens, piece by piece, so a document
may be larger than memory. The byte encoder is exact for any bytes. A tokenizer sees at most
`PIECE_CHARS` characters at once, cut after a line's end, else before a space, else anywhere; a
word across such a cut may get other tokens than in one piece, always the same ones.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers
import xxhash

from moe.data.source import BYTE_SEPARATOR, BYTE_VOCAB_SIZE
from ops.errors import DataError

PIECE_CHARS = 1 << 15
# Pieces handed to the tokenizer together, which spreads them over its threads.
_PIECES_AT_ONCE = 32
# Tokens that end a document in published vocabularies, the first one present is taken.
SEPARATOR_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|eos|>",
)


class Encoder(Protocol):
    """Turns documents into tokens below `vocab_size`, none of which is needed to be `separator`.

    `digest` (16 bytes) identifies the tokenizer in a token file. `needs_utf8` says whether a
    document must be valid UTF-8.
    """

    vocab_size: int
    separator: int
    digest: bytes
    needs_utf8: bool

    def encode(self, chunks: Iterable[bytes]) -> Iterator[npt.NDArray[np.integer[Any]]]:
        """Tokens [n_i] of the consecutive chunks of one document, without the separator."""
        ...

    def encode_texts(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.integer[Any]]]:
        """Tokens [n_i] of whole short documents (at most `PIECE_CHARS` bytes each), in order."""
        ...


class ByteEncoder:
    """Each byte is a token (0 to 255); 256 is the separator."""

    vocab_size = BYTE_VOCAB_SIZE
    separator = BYTE_SEPARATOR
    digest = bytes(16)
    needs_utf8 = False

    def encode(self, chunks: Iterable[bytes]) -> Iterator[npt.NDArray[np.integer[Any]]]:
        """Tokens u8 [n_i] of each chunk."""
        for chunk in chunks:
            yield np.frombuffer(chunk, dtype=np.uint8)

    def encode_texts(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.integer[Any]]]:
        """Tokens u8 [n_i] of each text."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]


class TokenizerEncoder:
    """The tokenizer of a `tokenizer.json`, without its special tokens, truncation or padding."""

    needs_utf8 = True

    def __init__(self, path: Path, separator_name: str | None = None) -> None:
        """`separator_name` is a token of the vocabulary (None: the first of `SEPARATOR_NAMES`).

        Raises `DataError` when the file cannot be used or knows no such token.
        """
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read the tokenizer {path}: {error.strerror}") from error
        try:
            tokenizer = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:  # tokenizers raises no narrower type
            raise DataError(f"{path} is not a usable tokenizer.json: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{path} is not a usable tokenizer.json: its vocabulary is empty")
        self.vocab_size = max(vocabulary.values()) + 1
        self.separator = _separator(path, vocabulary, separator_name)
        self.digest = xxhash.xxh3_128_digest(raw)
        self._tokenizer = tokenizer

    def encode(self, chunks: Iterable[bytes]) -> Iterator[npt.NDArray[np.integer[Any]]]:
        """Tokens u32 [n_i] of pieces of the document; raises UnicodeDecodeError."""
        pieces = _pieces(chunks)
        while group := list(itertools.islice(pieces, _PIECES_AT_ONCE)):
            yield from self._encode_group(group)

    def encode_texts(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.integer[Any]]]:
        """Tokens u32 [n_i] of each text; raises UnicodeDecodeError."""
        return self._encode_group([text.decode("utf-8") for text in texts])

    def _encode_group(self, group: list[str]) -> list[npt.NDArray[np.integer[Any]]]:
        encodings = self._tokenizer.encode_batch(group, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def _separator(path: Path, vocabulary: dict[str, int], name: str | None) -> int:
    for candidate in SEPARATOR_NAMES if name is None else (name,):
        if candidate in vocabulary:
            return vocabulary[candidate]
    if name is None:
        raise DataError(
            f"{path} has none of the usual tokens that end a document "
            f"({', '.join(SEPARATOR_NAMES)}); name one with --separator"
        )
    raise DataError(f"{path} has no token {name!r} to separate documents; change --separator")


def _pieces(chunks: Iterable[bytes]) -> Iterator[str]:
    """The text of the chunks in pieces of 1 to `PIECE_CHARS` characters."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    pending = ""
    for chunk in chunks:
        pending += decoder.decode(chunk)
        start = 0
        while len(pending) - start > PIECE_CHARS:
            cut = _cut(pending, start)
            yield pending[start:cut]
            start = cut
        pending = pending[start:]
    pending += decoder.decode(b"", final=True)
    if pending:
        yield pending


def _cut(text: str, start: int) -> int:
    """Where a piece that begins at `start` ends, at most `PIECE_CHARS` on."""
    stop = start + PIECE_CHARS
    newline = text.rfind("\n", start, stop)
    if newline >= 0:
        return newline + 1
    space = text.rfind(" ", start + 1, stop)
    return space if space >= 0 else stop
