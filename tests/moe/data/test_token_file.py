import errno
import os
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data import token_file
from moe.data.token_file import (
    HEADER_BYTES,
    TokenFileHeader,
    TokenFileWriter,
    open_token_file,
    read_header,
    verify_token_file,
)
from ops.errors import DataError, StorageError


def write(path, documents, vocab_size=257, separator=256, digest=bytes(16)):
    with TokenFileWriter(path, vocab_size, separator, digest) as writer:
        for document in documents:
            writer.append(np.array(document))
            writer.end_document()
        return writer.publish()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "text.tokens"
    write(path, [[1, 2, 3], [4], [5, 6]])
    return path


def reseal(path, **changes):
    """Change fields of a header and give it a right checksum again."""
    raw = bytearray(path.read_bytes())
    offsets = {"version": (8, "<I"), "token_bytes": (12, "<I"), "vocab_size": (16, "<I")}
    offsets |= {"separator": (20, "<I"), "num_tokens": (24, "<Q"), "num_documents": (32, "<Q")}
    for name, value in changes.items():
        offset, kind = offsets[name]
        struct.pack_into(kind, raw, offset, value)
    struct.pack_into("<Q", raw, 120, xxhash.xxh3_64_intdigest(bytes(raw[:120])))
    path.write_bytes(bytes(raw))


def test_reads_back_what_was_written(path):
    source = open_token_file(path)
    assert source.tokens.tolist() == [1, 2, 3, 256, 4, 256, 5, 6, 256]
    assert source.document_ends.tolist() == [4, 6, 9]
    assert source.vocab_size == 257
    assert source.separator == 256
    assert not source.tokens.flags.writeable
    verify_token_file(path)


@settings(deadline=None, max_examples=30)
@given(
    documents=st.lists(st.lists(st.integers(0, 69_999), min_size=1, max_size=50), min_size=1),
    vocab_size=st.sampled_from([70_000, 70_001, 2**32 - 1]),
)
def test_round_trip_of_wide_tokens(tmp_path_factory, documents, vocab_size):
    path = tmp_path_factory.mktemp("wide") / "wide.tokens"
    write(path, documents, vocab_size, separator=7)
    source = open_token_file(path)
    assert source.tokens.dtype == np.dtype("<u4")
    expected = [token for document in documents for token in [*document, 7]]
    assert source.tokens.tolist() == expected
    assert source.document_ends.tolist() == np.cumsum([len(d) + 1 for d in documents]).tolist()
    verify_token_file(path)


@pytest.mark.parametrize("vocab_size, token_bytes", [(65_536, 2), (65_537, 4)])
def test_tokens_take_two_bytes_while_they_fit(tmp_path, vocab_size, token_bytes):
    path = tmp_path / "text.tokens"
    write(path, [[vocab_size - 1]], vocab_size, separator=0)
    assert read_header(path).token_bytes == token_bytes
    assert open_token_file(path).tokens.tolist() == [vocab_size - 1, 0]


def test_the_bytes_are_those_of_the_format_document(tmp_path):
    path = tmp_path / "text.tokens"
    write(path, [[65], [66, 67]], digest=b"0123456789abcdef")
    raw = path.read_bytes()
    tokens = struct.pack("<5H", 65, 256, 66, 67, 256)
    borders = struct.pack("<2Q", 2, 5)
    header = b"HDRTOKEN" + struct.pack("<IIIIQQ", 1, 2, 257, 256, 5, 2) + b"0123456789abcdef"
    header += struct.pack("<Q", xxhash.xxh3_64_intdigest(tokens))
    header += struct.pack("<Q", xxhash.xxh3_64_intdigest(borders))
    header += bytes(48)
    header += struct.pack("<Q", xxhash.xxh3_64_intdigest(header))
    assert raw == header + tokens + bytes(6) + borders


def test_documents_beyond_the_buffer_keep_their_borders(tmp_path, monkeypatch):
    monkeypatch.setattr(token_file, "_BORDERS_BUFFERED", 3)
    path = tmp_path / "text.tokens"
    write(path, [[1]] * 10)
    assert open_token_file(path).document_ends.tolist() == list(range(2, 22, 2))


def test_empty_documents_leave_no_trace(tmp_path):
    path = tmp_path / "text.tokens"
    with TokenFileWriter(path, 257, 256) as writer:
        assert not writer.end_document()
        writer.append(np.array([1]))
        assert writer.end_document()
        assert not writer.end_document()
        writer.publish()
    assert open_token_file(path).tokens.tolist() == [1, 256]


@pytest.mark.parametrize("token", [-1, 257])
def test_the_writer_refuses_tokens_outside_of_the_vocabulary(tmp_path, token):
    with (
        TokenFileWriter(tmp_path / "text.tokens", 257, 256) as writer,
        pytest.raises(ValueError, match="257"),
    ):
        writer.append(np.array([1, token]))
    assert list(tmp_path.iterdir()) == []


