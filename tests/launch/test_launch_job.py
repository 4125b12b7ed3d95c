"""Real ranks under real launchers: what is shown, how failures and signals end them all.

Every rank but the one that fails would go on for ten minutes, so a test that ends at all has shown
that they were stopped; how long a launch may take is bounded.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from launch.launcher.logs import LogDirectory, RankExit, default_directory, last_lines
from tests.launch.launched import Launched


def test_rank_0_is_shown_and_every_rank_has_a_log(launched: Launched, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1  # this machine\n127.0.0.1 slots=3\n")
    launched.start(
        'say(os.environ["OMP_NUM_THREADS"]); print("from", rank, file=sys.stderr)',
        hostfile=hosts,
    )
    status, out, err = launched.end()
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    assert (status, err) == (0, "")
    assert out.endswith(f"rank 0: {threads}\nfrom 0\n") and "rank 1" not in out
    for rank in range(4):
        text = launched.logs.rank_log(rank).read_text()
        assert text == f"rank {rank}: {threads}\nfrom {rank}\n"
    assert [exit.status for exit in launched.logs.exits()] == [0] * 4
    assert launched.logs.hostfile.read_text() == "localhost slots=4\n"


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("sys.exit(3)", 3, "failed with exit status 3"),
        ("os.kill(os.getpid(), 9)", 137, "was ended by SIGKILL"),
    ],
)
def test_a_failing_rank_ends_all_and_shows_its_last_lines(
    launched: Launched, how: str, status: int, said: str
) -> None:
    launched.start(f"""
        if rank == 2:
            say("about to fail")
            {how}
        go_on()
    """)
    found, _, err = launched.end()
    assert found == status
    assert f"rank 2 {said}; the end of {launched.logs.rank_log(2)}:\n" in err
    assert "  | rank 2: about to fail\n" in err
    assert "[rank " not in err  # the others did not fail, they were ended


def test_a_rank_that_hangs_is_killed_when_others_fail(launched: Launched) -> None:
    """It does not even listen to SIGTERM."""
    launched.start(
        """
        if rank == 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            go_on()
        print(f"[rank {rank}] headrace: rank {rank} lost rank 2", flush=True)
        sys.exit(4)
    """,
        grace_seconds=1,
    )
    status, _, err = launched.end()
    failed = [exit.rank for exit in launched.logs.exits() if exit.failed]
    assert status == 4 and failed and 2 not in failed
    assert f"rank {failed[0]} failed with exit status 4; the end of" in err
    assert [line for line in err.splitlines() if line.startswith("[rank ")] == [
        f"[rank {rank}] failed with exit status 4: headrace: rank {rank} lost rank 2"
        for rank in failed[1:]
    ]


# Every rank says so in a file once it listens to signals; rank 0 waits for the others' files.
STOPPABLE = """
from pathlib import Path
from launch.signals import stop_on_signals
stop = threading.Event()
log = Path(os.readlink("/proc/self/fd/1"))
with stop_on_signals(stop):
    log.with_suffix(".listens").touch()
    while rank == 0 and len(list(log.parent.glob("*.listens"))) < 4:
        threading.Event().wait(0.01)
    print("ready", flush=True)
    stop.wait(600)
    print("stopped", flush=True)
    {after}
