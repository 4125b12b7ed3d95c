"""What each rank owns, and that its initial values are those of the whole model."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe.mesh import Mesh, ParallelConfig, Share
from moe.params import build_units, expert_unit, head_units, initial_values, unit_names
from offload.blocks import TensorSpec, UnitSpec
from offload.shards import piece, share_of
from tests.moe.test_mesh import make_model

RUN = 1 << 16


def whole_of(model):
    """Every tensor of the model by name, with its whole shape."""
    found: dict[str, list[TensorSpec]] = {}
    for unit in build_units(model):
        for tensor in unit.tensors:
            found.setdefault(tensor.name, []).append(tensor)
    return found


def covered(model, config):
    """How many ranks hold each element, counted by `replicas`: {name: array of the whole}."""
    shapes = {
        name: (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        for name, parts in whole_of(model).items()
    }
    counts = {name: np.zeros(shape) for name, shape in shapes.items()}
    mesh = Mesh(config)
    for rank in range(mesh.num_ranks):
        for unit in build_units(model, share=mesh.share(model, rank)):
            for tensor in unit.tensors:
                rows = slice(tensor.row0, tensor.row0 + tensor.shape[0])
                target = counts[tensor.name][rows]
                if len(tensor.shape) == 2:
                    assert (tensor.num_cols or tensor.shape[1]) == target.shape[1]
                    target = target[:, tensor.col0 : tensor.col0 + tensor.shape[1]]
                assert target.shape == tensor.shape
                target += 1 / tensor.replicas
    return counts


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (1, 1, 4, 1), (2, 1, 2, 1), (1, 4, 1, 4), (3, 4, 2, 2)]
)
@pytest.mark.parametrize("tied", [True, False])
def test_ranks_together_hold_every_element_once_in_each_replica(sizes, tied):
    pp, dp, op, ep = sizes
    config = ParallelConfig(pp, dp, op, ep)
    model = make_model(
        tie_word_embeddings=tied, n_shared_experts=1, vocab_size=60, vocab_slice_rows=16
    )
    for name, count in covered(model, config).items():
        assert np.all(count == (dp // ep if ".experts." in name else dp)), name


def test_an_operator_group_divides_attention_by_heads_and_ffn_by_width():
    model = make_model()
    share = Mesh(ParallelConfig(model_parallel=4)).share(model, 2)
    units = {unit.name: unit for unit in build_units(model, share=share)}
    dense = {x.name.rsplit(".", 2)[-2]: x for x in units["layers.3"].tensors}
    assert (dense["q_proj"].shape, dense["q_proj"].row0) == ((8, 8), 16)
    assert (dense["k_proj"].shape, dense["v_proj"].row0) == ((4, 8), 8)
    o_proj = dense["o_proj"]
    assert (o_proj.shape, o_proj.col0, o_proj.num_cols, o_proj.row0) == ((8, 8), 16, 32, 0)
    for name in ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "gate"):
        assert dense[name].replicas == 4
    assert dense["q_proj"].replicas == o_proj.replicas == 1
    gate, up, down = units["layers.3.experts.5"].tensors
    assert (gate.shape, gate.row0, up.shape, up.row0) == ((3, 8), 6, (3, 8), 6)
    assert (down.shape, down.col0, down.num_cols) == ((8, 3), 6, 12)


def test_vocabulary_slices_are_divided_one_by_one():
    model = make_model(vocab_size=40, vocab_slice_rows=16, tie_word_embeddings=False)
    share = Mesh(ParallelConfig(model_parallel=4)).share(model, 3)
    for prefix in ("embed", "head"):
        tensors = [
            unit.tensors[0]
            for unit in build_units(model, share=share)
            if unit.name.startswith(prefix)
        ]
        assert [(x.row0, x.shape[0]) for x in tensors] == [(12, 4), (28, 4), (38, 2)]


def test_stages_own_their_layers_and_the_ends_of_the_model():
    model = make_model(tie_word_embeddings=False)
    mesh = Mesh(ParallelConfig(pipeline_stage=2, pp_interleave_num=3))
    first, last = ([u.name for u in build_units(model, share=mesh.share(model, r))] for r in (0, 1))
    dense = [name for name in first if name.startswith("layers.") and "experts" not in name]
    assert dense == ["layers.0", "layers.2", "layers.4"]
    assert first[0] == "embed.0" and "norm" not in first and "head.0" not in first
    assert last[-2:] == ["norm", "head.0"] and "embed.0" not in last
    assert Counter(first + last) == Counter(unit_names(model))


def test_a_tied_head_is_owned_by_the_first_stage_alone():
    model = make_model(tie_word_embeddings=True)
    mesh = Mesh(ParallelConfig(pipeline_stage=2))
    first, last = ([u.name for u in build_units(model, share=mesh.share(model, r))] for r in (0, 1))
    assert "embed.0" in first and last[-1] == "norm"
    assert head_units(model) == ["embed.0"]


def test_experts_keep_their_global_numbers():
    model = make_model()
    mesh = Mesh(ParallelConfig(data_parallel=4, expert_parallel=4))
    for rank in range(4):
        units = build_units(model, share=mesh.share(model, rank))
        experts = [unit for unit in units if unit.expert is not None and unit.layer == 2]
        assert [unit.expert for unit in experts] == [2 * rank, 2 * rank + 1]
        assert experts[0].name == expert_unit(2, 2 * rank)
        assert (
            experts[0].tensors[0].name == f"model.layers.2.mlp.experts.{2 * rank}.gate_proj.weight"
        )


@pytest.mark.parametrize("tied", [True, False])
def test_the_names_of_all_units_are_those_of_the_only_rank(tied):
    model = make_model(tie_word_embeddings=tied, vocab_size=60, vocab_slice_rows=16)
    names = [unit.name for unit in build_units(model)]
    assert names == unit_names(model)
    assert build_units(model) == build_units(model, share=Share.whole(model))


def test_initial_values_are_the_documented_stream():
    """The seed, the name and the run of 65 536 elements key a Philox stream; this is for ever."""
    tensor = TensorSpec("a.weight", (3, RUN), False, True, 0.5)
    key = hashlib.blake2b(b"7/a.weight/2", digest_size=16).digest()
    philox = np.random.Philox(key=int.from_bytes(key, "little"))
    values = np.random.Generator(philox).standard_normal(RUN, np.float32)
    found = initial_values(tensor, 7)
    assert found.dtype == np.float32
    assert np.array_equal(found[2 * RUN :], values * np.float32(0.5))


def test_norms_start_at_one_and_padding_at_positive_zero():
    assert np.all(initial_values(TensorSpec("n", (5,), True, False, None, replicas=2), 1) == 1)
    padding = initial_values(TensorSpec("", (5,), True, False, 0.0), 1)
    assert np.all(padding.view(np.uint32) == 0)


blocks = st.tuples(st.integers(1, 40), st.integers(1, 4000)).flatmap(
    lambda shape: st.tuples(
        st.just(shape),
        st.integers(0, shape[0] - 1),
        st.integers(0, shape[1] - 1),
        st.integers(1, shape[0]),
        st.integers(1, shape[1]),
        st.tuples(st.floats(0, 1), st.floats(0, 1)),
    )
)


@settings(deadline=None, max_examples=60)
@given(blocks, st.booleans())
@example(((2, 3 * RUN), 0, 2 * RUN, 2, 100, (0.0, 1.0)), True)
@example(((5, RUN), 1, 0, 3, RUN, (0.3, 0.7)), False)
def test_any_block_and_any_piece_has_the_values_of_the_whole(case, by_columns):
    (rows, cols), row0, col0, num_rows, num_cols, ends = case
    num_rows, num_cols = min(num_rows, rows - row0), min(num_cols, cols - col0)
    if not by_columns:
        col0, num_cols = 0, cols
    whole = initial_values(TensorSpec("w", (rows, cols), False, True, 0.02), 3).reshape(rows, cols)
    block = TensorSpec(
        "w", (num_rows, num_cols), False, True, 0.02, row0, col0, cols if by_columns else None
    )
    wanted = whole[row0 : row0 + num_rows, col0 : col0 + num_cols].reshape(-1)
    assert initial_values(block, 3).tobytes() == wanted.tobytes()
    lo, hi = sorted(int(end * (block.size - 1)) for end in ends)
    part = initial_values(piece(block, lo, hi + 1 - lo), 3)
    assert part.tobytes() == wanted[lo : hi + 1].tobytes()


def test_only_the_runs_of_a_block_are_generated(monkeypatch):
    made = []
    philox = np.random.Philox
    monkeypatch.setattr(np.random, "Philox", lambda key: made.append(key) or philox(key=key))
    block = TensorSpec("w", (2, 10), False, True, 1.0, row0=1, col0=2 * RUN + 5, num_cols=4 * RUN)
    initial_values(block, 1)
    assert len(made) == 2, "one run for each row of the block"
    made.clear()
    whole = TensorSpec("w", (8, RUN), False, True, 1.0)
    initial_values(piece(whole, 3 * RUN, RUN), 1)
    assert len(made) == 1


@pytest.mark.parametrize("sizes", [(1, 3, 2, 1), (2, 2, 4, 2), (1, 5, 1, 1)])
def test_the_shares_of_all_ranks_start_as_the_whole_model_does(sizes):
    """Values of (seed, name, index): the same on every mesh, through operators and shards."""
    pp, dp, op, ep = sizes
    model = make_model(n_shared_experts=1, num_hidden_layers=2, vocab_size=60, vocab_slice_rows=16)
    mesh = Mesh(ParallelConfig(pp, dp, op, ep))
    whole = {
        name: np.concatenate([initial_values(x, 5).reshape(x.shape) for x in parts])
        for name, parts in whole_of(model).items()
    }
    for rank in range(mesh.num_ranks):
        share = mesh.share(model, rank)
        for unit in build_units(model, share=share):
            index, size = share.weight_shards(unit.expert is not None)
            layout = share_of(unit, "bfloat16", "float32", "float32", rank=index, size=size)
            for place in layout.places:
                check_piece(place.spec, whole)


def check_piece(spec: TensorSpec, whole: dict[str, np.ndarray]) -> None:
    """The values of one piece of a share are those of the whole tensor."""
    found = initial_values(spec, 5)
    if not spec.name:
        assert not found.any()
        return
    block = spec.piece_of or spec
    wanted = whole[block.name][block.row0 : block.row0 + block.shape[0]]
    if block.num_cols:
        wanted = wanted[:, block.col0 : block.col0 + block.shape[1]]
    wanted = wanted.reshape(-1)[spec.flat0 : spec.flat0 + spec.size]
    assert found.tobytes() == np.ascontiguousarray(wanted).tobytes()


def test_a_unit_of_a_test_may_have_tensors_of_one_dimension():
    unit = UnitSpec("u", 0, None, (TensorSpec("v", (10,), False, True, 1.0, row0=20),))
    whole = initial_values(TensorSpec("v", (40,), False, True, 1.0), 1)
    assert np.array_equal(initial_values(unit.tensors[0], 1), whole[20:30])
