"""Checkpoints of unknown origin: one kind of error, no file elsewhere, no memory for mere claims.

C68. Every file that describes a checkpoint is changed, byte by byte or field by field with
checksums made anew, and then everything that reads checkpoints is let loose on it. What comes out
is the right bytes or a sentence.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.checkpoint.catalog import UNFINISHED_NAME, find_checkpoints, open_parts
from offload.checkpoint.copy import choose_source, copy_checkpoint
from offload.checkpoint.sizes import sizes_of
from offload.nvme.directory import PUBLISHED_FILE_NAME
from offload.nvme.inspect import InspectedStore
from offload.rank_commits import RECORD_NAME
from offload.testing_storage import filled_buffer
from ops.checksum import checksum
from ops.errors import HeadraceError
from tests.offload.checkpoint.test_catalog import Ranks
from tests.offload.nvme.test_manifest import fields_of, seal

NBYTES = (1 << 20) + 3
COPY_NAME = f"rank-00001/{PUBLISHED_FILE_NAME}"
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
DESCRIPTIONS = (
    "rank-00000/manifest.1",
    "rank-00001/manifest.1",
    "rank-00000/member.json",
    RECORD_NAME,
    UNFINISHED_NAME,
    COPY_NAME,
)
HUGE = 1 << 62
VALUES = st.one_of(
    st.sampled_from([None, True, -1, 0, 1, HUGE, 1 << 80, 1e300, "", "..", "/etc/passwd", [], {}]),
    st.integers(0, 1 << 40),
    st.sampled_from(["../../../etc", "manifest.0", "\0", "a" * 5000, [[]], {"ranks": HUGE}]),
)


class Opened:
    """The paths that this process opens while it is active; the hook itself stays."""

    paths: list[str] | None = None

    @classmethod
    def note(cls, event, arguments):
        if event == "open" and cls.paths is not None and isinstance(arguments[0], str):
            cls.paths.append(arguments[0])


sys.addaudithook(Opened.note)


@contextlib.contextmanager
def opened_files():
    Opened.paths = found = []
    try:
        yield found
    finally:
        Opened.paths = None


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    path = tmp_path_factory.mktemp("pristine")
    ranks = Ranks(path, 2, copies=True)
    ranks.publish(7)
    ranks.close()
    shutil.copy(path / RECORD_NAME, path / UNFINISHED_NAME)
    return path


@pytest.fixture
def target(pristine, tmp_path):
    """A fresh copy of the checkpoint for each example."""
    count = iter(range(1 << 30))

    def fresh():
        path = tmp_path / str(next(count))
        shutil.copytree(pristine, path)
        return path

    return fresh


def read_everything(path):
    """Everything that reads checkpoints; returns how many parts were read whole and were right."""
    out = str(path) + ".copy"
    right = 0
    with contextlib.suppress(HeadraceError):
        found = find_checkpoints([str(path)])
        sizes_of(found)
        for checkpoint in found:
            with contextlib.suppress(HeadraceError):
                for part in open_parts(checkpoint):
                    with part:
                        for name, stored in part.blocks.items():
                            chunks = part.read_chunks(name, range(len(stored.checksums)))
                            data = b"".join(bytes(x) for _, x in chunks)
                            assert len(data) == stored.nbytes
                            right += data == filled_buffer(NBYTES, seed=7).tobytes()
    for rank in ("rank-00000", "rank-00001"):
        with contextlib.suppress(HeadraceError):
            store = InspectedStore([str(path / rank)])
            try:
                list(store.verify())
            finally:
                store.close()
    with contextlib.suppress(HeadraceError):
        copy_checkpoint(choose_source([str(path)], out), out)
    shutil.rmtree(out, ignore_errors=True)
    return right


def check(path):
    """Read everything within bounds: of memory, and of the directory."""
    with opened_files() as opened:
        tracemalloc.start()
        try:
            right = read_everything(path)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak_bytes < 64 << 20, peak_bytes
    allowed = (str(path), "/proc/", sys.prefix, sys.base_prefix, str(Path(__file__).parents[3]))
    strangers = {x for x in opened if os.path.isabs(x) and not x.startswith(allowed)}
    assert strangers <= {str(path.parent)}, "a copy makes its own name durable"
    shutil.rmtree(path)
    return right


def test_the_whole_checkpoint_is_read(target):
    assert check(target()) == 2


@SETTINGS
@given(
    name=st.sampled_from(DESCRIPTIONS),
    changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), max_size=4),
    length=st.one_of(st.none(), st.integers(0, 1 << 12)),
)
def test_changed_bytes_of_any_description(target, name, changes, length):
    path = target()
    data = bytearray((path / name).read_bytes())
    for at, mask in changes:
        data[at % len(data)] ^= mask
    if length is not None:
        del data[length % (len(data) + 1) :]
    (path / name).write_bytes(data)
    check(path)


def places(value, path=()):
    """Every place in JSON data."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items if isinstance(value, (dict, list)) else ():
        yield from places(item, (*path, key)) if isinstance(item, (dict, list)) else [(*path, key)]


