"""A commit of any mesh as safetensors files."""

from __future__ import annotations

import json
import os
import threading
import tracemalloc

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from moe.checkpoint import saved_ledger
from moe.mesh import ParallelConfig
from moe.weights import writing
from moe.weights.directory import ExportDirectory
from moe.weights.export import Export, ExportOptions, facts_of
from moe.weights.reading import WeightFiles
from offload.checkpoint.units import UnitReader
from ops.errors import ConfigError, StorageError
from ops.kernels.pool import KernelPool
from tests.moe.weights.saved_weights import (
    OPTIMIZER_STEP,
    STEP,
    make_run,
    numbers_of,
    parts_in_memory,
)
from tests.moe.weights.weight_files import packed

MESHES = [
    ParallelConfig(),
    ParallelConfig(data_parallel=2, model_parallel=2),
    ParallelConfig(data_parallel=4, expert_parallel=2),
    ParallelConfig(pipeline_stage=3, model_parallel=2),
]
UNTIED = {"tie_word_embeddings": False, "vocab_size": 64}


@pytest.fixture(scope="module")
def pool():
    with KernelPool(1) as made:
        yield made


def reader_of(run, meta, parts, pool):
    ledger = saved_ledger(run, dict.fromkeys(parts, meta))
    decay, replays = run.optimizer.weight_decay, run.idle_expert_policy != "skip"
    return UnitReader(parts, run.layouts, ledger, decay, pool, replays=replays)


def export(folder, run, meta, source, **options):
    chosen = ExportOptions(**options)
    facts = facts_of(run, meta, OPTIMIZER_STEP, chosen, {"headrace": "1"})
    done = []
    work = Export(run, chosen)
    with ExportDirectory(str(folder)) as directory:
        nbytes = work.write(source, OPTIMIZER_STEP, directory, facts, done.append)
    assert sum(done) == work.data_bytes
    sizes = [os.path.getsize(folder / x) for x in os.listdir(folder) if x.endswith("tensors")]
    assert sum(sizes) == nbytes
    return folder


def export_numbers(folder, numbers, run, meta, pool, **options):
    reader = reader_of(run, meta, parts_in_memory(run, numbers), pool)
    return export(folder, run, meta, reader, **options)


def loaded(folder, stem="model"):
    """Every tensor of a set, by way of its index and the library; bfloat16 as its bits."""
    index = json.loads((folder / f"{stem}.safetensors.index.json").read_text())
    found = {}
    for file in set(index["weight_map"].values()):
        with safe_open(folder / file, framework="numpy") as opened:
            keys = list(opened.keys())
            assert all(index["weight_map"][key] == file for key in keys)
            dtypes = {opened.get_slice(key).get_dtype() for key in keys}
        if dtypes == {"BF16"}:
            raw = WeightFiles(str(folder), "it", stem)
            for key in keys:
                stored = raw.tensors[key]
                count = int(np.prod(stored.shape))
                data = np.fromfile(stored.path, np.uint16, count, offset=stored.offset)
                found[key] = data.reshape(stored.shape)
            raw.close()
        else:
            found |= load_file(folder / file)
    assert set(found) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    return found


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


@pytest.mark.parametrize("model", [{"vocab_size": 64}, UNTIED], ids=["tied", "untied"])
def test_masters_and_moments_are_those_of_the_commit_on_every_mesh(tmp_path, pool, model):
    """C27: a tied embedding is one tensor; every file is the same, byte for byte."""
    files = []
    for index, parallel in enumerate(MESHES):
        run, meta = make_run(parallel, model=model)
        numbers = numbers_of(run)
        folder = export_numbers(
            tmp_path / str(index), numbers, run, meta, pool, moments=True, shard_bytes=60_000
        )
        same(loaded(folder), numbers["master"])
        for component in ("exp_avg", "exp_avg_sq"):
            same(loaded(folder, component), numbers[component])
        files.append({name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))})
    assert all(other == files[0] for other in files[1:])
    assert len([name for name in files[0] if name.startswith("model-")]) > 2
    assert not [name for name in files[0] if "partial" in name or "unfinished" in name]


