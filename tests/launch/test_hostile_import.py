"""`headrace checkpoint import` of directories that somebody has made to harm: all are refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe.weights.directory import ExportDirectory
from moe.weights.initial import check_initial_weights, initial_weights
from ops.errors import ConfigError
from tests.launch.test_export_command import MODEL, invoke
from tests.moe.harness import make_config
from tests.moe.weights.saved_weights import commit_to, make_run, numbers_of
from tests.moe.weights.weight_files import PLAIN, random_weights, save


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An export with moments of a commit of one rank."""
    path = tmp_path_factory.mktemp("exported")
    run, meta = make_run(model=MODEL)
    commit_to(path / "store", run, meta, numbers_of(run))
    invoke("export", path / "store", "--out", path / "out", "--moments")
    return path / "out"


@pytest.fixture
def copied(exported, tmp_path):
    """A copy of it that a test may spoil."""
    return shutil.copytree(exported, tmp_path / "copied")


def refused(folder, why):
    """The import is refused, in one sentence and at once, and makes no checkpoint."""
    native = folder.parent / "native"
    before = time.process_time()
    with pytest.raises(ConfigError, match=why) as caught:
        invoke("import", folder, "--out", native)
    assert time.process_time() - before < 5
    assert len(str(caught.value)) < 1000
    with pytest.raises(ConfigError):
        invoke("list", native)


def change_facts(folder, change):
    path = folder / "headrace.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))


@pytest.mark.parametrize(
    "model",
    [
        {"vocab_size": 10**12},
        {"vocab_size": 10**8, "vocab_slice_rows": 1},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**5},
        {"num_experts": 10**6},
        {"vocab_size": 10**99, "hidden_size": 10**99, "moe_intermediate_size": 10**99},
    ],
    ids=str,
)
def test_a_model_that_the_files_cannot_hold_is_refused_before_it_is_laid_out(copied, model):
    """The layouts of all units were made first: minutes, and memory without end."""
    change_facts(copied, lambda x: x["run"]["config"]["model"].update(model))
    refused(
        copied,
        r"is said to hold a model of|does not hold this model|"
        r"is not possible: allowed is a whole number|units; allowed are at most",
    )


def test_patterns_without_number_are_refused(copied):
    many = [f"layers.{number}" for number in range(400_000)]
    change_facts(copied, lambda x: x["run"]["config"]["train"].update(freeze=many))
    with pytest.raises(ConfigError, match="400,000 patterns, too many"):
        invoke("import", copied, "--out", copied.parent / "native")


RUN = ["run"]
CONFIG = ["run", "config"]


@pytest.mark.parametrize(
    "where, value, why",
    [
        (["optimizer_step"], 2**63, "optimizer_step = 9223372036854775808 is no whole number"),
        (["optimizer_step"], 1000, "optimizer_step = 1000 is more than step = 7"),
        (["step"], 10**30, "step = 10{30} is no whole number"),
        (["step"], True, "step = True is no whole number"),
        (["step"], 7.0, "step = 7.0 is no whole number"),
        (["moments"], "yes", "moments"),
        (["loss_scale"], {}, "loss_scale.scale is missing"),
        (["loss_scale", "scale"], "big", "loss_scale.scale = 'big' is no positive number"),
        (["loss_scale", "scale"], 0, "no positive number"),
        (["loss_scale", "good_steps"], -1, "good_steps = -1 is no whole number"),
        (["loss_scale", "good_steps"], 0.5, "good_steps = 0.5 is no whole number"),
        ([*CONFIG, "offload", "idle_expert_policy"], ["replay"], "allowed are replay, dense, skip"),
        ([*CONFIG, "offload", "idle_expert_policy"], "later", "allowed are replay, dense, skip"),
        ([*CONFIG, "offload", "codec"], "lz4", "offload.codec is not known"),
        ([*CONFIG, "data", "seed"], -1, "data.seed is -1"),
        ([*CONFIG, "data", "speed"], -1, "speed"),
        ([*CONFIG, "train", "freeze"], "norm", "freeze is no list"),
        ([*CONFIG, "runtime", "threads"], [2], "threads"),
        ([*CONFIG, "model"], [], "model is no mapping"),
        ([*RUN, "ranks"], 4, "run.ranks is not known to this version"),
        ([*RUN, "step"], 8, "run.step = 8 is not step = 7"),
        ([*RUN, "digests"], None, "run.digests is no mapping"),
        ([*RUN, "name"], 5, "run.name is no text"),
        ([*RUN, "cursor", "position"], 2**64, "cursor.position"),
        ([*RUN, "cursor", "stream"], 5, "cursor.stream"),
        ([*RUN, "cursor"], None, "run.cursor is no mapping"),
        (["frozen"], "abc", "frozen is no list"),
        (["frozen"], [[]], "frozen is no list"),
        (["weights", "dtype"], "int8", "weights.dtype = 'int8'"),
        (["extra"], 1, "extra is not known to this version"),
    ],
    ids=str,
)
def test_facts_that_no_run_could_go_on_from_are_refused(copied, where, value, why):
    """They became a commit, and the import said that it had succeeded."""

    def change(facts):
        for name in where[:-1]:
            facts = facts[name]
        facts[where[-1]] = value

    change_facts(copied, change)
    refused(copied, why)


@pytest.mark.parametrize(
    "old, new, why",
    [
        ('"step": 7', '"step": 8, "step": 7', "the key 'step' appears twice"),
        ('"position": 28', '"position": 28, "position": 2', "'position' appears twice"),
        ('"scale": 1.0', '"scale": NaN', "NaN is no number"),
        ('"scale": 1.0', '"scale": 1e999', "1e999 is no finite number"),
        ('"threads": 2', f'"threads": {"9" * 5000}', "has 5000 digits"),
    ],
)
def test_json_that_others_read_otherwise_is_refused(copied, old, new, why):
    path = copied / "headrace.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    refused(copied, why)


