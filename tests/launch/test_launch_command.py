"""What `headrace launch` would start, as text, and what it refuses to start."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from launch import launch_command
from launch.hostfile import Host
from launch.launch_command import LaunchOptions, launch
from launch.launcher.command import Launch, mpirun_command, msrun_command, program_of
from launch.launcher.tools import choose_launcher, find_mpirun, has_ascend
from ops.errors import ConfigError
from tests.launch.helpers import run_python

EIGHT = tuple(Host(f"worker{number}", 4) for number in range(1, 9))
TRAIN = ["train", "tiny-moe", "--run-dir", "runs/big", "--set", "train.steps=5"]


def cluster(**changes: object) -> Launch:
    """32 ranks on the target cluster, machines with 64 cores."""
    fields: dict[str, object] = {
        "num_ranks": 32,
        "program": program_of(TRAIN),
        "log_dir": Path("/shared/logs"),
        "num_cores": 64,
        "hosts": EIGHT,
    }
    return Launch(**{**fields, **changes})  # type: ignore[arg-type]


def mpirun_text(what: Launch, is_root: bool = False, **environment: str) -> str:
    return shlex.join(mpirun_command(what, "/env/bin/mpirun", environment, is_root=is_root))


def test_32_ranks_on_8_machines_are_started_by_one_mpirun() -> None:
    text = mpirun_text(cluster(), HEADRACE_TRACEBACK="1", LD_LIBRARY_PATH="/lib", HOME="/root")
    assert text == (
        "/env/bin/mpirun -n 32 --hostfile /shared/logs/hostfile --map-by slot --bind-to none "
        "-x OMP_NUM_THREADS=16 -x OPENBLAS_NUM_THREADS=16 -x NUMBA_NUM_THREADS=16 "
        "-x HEADRACE_TRACEBACK -x LD_LIBRARY_PATH "
        f"{sys.executable} -m launch.launcher.rank_runner /shared/logs 0-31 5 "
        f"{sys.executable} -m launch {shlex.join(TRAIN)}"
    )


def test_more_ranks_than_cores_yield_while_they_wait() -> None:
    """Open MPI spins; two ranks on a core would take it from each other."""
    crowded = cluster(num_cores=2, hosts=())
    text = mpirun_text(crowded)
    assert "--map-by slot:OVERSUBSCRIBE --bind-to none --mca mpi_yield_when_idle 1" in text
    assert "-x OMP_NUM_THREADS=1 " in text
    assert "mpi_yield_when_idle" not in mpirun_text(cluster(num_cores=4))
    assert "mpi_yield_when_idle 1" in mpirun_text(cluster(num_cores=3))


def test_root_is_allowed_only_where_it_is_root() -> None:
    assert "--allow-run-as-root" in mpirun_text(cluster(), is_root=True)
    assert "--allow-run-as-root" not in mpirun_text(cluster())


def test_msrun_is_told_its_part_of_the_machines_and_finds_this_python() -> None:
    command = msrun_command(cluster(), "/env/bin/msrun", 3, 8118, {"PATH": "/usr/bin:/bin"})
    assert command[0] == "env" and f"PATH={Path(sys.executable).parent}:/usr/bin:/bin" in command
    assert "HEADRACE_LOCAL_SIZE=4" in command and "OMP_NUM_THREADS=16" in command
    start = command.index("/env/bin/msrun")
    assert command[start + 1 : start + 6] == [
        "--worker_num=32",
        "--local_worker_num=4",
        "--master_addr=worker1",
        "--master_port=8118",
        "--node_rank=3",
    ]
    # Its ranks meet in the records of their own machine: four of them.
    runner = command[command.index("python") :]
    assert runner[:5] == ["python", "-m", "launch.launcher.rank_runner", "/shared/logs", "12-15"]


def test_msrun_refuses_machines_that_are_filled_unevenly() -> None:
    hosts = (Host("a", 4), Host("b", 2))
    with pytest.raises(ConfigError, match=r"-n 6 fills them unevenly \(a 4, b 2\)"):
        msrun_command(cluster(num_ranks=6, hosts=hosts), "msrun", 0, 8118, {})


def hostfile(folder: Path, num_hosts: int = 8) -> Path:
    path = folder / "hosts"
    path.write_text("".join(f"worker{n} slots=4\n" for n in range(1, num_hosts + 1)))
    return path


def test_msrun_on_several_machines_prints_what_to_start_on_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = hostfile(tmp_path)
    with pytest.raises(ConfigError, match="8 machines to -n 32: start the command printed"):
        launch(LaunchOptions(32, hosts, "msrun"), TRAIN)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0::2] == [f"on worker{number}:" for number in range(1, 9)]
    for number, line in enumerate(lines[1::2]):
        assert line.strip() == (
            f"headrace launch -n 32 --launcher msrun --hostfile {hosts} --node-rank {number} "
            + shlex.join(TRAIN)
        )


def test_the_printed_command_of_one_machine_runs_msrun_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = LaunchOptions(32, hostfile(tmp_path), "msrun", node_rank=5, dry_run=True)
    assert launch(options, TRAIN) == 0
    assert "--node_rank=5 --log_dir=" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        (LaunchOptions(2), [], "cannot start nothing on many ranks: allowed"),
        (LaunchOptions(2), ["plan", "tiny-moe"], "cannot start plan on many ranks: allowed"),
        (LaunchOptions(2, launcher="slurm"), TRAIN, "slurm: allowed is auto, mpirun, msrun"),
        (LaunchOptions(2, launcher="mpirun", node_rank=0), TRAIN, "is for --launcher msrun"),
        (LaunchOptions(2, launcher="msrun", node_rank=1), TRAIN, "allowed is 0"),
        (LaunchOptions(2, Path("/nowhere")), TRAIN, "/nowhere cannot be read"),
    ],
)
def test_a_wrong_start_is_refused(
    options: LaunchOptions, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        launch(options, arguments)
    assert message in str(caught.value)


def test_too_small_a_hostfile_and_a_machine_beyond_it_are_refused(tmp_path: Path) -> None:
    hosts = hostfile(tmp_path)
    with pytest.raises(ConfigError, match="-n 33 is more than the 32 slots"):
        launch(LaunchOptions(33, hosts), TRAIN)
    with pytest.raises(ConfigError, match="8 machines to -n 32: allowed is 0 to 7"):
        launch(LaunchOptions(32, hosts, "msrun", node_rank=8), TRAIN)


def test_a_dry_run_prints_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch(LaunchOptions(32, launcher="mpirun", dry_run=True), TRAIN) == 0
    out = capsys.readouterr().out
    assert "starting 32 ranks, " in out and " -n 32 " in out
    assert "logs of all ranks: runs/big/logs/" in out
    assert not list(tmp_path.iterdir())
    launch(LaunchOptions(2, launcher="mpirun", dry_run=True), ["train", "tiny-moe"])
    assert "logs of all ranks: launch-logs/" in capsys.readouterr().out


def test_one_other_machine_gets_the_environment_that_several_get() -> None:
    """What to export was asked of the number of machines, so ranks that all ran on one other had
    none of the variables that docs/launch.md promises them."""
    one = cluster(num_ranks=4, hosts=EIGHT[:1])
    assert "-x HEADRACE_TRACEBACK -x PATH " in mpirun_text(one, HEADRACE_TRACEBACK="1", PATH="/bin")
    here = cluster(num_ranks=4, hosts=(Host("localhost", 4, is_here=True),))
    assert "-x HEADRACE_TRACEBACK" not in mpirun_text(here, HEADRACE_TRACEBACK="1")


def test_msrun_does_not_start_here_what_belongs_on_one_other_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It started the ranks on this machine, which then waited for a master on the other."""
    asked: list[str] = []

    def resolve(name: str) -> bool:
        asked.append(name)
        return name == "alias"

    monkeypatch.setattr(launch_command, "resolves_to_this_machine", resolve)
    hosts = hostfile(tmp_path)
    with pytest.raises(ConfigError, match="gives worker1 to -n 4, which is not this one: start"):
        launch(LaunchOptions(4, hosts, "msrun", dry_run=True), TRAIN)
    printed = capsys.readouterr().out
    assert printed.startswith("on worker1:\n") and "--node-rank 0 train" in printed
    there = LaunchOptions(4, hosts, "msrun", node_rank=0, dry_run=True)
    assert launch(there, TRAIN) == 0  # the command it printed, on worker1
    hosts.write_text("alias slots=4\n")
    assert launch(LaunchOptions(4, hosts, "msrun", dry_run=True), TRAIN) == 0
    assert asked == ["worker1", "alias"]
    hosts.write_text("localhost slots=4\n")
    assert launch(LaunchOptions(4, hosts, "msrun", dry_run=True), TRAIN) == 0
    assert asked == ["worker1", "alias"]


