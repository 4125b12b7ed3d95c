import itertools
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from moe.data import cpython_text
from moe.data.cpython_text import cpython_source, iter_documents
from moe.data.source import check_tokens
from ops.errors import DataError


@pytest.fixture
def library(tmp_path):
    """A small standard library with everything that may be met in one."""
    files = {
        "b.py": '"""Module b."""\nclass C:\n  """Class C."""\n  def m(self):\n    """M."""\n',
        "a/__init__.py": '"""Package a."""\n',
        "a/inner.py": "async def f():\n    'Function f.'\n",
        "bare.py": "x = 1\n",
        "broken.py": "def (:\n",
        "nul.py": '"""Doc."""\0\n',
        "surrogate.py": '"""Half \\ud800 pair."""\n',
        "test/case.py": '"""Not this."""\n',
        "site-packages/other.py": '"""Nor this."""\n',
        "notes.txt": '"""Nor a text file."""\n',
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\n'''Ä.'''\n".encode("latin-1"))
    (tmp_path / "undecodable.py").write_bytes(b'"""\xff."""\n')
    (tmp_path / "dangling.py").symlink_to(tmp_path / "none.py")
    return tmp_path


def test_modules_give_their_docstrings_under_qualified_names(library, monkeypatch):
    monkeypatch.setattr(cpython_text, "_topics", lambda: {"z": "Last. ", "assert": "First."})
    texts = [text.decode() for text in iter_documents(library)]
    assert texts == [
        "assert\n\nFirst.\n",
        "z\n\nLast.\n",
        "b\n\nModule b.\n\nb.C\n\nClass C.\n\nb.C.m\n\nM.\n",
        "latin\n\nÄ.\n",
        "surrogate\n\nHalf ? pair.\n",
        "a\n\nPackage a.\n",
        "a.inner.f\n\nFunction f.\n",
    ]


def test_modules_are_parsed_not_imported(library, monkeypatch):
    (library / "danger.py").write_text('"""Doc."""\nraise SystemExit("imported")\n')
    assert any(b"danger" in text for text in iter_documents(library))
    assert "danger" not in sys.modules


def test_a_python_without_documentation_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(cpython_text, "_topics", dict)
    with pytest.raises(DataError, match="headrace data prepare"):
        cpython_source(tmp_path)


def test_missing_topics_are_done_without(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert cpython_text._topics() == {}


def test_this_python_documents_itself_the_same_way_each_time():
    source = cpython_source()
    assert source.num_documents > 300
    assert source.num_tokens > 1_000_000
    check_tokens(source, 257)
    ends = source.document_ends.astype(np.int64)
    assert (source.tokens[ends - 1] == 256).all()
    assert int((source.tokens == 256).sum()) == source.num_documents
    assert b"lambda" in source.tokens[:200_000].astype(np.uint8).tobytes()
    library = Path(sysconfig.get_path("stdlib"))
    again = list(itertools.islice(iter_documents(library), 200))
    assert [len(text) + 1 for text in again] == np.diff(ends[:200], prepend=0).tolist()
    assert source.tokens[: ends[199]].tolist() == [t for text in again for t in [*text, 256]]