sys.exit(130)
"""


def test_ctrl_c_stops_every_rank_as_it_would_a_single_run(launched: Launched) -> None:
    process = launched.start(STOPPABLE.format(after=""))
    launched.wait_for("ready")
    process.send_signal(signal.SIGINT)
    status, _, err = launched.end()
    assert status == 130
    assert "stopping every rank after its step" in err and "failed" not in err
    for rank in range(4):
        assert last_lines(launched.logs.rank_log(rank))[-1] == "stopped"
    assert [(exit.status, exit.told) for exit in launched.logs.exits()] == [(130, False)] * 4


def test_a_second_signal_stops_them_at_once(launched: Launched) -> None:
    process = launched.start(STOPPABLE.format(after="go_on()"))
    launched.wait_for("ready")
    process.send_signal(signal.SIGINT)
    launched.wait_for("stopped")
    process.send_signal(signal.SIGINT)
    status, _, err = launched.end()
    assert (status, "failed" in err) == (130, False)


STOPPING_ALONE = """
from launch.signals import stop_on_signals
say("ready")
if rank == 2:
    with stop_on_signals(threading.Event()):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        go_on()
{others}
"""


@pytest.mark.parametrize("launcher", ["mpirun", "msrun"])
def test_a_rank_that_alone_is_stopped_at_once_ends_all(launched: Launched, launcher: str) -> None:
    """Two signals to one rank: it ended with the status of a stop, which was taken for one that
    all had agreed on, and the others were left waiting for a minute without a word."""
    start = time.monotonic()
    launched.start(STOPPING_ALONE.format(others="go_on()"), launcher)
    status, _, err = launched.end()
    assert time.monotonic() - start < 55  # of which most is the start
    assert status == 130
    said = "rank 2 stopped with exit status 130, but this launch was not asked to stop"
    assert f"{said} and other ranks did not; the end of {launched.logs.rank_log(2)}:\n" in err
    assert "  | Stopping after this step; a second signal stops at once." in err
    assert [exit.rank for exit in launched.logs.exits() if exit.alone] == [2]


def test_a_rank_that_fails_for_one_that_stopped_alone_is_not_blamed_alone(
    launched: Launched,
) -> None:
    others = """
while not os.path.exists(os.path.join(os.path.dirname(os.readlink("/proc/self/fd/1")),
                                      "exits", "00002.json")):
    threading.Event().wait(0.01)
sys.exit(4) if rank == 1 else go_on()
"""
    launched.start(STOPPING_ALONE.format(others=others), grace_seconds=2)
    status, _, err = launched.end()
    assert status == 4
    assert "rank 2 had stopped before, though this launch was not asked to stop\n" in err
    assert "rank 1 failed with exit status 4; the end of" in err


def test_ranks_that_stop_in_agreement_may_end_apart(launched: Launched) -> None:
    """One of them was asked by others than this launch, and all agreed."""
    launched.start('say("stopped"); threading.Event().wait(rank); sys.exit(130)', grace_seconds=2)
    assert launched.end()[::2] == (130, "")
    assert [exit.alone for exit in launched.logs.exits()] == [False] * 4


def test_ranks_end_with_a_launch_that_is_killed(launched: Launched) -> None:
    process = launched.start('say("ready"); go_on()')
    launched.wait_for("rank 0: ready")
    process.kill()
    assert launched.end()[0] == -signal.SIGKILL


def test_under_msrun_too_signals_reach_ranks_and_a_failing_rank_ends_all(
    launched: Launched,
) -> None:
    fail_or_hang = """
    if rank == 2:
        sys.exit("rank 2 is lost")
    go_on()
    """
    process = launched.start(STOPPABLE.format(after=fail_or_hang.strip()), "msrun")
    launched.wait_for("ready")
    process.send_signal(signal.SIGTERM)
    status, out, err = launched.end()
    assert status == 1 and "stopped" in out
    assert "rank 2 failed with exit status 1" in err and "  | rank 2 is lost\n" in err


def test_without_a_record_of_the_rank_the_launcher_itself_is_quoted(launched: Launched) -> None:
    """The kernel may take the rank's runner, too, when memory is short."""
    launched.start("os.kill(os.getppid(), 9) if rank == 1 else go_on()")
    status, _, err = launched.end()
    assert status == 137
    assert "mpirun ended with exit status 137; its last lines:\n  | " in err


def test_records_are_read_in_the_order_of_time_and_damage_is_passed_over(tmp_path: Path) -> None:
    logs = LogDirectory(tmp_path / "logs")
    late, early = RankExit(0, 1, 20, False), RankExit(3, 3, 10, False)
    with logs.claim():
        logs.write_exit(late)
        logs.write_exit(early)
        (logs.path / "exits" / "00001.json").write_text('{"status":')
        assert logs.exits() == [early, late] and logs.num_exits() == 3
        logs.rank_log(0).write_text("old")
    with logs.claim():
        assert logs.exits() == [] and not logs.rank_log(0).exists()