def test_mpirun_gets_the_machines_in_use_with_all_their_slots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It got the user's file, and refused the ones with a machine named twice."""
    hosts = tmp_path / "hosts"
    hosts.write_text("worker1 slots=1\nme@worker2 slots=4\nworker1 slots=1\nworker3 slots=4\n")
    options = LaunchOptions(4, hosts, "mpirun", tmp_path / "logs", dry_run=True)
    assert launch(options, TRAIN) == 0
    out = capsys.readouterr().out
    assert f"--hostfile {tmp_path}/logs/hostfile --map-by slot" in out
    assert out.endswith("the hostfile there would be:\nworker1 slots=2\nme@worker2 slots=2\n")
    assert not (tmp_path / "logs").exists()


def test_a_log_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = LaunchOptions(2, launcher="mpirun", log_dir=tmp_path / "file" / "logs")
    with pytest.raises(ConfigError, match="logs cannot be written: Not a directory"):
        launch(options, TRAIN)


def test_auto_takes_msrun_where_ascend_cards_are(tmp_path: Path) -> None:
    assert choose_launcher("auto", tmp_path) == "mpirun"
    (tmp_path / "davinci_manager").touch()
    assert not has_ascend(tmp_path)  # the driver without a card
    (tmp_path / "davinci3").touch()
    assert choose_launcher("auto", tmp_path) == "msrun"
    assert choose_launcher("mpirun", tmp_path) == "mpirun"


