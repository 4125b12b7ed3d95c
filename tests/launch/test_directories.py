"""C67: one rank makes a directory, all wait until they see it, on file systems that are slow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.directories import FileSystem, make_shared_directory
from ops.comm.base import World
from ops.comm.local import run_local
from ops.comm.single import SingleRank
from ops.errors import StorageError
from tests.launch.launched import Launched
from tests.launch.test_world import in_a_world


class Blind:
    """A rank's view of a file system that answers "not there" `late` times, and its clock."""

    def __init__(self, late: float) -> None:
        self.late = late
        self.asked = 0
        self.seconds = 0.0

    def sees(self, path: Path) -> bool:
        self.asked += 1
        return self.asked > self.late and path.is_dir()

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def files(self) -> FileSystem:
        return FileSystem(sees=self.sees, sleep=self.sleep, now=lambda: self.seconds)


def test_a_single_rank_makes_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    make_shared_directory(path, SingleRank())
    make_shared_directory(path, SingleRank())
    assert path.is_dir()


def test_every_rank_waits_until_it_sees_it(tmp_path: Path) -> None:
    views = [Blind(late) for late in (0, 3, 0, 9)]

    def work(world: World) -> None:
        make_shared_directory(tmp_path / "run", world, files=views[world.rank].files())

    run_local(4, work)
    assert [view.asked for view in views] == [1, 4, 1, 10]
    assert 0 < views[3].seconds < 60


def test_ranks_that_never_see_it_are_named_on_all(tmp_path: Path) -> None:
    views = [Blind(float("inf") if rank == 2 else 0) for rank in range(4)]

    def work(world: World) -> str:
        with pytest.raises(StorageError) as caught:
            make_shared_directory(tmp_path / "run", world, files=views[world.rank].files())
        return str(caught.value)

    messages = run_local(4, work)
    assert len(set(messages)) == 1
    assert "1 of 4 ranks do not see it after 60 s (ranks 2)" in messages[0]
    assert str(tmp_path / "run") in messages[0]
    assert views[2].seconds == pytest.approx(60)


def test_a_directory_that_cannot_be_made_is_an_error_of_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def work(world: World) -> str:
        with pytest.raises(StorageError) as caught:
            make_shared_directory(tmp_path / "file" / "run", world)
        return str(caught.value)

    (message,) = set(run_local(3, work))
    assert "cannot be created: Not a directory" in message
    assert f"path={tmp_path / 'file' / 'run'}" in message


def test_real_ranks_share_a_directory_of_a_slow_file_system(
    launched: Launched, tmp_path: Path
) -> None:
    """Only rank 0 asks the server to make it, and that takes long; every machine learns late."""
    path = tmp_path / "shared" / "run"
    launched.start(
        in_a_world(f"""
            from pathlib import Path
            from launch.directories import FileSystem, make_shared_directory
            path = Path({os.fspath(path)!r})
            asked = 0
            def make(path):
                assert rank == 0
                threading.Event().wait(0.5)
                path.mkdir(parents=True)
            def sees(path):
                nonlocal asked
                asked += 1
                assert path.is_dir()
                return asked > 2 * rank
            make_shared_directory(path, world, files=FileSystem(make=make, sees=sees))
            (path / str(rank)).touch()
            say(f"asked {{asked}}")
        """)
    )
    status, _, err = launched.end()
    assert status == 0, err
    assert sorted(os.listdir(path)) == ["0", "1", "2", "3"]
    for rank in range(4):
        assert f"asked {2 * rank + 1}\n" in launched.logs.rank_log(rank).read_text()
