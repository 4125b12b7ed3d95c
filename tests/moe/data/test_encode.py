import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moe.data import encode
from moe.data.encode import ByteEncoder, TokenizerEncoder, _pieces
from ops.errors import DataError


def make_tokenizer(path, special="<|endoftext|>", change=None):
    """A byte-level BPE of 256 bytes, one merge and one special token; returns the tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    vocabulary["th"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if special:
        tokenizer.add_special_tokens([special])
    if change:
        change(tokenizer)
    tokenizer.save(str(path))
    return tokenizer


def encode_all(encoder, chunks):
    return np.concatenate([*encoder.encode(chunks), np.array([], dtype=np.int64)]).tolist()


@given(st.lists(st.binary(max_size=50), max_size=10))
def test_bytes_are_their_own_tokens(chunks):
    assert encode_all(ByteEncoder(), chunks) == list(b"".join(chunks))


def test_a_tokenizer_encodes_as_it_would_by_itself(tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    encoder = TokenizerEncoder(tmp_path / "tokenizer.json")
    text = "the thin thread — naïve Ärger 漢字\n"
    assert encode_all(encoder, [text.encode()]) == tokenizer.encode(text).ids
    assert encoder.vocab_size == 258
    assert encoder.separator == 257


@settings(deadline=None, max_examples=30)
@given(text=st.text(max_size=60), size=st.integers(1, 7))
def test_characters_cut_by_chunks_are_put_together(text, size):
    raw = text.encode()
    chunks = [raw[i : i + size] for i in range(0, len(raw), size)]
    assert "".join(_pieces(chunks)) == text


@settings(deadline=None, max_examples=60)
@given(text=st.text(alphabet="ab \n漢", max_size=200), size=st.integers(1, 64))
def test_pieces_are_bounded_and_lose_nothing(text, size):
    raw = text.encode()
    original, encode.PIECE_CHARS = encode.PIECE_CHARS, 10
    try:
        pieces = list(_pieces([raw[i : i + size] for i in range(0, len(raw), size)]))
    finally:
        encode.PIECE_CHARS = original
    assert "".join(pieces) == text
    assert all(1 <= len(piece) <= 10 for piece in pieces)


def test_pieces_end_after_a_line_else_before_a_space_else_anywhere(monkeypatch):
    monkeypatch.setattr(encode, "PIECE_CHARS", 8)
    assert list(_pieces([b"abc\nde fghij"])) == ["abc\n", "de fghij"]
    assert list(_pieces([b"abc de fghij"])) == ["abc de", " fghij"]
    assert list(_pieces([b"abcdefghijkl"])) == ["abcdefgh", "ijkl"]


def test_truncation_and_padding_saved_in_a_tokenizer_are_ignored(tmp_path):
    """Published files often keep the truncation of an inference set-up: text must not get lost."""

    def limit(tokenizer):
        tokenizer.enable_truncation(max_length=5)
        tokenizer.enable_padding(length=50)

    make_tokenizer(tmp_path / "tokenizer.json", change=limit)
    tokens = encode_all(TokenizerEncoder(tmp_path / "tokenizer.json"), [b"abcdefghij"])
    assert len(tokens) == 10


def test_the_separator_can_be_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    make_tokenizer(path, special="<done>")
    assert TokenizerEncoder(path, "<done>").separator == 257
    with pytest.raises(DataError, match=r"none of the usual tokens.*--separator"):
        TokenizerEncoder(path)
    with pytest.raises(DataError, match=r"no token '<end>'.*--separator"):
        TokenizerEncoder(path, "<end>")


def test_the_digest_follows_the_file(tmp_path):
    make_tokenizer(tmp_path / "a.json")
    make_tokenizer(tmp_path / "b.json", special="</s>")
    digests = {TokenizerEncoder(tmp_path / name).digest for name in ("a.json", "b.json")}
    assert len(digests) == 2
    assert all(len(digest) == 16 for digest in digests)


@pytest.mark.parametrize(
    "content",
    [b"", b"not json", b"{}", b"\xff\xfe", json.dumps({"model": {"type": "none"}}).encode()],
)
def test_a_bad_tokenizer_file_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json is not a usable tokenizer\.json"):
        TokenizerEncoder(path)


def test_a_tokenizer_without_vocabulary_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE()).save(str(path))
    with pytest.raises(DataError, match="vocabulary is empty"):
        TokenizerEncoder(path)


def test_a_missing_tokenizer_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        TokenizerEncoder(tmp_path / "none.json")