def put(fields, place, value):
    value = copy.deepcopy(value)  # a later change must not reach what values are drawn from
    if not place:
        return value
    target = fields
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    return fields


@SETTINGS
@given(data=st.data(), rank=st.sampled_from([0, 1]))
def test_changed_fields_of_a_manifest_with_its_digest_made_anew(target, data, rank):
    path = target()
    file = path / f"rank-0000{rank}" / "manifest.1"
    fields, sums = fields_of(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(sorted(places(fields), key=str)))
        fields = put(fields, place, data.draw(VALUES))
        if not isinstance(fields, dict):
            break
    file.write_bytes(seal(fields, sums, (b"\x89HRCOLD\n", 1, 0, 1)))
    check(path)


@SETTINGS
@given(data=st.data(), name=st.sampled_from([RECORD_NAME, UNFINISHED_NAME, COPY_NAME]))
def test_changed_fields_of_a_record_with_its_checksum_made_anew(target, data, name):
    path = target()
    if name != RECORD_NAME:
        (path / RECORD_NAME).unlink()
        for copy in path.glob(f"*/{PUBLISHED_FILE_NAME}"):
            if name == UNFINISHED_NAME:
                copy.unlink()
    fields = json.loads((path / name).read_text())
    fields.pop("checksum")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(sorted(places(fields), key=str)))
        fields = put(fields, place, data.draw(VALUES))
        if not isinstance(fields, dict):
            break
    if isinstance(fields, dict):
        text = json.dumps(fields).encode()
        fields = {**fields, "checksum": f"{checksum(memoryview(text)):016x}"}
    (path / name).write_text(json.dumps(fields))
    check(path)


@pytest.mark.parametrize("text", ["3", '"x"', "null", "[]", "{}", "[" * 100_000, '{"commits": 3}'])
@pytest.mark.parametrize(
    "name", [RECORD_NAME, UNFINISHED_NAME, COPY_NAME, "rank-00000/member.json"]
)
def test_other_json_in_the_place_of_a_description(target, name, text):
    path = target()
    (path / name).write_text(text)
    check(path)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
@pytest.mark.parametrize("name", [*DESCRIPTIONS, "rank-00001/data.bin"])
def test_a_link_or_pipe_in_the_place_of_a_file_is_not_followed(target, name, kind, tmp_path):
    path = target()
    elsewhere = tmp_path / "elsewhere"
    shutil.move(path / name, elsewhere)
    if kind == "link":
        (path / name).symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).mkdir()
    before = elsewhere.stat()
    right = check(path)
    spared = ("rank-00000/member.json", UNFINISHED_NAME, COPY_NAME)
    assert right == 2 if name in spared else right == 0
    after = elsewhere.stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)
