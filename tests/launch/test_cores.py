"""C53: cores used = cores configured, and ranks on one machine share them out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launch import cores, environment
from launch.config import RuntimeConfig
from tests.launch.helpers import ROOT, call_script, run_python
from tests.mpirun import MPIRUN

NUM_CORES = len(os.sched_getaffinity(0))


def choose(allowed, threads, rank=0, num_ranks=1, num_launcher=None, current=0):
    launcher = len(allowed) if num_launcher is None else num_launcher
    return cores.choose(allowed, threads, rank, num_ranks, launcher, current)


def test_all_cores_are_used_unless_fewer_are_asked_for():
    allowed = [0, 1, 4, 5, 8, 9, 12]
    assert choose(allowed, 0) == choose(allowed, 7) == choose(allowed, 99) == allowed
    for threads in range(1, 7):
        for current in (*allowed, 3, -1):
            found = choose(allowed, threads, current=current)
            assert len(found) == threads and set(found) <= set(allowed)


def test_a_run_stays_in_the_block_where_the_scheduler_put_it():
    """Two runs with two threads each on eight cores must not both take the first two."""
    assert choose(range(8), 2, current=5) == [4, 5]
    assert choose(range(8), 2, current=4) == [4, 5]
    assert choose(range(8), 3, current=7) == [5, 6, 7]
    assert choose(range(2), 1, current=1) == [1]


@pytest.mark.parametrize("num_machine", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_unbound_ranks_share_the_machine_and_no_core_is_taken_twice(num_machine, num_ranks):
    shares = [choose(range(num_machine), 0, r, num_ranks) for r in range(num_ranks)]
    assert all(shares)
    if num_ranks <= num_machine:
        assert sorted(core for share in shares for core in share) == list(range(num_machine))
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
    for rank, share in enumerate(shares):
        assert set(choose(range(num_machine), 1, rank, num_ranks, current=0)) <= set(share)


def test_ranks_that_their_launcher_has_bound_keep_what_they_were_given():
    assert choose([4, 5, 6, 7], 0, rank=1, num_ranks=4, num_launcher=16) == [4, 5, 6, 7]
    assert choose([3], 0, rank=3, num_ranks=4, num_launcher=4) == [3]
    uneven = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]
    assert [choose(uneven[r], 0, r, 3, num_launcher=16) for r in range(3)] == uneven


def test_ranks_bound_to_a_socket_share_it():
    sockets = [range(16), range(16), range(16, 32), range(16, 32)]
    shares = [choose(sockets[r], 0, r, 4, num_launcher=32) for r in range(4)]
    assert all(len(share) == 4 for share in shares)
    assert len({core for share in shares for core in share}) == 16


PREPARED = """
import os, sys
from launch import environment
from launch.config import RuntimeConfig
environment.prepare(RuntimeConfig(threads=int(sys.argv[1])))
print(sorted(os.sched_getaffinity(0)), RuntimeConfig().num_threads, os.environ["OMP_NUM_THREADS"])
"""


def prepared(threads: int, **variables: str) -> tuple[list[int], int, int]:
    """(cores, threads that 0 would mean, OMP_NUM_THREADS) of a process after `prepare`."""
    result = run_python(PREPARED, str(threads), env=os.environ | variables)
    assert result.returncode == 0, result.stderr
    listed, _, rest = result.stdout.partition("]")
    default, omp = rest.split()
    return [int(core) for core in listed.strip("[").split(",")], int(default), int(omp)


def test_preparing_confines_the_process_and_its_libraries():
    found, default, omp = prepared(1)
    assert (len(found), default, omp) == (1, 1, 1)
    found, default, omp = prepared(0)
    assert len(found) == default == omp == NUM_CORES


@pytest.mark.skipif(NUM_CORES < 2, reason="two cores are to be shared")
def test_two_ranks_of_a_launcher_compute_on_different_cores():
    shares = []
    for rank in ("0", "1"):
        variables = {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        }
        found, default, omp = prepared(0, **variables)
        assert len(found) == default == omp
        shares.append(set(found))
    assert not shares[0] & shares[1] and sum(map(len, shares)) == NUM_CORES


# A launcher of two ranks on a machine of 128 cores that was itself given what this process has.
# Each rank stands behind a process that has its variables too, as under `headrace launch`.
UNDER_A_LAUNCHER = """
import os, subprocess, sys
bound, code = sys.argv[1:]
for rank in range(2):
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (rank, 2, rank, 2)
    ours = {f"OMPI_COMM_WORLD_{n}": str(v) for n, v in zip(names, values)}
    allowed = sorted(os.sched_getaffinity(0))
    own = allowed[rank::2] if bound == "bound" else allowed
    runner = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))"
    command = [sys.executable, "-c", runner, "-c", code]
    bind = lambda: os.sched_setaffinity(0, own)
    subprocess.run(command, env=os.environ | ours, preexec_fn=bind, check=True)
