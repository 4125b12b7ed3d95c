"""The command line `headrace train | launch | plan | config | data | checkpoint | store`.

Also `python -m launch`.

Commands import what they need when they run, so that `plan` and `config` work without MindSpore
and `train` can check and set the environment first. A HeadraceError becomes one sentence on
stderr and its exit code; with HEADRACE_TRACEBACK=1 the traceback follows.
"""

from __future__ import annotations

import shlex
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from launch.config import RunConfig, load_config
from launch.failures import show_failure
from launch.ranks import rank_prefix
from ops.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from launch.progress import Observers
    from ops.trace import Tracer

app = typer.Typer(
    name="headrace",
    help="Train Mixture-of-Experts Transformers larger than memory: device, host RAM and NVMe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file or the name of a preset.")
]
SetOption = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads it at run time
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key; may be repeated."),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        from launch.environment import versions

        typer.echo(f"headrace {versions().get('headrace', 'from a folder that is not installed')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    source: ConfigArgument,
    overrides: SetOption = None,
    run_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--run-dir", help="Folder of the run's files; default runs/NAME-TIME."),
    ] = None,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--steps", min=1, help="Stop after so many steps; schedules are unchanged."),
    ] = None,
    resume: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--resume",
            metavar="latest|PATH",
            help="Go on at the newest commit of the store, if any, or of the store or copy at PATH "
            "(several drives: PATH:PATH). Another mesh may have made it.",
        ),
    ] = None,
    trace_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--trace", metavar="FILE", help="Draw the run for https://ui.perfetto.dev."),
    ] = None,
) -> None:
    """Train a model. Exit: 0 done, 2 refused, 3 storage fault, 4 numeric alarm, 130 stopped."""
    from launch import environment
    from launch.ranks import detect_ranks
    from moe.mesh_check import check_num_ranks

    config = load_config(source, overrides or ())
    check_num_ranks(config.parallel, config.model, config.train, detect_ranks().size)
    if steps is not None and steps > config.train.steps:
        raise ConfigError(
            f"--steps {steps} is more than train.steps = {config.train.steps}: it can only stop "
            "earlier; use --set train.steps to train longer."
        )
    environment.prepare(config.runtime)
    sets = [argument for override in overrides or () for argument in ("--set", override)]
    size = config.parallel.num_ranks
    launched = ["launch", "-n", str(size)] if size > 1 else []
    again = shlex.join(["headrace", *launched, "train", source, *sets])
    _train(config, run_dir, steps, trace_file, resume, again)


def _train(
    config: RunConfig,
    run_dir: Path | None,
    steps: int | None,
    trace_file: Path | None,
    resume: str | None,
    again: str,
) -> None:
    from launch.build import make_plans
    from launch.mesh_plan import require_all_fit
    from launch.notices import warnings_shown
    from launch.origin import LATEST
    from launch.ranks import detect_ranks
    from launch.report import prepare_run_dir
    from launch.run import run_training
    from launch.same_run import require_same_settings
    from launch.save_request import SaveRequest
    from launch.signals import stop_on_signals
    from launch.world import shared_world
    from moe.save_plan import never
    from ops.trace import NO_TRACE, Trace

    require_all_fit(make_plans(config, resume == LATEST))
    ranks, seconds = detect_ranks(), config.runtime.collective_timeout
    stop = threading.Event()
    # Signals first: a rank that is stopped while it waits for the others must not die at once.
    with stop_on_signals(stop), shared_world(ranks, seconds) as world:
        require_same_settings(config, steps, resume, world)
        directory = (
            prepare_run_dir(run_dir, config.name, resume is not None) if ranks.is_first else None
        )
        trace = Trace(trace_file) if trace_file is not None and ranks.is_first else NO_TRACE
        observer = _observer(config, directory, resume is not None, again, trace)
        asked = never if directory is None else SaveRequest(directory)
        with closing(trace), closing(observer), warnings_shown(observer.on_message):
            run_training(config, steps, observer, stop, trace, resume, world, asked)


