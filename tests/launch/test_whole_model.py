"""What a run tells of the model is told of the whole model, the same on one rank and on two.

With two ranks `report.json` and the first line said how many parameters rank 0 stores, and
`steps.jsonl` how many of its own units idled: half of the model, and another number on every mesh.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.build import make_plan, model_size
from launch.config import load_config
from tests.launch.helpers import call, command, report_of, steps_of
from tests.mpirun import run_commands

MESHES = (
    [],
    ["parallel.data_parallel=2", "parallel.optimizer_parallel=false"],
    ["parallel.data_parallel=4", "parallel.expert_parallel=2"],
    ["parallel.model_parallel=2"],
    ["parallel.pipeline_stage=3"],
)


@pytest.mark.parametrize("freeze", ["[]", "[layers.0.*, embed.*]"])
def test_no_mesh_changes_the_size_of_a_model(freeze: str) -> None:
    """Where each replica stores the whole, and with a head tied to another stage's embedding."""
    keys = [f"train.freeze={freeze}", "model.tie_word_embeddings=true"]
    wanted = make_plan(load_config("tiny-moe", keys))
    for mesh in MESHES:
        size = model_size(load_config("tiny-moe", [*keys, *mesh]))
        assert size == (wanted.parameters, wanted.state_bytes)


def test_two_ranks_tell_what_one_rank_tells(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="the extra headrace[mpi] is not installed")
    keys = ["model.num_experts=32", "train.seq_len=8", "train.grad_dtype=float32"]
    options = ["--steps", "2", *(x for key in keys for x in ("--set", key))]
    alone, two = tmp_path / "alone", tmp_path / "two"
    for folder in (alone, two):
        folder.mkdir()
    one = call(alone, *options, "--set", "train.gradient_accumulation_steps=2")
    assert one.returncode == 0, one.stderr
    mesh = ["--set", "parallel.data_parallel=2", "--set", "parallel.expert_parallel=2"]
    line = command(two, *options, *mesh)
    both = run_commands(line, line, seconds_max=240)
    assert both.returncode == 0, both.stderr
    wanted, found = report_of(alone), report_of(two)
    for key in ("parameters", "state_bytes"):
        assert found[key] == wanted[key]
        assert sum(rank[key] for rank in found["ranks"]) == wanted[key]
    size = f"{wanted['parameters']:,} parameters, "
    assert size in one.stdout and size in both.stdout
    idle = [row["experts_idle"] for row in steps_of(alone)]
    assert [row["experts_idle"] for row in steps_of(two)] == idle and min(idle) > 0
