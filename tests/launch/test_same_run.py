"""All ranks train the same run, or none does.

A rank used to take whatever its own command said: with other seeds or rates on two ranks a run went
to its end, exited with 0 and committed a model that nobody had configured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launch.compose import dotted_keys
from launch.config import RunConfig, load_config
from launch.same_run import LOCAL_KEYS, require_same_settings, require_same_text
from moe.data.source import TokenSource, source_from_documents
from ops.comm.base import World
from ops.comm.local import run_local
from ops.comm.single import SingleRank
from ops.errors import ConfigError
from tests.launch.helpers import command, report_of
from tests.mpirun import run_commands

Given = tuple[list[str], int | None, str | None]
ALIKE: Given = (["train.seed=1"], None, None)


def told(*given: Given) -> list[str]:
    """What each rank is told, empty where it may go on; `given` are overrides, steps, resume."""
    configs = [load_config("tiny-moe", overrides) for overrides, _, _ in given]

    def work(world: World) -> str:
        _, steps, resume = given[world.rank]
        return refusal(lambda: require_same_settings(configs[world.rank], steps, resume, world))

    return run_local(len(given), work, checked=True)


def refusal(call: Callable[[], None]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_are_alike_go_on() -> None:
    assert told(ALIKE, ALIKE, ALIKE) == [""] * 3
    require_same_settings(load_config("tiny-moe"), 3, "latest", SingleRank())


def test_what_differs_is_refused_on_all_with_keys_ranks_and_values() -> None:
    other: Given = (["train.seed=2", "optimizer.learning_rate=0.01"], None, None)
    found = told(ALIKE, other, ALIKE, ALIKE)
    assert len(set(found)) == 1
    assert "train.seed is 1 on ranks 0, 2-3 and 2 on rank 1" in found[0]
    assert "optimizer.learning_rate is 0.001 on ranks 0, 2-3 and 0.01 on rank 1" in found[0]
    assert "model." not in found[0] and "version" not in found[0]


@pytest.mark.parametrize(
    ("one", "other", "sentence"),
    [
        (([], 3, None), ([], 4, None), "--steps is 3 on rank 0 and 4 on rank 1"),
        (([], 3, None), ([], None, None), "--steps is 3 on rank 0 and not given on rank 1"),
        (
            ([], None, "latest"),
            ([], None, None),
            "--resume is latest on rank 0 and not given on rank 1",
        ),
        (
            ([], None, "latest"),
            ([], None, "/elsewhere"),
            "--resume is latest on rank 0 and a path that is not the run's own store on rank 1",
        ),
        (
            (["parallel.data_parallel=2"], None, None),
            (["parallel.model_parallel=2"], None, None),
            "parallel.data_parallel is 2 on rank 0 and 1 on rank 1",
        ),
        (
            (["parallel.pipeline_stage=2", "parallel.pipeline_layers=[1, 2]"], None, None),
            (["parallel.pipeline_stage=2", "parallel.pipeline_layers=[2, 1]"], None, None),
            "parallel.pipeline_layers is [1, 2] on rank 0 and [2, 1] on rank 1",
        ),
    ],
)
def test_options_and_mesh_are_compared(one: Given, other: Given, sentence: str) -> None:
    found = told(one, other)
    assert found[0] == found[1] and sentence in found[0]


def test_what_belongs_to_a_machine_may_differ() -> None:
    here: Given = (["offload.nvme.path=/here", "runtime.threads=1"], None, "/here")
    there: Given = (
        ["offload.nvme.path=/there", "runtime.threads=2", "offload.host.capacity=1GiB"],
        None,
        "latest",
    )
    assert told(here, there) == ["", ""]
    assert set(dotted_keys(RunConfig)) >= LOCAL_KEYS


def test_many_differences_are_named_but_not_all_with_values() -> None:
    seeds = [([f"train.seed={rank}", f"data.seed={rank}"], None, None) for rank in range(1, 6)]
    (found,) = set(told(*seeds))
    assert "train.seed is 1 on rank 0, 2 on rank 1, 3 on rank 2 and 2 more values" in found
    keys = [f"optimizer.{key}=0.5" for key in ("beta1", "beta2", "eps", "weight_decay")]
    keys += [f"model.{key}=0.5" for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff")]
    keys += ["train.seed=7", "data.seed=7", "data.held_out_fraction=0.1", "train.eval_batches=3"]
    (found,) = set(told(([], None, None), (keys, None, None)))
    assert found.count(" on rank 1") == 8 and "data.held_out_fraction differ too" in found


def test_other_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages and kernels of other versions round differently; Python's and the system's do not."""
    config = load_config("tiny-moe")
    found = iter([{"numpy": "1.26.3", "python": "3.11.4"}, {"numpy": "1.26.4", "python": "3.11.5"}])
    monkeypatch.setattr("launch.same_run.versions", lambda: next(found))

    def work(world: World) -> str:
        return refusal(lambda: require_same_settings(config, None, None, world))

    (message,) = set(run_local(2, work))
    assert "the version of numpy is 1.26." in message and "python" not in message


