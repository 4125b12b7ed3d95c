"""The commands that start a run's ranks: text from a description, nothing else.

Every rank is started through `launch/launcher/rank_runner.py`. Ranks choose their cores themselves
(`launch/cores.py`), so neither launcher may bind them. Ranks fill one machine after the other,
because neighbouring ranks talk most.

mpirun starts ranks on other machines itself, over ssh, from the same path: the environment has to
be in a directory that all machines see. msrun starts those of its own machine, once on each.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.hostfile import Host
from launch.launcher.logs import LogDirectory
from launch.ranks import LOCAL_SIZE_VARIABLE
from ops.errors import ConfigError

# mpirun gives ranks of this machine its whole environment, those of others only what is named.
_EXPORTED = ("HEADRACE_", "MS_", "ASCEND_", "HCCL_", "NCCL_", "GLOG_")
_EXPORTED_NAMES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class Launch:
    """What is to be started.

    `hosts` are the machines in use with the ranks on each in `slots`; empty means this machine.
    `program` is what each rank runs, beginning with the path of an executable. `num_cores` are
    those of one machine; machines are taken to be alike. `grace_seconds` is how long the other
    ranks of one that failed may take to end by themselves.
    """

    num_ranks: int
    program: tuple[str, ...]
    log_dir: Path
    num_cores: int
    hosts: tuple[Host, ...] = ()
    grace_seconds: float = 5.0

    @property
    def local_size(self) -> int:
        """The most ranks on one machine."""
        return max((host.slots for host in self.hosts), default=self.num_ranks)

    @property
    def stays_here(self) -> bool:
        """Whether all ranks run on this machine."""
        return all(host.is_here for host in self.hosts)

    @property
    def threads(self) -> int:
        """Threads, and cores, of each rank."""
        return max(1, self.num_cores // self.local_size)

    @property
    def crowded(self) -> bool:
        """Whether ranks share cores, so that one that waits should let others compute."""
        return self.local_size > self.num_cores

    @property
    def variables(self) -> dict[str, str]:
        """What every rank gets in its environment before it starts."""
        return dict.fromkeys(THREAD_VARIABLES, str(self.threads))


def rank_command(launch: Launch, ranks: range) -> list[str]:
    """What a launcher starts for each rank; `ranks` are those whose end it awaits."""
    runner = ["-m", "launch.launcher.rank_runner", str(launch.log_dir)]
    runner.append(f"{ranks[0]}-{ranks[-1]}")
    return [*runner, f"{launch.grace_seconds:g}", *launch.program]


def mpirun_command(
    launch: Launch, mpirun: str, environment: Mapping[str, str], *, is_root: bool
) -> list[str]:
    """The command for all ranks on all machines, for Open MPI 4 and 5.

    Where there are machines, the log directory has to hold `hostfile_text` of them.

    Open MPI counts a machine's cores as its slots unless a hostfile says more, so more ranks than
    that have to be allowed. Waiting ranks spin: where ranks share cores they shall yield.
    """
    command = [mpirun, "-n", str(launch.num_ranks)]
    if is_root:
        command.append("--allow-run-as-root")
    if launch.hosts:
        hostfile = LogDirectory(launch.log_dir).hostfile
        command += ["--hostfile", str(hostfile), "--map-by", "slot"]
    else:
        command += ["--map-by", "slot:OVERSUBSCRIBE"]
    command += ["--bind-to", "none"]
    if launch.crowded:
        command += ["--mca", "mpi_yield_when_idle", "1"]
    for name, value in launch.variables.items():
        command += ["-x", f"{name}={value}"]
    if not launch.stays_here:
        for name in sorted(environment):
            if name.startswith(_EXPORTED) or name in _EXPORTED_NAMES:
                command += ["-x", name]
    return [*command, sys.executable, *rank_command(launch, range(launch.num_ranks))]


def msrun_command(
    launch: Launch, msrun: str, node_rank: int, port: int, environment: Mapping[str, str]
) -> list[str]:
    """The command for the ranks of machine `node_rank`; the first machine runs the scheduler.

    msrun starts the word `python` from PATH, so this interpreter's folder has to come first there.
    Raises ConfigError unless all machines in use have the same number of ranks, as msrun assumes.
    """
    hosts = launch.hosts or (Host("127.0.0.1", launch.num_ranks),)
    if len({host.slots for host in hosts}) > 1:
        counts = ", ".join(f"{host.name} {host.slots}" for host in hosts)
        raise ConfigError(
            f"msrun needs the same number of ranks on every machine, but -n {launch.num_ranks} "
            f"fills them unevenly ({counts}): allowed is a multiple of the slots of one machine."
        )
    local_size = hosts[0].slots
    variables = {
        **launch.variables,
        LOCAL_SIZE_VARIABLE: str(local_size),
        "PATH": _path(environment),
    }
    return [
        "env",
        *(f"{name}={value}" for name, value in variables.items()),
        msrun,
        f"--worker_num={launch.num_ranks}",
        f"--local_worker_num={local_size}",
        f"--master_addr={hosts[0].name}",
        f"--master_port={port}",
        f"--node_rank={node_rank}",
        f"--log_dir={launch.log_dir / 'msrun'}",
        "--join=True",  # watch the ranks, kill all when one fails
        "--tail_worker_log=-2",  # no rank: `headrace launch` shows rank 0
        "--bind_core=False",
        "python",
        *rank_command(launch, ranks_of_node(launch, node_rank)),
    ]


def ranks_of_node(launch: Launch, node_rank: int) -> range:
    """The ranks that msrun starts on machine `node_rank`; all machines have as many."""
    return range(node_rank * launch.local_size, (node_rank + 1) * launch.local_size)


def _path(environment: Mapping[str, str]) -> str:
    own = str(Path(sys.executable).parent)
    folders = environment.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(":")
    return ":".join([own, *(folder for folder in folders if folder != own)])


def program_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """What a rank runs for `headrace ARGUMENTS`."""
    return (sys.executable, "-m", "launch", *arguments)
