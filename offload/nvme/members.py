"""`member.json`: which store a directory belongs to, and which of its directories it is.

A store over several paths has a data file in each; the file here keeps them from being mixed up.
Also the one way to replace a small file durably.

Invariants: `replace_file` either leaves the old content or the new one, whatever happens between;
its order of steps is the one of a commit (`docs/formats/nvme_store.md`).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from offload.nvme.files import DirectoryFiles, describe_os_error
from offload.nvme.manifest import is_store_id
from ops.checksum import checksum
from ops.errors import StorageError

MEMBER_FILE_NAME = "member.json"
TEMPORARY_SUFFIX = ".tmp"
_MEMBER_BYTES_MAX = 4096
_FORMAT = 1


@dataclass(frozen=True)
class Member:
    """Directory `index` of the `count` directories of store `store_id`."""

    store_id: str
    index: int
    count: int


def read_member(directory: str, files: DirectoryFiles) -> Member | None:
    """What `directory` says it is; None when it says nothing that can be read and verified."""
    try:
        data = files.read_file(os.path.join(directory, MEMBER_FILE_NAME), _MEMBER_BYTES_MAX)
        fields = json.loads(data)
        member = Member(fields["store_id"], fields["index"], fields["count"])
        if encode_member(member) == data and is_store_id(member.store_id):
            return member
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    return None


def encode_member(member: Member) -> bytes:
    """The content of `member.json`."""
    fields = {
        "format": _FORMAT,
        "store_id": member.store_id,
        "index": member.index,
        "count": member.count,
    }
    text = json.dumps(fields)
    return json.dumps(fields | {"checksum": f"{checksum(memoryview(text.encode())):016x}"}).encode()


def write_member(directory: str, member: Member, files: DirectoryFiles) -> None:
    """Make `directory` that member, durably; StorageError when it cannot be done."""
    replace_file(files, os.path.join(directory, MEMBER_FILE_NAME), encode_member(member))


def replace_file(files: DirectoryFiles, path: str, data: bytes) -> None:
    """Make `data` the content of `path`, durably, at once or not at all; blocks.

    Raises StorageError that names the step and the file it failed on. A temporary file may then be
    left behind.
    """
    directory, temporary = os.path.dirname(path), path + TEMPORARY_SUFFIX
    for step, where, call in (
        ("write", temporary, lambda: files.write_file(temporary, data)),
        ("fsync", temporary, lambda: files.sync_file(temporary)),
        ("rename", path, lambda: files.rename(temporary, path)),
        ("fsync of the directory", directory, lambda: files.sync_directory(directory)),
    ):
        try:
            call()
        except OSError as error:
            raise StorageError(f"{step} failed: {describe_os_error(error)}", path=where) from error
