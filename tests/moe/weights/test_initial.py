"""`train.init_from`: a run that starts with the weights of a directory."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from launch import run
from moe.digest import weights_digest
from moe.memory import layouts_of
from moe.mesh import Mesh, ParallelConfig
from moe.weights import reading
from moe.weights.initial import check_initial_weights, initial_weights, rectangles
from ops.errors import ConfigError
from tests.moe.harness import make_config, smallest
from tests.moe.weights.weight_files import (
    PLAIN,
    model_of,
    packed,
    random_weights,
    save,
    save_shards,
    started,
)


def digest_of(tensors):
    """The digest as `moe/digest.py` describes it, over what the files hold."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors, key=str.encode):
        digest.update(np.ascontiguousarray(tensors[name], "<f4").data)
    return digest.hexdigest()


@pytest.mark.parametrize(
    "dtype, weight_dtype", [("F32", "bfloat16"), ("BF16", "bfloat16"), ("F16", "float32")]
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_digest_of_a_start_is_that_of_the_weights(tmp_path, dtype, weight_dtype, tied):
    options = {
        "model": PLAIN | {"tie_word_embeddings": tied},
        "train": {"init_from": str(tmp_path / "w"), "weight_dtype": weight_dtype},
    }
    config = smallest(tmp_path / "nvme", **options)
    weights = random_weights(config.model, dtype)
    save_shards(tmp_path / "w", weights, 3)
    with started(config) as engine:
        assert weights_digest(engine) == digest_of(weights)


@pytest.mark.parametrize("form", ["in-out", "out-in"])
def test_packed_experts_make_the_same_start(tmp_path, form):
    # C45
    config = make_config(tmp_path / "nvme", model=PLAIN, train={"init_from": str(tmp_path / "w")})
    weights = random_weights(config.model, "BF16")
    save_shards(tmp_path / "w", packed(config.model, weights, form), 2)
    with started(config) as engine:
        assert weights_digest(engine) == digest_of(weights)


def test_moments_of_such_a_start_are_zero(tmp_path):
    config = make_config(tmp_path / "nvme", model=PLAIN, train={"init_from": str(tmp_path / "w")})
    save_shards(tmp_path / "w", random_weights(config.model), 1)
    with started(config) as engine:
        for unit in engine._shared.units.values():
            fields = {f.component: f for f in unit.layout.fields["state"]}
            for name in ("exp_avg", "exp_avg_sq"):
                field = fields[name]
                assert not unit.host_state.array[field.offset :][: field.nbytes].any()


MESHES = [
    ParallelConfig(model_parallel=2),
    ParallelConfig(data_parallel=4, expert_parallel=2),
    ParallelConfig(pipeline_stage=3, data_parallel=2, model_parallel=2),
]


@pytest.mark.parametrize("parallel", MESHES, ids=str)
def test_every_rank_reads_its_own_elements_and_hardly_more(tmp_path, parallel, monkeypatch):
    monkeypatch.setattr(reading, "_PAGE_BYTES", 0)  # so small a model is all on one page
    config = make_config(tmp_path, model=PLAIN | {"vocab_size": 64})
    model, weights = config.model, random_weights(config.model)
    save(tmp_path / "model.safetensors", weights)
    mesh = Mesh(parallel)
    for rank in range(mesh.num_ranks):
        layouts = layouts_of(model, config.train, False, mesh.share(model, rank))
        wanted = 0
        with initial_weights(str(tmp_path), model) as source:
            before = source._files.bytes_read
            for place in (place for layout in layouts for place in layout.places):
                spec = place.spec
                values = source.values(spec)
                assert values.tobytes() == expected(weights, spec).tobytes()
                wanted += 4 * spec.size if spec.name else 0
            assert source._files.bytes_read - before == wanted


def expected(weights, spec):
    """The elements of a piece, taken from whole tensors."""
    if not spec.name:
        return np.zeros(spec.size, np.float32)
    block = spec.piece_of or spec
    whole = weights[spec.name].reshape(weights[spec.name].shape[0], -1)
    rows, columns = block.shape[0], block.size // block.shape[0]
    part = whole[block.row0 : block.row0 + rows, block.col0 : block.col0 + columns]
    return part.ravel()[spec.flat0 : spec.flat0 + spec.size]


def test_rectangles_cover_a_run_of_elements_in_order():
    for begin, end, width in [(0, 12, 4), (3, 4, 4), (3, 5, 4), (5, 7, 4), (1, 11, 4), (2, 2, 4)]:
        indices = np.arange(16).reshape(4, 4)
        found = [int(x) for rows, cols in rectangles(begin, end, width)
                 for x in indices[rows, cols].ravel()]  # fmt: skip
        assert found == list(range(begin, end))


def test_a_wrong_directory_is_refused_before_a_store_is_opened(tmp_path, monkeypatch):
    """A start that is refused costs no commit; one that resumes does not need the directory."""
    wrong = make_config(tmp_path / "nvme", model=PLAIN, train={"init_from": str(tmp_path / "w")})
    weights = random_weights(wrong.model)
    del weights["model.norm.weight"]
    save_shards(tmp_path / "w", weights, 2)
    reached = []

    class Reached(Exception):
        pass

    def reach(*arguments):
        reached.append(arguments)
        raise Reached

    monkeypatch.setattr(run, "starting_point", reach)
    with pytest.raises(ConfigError, match=r"1 missing: model\.norm\.weight \[32\]"):
        run.run_training(wrong, None, None, threading.Event())
    assert not reached
    origin = SimpleNamespace(is_own=True)
    monkeypatch.setattr(run, "find_origin", lambda *arguments: origin)
    with pytest.raises(Reached):
        run.run_training(wrong, None, None, threading.Event(), resume="latest")


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_a_tied_embedding_must_be_the_same(tmp_path, same):
    # C27
    model = model_of(tmp_path)
    weights = random_weights(model)
    head = weights["model.embed_tokens.weight"].copy()
    if not same:
        head[60, 31] += 1
    save(tmp_path / "model.safetensors", weights | {"lm_head.weight": head})
    if same:
        check_initial_weights(str(tmp_path), model)
    else:
        with pytest.raises(ConfigError, match=r"lm_head\.weight differs from"):
            check_initial_weights(str(tmp_path), model)


def test_the_key_wants_a_path(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.init_from = 3"):
        make_config(tmp_path, train={"init_from": 3})