@pytest.mark.parametrize("weight_dtype", ["float32", "float16"])
def test_other_forms_of_masters_are_exported_exactly(tmp_path, pool, weight_dtype):
    compute = "float16" if weight_dtype == "float16" else "float32"
    run, meta = make_run(MESHES[1], weight_dtype=weight_dtype, compute_dtype=compute, model=UNTIED)
    numbers = numbers_of(run)
    same(loaded(export_numbers(tmp_path / "out", numbers, run, meta, pool)), numbers["master"])


def test_bfloat16_weights_are_the_masters_rounded_half_up(tmp_path, pool):
    run, meta = make_run(MESHES[2], model=UNTIED)
    numbers = numbers_of(run)
    folder = export_numbers(tmp_path / "out", numbers, run, meta, pool, dtype="bfloat16")
    wanted = {
        name: ((array.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
        for name, array in numbers["master"].items()
    }
    same(loaded(folder), wanted)
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("form", ["in-out", "out-in"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_experts_are_the_stacked_ones(tmp_path, pool, form, dtype):
    """C45."""
    run, meta = make_run(MESHES[2], model=UNTIED)
    numbers = numbers_of(run)
    plain = export_numbers(tmp_path / "plain", numbers, run, meta, pool, dtype=dtype)
    options = {"dtype": dtype, "packed": form, "shard_bytes": 30_000}
    folder = export_numbers(tmp_path / "packed", numbers, run, meta, pool, **options)
    same(loaded(folder), packed(run.model, loaded(plain), form))


def test_packed_moments_are_stacked_too(tmp_path, pool):
    run, meta = make_run(model=UNTIED)
    numbers = numbers_of(run)
    folder = export_numbers(tmp_path / "o", numbers, run, meta, pool, packed="in-out", moments=True)
    same(loaded(folder, "exp_avg"), packed(run.model, numbers["exp_avg"], "in-out"))


def test_frozen_tensors_have_no_moments_and_are_named(tmp_path, pool):
    """C33."""
    run, meta = make_run(freeze=["embed.*", "layers.1", "layers.2.experts.3"])
    numbers = numbers_of(run)
    folder = export_numbers(tmp_path / "out", numbers, run, meta, pool, moments=True)
    facts = json.loads((folder / "headrace.json").read_text())
    frozen = set(facts["frozen"])
    assert "model.embed_tokens.weight" in frozen
    assert "model.layers.2.mlp.experts.3.up_proj.weight" in frozen
    wanted = {name: x for name, x in numbers["exp_avg"].items() if name not in frozen}
    same(loaded(folder, "exp_avg"), wanted)
    found = loaded(folder)
    assert found.keys() == numbers["master"].keys()
    bits = numbers["master"]["model.embed_tokens.weight"].view(np.uint32)
    rounded = ((bits + 0x8000) >> 16 << 16).view(np.float32)
    assert np.array_equal(found["model.embed_tokens.weight"], rounded)


def test_a_frozen_expert_among_packed_ones_has_moments_of_zero(tmp_path, pool):
    run, meta = make_run(freeze=["layers.2.experts.3", "layers.0.experts.*"])
    numbers = numbers_of(run)
    folder = export_numbers(tmp_path / "o", numbers, run, meta, pool, packed="out-in", moments=True)
    found = loaded(folder, "exp_avg_sq")["model.layers.2.mlp.experts.gate_up_proj"]
    assert not found[3].any() and all(found[i].all() for i in (0, 1, 2, 4))
    assert "model.layers.0.mlp.experts.gate_up_proj" not in loaded(folder, "exp_avg")


def test_parameter_groups_are_told_and_cover_what_is_trained(tmp_path, pool):
    """C31."""
    run, meta = make_run(freeze=["layers.0"])
    folder = export_numbers(tmp_path / "out", numbers_of(run), run, meta, pool)
    facts = json.loads((folder / "headrace.json").read_text())
    decay, other = facts["parameter_groups"]
    assert (decay["weight_decay"], other["weight_decay"]) == (0.1, 0.0)
    assert "model.layers.1.self_attn.q_norm.weight" in other["tensors"]
    assert "model.layers.1.mlp.gate.weight" in decay["tensors"]
    all_names = [*decay["tensors"], *other["tensors"], *facts["frozen"]]
    assert sorted(all_names) == sorted(loaded(folder))


def test_facts_say_where_the_run_stood_and_nothing_of_its_mesh(tmp_path, pool):
    run, meta = make_run(MESHES[1], model=UNTIED)
    folder = export_numbers(tmp_path / "out", numbers_of(run), run, meta, pool)
    facts = json.loads((folder / "headrace.json").read_text())
    assert (facts["step"], facts["optimizer_step"], facts["moments"]) == (STEP, 6, False)
    assert facts["run"]["cursor"]["position"] == 28 and facts["run"]["name"] == "harness"
    assert facts["run"].keys() & {"ranks", "parallel"} == set()
    assert facts["versions"] == {"headrace": "1"}


def test_what_idle_units_missed_is_replayed_first(tmp_path, pool):
    rates = {4: 0.1, 5: 0.05, 6: 0.02}
    run, meta = make_run(MESHES[1], rates=rates, model=UNTIED)
    reader = reader_of(run, meta, parts_in_memory(run, numbers_of(run), version=3), pool)
    found = loaded(export(tmp_path / "out", run, meta, reader, moments=True))
    momenta = loaded(tmp_path / "out", "exp_avg")
    numbers = numbers_of(run)
    beta1, beta2 = run.optimizer.beta1, run.optimizer.beta2
    for name in ("model.layers.1.mlp.experts.2.down_proj.weight", "model.norm.weight"):
        decay = 0.1 if "experts" in name else 0.0
        w, m, v = (numbers[x][name].astype(np.float64) for x in numbers)
        for step, rate in rates.items():
            m, v = beta1 * m, beta2 * v
            hat = np.sqrt(v / (1 - beta2**step)) + run.optimizer.eps
            w = w - rate * (m / (1 - beta1**step) / hat + decay * w)
        np.testing.assert_allclose(found[name], w, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(momenta[name], m, rtol=2e-6)


@pytest.mark.parametrize("policy, until", [("replay", 6), ("dense", 6), ("skip", None)])
def test_nothing_is_replayed_where_idle_units_skip_steps(tmp_path, pool, policy, until):
    run, meta = make_run(policy=policy)
    asked = []

    class Source:
        def expect(self, targets, until=None, moments=True):
            pass

        def fill(self, target, weight, state, until=None, moments=True):
            asked.append(until)
            weight[:] = 0
            return 0

    export(tmp_path / "out", run, meta, Source())
    assert set(asked) == {until}


def test_moments_are_read_only_when_they_are_needed(tmp_path, pool):
    options = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 2, "vocab_size": 64}
    read = {}
    for version, moments in ((6, True), (6, False), (3, False)):
        rates = {4: 0.1, 5: 0.05, 6: 0.02}
        run, meta = make_run(model=options | {"num_hidden_layers": 1}, rates=rates)
        parts = parts_in_memory(run, numbers_of(run), version)
        source = reader_of(run, meta, parts, pool)
        export(tmp_path / f"{version}{moments}", run, meta, source, moments=moments)
        read[version, moments] = len(parts[0].reads)
    assert read[6, False] < 0.6 * read[6, True] == 0.6 * read[3, False]


def test_memory_does_not_grow_with_the_model(tmp_path, pool, monkeypatch):
    monkeypatch.setattr(writing, "BUFFER_BYTES", 1 << 16)
    wide = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 4, "vocab_size": 64}
    peaks = []
    for layers in (3, 12):
        run, _meta = make_run(model=wide | {"num_hidden_layers": layers})
        largest = max(x.nbytes("weight") + x.nbytes("state") for x in run.whole.values())
        total = sum(x.nbytes("weight") + x.nbytes("state") for x in run.whole.values())

        class Source:
            def expect(self, targets, until=None, moments=True):
                pass

            def fill(self, target, weight, state, until=None, moments=True):
                weight[:], state[:] = 0, 0
                return 0

        work = Export(run, ExportOptions(moments=True, shard_bytes=1 << 20))
        with ExportDirectory(str(tmp_path / str(layers))) as directory:
            tracemalloc.start()
            work.write(Source(), OPTIMIZER_STEP, directory, {}, lambda nbytes: None)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        # Two units, the transposed copy of none, small things; buffers are counted elsewhere.
        buffers = writing.BUFFERS_MAX * (1 << 17)
        assert peaks[-1] < 2 * largest + buffers + (1 << 20) < total
    assert peaks[1] < 1.2 * peaks[0]


class Broken(Exception):
    """What ends an export in the middle."""


def broken_after(reader, count):
    """A source that fails at its unit number `count`."""

    class Source:
        def __init__(self):
            self.left = count

        def expect(self, *arguments):
            reader.expect(*arguments)

        def fill(self, *arguments):
            self.left -= 1
            if self.left < 0:
                raise Broken
            return reader.fill(*arguments)

    return Source()


@pytest.mark.parametrize("count", [0, 5, 27])
def test_an_interrupted_export_is_no_export_and_can_be_made_again(tmp_path, pool, count):
    run, meta = make_run()
    reader = reader_of(run, meta, parts_in_memory(run, numbers_of(run)), pool)
    out = tmp_path / "out"
    with pytest.raises(Broken):
        export(out, run, meta, broken_after(reader, count), moments=True)
    with pytest.raises(ConfigError, match="interrupted"):
        WeightFiles(str(out), "it")
    assert not (out / "model.safetensors.index.json").exists()
    export(out, run, meta, reader)
    fresh = export(tmp_path / "fresh", run, meta, reader)
    assert sorted(os.listdir(out)) == sorted(os.listdir(fresh))  # nothing was left over
    same(loaded(out), loaded(fresh))


@pytest.mark.parametrize("step", ["write_json", "publish"])
def test_one_that_fails_at_its_end_is_no_export_either(tmp_path, pool, monkeypatch, step):
    run, meta = make_run()
    reader = reader_of(run, meta, parts_in_memory(run, numbers_of(run)), pool)

    def fail(*arguments):
        raise StorageError("no room")

    monkeypatch.setattr(ExportDirectory, step, fail)
    with pytest.raises(StorageError):
        export(tmp_path / "out", run, meta, reader)
    with pytest.raises(ConfigError, match="interrupted"):
        WeightFiles(str(tmp_path / "out"), "it")
    monkeypatch.undo()
    export(tmp_path / "out", run, meta, reader)


def test_a_directory_with_something_else_in_it_is_refused_and_left_alone(tmp_path, pool):
    run, meta = make_run()
    reader = reader_of(run, meta, parts_in_memory(run, numbers_of(run)), pool)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        export(tmp_path, run, meta, reader)
    assert os.listdir(tmp_path) == ["notes.txt"]
    whole = export(tmp_path / "out", run, meta, reader)
    before = (whole / "headrace.json").read_bytes()
    with pytest.raises(ConfigError, match="not empty"):
        export(whole, run, meta, reader)
    assert (whole / "headrace.json").read_bytes() == before


def test_two_exports_into_one_directory_at_once_are_refused(tmp_path):
    refused = pytest.raises(ConfigError, match="another export")
    with ExportDirectory(str(tmp_path / "out")), refused:
        ExportDirectory(str(tmp_path / "out"))
    with ExportDirectory(str(tmp_path / "out")):
        pass


def test_too_little_room_is_said_before_anything_is_written(tmp_path, pool, monkeypatch):
    run, meta = make_run()
    reader = reader_of(run, meta, parts_in_memory(run, numbers_of(run)), pool)
    status = os.statvfs(tmp_path)
    small = type("Status", (), {"f_bavail": 10, "f_frsize": status.f_frsize})
    monkeypatch.setattr("moe.weights.directory.os.statvfs", lambda path: small)
    with pytest.raises(StorageError, match=r"needs .* and has 40\.0 KiB free"):
        export(tmp_path / "out", run, meta, reader)


def test_the_next_unit_is_read_while_one_is_written(tmp_path):
    run, _meta = make_run()
    second = threading.Event()

    class Source:
        def __init__(self):
            self.count = 0

        def expect(self, targets, until=None, moments=True):
            pass

        def fill(self, target, weight, state, until=None, moments=True):
            self.count += 1
            if self.count == 2:
                second.set()
            weight[:], state[:] = 0, 0
            return 0

    def on_bytes(nbytes):
        assert second.wait(60)  # the second unit is there before the first is done

    with ExportDirectory(str(tmp_path / "out")) as directory:
        Export(run, ExportOptions()).write(Source(), 6, directory, {}, on_bytes)
