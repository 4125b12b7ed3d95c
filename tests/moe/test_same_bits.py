"""Promise 1 on the real model: tiers, window, recomputation, order, timing change no bit.

Every run is compared with one in which nothing has to move, by the hexadecimal fp32 loss of each
step, the gradient norm and the digest of all fp32 masters.
"""

from __future__ import annotations

import pytest

from offload.testing import RandomDelays
from tests.moe.harness import Trained, make_config, run, smallest

# Budgets: what everything has to move under tells more than what nothing has to.
TIGHT_OR_NOT = [True, pytest.param(False, marks=pytest.mark.long)]


def same(found: Trained, wanted: Trained) -> bool:
    return (found.losses, found.norms, found.digest) == (wanted.losses, wanted.norms, wanted.digest)


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory) -> Trained:
    """(a) Budgets so large that nothing moves."""
    found = run(make_config(tmp_path_factory.mktemp("memory")))
    assert found.peaks["nvme"] == 0
    assert found.idle > 5, "the routing must leave experts idle, or the policies are not tested"
    return found


def between(path, share: float, **options):
    low = smallest(path, **options)
    return make_config(
        path,
        device=low.offload.device.capacity + int(share * 100_000),
        host=low.offload.host.capacity + int(share * 1_000_000),
        **options,
    )


@pytest.mark.parametrize("share", [0.2, pytest.param(0.5, marks=pytest.mark.long)])
def test_default_like_budgets(tmp_path, in_memory, share):
    """(b) All three tiers at work, with some room for caches and read-ahead."""
    config = between(tmp_path, share)
    found = run(config, verify_leases=True)
    assert found.peaks["nvme"] > 0
    assert same(found, in_memory)


def test_smallest_budgets(tmp_path, in_memory):
    """(c) The least the plan accepts, gradients spilled."""
    config = smallest(tmp_path)
    found = run(config, verify_leases=True)
    assert same(found, in_memory)
    for tier, peak in found.peaks.items():
        assert peak <= getattr(config.offload, tier).capacity


@pytest.mark.parametrize("tight", TIGHT_OR_NOT)
def test_window_zero(tmp_path, in_memory, tight):
    """(d) `pipeline: sync` is the same loop."""
    make = smallest if tight else make_config
    assert same(run(make(tmp_path, pipeline="sync")), in_memory)


@pytest.mark.parametrize(
    ("recompute", "every"),
    [
        ("none", 1),
        pytest.param("full", 1, marks=pytest.mark.long),
        ("full", 2),
        pytest.param("full", 3, marks=pytest.mark.long),
    ],
)
def test_recompute_policies(tmp_path, in_memory, recompute, every):
    """(e) Recomputation repeats the same functions."""
    options = {"train": {"recompute": recompute, "recompute_every": every}}
    assert same(run(smallest(tmp_path, **options)), in_memory)


@pytest.mark.parametrize("tight", TIGHT_OR_NOT)
def test_idle_experts_that_are_not_replayed(tmp_path, in_memory, tight):
    """(f) Experts idle here, and replay, which all others do, catches up to the bits of dense."""
    make = smallest if tight else make_config
    assert make_config(tmp_path).offload.idle_expert_policy == "replay"
    assert same(run(make(tmp_path, idle_expert_policy="dense")), in_memory)


@pytest.mark.parametrize("tight", TIGHT_OR_NOT)
def test_batch_major_order(tmp_path, in_memory, tight):
    """(g) Micro-batches one after another, gradients kept in fp32 between them."""
    make = smallest if tight else make_config
    options = {"train": {"micro_batch_order": "batch_major"}}
    assert same(run(make(tmp_path, **options)), in_memory)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_random_delays_in_every_lane(tmp_path, in_memory, seed):
    """(h), C25: late transfers, shadow checksums between lease and release."""
    config = between(tmp_path, 0.4)
    assert same(run(config, delay=RandomDelays(seed, 0.0005), verify_leases=True), in_memory)


def test_io_settings_and_window_sizes(tmp_path, in_memory):
    for number, (window, workers) in enumerate([(4096, 1), (1 << 20, 8)]):
        options = {"prefetch_buffer_size": window, "io_workers": workers}
        config = between(tmp_path / str(number), 0.3, **options)
        assert same(run(config), in_memory)


@pytest.mark.parametrize("tie", [False, pytest.param(True, marks=pytest.mark.long)])
def test_tied_and_untied_heads_survive_eviction(tmp_path, tie):
    """C27 for evict and reload: one owner, both gradient halves, still one tensor."""
    options = {"model": {"tie_word_embeddings": tie}}
    wide = run(make_config(tmp_path / "wide", **options))
    assert same(run(smallest(tmp_path / "tight", **options)), wide)


def test_evaluation_between_steps(tmp_path, in_memory):
    """C30: evaluation passes leave schedule, ledger and weights alone."""
    tight = run(smallest(tmp_path / "tight"), evaluate=True)
    assert same(tight, in_memory)
    assert run(make_config(tmp_path / "again"), evaluate=True).evals == tight.evals


@pytest.mark.parametrize(
    "form",
    [
        {"weight_dtype": "float32", "grad_dtype": "float32"},
        {"weight_dtype": "float16", "compute_dtype": "float16", "grad_dtype": "float32"},
    ],
    ids=["float32", "float16"],
)
def test_other_formats(tmp_path, form):
    options = {"train": form}
    wide = run(make_config(tmp_path / "wide", **options))
    assert same(run(smallest(tmp_path / "tight", **options)), wide)