def test_no_tokens_are_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(DataError, match="empty"):
        write(tmp_path / "text.tokens", [])
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_writer_leaves_the_older_file(path):
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), TokenFileWriter(path, 257, 256) as writer:
        writer.append(np.array([9, 9, 9]))
        raise KeyboardInterrupt
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_published_file_replaces_the_older_one(path):
    write(path, [[9]])
    assert open_token_file(path).tokens.tolist() == [9, 256]
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_is_no_token_file_is_never_overwritten(tmp_path):
    """`prepare novel.txt --out novel.txt` must not destroy the novel."""
    novel = tmp_path / "novel.txt"
    novel.write_text("It was a dark and stormy night.")
    with pytest.raises(DataError, match="not overwritten"):
        write(novel, [[1]])
    assert novel.read_text() == "It was a dark and stormy night."


def test_an_out_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(DataError, match="is a directory"):
        write(tmp_path, [[1]])
    with pytest.raises(DataError, match="No such file or directory"):
        write(tmp_path / "missing" / "text.tokens", [[1]])


def test_a_full_disk_is_reported_and_leaves_the_older_file(path, monkeypatch):
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(token_file.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        write(path, [[1, 2]])
    assert caught.value.path == str(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_syncs_the_file_before_renaming_and_the_directory_after(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor):
        events.append("fsync " + os.readlink(f"/proc/self/fd/{descriptor}").rsplit("/", 1)[1])
        fsync(descriptor)

    def recorded_replace(source, target):
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(token_file.os, "fsync", recorded_fsync)
    monkeypatch.setattr(token_file.os, "replace", recorded_replace)
    write(tmp_path / "text.tokens", [[1]])
    partial = f".text.tokens.{os.getpid()}.partial"
    assert events == [f"fsync {partial}", "rename", f"fsync {tmp_path.name}"]


def test_a_missing_file_is_refused_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(DataError, match="headrace data prepare TEXT --out"):
        open_token_file(tmp_path / "none.tokens")


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(DataError, match="Is a directory"):
        open_token_file(tmp_path)


@pytest.mark.parametrize("content", [b"", b"HDR", b"plain text " * 50])
def test_plain_text_is_refused_with_the_command_that_prepares_it(tmp_path, content):
    path = tmp_path / "novel.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"headrace data prepare .*novel\.txt --out .*novel\.tok"):
        open_token_file(path)


@pytest.mark.parametrize("length", [8, 60, HEADER_BYTES - 1])
def test_a_header_cut_off_is_refused(path, length):
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match="cut off inside of its header"):
        open_token_file(path)


@pytest.mark.parametrize("offset", [9, 13, 24, 41, 60, 80, 120])
def test_a_flipped_bit_in_the_header_is_refused(path, offset):
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(DataError, match="checksum is wrong"):
        open_token_file(path)


def test_a_later_version_is_refused(path):
    reseal(path, version=2)
    with pytest.raises(DataError, match="version 2, this program reads 1"):
        open_token_file(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_bytes": 4},
        {"token_bytes": 3},
        {"vocab_size": 0},
        {"vocab_size": 256},
        {"separator": 257},
        {"num_documents": 0},
        {"num_documents": 10},
        {"num_tokens": 0},
    ],
)
def test_a_header_that_contradicts_itself_is_refused(path, changes):
    reseal(path, **changes)
    with pytest.raises(DataError, match="contradicts itself"):
        open_token_file(path)


@pytest.mark.parametrize("num_tokens", [2**20, 2**60, 2**64 - 1])
def test_a_claim_of_more_tokens_than_the_file_holds_allocates_nothing(path, num_tokens):
    reseal(path, num_tokens=num_tokens)
    with pytest.raises(DataError, match="its header describes"):
        open_token_file(path)


@pytest.mark.parametrize("change", [-1, 1, -24])
def test_a_file_of_another_size_is_refused(path, change):
    raw = path.read_bytes()
    path.write_bytes(raw[:change] if change < 0 else raw + bytes(change))
    with pytest.raises(DataError, match="bytes, its header describes"):
        open_token_file(path)


def test_borders_that_do_not_end_with_the_text_are_refused(path):
    raw = path.read_bytes()
    path.write_bytes(raw[:-8] + struct.pack("<Q", 8))
    with pytest.raises(DataError, match="last document ends at token 8, the file holds 9"):
        open_token_file(path)


@pytest.mark.parametrize("part, offset", [("tokens", 130), ("borders", HEADER_BYTES + 24)])
def test_a_flipped_bit_in_the_body_is_found_by_verification(path, part, offset):
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(bytes(raw))
    open_token_file(path)
    with pytest.raises(DataError, match=f"checksum of its {part}"):
        verify_token_file(path)


def test_the_digest_identifies_contents(tmp_path):
    digests = []
    for name, documents in [("a", [[1, 2]]), ("b", [[1, 2]]), ("c", [[2, 1]]), ("d", [[1], [2]])]:
        write(tmp_path / name, documents)
        digests.append(open_token_file(tmp_path / name).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_offsets_above_four_gibibytes_are_right():
    header = TokenFileHeader(4, 100_000, 0, 2**33 + 1, 3, bytes(16), 0, 0)
    assert header.borders_offset == HEADER_BYTES + 2**35 + 8
    assert header.file_bytes == header.borders_offset + 24
    assert len(header.pack()) == HEADER_BYTES