def test_two_launches_of_one_second_have_a_directory_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both took the same one, which did not exist yet, and the second ended with the first's
    exit status."""
    monkeypatch.chdir(tmp_path)
    for run_dir in (None, Path("run")):
        found = [default_directory(run_dir, create=True) for _ in range(5)]
        assert len(set(found)) == 5 and all(path.is_dir() for path in found)
        assert default_directory(run_dir, create=False) not in found


def test_a_log_directory_in_use_is_refused_until_its_launch_has_ended(
    launched: Launched, tmp_path: Path
) -> None:
    """A second launch with the same --log-dir deleted the first one's logs and records."""
    launched.start('say("ready"); threading.Event().wait(4); say("done")')
    launched.wait_for("rank 0: ready")
    second = Launched(tmp_path)
    second.start("sys.exit(3)")
    assert second.process is not None
    _, err = second.process.communicate(timeout=60)
    assert second.process.returncode != 0
    assert f"--log-dir {launched.path} is in use by another launch" in err
    assert launched.end()[0] == 0
    assert launched.logs.rank_log(1).read_text() == "rank 1: ready\nrank 1: done\n"
    with launched.logs.claim():
        assert launched.logs.exits() == []


def test_machines_that_share_a_log_directory_leave_each_other_alone(tmp_path: Path) -> None:
    """The launch of the second machine deleted the logs that the first one's ranks wrote, and took
    their ends for its own."""
    path = tmp_path / "logs"
    first, second = (LogDirectory(path, range(2 * n, 2 * n + 2), n) for n in range(2))
    with first.claim() as log:
        log.write(b"first")
        first.rank_log(0).write_text("at work")
        second.rank_log(3).write_text("of an earlier launch")
        second.write_exit(RankExit(3, 0, 10, False))
        first.write_exit(RankExit(1, 3, 20, False))
        with second.claim():
            assert first.rank_log(0).read_text() == "at work"
            assert not second.rank_log(3).exists()
            assert (first.num_exits(), second.num_exits()) == (1, 0)
            second.write_exit(RankExit(2, 0, 30, False))
            assert [exit.rank for exit in second.exits()] == [2]
            assert [exit.rank for exit in first.exits()] == [1]
    assert first.launcher_log.read_text() == "first" and first.launcher_log != second.launcher_log


def test_a_rank_that_fails_on_one_machine_of_msrun_is_not_counted_on_another(
    launched: Launched, tmp_path: Path
) -> None:
    """Both machines are this one here; they share the log directory."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 slots=2\nworker2 slots=2\n")
    end = tmp_path / "end"
    launched.start(
        f"""
        say("ready")
        while not os.path.exists({str(end)!r}):
            threading.Event().wait(0.05)
        say("done")
    """,
        "msrun",
        hostfile=hosts,
        node_rank=0,
    )
    launched.wait_for("rank 0: ready")
    second = Launched(tmp_path)
    second.start(
        'say("ready"); sys.exit(3) if rank == 3 else go_on()',
        "msrun",
        hostfile=hosts,
        node_rank=1,
    )
    assert second.process is not None
    out, err = second.process.communicate(timeout=120)
    assert second.process.returncode == 3, err
    assert "rank 2: ready" in out and "rank 3 failed with exit status 3" in err
    end.touch()
    status, out, err = launched.end()
    assert (status, err) == (0, "") and out == "rank 0: done\n"
    assert launched.logs.rank_log(0).read_text() == "rank 0: ready\nrank 0: done\n"
    assert {path.name for path in launched.path.glob("launcher*.log")} == {
        "launcher-00000.log",
        "launcher-00001.log",
    }


def test_only_a_rank_that_obeyed_is_no_failure() -> None:
    assert not RankExit(0, 143, 0, told=True).failed
    assert not RankExit(0, 0, 0, told=False).failed
    assert RankExit(0, 3, 0, told=True).failed  # it failed just before it was told
    assert RankExit(0, 137, 0, told=False).failed