"""
CONFINED = """
import os
real = os.sched_getaffinity
os.sched_getaffinity = lambda pid: set(range(128)) if pid == 1 else real(pid)
from launch.cores import confine
print(*confine(0), flush=True)
"""


@pytest.mark.skipif(NUM_CORES < 2, reason="two cores are to be shared")
@pytest.mark.parametrize("bound", ["bound", "unbound"])
def test_ranks_share_the_cores_that_their_launcher_was_given(bound):
    """Whether ranks were bound was guessed from the first process of the machine. Where a batch
    system had given the launcher some of its cores, every rank took all of those."""
    result = run_python(UNDER_A_LAUNCHER, bound, CONFINED)
    assert result.returncode == 0, result.stderr
    shares = [[int(core) for core in line.split()] for line in result.stdout.splitlines()]
    allowed = sorted(os.sched_getaffinity(0))
    assert len(shares) == 2 and sorted(shares[0] + shares[1]) == allowed
    if bound == "bound":
        assert shares == [allowed[0::2], allowed[1::2]]


@pytest.mark.skipif(NUM_CORES < 2 or not MPIRUN.exists(), reason="mpirun binds to two cores")
@pytest.mark.parametrize("bind_to", ["none", "core"])
def test_mpirun_with_and_without_binding_gives_each_rank_its_own_cores(bind_to):
    command = [str(MPIRUN), "-n", "2", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", bind_to]
    command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    result = subprocess.run(
        [*command, sys.executable, "-c", CONFINED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    shares = [line.split() for line in result.stdout.splitlines()]
    assert len(shares) == 2 and not set(shares[0]) & set(shares[1])


# Looks at every thread of the real command after every step, and at the time they have used.
WATCHED = """
import os, time
import launch.run
from launch.trace_observer import TraceObserver
allowed = set()
def look(self, record):
    for task in os.listdir("/proc/self/task"):
        allowed.update(os.sched_getaffinity(int(task)))
TraceObserver.on_step = look
run = launch.run._run
def measured(*arguments):
    used, wall = time.process_time(), time.perf_counter()
    failure = run(*arguments)
    used, wall = time.process_time() - used, time.perf_counter() - wall
    names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
    assert any(name.startswith("ActorThread") for name in names), names
    print("measured", len(allowed), used, wall)
    return failure
launch.run._run = measured
from launch.cli import main
main()
"""


@pytest.mark.parametrize("threads", [1, pytest.param(min(2, NUM_CORES), marks=pytest.mark.long)])
def test_a_run_uses_as_many_cores_as_it_is_given(tmp_path, threads):
    """MindSpore's threads, the updater's, the mover's, the store's: all of them together."""
    result = call_script(WATCHED, tmp_path, "--set", f"runtime.threads={threads}")
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("measured")]
    num_allowed, used_s, wall_s = (float(word) for word in line.split()[1:])
    assert num_allowed == threads
    assert used_s <= 1.05 * threads * wall_s + 0.05


def test_refused_settings_leave_the_cores_alone(monkeypatch):
    def refuse() -> None:
        raise environment.ConfigError("no")

    called: list[int] = []
    monkeypatch.setattr(environment, "check_mindspore", refuse)
    monkeypatch.setattr(environment, "confine", called.append)
    with pytest.raises(environment.ConfigError):
        environment.prepare(RuntimeConfig(threads=1))
    assert not called