def source(name: str, text: bytes, tokenizer: str = "0" * 32) -> TokenSource:
    made = source_from_documents(name, [np.frombuffer(text, np.uint8)], 257, 256)
    return replace(made, tokenizer=tokenizer)


def test_another_text_is_refused_wherever_it_lies() -> None:
    def compared(*sources: TokenSource) -> set[str]:
        def work(world: World) -> str:
            return refusal(lambda: require_same_text(sources[world.rank], world))

        return set(run_local(len(sources), work))

    assert compared(source("/here/text", b"abc"), source("/there/text", b"abc")) == {""}
    (message,) = compared(source("text", b"abc"), source("text", b"abd"))
    assert "the text of data.source (its digest) is " in message and "tokenizer of" not in message
    (message,) = compared(source("text", b"abc"), source("text", b"abc", "1" * 32))
    assert f"{'0' * 32} on rank 0 and {'1' * 32} on rank 1" in message


def test_real_ranks_that_were_told_different_things_train_nothing(tmp_path: Path) -> None:
    """Proven on the command line of the report: one rank with another seed and another rate."""
    pytest.importorskip("mpi4py", reason="the extra headrace[mpi] is not installed")
    line = [*command(tmp_path, "--set", "parallel.data_parallel=2")]
    other = [*line, "--set", "train.seed=2", "--set", "optimizer.learning_rate=0.01"]
    done = run_commands(line, other, seconds_max=120)
    assert done.returncode == ConfigError.exit_code, done.stderr[-3000:]
    assert "train.seed is 1 on rank 0 and 2 on rank 1" in done.stderr
    assert "optimizer.learning_rate is 0.002 on rank 0 and 0.01 on rank 1" in done.stderr
    for rank in (0, 1):  # none ends the other before it has said why
        assert f"[rank {rank}] headrace: the ranks were not started alike: " in done.stderr
    assert "MPI_ABORT" not in done.stderr
    assert not (tmp_path / "run").exists() and not (tmp_path / "nvme").exists()


def test_real_ranks_with_other_machines_train_the_same_model(tmp_path: Path) -> None:
    """Every key that may differ does, and no bit of the model changes."""
    pytest.importorskip("mpi4py", reason="the extra headrace[mpi] is not installed")
    digests = []
    for name, local in {
        "alike": [],
        "apart": [
            "name=other",
            "offload.device.capacity=12MiB",
            "offload.host.capacity=16MiB",
            "offload.nvme.capacity=80MiB",
            f"offload.nvme.path={tmp_path / 'elsewhere'}",
            "offload.io_workers=3",
            "offload.io_request_size=1MiB",
            "offload.codec=lz4",
        ],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        line = command(folder, "--steps", "2", "--set", "parallel.data_parallel=2")
        other = [*line, *(x for key in local for x in ("--set", key))]
        done = run_commands(line, other, seconds_max=240)
        assert done.returncode == 0, done.stderr[-3000:]
        digests.append(report_of(folder)["weights_digest"])
    assert digests[0] == digests[1]
    assert (tmp_path / "elsewhere").is_dir()
