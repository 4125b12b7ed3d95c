import errno
import itertools
import json
import os
import tracemalloc

import numpy as np
import pytest
from tokenizers import normalizers

from moe.data import prepare
from moe.data.encode import ByteEncoder, TokenizerEncoder
from moe.data.prepare import prepare_token_file
from moe.data.token_file import open_token_file, verify_token_file
from ops.errors import DataError
from tests.moe.data.test_encode import make_tokenizer


def documents_of(path):
    source = open_token_file(path)
    starts = [0, *source.document_ends.tolist()]
    return [source.tokens[a : b - 1].tolist() for a, b in itertools.pairwise(starts)]


def texts_of(path):
    return [bytes(document).decode() for document in documents_of(path)]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.tokens"


def test_a_text_file_is_one_document(tmp_path, out):
    (tmp_path / "a.txt").write_text("First.\nSecond, naïve.\n")
    (tmp_path / "b").write_text("Other")
    report = prepare_token_file([tmp_path / "b", tmp_path / "a.txt"], out, ByteEncoder())
    assert texts_of(out) == ["Other", "First.\nSecond, naïve.\n"]
    assert report.num_documents == 2
    assert report.num_tokens == open_token_file(out).num_tokens
    assert report.num_rejected == 0
    assert report.file_bytes == out.stat().st_size
    verify_token_file(out)


def test_directories_are_walked_in_sorted_order_without_hidden_entries(tmp_path, out):
    for name in ("z.txt", "a/2.txt", "a/1.txt", "b/c/deep.txt", ".hidden", ".git/config"):
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    os.symlink(tmp_path / "text", tmp_path / "text" / "b" / "loop")
    prepare_token_file([tmp_path / "text"], out, ByteEncoder())
    assert texts_of(out) == ["a/1.txt", "a/2.txt", "b/c/deep.txt", "z.txt"]


def test_a_line_of_json_is_one_document(tmp_path, out):
    path = tmp_path / "text.jsonl"
    records = [{"text": "one\ntwo"}, {"text": "Ärger", "id": 3}]
    lines = [json.dumps(records[0]), "", json.dumps(records[1], ensure_ascii=False)]
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    report = prepare_token_file([path], out, ByteEncoder())
    assert texts_of(out) == ["one\ntwo", "Ärger"]
    assert report.num_rejected == 0


def test_the_key_of_the_text_can_be_chosen(tmp_path, out):
    path = tmp_path / "text.NDJSON"
    path.write_text('{"content": "yes", "text": "no"}\n')
    prepare_token_file([path], out, ByteEncoder(), text_key="content")
    assert texts_of(out) == ["yes"]


def test_rejected_lines_are_counted_with_the_first_reasons(tmp_path, out):
    path = tmp_path / "text.jsonl"
    bad = [
        b"{broken",
        b"[1, 2]",
        b'{"other": "x"}',
        b'{"text": 5}',
        b'{"text": ""}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"n": ' + b"9" * 10_000 + b"}",
    ]
    path.write_bytes(b"\n".join([b'{"text": "first"}', *bad, b'{"text": "last"}']))
    report = prepare_token_file([path], out, ByteEncoder())
    assert texts_of(out) == ["first", "last"]
    assert report.num_rejected == len(bad)
    assert len(report.reasons) == 5
    expected = ["not JSON", "not a JSON object", "no key 'text'", "not a string", "no tokens"]
    for number, (reason, words) in enumerate(zip(report.reasons, expected), start=2):
        assert reason.startswith(f"{path}:{number}: ")
        assert words in reason


def test_a_line_beyond_the_limit_is_rejected_without_being_held(tmp_path, out, monkeypatch):
    monkeypatch.setattr(prepare, "LINE_BYTES_MAX", 100)
    monkeypatch.setattr(prepare, "CHUNK_BYTES", 64)
    path = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": text}) for text in ("a", "b" * 87, "c" * 88, "d" * 5000, "e")]
    assert [len(line) + len("\n") for line in lines[1:3]] == [100, 101]
    path.write_text("\n".join(lines))
    report = prepare_token_file([path], out, ByteEncoder())
    assert texts_of(out) == ["a", "b" * 87, "e"]
    assert report.num_rejected == 2
    assert "longer than 100 bytes" in report.reasons[0]


@pytest.mark.parametrize("texts_max, bytes_max", [(4096, 1 << 20), (2, 1 << 20), (4096, 20)])
def test_short_and_long_lines_keep_their_order(tmp_path, out, monkeypatch, texts_max, bytes_max):
    """Short lines are encoded together, long ones alone: neither may overtake the other."""
    monkeypatch.setattr(prepare, "_TEXTS_MAX", texts_max)
    monkeypatch.setattr(prepare, "_TEXTS_BYTES_MAX", bytes_max)
    texts = ["a", "b" * 40_000, "c", "d", "e" * 10, "f" * 32_768, "g " * 50_000, "h", "i"]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare_token_file([path], out, ByteEncoder())
    assert texts_of(out) == texts
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    prepare_token_file([path], out, TokenizerEncoder(tmp_path / "tokenizer.json"))
    assert documents_of(out) == [tokenizer.encode(text).ids for text in texts]


def test_a_line_that_a_tokenizer_gives_no_tokens_is_rejected(tmp_path, out):
    def drop_spaces(tokenizer):
        tokenizer.normalizer = normalizers.Replace(" ", "")

    make_tokenizer(tmp_path / "tokenizer.json", change=drop_spaces)
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a"}\n{"text": "  "}\n{"text": "b"}\n')
    report = prepare_token_file([path], out, TokenizerEncoder(tmp_path / "tokenizer.json"))
    assert report.num_documents == 2
    assert report.reasons == (f"{path}:2: no tokens",)


