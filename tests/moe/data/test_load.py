import numpy as np
import pytest

from moe.data import load
from moe.data.config import DataConfig
from moe.data.load import load_data
from moe.data.stream import BatchStream, Cursor
from moe.data.token_file import HEADER_BYTES, TokenFileWriter
from ops.errors import DataError


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "text.tokens"
    rng = np.random.default_rng(1)
    with TokenFileWriter(path, 257, 256) as writer:
        for _ in range(200):
            writer.append(rng.integers(0, 256, 99))
            writer.end_document()
        writer.publish()
    return path


def test_the_default_text_trains_a_byte_model():
    data = load_data(DataConfig(), vocab_size=257, seq_len=128)
    assert data.train.num_tokens + data.held_out.num_tokens == data.source.num_tokens
    assert "held out" in data.describe()
    batch = BatchStream(data.train, 128, 4, Cursor(), vocab_size=257).next()
    assert batch.tokens.shape == (4, 128)


def test_a_token_file_is_mapped_and_split(path):
    data = load_data(DataConfig(source=str(path), held_out_fraction=0.1), vocab_size=300, seq_len=8)
    assert data.source.num_documents == 200
    assert 0.05 <= data.held_out.num_tokens / 20_000 <= 0.2
    assert isinstance(data.source.tokens, np.memmap)


def test_a_vocabulary_too_small_for_the_text_is_refused(path):
    with pytest.raises(DataError, match=r"token 256 at position 99 .*vocab_size is 256"):
        load_data(DataConfig(source=str(path)), vocab_size=256, seq_len=8)


def test_a_damaged_text_is_never_trained_on(path):
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + 1000] ^= 4
    path.write_bytes(bytes(raw))
    with pytest.raises(DataError, match="checksum of its tokens"):
        load_data(DataConfig(source=str(path)), vocab_size=257, seq_len=8)


def test_a_very_large_file_is_not_read_at_the_start(path, monkeypatch):
    monkeypatch.setattr(load, "VERIFIED_BYTES_MAX", 10_000)
    data = load_data(DataConfig(source=str(path)), vocab_size=100, seq_len=8)
    stream = BatchStream(data.train, 8, 20, Cursor(), vocab_size=100)
    with pytest.raises(DataError, match="vocab_size is 100"):
        stream.next()


@pytest.mark.parametrize("seq_len", [3000, 30_000])
def test_a_text_shorter_than_a_sequence_is_refused_with_the_numbers(path, seq_len):
    with pytest.raises(DataError) as caught:
        load_data(DataConfig(source=str(path)), vocab_size=257, seq_len=seq_len)
    message = str(caught.value)
    assert "of 20000 tokens" in message
    assert str(seq_len + 1) in message
    assert "data.held_out_fraction 0.05" in message


def test_plain_text_is_refused_with_the_command_that_prepares_it(tmp_path):
    (tmp_path / "novel.txt").write_text("It was a dark and stormy night. " * 100)
    with pytest.raises(DataError, match="headrace data prepare"):
        load_data(DataConfig(source=str(tmp_path / "novel.txt")), vocab_size=257, seq_len=8)
