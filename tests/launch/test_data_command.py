import json

import pytest
from typer.testing import CliRunner

from launch.data_command import app
from moe.data.token_file import open_token_file
from ops.errors import DataError
from tests.moe.data.test_encode import make_tokenizer


def invoke(*arguments):
    return CliRunner().invoke(app, ["prepare", *map(str, arguments)])


def refused(*arguments):
    """The message of the `DataError` that the command line will print."""
    result = invoke(*arguments)
    assert isinstance(result.exception, DataError), result.output
    assert result.exception.exit_code == 2
    message = str(result.exception)
    assert "\n" not in message
    return message


def test_prepares_bytes_and_says_how_to_train_on_them(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    out = tmp_path / "a.tokens"
    result = invoke(tmp_path / "a.txt", "--out", out)
    assert result.exit_code == 0, result.output
    assert "1 documents, 5 tokens, vocabulary of 257" in result.output
    assert "rejected: 0" in result.output
    assert f"data.source: {out}" in result.output
    assert open_token_file(out).tokens.tolist() == [*b"text", 256]


def test_prepares_with_a_tokenizer_a_key_and_a_separator(tmp_path):
    make_tokenizer(tmp_path / "tokenizer.json", special="<done>")
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "th"}))
    result = invoke(
        tmp_path / "a.jsonl",
        *("--out", tmp_path / "a.tokens"),
        *("--tokenizer", tmp_path / "tokenizer.json"),
        *("--text-key", "body"),
        *("--separator", "<done>"),
    )
    assert result.exit_code == 0, result.output
    assert open_token_file(tmp_path / "a.tokens").tokens.tolist() == [256, 257]


def test_reports_rejected_lines_with_the_first_reasons(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + "bad\n" * 7)
    result = invoke(tmp_path / "a.jsonl", "--out", tmp_path / "a.tokens")
    assert result.exit_code == 0, result.output
    assert "rejected: 7" in result.output
    assert "a.jsonl:2: not JSON" in result.output
    assert "and 2 more" in result.output


@pytest.mark.parametrize("missing", ["none.txt", "none/"])
def test_a_missing_text_is_one_sentence(tmp_path, missing):
    message = refused(tmp_path / missing, "--out", tmp_path / "a.tokens")
    assert "there is no file or directory" in message


def test_other_faults_are_one_sentence(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.json").write_text("{}")
    out = tmp_path / "a.tokens"
    assert "no tokens" in refused(tmp_path / "empty.txt", "--out", out)
    assert "cannot write" in refused(tmp_path / "a.txt", "--out", tmp_path / "none" / "x")
    bad = ("--out", out, "--tokenizer", tmp_path / "bad.json")
    assert "not a usable tokenizer.json" in refused(tmp_path / "a.txt", *bad)
    alone = ("--out", out, "--separator", "</s>")
    assert "needs --tokenizer" in refused(tmp_path / "a.txt", *alone)


def test_out_is_required(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert invoke(tmp_path / "a.txt").exit_code == 2