def test_a_byte_order_mark_is_left_out(tmp_path, out):
    path = tmp_path / "bom.txt"
    path.write_text("text", encoding="utf-8-sig")
    prepare_token_file([path], out, ByteEncoder())
    assert texts_of(out) == ["text"]


def test_binary_and_empty_files_are_rejected(tmp_path, out):
    directory = tmp_path / "text"
    directory.mkdir()
    (directory / "a.png").write_bytes(b"\x89PNG\0\0")
    (directory / "b.txt").write_bytes(b"")
    (directory / "c.txt").write_bytes(b"good")
    report = prepare_token_file([directory], out, ByteEncoder())
    assert texts_of(out) == ["good"]
    assert report.num_rejected == 2
    assert "a.png: a binary file" in report.reasons[0]
    assert "b.txt: no tokens" in report.reasons[1]


def test_bytes_take_any_encoding_but_a_tokenizer_needs_utf8(tmp_path, out):
    directory = tmp_path / "text"
    directory.mkdir()
    (directory / "latin.txt").write_bytes("Ärger".encode("latin-1"))
    (directory / "utf8.txt").write_bytes("Ärger".encode())
    assert prepare_token_file([directory], out, ByteEncoder()).num_rejected == 0
    make_tokenizer(tmp_path / "tokenizer.json")
    encoder = TokenizerEncoder(tmp_path / "tokenizer.json")
    report = prepare_token_file([directory], out, encoder)
    assert report.num_documents == 1
    assert "latin.txt: not UTF-8" in report.reasons[0]


def test_a_tokenizer_is_used_and_recorded(tmp_path, out):
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    encoder = TokenizerEncoder(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("the thin thread\n")
    (tmp_path / "b.jsonl").write_text('{"text": "thick"}\n')
    report = prepare_token_file([tmp_path / "a.txt", tmp_path / "b.jsonl"], out, encoder)
    assert documents_of(out) == [
        tokenizer.encode("the thin thread\n").ids,
        tokenizer.encode("thick").ids,
    ]
    source = open_token_file(out)
    assert source.vocab_size == report.vocab_size == 258
    assert source.separator == 257
    assert out.read_bytes()[40:56] == encoder.digest


def test_an_earlier_out_in_the_directory_is_not_read_as_text(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    out = tmp_path / "out.tokens"
    for _ in range(2):
        report = prepare_token_file([tmp_path], out, ByteEncoder())
        assert report.num_rejected == 0
        assert texts_of(out) == ["text"]


def test_progress_adds_up_to_the_bytes_read(tmp_path, out):
    (tmp_path / "a.txt").write_text("x" * 3_000_000)
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\nbroken\n')
    (tmp_path / "c.bin").write_bytes(bytes(100))
    paths = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.bin")]
    advanced = []
    prepare_token_file(paths, out, ByteEncoder(), advance=advanced.append)
    assert sum(advanced) == sum(path.stat().st_size for path in paths)


def test_memory_does_not_grow_with_the_text(tmp_path, out):
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.write(b"x" * 8192)
        file.truncate(64 << 20)
    jsonl = tmp_path / "large.jsonl"
    with jsonl.open("w") as file:
        for _ in range(20_000):
            file.write('{"text": "a line of some length"}\n')
    tracemalloc.start()
    try:
        report = prepare_token_file([path, jsonl], out, ByteEncoder())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.num_documents == 20_001
    assert report.num_tokens > 64 << 20
    assert peak < 16 << 20


def test_memory_does_not_grow_with_a_tokenizer(tmp_path, out):
    make_tokenizer(tmp_path / "tokenizer.json")
    path = tmp_path / "large.txt"
    path.write_text("the same line without end " * 160_000)
    encoder = TokenizerEncoder(tmp_path / "tokenizer.json")
    tracemalloc.start()
    try:
        prepare_token_file([path], out, encoder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20


def test_a_missing_path_is_refused_before_anything_is_written(tmp_path, out):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"no file or directory .*none\.txt"):
        prepare_token_file([tmp_path / "a.txt", tmp_path / "none.txt"], out, ByteEncoder())
    assert not out.exists()


def test_text_without_tokens_is_refused_and_leaves_nothing(tmp_path, out):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"no tokens in .*1 rejected, first .*empty\.txt"):
        prepare_token_file([tmp_path / "empty.txt"], out, ByteEncoder())
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="no text found in"):
        prepare_token_file([tmp_path / "nothing"], out, ByteEncoder())
    assert not out.exists()
    assert not list(tmp_path.glob(".*partial"))


def test_something_that_is_neither_file_nor_directory_is_refused(tmp_path, out):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a file nor a directory"):
        prepare_token_file([tmp_path / "pipe"], out, ByteEncoder())


def test_a_file_that_cannot_be_read_is_an_error_not_a_gap(tmp_path, out, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    chunks = prepare._chunks

    def failing(path, advance):
        yield from chunks(path, advance)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(prepare, "_chunks", failing)
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: Input/output error"):
        prepare_token_file([tmp_path / "a.txt"], out, ByteEncoder())
    assert not out.exists()


def test_the_same_text_gives_the_same_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 1000)
    for name in ("1.tokens", "2.tokens"):
        prepare_token_file([tmp_path / "a.txt"], tmp_path / name, ByteEncoder())
    assert (tmp_path / "1.tokens").read_bytes() == (tmp_path / "2.tokens").read_bytes()
    assert np.array_equal(open_token_file(tmp_path / "1.tokens").tokens[:4], list(b"text"))
