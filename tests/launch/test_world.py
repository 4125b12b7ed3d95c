"""Ranks are connected by the transport of their launcher, and end together."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

import launch.cli
from launch.config import RuntimeConfig, load_config
from launch.ranks import SINGLE, RankEnvironment
from launch.world import RefusedByAll, open_world, shared_world
from ops.comm.base import TIMEOUT_SECONDS
from ops.comm.single import SingleRank
from ops.errors import ConfigError, NumericAlarm, Stopped
from tests.launch.launched import Launched

IN_A_WORLD = """
import launch.cli
from launch.world import shared_world
from ops.errors import NumericAlarm, StorageError
def app():
    with shared_world(detect_ranks(), 200, checked=True) as world:
{body}
launch.cli.app = app
launch.cli.main()
"""


def in_a_world(body: str) -> str:
    """A program that runs `body` with a world of all ranks, under the command line's `main`."""
    return IN_A_WORLD.format(body=textwrap.indent(textwrap.dedent(body), 8 * " "))


def test_one_rank_needs_no_transport() -> None:
    for ranks in (SINGLE, RankEnvironment("mpirun", 0, 1, 0, 1)):
        world = open_world(ranks)
        assert (world.kind, world.rank, world.size) == ("single", 0, 1)


def test_an_error_of_a_single_rank_goes_its_usual_way() -> None:
    with pytest.raises(ZeroDivisionError), shared_world(SINGLE):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("error", "statuses"),
    [
        (ZeroDivisionError("no"), [1]),
        (ConfigError("no"), [2]),
        (SystemExit(3), [3]),
        (SystemExit("no"), [1]),
        (KeyboardInterrupt(), [1]),
        (SystemExit(0), []),
        (SystemExit(), []),
        (NumericAlarm("all ranks say so"), []),
        (Stopped("all ranks say so"), []),
        (RefusedByAll("all ranks say so"), []),
    ],
)
def test_what_ends_all_ranks_and_with_which_status(
    error: BaseException, statuses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[int] = []
    world = SingleRank()
    monkeypatch.setattr(world, "abort", aborted.append)
    monkeypatch.setattr("launch.world.open_world", lambda *_, **__: world)
    with pytest.raises(type(error)), shared_world(RankEnvironment("mpirun", 1, 2, 1, 2)):
        raise error
    assert aborted == statuses


@pytest.mark.parametrize(
    ("target", "module", "name"),
    [
        ("CPU", "ops.comm.mindspore", "MindSporeCpuWorld"),
        ("Ascend", "ops.comm.mindspore_device", "MindSporeDeviceWorld"),
    ],
)
def test_msrun_connects_ranks_by_the_device_they_compute_on(
    target: str, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, object]] = []

    def make(**options: object) -> SingleRank:
        made.append(options)
        return SingleRank()

    monkeypatch.setattr("ops.backend.MindSporeBackend.device_target", target)
    monkeypatch.setattr(f"{module}.{name}", make)
    monkeypatch.setenv("MS_SCHED_HOST", "worker1")
    open_world(RankEnvironment("msrun", 1, 2, 1, 2), 7.0, checked=True)
    assert made == [{"timeout_seconds": 7.0, "checked": True, "store_host": "worker1"}]


def test_the_patience_of_the_ranks_is_a_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pipeline whose steps took more than 600 s was killed, and nothing could change that."""
    assert RuntimeConfig().collective_timeout == TIMEOUT_SECONDS
    opened: list[float] = []

    def no_world(ranks: RankEnvironment, seconds: float) -> None:
        opened.append(seconds)
        raise ConfigError("seen")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("launch.environment.prepare", lambda runtime: None)
    monkeypatch.setattr(
        "launch.world.open_world", lambda ranks, seconds, **_: no_world(ranks, seconds)
    )
    for key, wanted in (([], 600.0), (["--set", "runtime.collective_timeout=7200"], 7200.0)):
        monkeypatch.setattr(sys, "argv", ["headrace", "train", "tiny-moe", *key])
        with pytest.raises(SystemExit):
            launch.cli.main()
        assert opened.pop() == wanted
    shown = load_config("tiny-moe", ["runtime.collective_timeout=7200"]).to_yaml()
    assert "collective_timeout: 7200.0" in shown


def test_mpi4py_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ops.comm.mpi", None)
    with pytest.raises(ConfigError, match=r"2 ranks, but mpi4py does not load.*headrace\[mpi\]"):
        open_world(RankEnvironment("mpirun", 1, 2, 1, 2))


@pytest.mark.parametrize(
    ("how", "status", "line"),
    [
        ("raise StorageError('bad', block='b7')", 3, "[rank 2] headrace: bad (block=b7)"),
        ("os.kill(os.getpid(), 9)", 137, "rank 2: failing"),
    ],
)
def test_a_rank_that_fails_while_others_are_in_a_collective_ends_all(
    launched: Launched, how: str, status: int, line: str
) -> None:
    launched.start(
        in_a_world(f"""
            world.barrier()
            if rank == 2:
                say("failing")
                {how}
            world.barrier()
        """)
    )
    found, _, err = launched.end()
    assert found == status, err
    assert "headrace launch: rank 2 " in err and f"  | {line}\n" in err


def test_an_error_that_all_ranks_agreed_on_lets_each_end_by_itself(launched: Launched) -> None:
    """Rank 3 still writes when the others have ended."""
    launched.start(
        in_a_world("""
            say(str(sorted(world.all_gather_object(rank))))
            try:
                raise NumericAlarm("the loss is not finite")
            finally:
                if rank == 3:
                    threading.Event().wait(0.5)
                    say("has written")
        """),
        grace_seconds=30,
    )
    status, out, err = launched.end()
    assert status == NumericAlarm.exit_code
    assert "rank 0: [0, 1, 2, 3]\n" in out
    assert "rank 3: has written\n" in launched.logs.rank_log(3).read_text()
    assert err.count("headrace: the loss is not finite") == 1
    assert "3 other ranks failed with the same words" in err
    assert [exit.status for exit in launched.logs.exits()] == [NumericAlarm.exit_code] * 4


def test_under_msrun_ranks_are_connected_by_mindspore(launched: Launched) -> None:
    """Its scheduler runs the same program, is no rank, and ends with the ranks."""
    program = in_a_world('say(f"{world.kind} {sorted(world.all_gather_object(rank))}")')
    launched.start(program, "msrun", scheduler=True)
    status, out, err = launched.end()
    assert status == 0, err
    assert "rank 0: mindspore [0, 1, 2, 3]\n" in out


def test_under_msrun_a_refusal_by_all_is_told_by_all(launched: Launched) -> None:
    """Rank 0 keeps the counters that others still read; it ended before they had read them."""
    program = in_a_world("""
        world.barrier()
        if rank:
            threading.Event().wait(1)
        raise RefusedByAll("they differ")
    """)
    program = program.replace("import shared_world", "import RefusedByAll, shared_world")
    launched.start(program, "msrun", grace_seconds=30, scheduler=True)
    status, _, err = launched.end()
    assert status == ConfigError.exit_code, err
    for rank in range(4):
        assert "headrace: they differ\n" in launched.logs.rank_log(rank).read_text()
