"""`headrace launch -n N ... train CONFIG ...`: starts a command on many ranks, watches over it."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from launch.hostfile import (
    Host,
    hostfile_text,
    place,
    read_hostfile,
    resolves_to_this_machine,
)
from launch.launcher.command import (
    Launch,
    mpirun_command,
    msrun_command,
    program_of,
    ranks_of_node,
)
from launch.launcher.job import DEFAULT_PATIENCE, Job, Patience
from launch.launcher.logs import LogDirectory, default_directory
from launch.launcher.tools import choose_launcher, find_mpirun, find_msrun
from ops.errors import ConfigError

COMMANDS = ("train",)
MASTER_PORT = 8118  # msrun's own default; one machine takes a free port instead


@dataclass(frozen=True)
class LaunchOptions:
    """What the command line says; `node_rank` is for msrun on several machines only."""

    num_ranks: int
    hostfile: Path | None = None
    launcher: str = "auto"
    log_dir: Path | None = None
    node_rank: int | None = None
    dry_run: bool = False


def launch(
    options: LaunchOptions,
    arguments: Sequence[str],
    *,
    program: Sequence[str] | None = None,
    grace_seconds: float = Launch.grace_seconds,
    patience: Patience = DEFAULT_PATIENCE,
) -> int:
    """Start `headrace ARGUMENTS` on every rank; returns the exit status of the run.

    `program` is started instead where tests want another. Blocks until all ranks have ended.
    Raises ConfigError when the start is refused, before anything runs.
    """
    if program is None:
        _check_arguments(arguments)
    run_dir = _run_dir(arguments)
    log_dir = options.log_dir or default_directory(run_dir, create=False)
    hosts: tuple[Host, ...] = ()
    if options.hostfile is not None:
        hosts = place(read_hostfile(options.hostfile), options.num_ranks, str(options.hostfile))
    what = Launch(
        num_ranks=options.num_ranks,
        program=tuple(program or program_of(arguments)),
        log_dir=log_dir.resolve(),
        num_cores=len(os.sched_getaffinity(0)),
        hosts=hosts,
        grace_seconds=grace_seconds,
    )
    launcher = choose_launcher(options.launcher)
    hostfile = ""
    if launcher == "mpirun":
        command_of = _mpirun(options)
        hostfile = hostfile_text(hosts)
    else:
        command_of = _msrun(options, what, arguments)
    command = command_of(what)  # all that is refused is refused before anything is made
    if options.dry_run:
        _announce(what, command, log_dir)
        if hostfile:
            print(f"the hostfile there would be:\n{hostfile}", end="")
        return 0
    with ExitStack() as claimed:
        try:
            if options.log_dir is None:
                log_dir = default_directory(run_dir, create=True)
                what = replace(what, log_dir=log_dir.resolve())
                command = command_of(what)
            logs = _logs(options, what)
            log = claimed.enter_context(logs.claim())
            if hostfile:
                logs.hostfile.write_text(hostfile)
        except OSError as error:
            raise ConfigError(f"--log-dir {log_dir} cannot be written: {error.strerror}.") from None
        _announce(what, command, log_dir)
        return Job(launcher, command, logs, log, sys.stdout.buffer, sys.stderr, patience).run()


def _announce(what: Launch, command: Sequence[str], log_dir: Path) -> None:
    print(f"starting {_counted(what)}:\n  {shlex.join(command)}\nlogs of all ranks: {log_dir}")
    sys.stdout.flush()


def _logs(options: LaunchOptions, what: Launch) -> LogDirectory:
    """The log directory as this launch sees it: with --node-rank, the ranks of this machine."""
    if options.node_rank is None:
        return LogDirectory(what.log_dir, range(what.num_ranks))
    ranks = ranks_of_node(what, options.node_rank)
    return LogDirectory(what.log_dir, ranks, options.node_rank)


def _check_arguments(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] not in COMMANDS:
        found = shlex.join(arguments[:1]) or "nothing"
        raise ConfigError(
            f"headrace launch cannot start {found} on many ranks: allowed after its own options "
            f"is {' or '.join(COMMANDS)}, followed by that command's arguments."
        )


def _run_dir(arguments: Sequence[str]) -> Path | None:
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        if argument == "--run-dir" and following:
            return Path(following)
        if argument.startswith("--run-dir="):
            return Path(argument.partition("=")[2])
    return None


def _mpirun(options: LaunchOptions) -> Callable[[Launch], list[str]]:
    """Makes the mpirun command of a launch. Raises ConfigError where there is no mpirun."""
    if options.node_rank is not None:
        raise ConfigError("--node-rank is for --launcher msrun: mpirun starts all machines.")
    mpirun, is_root = find_mpirun(), os.geteuid() == 0
    return lambda what: mpirun_command(what, mpirun, os.environ, is_root=is_root)


def _msrun(
    options: LaunchOptions, what: Launch, arguments: Sequence[str]
) -> Callable[[Launch], list[str]]:
    """Makes the msrun command of this machine.

    Where there are several machines, or one that is not this one, and --node-rank does not say
    which this one is, raises ConfigError after printing what to start on each.
    """
    msrun = find_msrun()
    one_machine = len(what.hosts) <= 1
    if one_machine and options.node_rank not in (None, 0):
        raise ConfigError(
            f"--node-rank {options.node_rank}: -n {what.num_ranks} needs one machine; allowed is 0."
        )
    if one_machine and (options.node_rank == 0 or _is_all_here(what)):
        port = _free_port()
        return lambda what: msrun_command(what, msrun, 0, port, os.environ)
    if options.node_rank is not None:
        node_rank = options.node_rank
        if not 0 <= node_rank < len(what.hosts):
            raise ConfigError(
                f"--node-rank {node_rank}: {options.hostfile} gives {len(what.hosts)} "
                f"machines to -n {what.num_ranks}: allowed is 0 to {len(what.hosts) - 1}."
            )
        return lambda what: msrun_command(what, msrun, node_rank, MASTER_PORT, os.environ)
    msrun_command(what, msrun, 0, MASTER_PORT, os.environ)  # refuses uneven machines first
    own = ["headrace", "launch", "-n", str(options.num_ranks), "--launcher", "msrun"]
    own += ["--hostfile", str(options.hostfile)]
    if options.log_dir is not None:
        own += ["--log-dir", str(options.log_dir)]
    for node_rank, host in enumerate(what.hosts):
        line = shlex.join([*own, "--node-rank", str(node_rank), *arguments])
        print(f"on {host.name}:\n  {line}")
    if one_machine:
        raise ConfigError(
            f"msrun starts only the ranks of its own machine, and {options.hostfile} gives "
            f"{what.hosts[0].name} to -n {what.num_ranks}, which is not this one: start the "
            "command printed there (or use --launcher mpirun, which starts it from here)."
        )
    raise ConfigError(
        f"msrun starts only the ranks of its own machine, and {options.hostfile} gives "
        f"{len(what.hosts)} machines to -n {what.num_ranks}: start the command printed for each "
        "machine there, within 10 minutes (or use --launcher mpirun, which starts them all)."
    )


def _is_all_here(what: Launch) -> bool:
    """Whether all ranks run here, also under a name that only the resolver knows for ours."""
    return all(host.is_here or resolves_to_this_machine(host.name) for host in what.hosts)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _counted(what: Launch) -> str:
    ranks = f"{what.num_ranks} rank{'s' if what.num_ranks > 1 else ''}"
    cores = f"{what.threads} thread{'s' if what.threads > 1 else ''} each"
    if not what.stays_here:
        machines = f"{len(what.hosts)} machines" if len(what.hosts) > 1 else what.hosts[0].name
        return f"{ranks} on {machines}, {cores}"
    shared = f" ({what.num_cores} cores are shared)" if what.crowded else ""
    return f"{ranks}, {cores}{shared}"
