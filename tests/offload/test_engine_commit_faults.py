"""A disk that is full or fails while a step is committed: training stops, the last commit opens.

Resuming from it, with the disk in order again, comes to the bits of the run without a fault.
"""

from __future__ import annotations

import errno

import pytest

from offload.testing import toy_run
from offload.testing_storage import BUFFERED, Fault, FaultyDirectoryFiles, FaultyStorage
from ops.errors import StorageError
from tests.offload.courses import after, train, uninterrupted
from tests.offload.test_engine_resume import COURSES, check_resumes, on_disk, tight
from tests.offload.watch import hang_guard, one_call_a_block  # noqa: F401

pytestmark = pytest.mark.usefixtures("hang_guard", "one_call_a_block")


def stops(course, config, at_op: int, verb: str, code: int):
    """Train until the fault at the `at_op`-th call of `verb`; what came out, and the error."""
    files, names = FaultyStorage(), FaultyDirectoryFiles()
    if verb in ("write", "sync"):
        files.faults.append(Fault("error", verb, at_op=at_op, code=code))  # type: ignore[arg-type]
    else:
        names = FaultyDirectoryFiles(verb, code, at_op)
    found: dict[str, int] = {}
    published = None
    with toy_run(
        course.toy,
        config,
        course.optimizer,
        open_file=files,
        access=BUFFERED,
        store_options={"required_bytes": 0, "directory_files": names},
        delete=False,
    ) as run:
        with pytest.raises(StorageError) as caught:
            train(run, course, found.__setitem__)
        published = run.engine.commits.last_step
        run.engine.close()
    return found, published, caught.value


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("verb", ["write", "sync", "write_file", "sync_file", "rename"])
@pytest.mark.parametrize("name", ["chased", "speculative"])
def test_a_fault_while_committing_stops_the_run_and_the_last_commit_resumes(
    tmp_path, name, verb, code
):
    """C04, C05, C28: whichever step of a commit fails; exit code 3 is that of StorageError."""
    course = COURSES[name]
    expected = uninterrupted(course, tmp_path / "memory")
    config = tight(course, tmp_path / "store", 200_000)
    at_op = {"write": 30}.get(verb, 4)  # behind the initial commit
    found, published, error = stops(course, config, at_op, verb, code)
    assert error.exit_code == 3
    assert errno.errorcode[code] in str(error) and str(tmp_path) in str(error.path)
    assert str(error).count("(path=") <= 1
    assert found.items() <= expected.items() and "digest" not in found
    with on_disk(course, config, resume=True) as run:
        step = run.resumed["step"]
    assert published is not None and step >= published
    check_resumes(course, config, tmp_path, step)
    assert after(expected, step)


def test_a_tier_too_small_for_a_commit_says_so_and_the_last_one_resumes(tmp_path):
    """A capacity below what two versions need: the run stops, and goes on with more."""
    course = COURSES["chased"]
    config = tight(course, tmp_path / "store", 200_000)
    with on_disk(course, config) as run:
        run.engine.commit({"step": 0})
        run.store._table.allocator.allocate(run.store.capacity_bytes - run.store.used_bytes - 65536)
        with pytest.raises(StorageError, match=r"offload\.nvme\.capacity"):
            train(run, course)
        run.engine.close()
    with on_disk(course, config, resume=True) as run:
        step = run.resumed["step"]
    check_resumes(course, config, tmp_path, step)