def _observer(
    config: RunConfig, directory: Path | None, resume: bool, again: str, trace: Tracer
) -> Observers:
    """Who is told of the run: rank 0 shows it and writes into `directory`, others only warn."""
    from launch.progress import ConsoleObserver, Observers, RunConsole
    from launch.rank_observer import RankObserver
    from launch.report import REPORT_FILE, ReportWriter
    from launch.trace_observer import TraceObserver

    if directory is None:
        return Observers([RankObserver()])
    again += f" --run-dir {shlex.quote(str(directory))} --resume latest"
    return Observers(
        [
            ReportWriter(directory, config, resume),
            ConsoleObserver(RunConsole(), directory / REPORT_FILE, resume_command=again),
            TraceObserver(trace),
        ]
    )


@app.command("launch", context_settings={"allow_interspersed_args": False})
def launch_ranks(
    num_ranks: Annotated[int, typer.Option("-n", "--num-ranks", min=1, help="Ranks in all.")],
    arguments: Annotated[
        list[str], typer.Argument(metavar="train CONFIG ...", help="What every rank runs.")
    ],
    hostfile: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--hostfile", metavar="FILE", help="Lines `HOST slots=N`; default: here."),
    ] = None,
    launcher: Annotated[
        str, typer.Option("--launcher", help="auto, mpirun or msrun; auto: msrun on Ascend.")
    ] = "auto",
    log_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--log-dir", help="Default RUN_DIR/logs/TIME or launch-logs/TIME."),
    ] = None,
    node_rank: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--node-rank", min=0, help="msrun: which of several machines this is."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the command.")] = False,
) -> None:
    """Train on many ranks. Exit: as of `train`, of the rank that failed first."""
    from launch.launch_command import LaunchOptions, launch

    options = LaunchOptions(num_ranks, hostfile, launcher, log_dir, node_rank, dry_run)
    raise typer.Exit(launch(options, arguments))


@app.command()
def plan(
    source: ConfigArgument,
    overrides: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    hostfile: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--hostfile", metavar="FILE", help="Machines, to warn of slow groups."),
    ] = None,
) -> None:
    """Show what each tier of each rank would hold. Exit: 0 it fits, 2 it does not."""
    from rich.console import Console

    from launch.build import make_plans
    from launch.hostfile import read_hostfile
    from launch.mesh_plan import mesh_plan_to_dict, render_mesh_plan, require_all_fit
    from launch.plan import render_plan
    from launch.report import to_json
    from moe.mesh import Mesh, machines_of

    config = load_config(source, overrides or ())
    slots = [host.slots for host in read_hostfile(hostfile)] if hostfile else []
    if slots:
        machines_of(Mesh(config.parallel), slots)  # refuses too few
    plans = make_plans(config)
    if as_json:
        typer.echo(to_json(mesh_plan_to_dict(config, plans, slots), indent=2))
    elif config.parallel.num_ranks == 1:
        render_plan(config.name, plans[0].plan, Console())
    else:
        render_mesh_plan(config, plans, Console(), slots)
    require_all_fit(plans)


@app.command("config")
def show_config(source: ConfigArgument, overrides: SetOption = None) -> None:
    """Print every key with the value in force, as YAML that can be edited and trained."""
    typer.echo(load_config(source, overrides or ()).to_yaml(), nl=False)


_FORWARDED = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
# Not mounted, because that would load NumPy before `train` could set its environment.


@app.command("data", **_FORWARDED)  # type: ignore[arg-type]
def data(context: typer.Context) -> None:
    """Make token files from text: see `headrace data prepare --help`."""
    from launch.data_command import app as data_app

    _forward(context, "data", data_app)


@app.command("checkpoint", **_FORWARDED)  # type: ignore[arg-type]
def checkpoint(context: typer.Context) -> None:
    """List, verify, copy, exchange and delete checkpoints: see `headrace checkpoint --help`."""
    from launch.checkpoint_command import app as checkpoint_app

    _forward(context, "checkpoint", checkpoint_app)


@app.command("store", **_FORWARDED)  # type: ignore[arg-type]
def store(context: typer.Context) -> None:
    """Look into a cold store: see `headrace store list --help` and `... verify --help`."""
    from launch.store_command import app as store_app

    _forward(context, "store", store_app)


def _forward(context: typer.Context, name: str, command: typer.Typer) -> None:
    shell = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    shell.add_typer(command, name=name)
    assert context.parent is not None
    shell([name, *context.args], prog_name=context.parent.command_path)


def main() -> None:
    """Run the command line and exit with the contract's status."""
    try:
        app()
    except HeadraceError as error:
        sys.exit(show_failure(error))
    except Exception as error:
        if not rank_prefix():
            raise
        sys.exit(show_failure(error))