def spoil(folder, stem, name, index, value):
    """Another number in a tensor."""
    for path in folder.glob(f"{stem}-0*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name][index] = value
            save_file(tensors, path, {"format": "pt"})
            return
    raise AssertionError(name)


UP = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    "stem, name, index, value, why",
    [
        ("exp_avg_sq", UP, (3, 5), -1e-9, r"has at \[3, 5\] the value -1e-09, which is negative"),
        ("exp_avg_sq", "model.norm.weight", (9,), -2.0, r"has at \[9\] the value -2.0,"),
        ("exp_avg_sq", UP, (3, 5), np.inf, r"not finite numbers, the first at \[3, 5\]"),
        ("exp_avg", UP, (0, 7), np.nan, r"not finite numbers, the first at \[0, 7\]"),
        ("model", UP, (3, 5), 3.4e38, r"at \[3, 5\] the value 3\.4.*e\+38, which is infinite in"),
        ("model", UP, (3, 5), -3.4e38, r"at \[3, 5\] the value -3\.4.*e\+38, which is infinite in"),
        ("model", "lm_head.weight", (61, 31), 3.4e38, r"lm_head\.weight has at \[61, 31\]"),
    ],
)
def test_numbers_that_training_cannot_have_are_refused_by_place(
    copied, stem, name, index, value, why
):
    """The last row of a vocabulary is in another unit than the first."""
    spoil(copied, stem, name, index, value)
    refused(copied, f"{name}.*{why}" if not why.startswith("lm_head") else why)


def test_the_largest_numbers_that_stay_finite_are_taken(copied):
    largest = np.nextafter(np.uint32(0x7F7F8000).view(np.float32), np.float32(0))
    spoil(copied, "model", UP, (3, 5), largest)
    spoil(copied, "model", "model.norm.weight", (3,), 3.4e38)  # kept in fp32
    spoil(copied, "exp_avg_sq", UP, (3, 5), 0.0)
    invoke("import", copied, "--out", copied.parent / "native")


@pytest.mark.parametrize("dtype, value", [("bfloat16", 3.4e38), ("float16", 65520.0)])
def test_a_start_from_weights_that_become_infinite_is_refused_too(tmp_path, dtype, value):
    config = make_config(tmp_path, model=PLAIN)
    weights = random_weights(config.model)
    weights[UP][2, 1] = value
    save(tmp_path / "model.safetensors", weights)
    check_initial_weights(str(tmp_path), config.model)  # reads headers only
    run, _ = make_run(model=PLAIN)
    place = next(p for x in run.whole.values() for p in x.places if p.spec.name == UP)
    with initial_weights(str(tmp_path), config.model, weight_dtype="float32") as source:
        source.values(place.spec)
    wanted = pytest.raises(ConfigError, match=r"up_proj\.weight has at \[2, 1\].*infinite")
    with initial_weights(str(tmp_path), config.model, weight_dtype=dtype) as source, wanted:
        source.values(place.spec)


@pytest.mark.parametrize(
    "name",
    [
        "headrace.json",
        "model.safetensors.index.json",
        "model-00001-of-00001.safetensors",
        "exp_avg.safetensors.index.json",
        "exp_avg-00001-of-00001.safetensors",
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "zero", "directory"])
def test_what_is_no_plain_file_is_refused_without_waiting_or_reading(copied, name, kind):
    """A pipe kept the import waiting for ever; /dev/zero filled the memory."""
    os.unlink(copied / name)
    if kind == "pipe":
        os.mkfifo(copied / name)
    elif kind == "zero":
        os.symlink("/dev/zero", copied / name)
    else:
        (copied / name).mkdir()
    with limited(seconds=20):
        refused(copied, "not a plain file")


@contextmanager
def limited(seconds):
    """Ends a system call that waits."""

    def end(*arguments):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_facts_without_end_do_not_fill_the_memory(copied):
    """In a process of its own, whose memory is limited."""
    os.unlink(copied / "headrace.json")
    os.symlink("/dev/zero", copied / "headrace.json")
    command = [sys.executable, "-m", "launch", "checkpoint", "import", copied, "--out", "native"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -v 4000000; exec "$@"', "bash", *command],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "headrace.json: EINVAL: not a plain file" in done.stderr


def test_links_to_plain_files_are_followed(exported, tmp_path):
    """Caches of Hugging Face are made of them."""
    for name in os.listdir(exported):
        (tmp_path / "links").mkdir(exist_ok=True)
        os.symlink(exported / name, tmp_path / "links" / name)
    invoke("import", tmp_path / "links", "--out", tmp_path / "native")


@pytest.mark.parametrize("text", [None, "", '{"format": "headrace'])
def test_an_interrupted_export_is_called_so(tmp_path, text):
    """It was said to hold no moments, or no JSON, depending on where it was interrupted."""
    with ExportDirectory(str(tmp_path / "out")):
        if text is not None:
            (tmp_path / "out/headrace.json").write_text(text)
    refused(tmp_path / "out", "import DIR = .*: it is an export that was interrupted")


def test_facts_larger_than_any_are_not_read(copied, monkeypatch):
    monkeypatch.setattr("moe.weights.facts._FACTS_BYTES_MAX", 1000)
    refused(copied, r"headrace\.json: EFBIG: larger than 1000 bytes")