def test_mpirun_is_found_beside_the_interpreter_then_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    with pytest.raises(ConfigError, match=r"mpirun is neither .* nor on PATH.*headrace\[mpi\]"):
        find_mpirun()
    for folder, version in (("path", "mpirun (Open MPI) 4.1.6"), (".", "mpirun (Open MPI) 5.0.8")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "mpirun").write_text(f"#!/bin/sh\necho '{version}'\n")
        (tmp_path / folder / "mpirun").chmod(0o755)
        assert Path(find_mpirun()) == tmp_path / folder / "mpirun"
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    with pytest.raises(ConfigError, match="says 'HYDRA build details:': allowed is Open MPI 4 or"):
        find_mpirun()


def test_the_commands_that_can_be_launched_exist() -> None:
    from launch.cli import app

    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(launch_command.COMMANDS) <= names


AS_RANK_7 = {
    "OMPI_COMM_WORLD_RANK": "7",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "7",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}
FAILING = """
import launch.cli
def app():
    raise {error}
launch.cli.app = app
launch.cli.main()
"""


def test_a_rank_begins_its_error_with_its_number() -> None:
    environment = {**os.environ, **AS_RANK_7}
    result = run_python(FAILING.format(error="ZeroDivisionError('no\\nnumber')"), env=environment)
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert lines[0] == "[rank 7] ZeroDivisionError: no"
    assert lines[1].startswith("Traceback")
    refused = FAILING.format(error="launch.cli.ConfigError('no such key')")
    result = run_python(refused, env=environment)
    assert (result.returncode, result.stderr) == (2, "[rank 7] headrace: no such key\n")
    result = run_python(refused)
    assert (result.returncode, result.stderr) == (2, "headrace: no such key\n")
