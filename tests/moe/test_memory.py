"""What a pipeline stage takes besides its units: what it does itself, and nothing else."""

from __future__ import annotations

import pytest

from moe.memory import activation_specs, demands_of, layouts_of
from moe.mesh import Mesh, ParallelConfig
from tests.moe.pipeline_cases import model_of, train_of


def test_a_stage_takes_memory_for_what_it_does():
    """Each end of a pipeline has its own arrays, and only the ends those of the vocabulary."""
    config = ParallelConfig(pipeline_stage=4)
    # A vocabulary that outweighs everything else in the workspace.
    model, train = model_of(vocab_size=4000, vocab_slice_rows=3000), train_of(config)
    mesh = Mesh(config)
    specs, workspace = [], []
    for rank in range(4):
        share = mesh.share(model, rank)
        specs.append({x.name: x for x in activation_specs(model, train, share)})
        layouts = layouts_of(model, train, False, share)
        workspace.append(demands_of(model, train, layouts, share).workspace_bytes)
    assert [("h_out" in found, "xn_out" in found) for found in specs] == 3 * [(False, False)] + [
        (True, True)
    ]
    assert [found["tied"].copies if "tied" in found else 0 for found in specs] == [0, 0, 0, 2]
    grads = [found["tied_grad"].copies if "tied_grad" in found else 0 for found in specs]
    assert grads == [1, 0, 0, 2]
    assert specs[3]["tied"].shape == (3000, model.hidden_size)
    assert workspace[1] == workspace[2] < min(workspace[0], workspace[3])
    untied = model_of(vocab_size=4000, vocab_slice_rows=3000, tie_word_embeddings=False)
    share = mesh.share(untied, 3)
    layouts = layouts_of(untied, train, False, share)
    less = demands_of(untied, train, layouts, share).workspace_bytes
    assert workspace[3] - less == pytest.approx(3000 * model.hidden_size * 4, abs=4096)


def test_nothing_waits_for_a_gradient_of_a_frozen_embedding():
    config = ParallelConfig(pipeline_stage=2)
    train = train_of(config, freeze=["embed.*"])
    for share in (Mesh(config).share(model_of(), rank) for rank in range(2)):
        names = [spec.name for spec in activation_specs(model_of(), train, share)]
        assert "tied_grad" not in names
        assert ("tied" in names) == share.has_head
