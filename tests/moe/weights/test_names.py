"""Which tensors a model wants, and where they lie in what a checkpoint has."""

from __future__ import annotations

import numpy as np
import pytest

from moe.config import ModelConfig
from moe.params import build_units, size_of
from moe.weights.names import (
    Match,
    Stored,
    model_shapes,
    packed_names,
    packed_shapes,
    require_size,
)
from ops.errors import ConfigError
from tests.moe.harness import MODEL
from tests.moe.weights.weight_files import dtype_name, packed, random_weights


def model_with(**changes) -> ModelConfig:
    return ModelConfig(**MODEL | {"n_shared_experts": 0} | changes)


def stored(tensors):
    return {name: Stored(dtype_name(array), array.shape) for name, array in tensors.items()}


def at(tensors, place, shape):
    """The matrix that lies at `place`."""
    flat = tensors[place.tensor].ravel()
    rows, columns = np.indices((shape[0], int(np.prod(shape[1:]))))
    return flat[place.first + rows * place.row_stride + columns * place.col_stride].reshape(shape)


def test_shapes_are_those_of_whole_tensors_over_vocabulary_slices():
    model = model_with()
    assert model.vocab_size > model.vocab_slice_rows
    shapes = model_shapes(model)
    assert shapes["model.embed_tokens.weight"] == (61, 32)
    total = sum(unit.size for unit in build_units(model))
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == total


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_its_own_is_wanted_unless_it_is_tied(tied):
    # C27
    assert ("lm_head.weight" in model_shapes(model_with(tie_word_embeddings=tied))) is not tied


@pytest.mark.parametrize("form", ["plain", "in-out", "out-in"])
@pytest.mark.parametrize("width", [24, 32, 16])  # 32 = hidden: down is square; 16: gate_up is
def test_every_tensor_is_found_where_it_was_put(form, width):
    # C45
    model = model_with(moe_intermediate_size=width)
    weights = random_weights(model)
    kept = weights if form == "plain" else packed(model, weights, form)
    match = Match(model, stored(kept))
    match.require("it")
    for name, array in weights.items():
        assert np.array_equal(at(kept, match.places[name], array.shape), array), name


def test_packed_shapes_are_those_of_stacked_experts():
    model = model_with()
    for form in ("in-out", "out-in"):
        found = packed(model, random_weights(model), form)
        shapes = tuple(found[name].shape for name in packed_names(1))
        assert shapes == packed_shapes(model, form)


def test_everything_that_is_wrong_is_listed_at_once():
    model = model_with()
    found = stored(random_weights(model))
    del found["model.norm.weight"], found["model.layers.1.mlp.gate.weight"]
    found["model.layers.0.self_attn.q_proj.weight"] = Stored("F32", (32, 31))
    found["model.layers.0.self_attn.k_proj.weight"] = Stored("F8_E4M3", (16, 32))
    found["visual.patch.weight"] = Stored("F32", (1,))
    with pytest.raises(ConfigError) as caught:
        Match(model, found).require("train.init_from = here")
    text = str(caught.value)
    assert text.startswith("train.init_from = here does not hold this model: 2 missing: ")
    assert "model.norm.weight [32]" in text and "model.layers.1.mlp.gate.weight [8, 32]" in text
    assert "1 extra: visual.patch.weight" in text and "2 unfit: " in text
    assert "model.layers.0.self_attn.q_proj.weight has [32, 31], the model needs [32, 32]" in text
    assert "k_proj.weight is of dtype F8_E4M3, allowed are F32, BF16, F16" in text


def test_long_lists_are_cut_with_a_count():
    model = model_with()
    with pytest.raises(ConfigError) as caught:
        Match(model, {}).require("it")
    total = len(model_shapes(model))
    assert f"{total} missing: " in str(caught.value)
    assert f"and {total - 10} more" in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False}, {"n_shared_experts": 2}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_the_size_of_a_model_is_known_without_listing_its_tensors(changes, tied):
    model = model_with(tie_word_embeddings=tied, **changes)
    shapes, size = model_shapes(model), size_of(model)
    assert size.units == len(build_units(model))
    assert size.tensors == len(shapes)
    assert size.numbers == sum(int(np.prod(shape)) for shape in shapes.values())
    assert size.packed == len(packed(model, random_weights(model), "in-out"))


def test_many_tensors_have_to_be_in_the_files():
    """Packed or not; few are listed by what is missing."""
    model = model_with(num_experts=1000, num_hidden_layers=6)
    found = {name: Stored("F32", shape) for name, shape in model_shapes(model).items()}
    require_size(model, found, "it")
    for name in list(found):
        if ".experts." in name:
            del found[name]
    with pytest.raises(ConfigError, match=r"it is said to hold a model of 18,.* tensors"):
        require_size(model, found, "it")
    for layer in range(6):
        both = zip(packed_names(layer), packed_shapes(model, "in-out"))
        found |= {name: Stored("F32", shape) for name, shape in both}
    require_size(model, found, "it")
    require_size(model_with(), {}, "it")
    with pytest.raises(ConfigError, match=r"of 300,0.* units .* at most 262,144"):
        require_size(model_with(vocab_size=300_000, vocab_slice_rows=1), {}, "it")


def test_inverse_frequencies_of_old_checkpoints_are_no_extra_tensors():
    model = model_with()
    found = stored(random_weights(model))
    found["model.layers.0.self_attn.rotary_emb.inv_freq"] = Stored("F32", (4,))
    assert Match(model, found).extra == []


def test_half_of_the_packed_experts_is_missing():
    model = model_with()
    found = stored(packed(model, random_weights(model), "in-out"))
    gate_up, down = packed_names(2)
    del found[down]
    match = Match(model, found)
    assert match.missing == [f"{down} [8, 24, 32]"] and not match.extra
    found[down] = Stored("F32", (8, 24, 31))
    (text,) = Match(model, found).unfit
    assert text == f"{down} has [8, 24, 31], the model needs [8, 24, 32] or [8, 32, 24]"
    found[gate_up] = Stored("F32", (8, 30, 48))
    assert len(Match(model, found).unfit) == 2


def test_packed_experts_that_are_not_transposed_alike_are_refused():
    model = model_with()
    found = stored(packed(model, random_weights(model), "in-out"))
    _, down = packed_names(0)
    found[down] = Stored("F32", (8, 32, 24))
    assert any("not transposed alike" in text for text in Match(model, found).unfit)


def test_experts_that_are_there_twice_are_extra():
    model = model_with()
    weights = random_weights(model)
    both = stored(weights | packed(model, weights, "in-out"))
    match = Match(model, both)
    assert len(match.extra) == 3 * model.num_experts * model.num_hidden_layers


@pytest.mark.parametrize("shape, is_fine", [((61, 32), True), ((60, 32), False)])
def test_a_head_beside_a_tied_embedding_has_its_shape(shape, is_fine):
    # C27
    model = model_with()
    found = stored(random_weights(model)) | {"lm_head.weight": Stored("F32", shape)}
    match = Match(model, found)
    assert not match.extra and bool(match.unfit) is not is_fine
