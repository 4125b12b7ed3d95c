"""Saved arrays of a rank: every index is in range, none is overwritten before it is used."""

from __future__ import annotations

import pytest

from moe.memory import activation_specs
from moe.mesh import Mesh
from moe.places import Places
from moe.schedule import chunk_micro_batches, segments, training_passes
from tests.moe.pipeline_cases import MESHES, model_of, train_of

FORMS = (
    {"recompute": "none"},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"recompute": "full", "recompute_every": 2},
    {"recompute": "full", "recompute_every": 5},
)


@pytest.mark.parametrize("config", MESHES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_what_is_saved_is_not_overwritten_before_it_is_used(config, form):
    """Walk the step: each index is in range, and holds what its reader expects."""
    model, train = model_of(), train_of(config, gradient_accumulation_steps=5, **form)
    full = train.recompute == "full"
    for share in (Mesh(config).share(model, rank) for rank in range(config.num_ranks)):
        places = Places(train, share)
        copies = {spec.name: spec.copies for spec in activation_specs(model, train, share)}
        micro = chunk_micro_batches(train)
        held: dict[tuple[str, int], tuple[int, int, int]] = {}

        def place(name: str, layer: int, m: int, chunk: int) -> tuple[str, int]:
            if name == "stream":
                found = places.stream_in(layer, m, chunk)  # noqa: B023
            else:
                found = name, places.slot(layer, m, chunk)  # noqa: B023
            assert 0 <= found[1] < copies[found[0]]  # noqa: B023
            return found

        def save(layer: int, chunk: int, *names: str) -> None:
            for name in names:
                for m in range(micro):  # noqa: B023
                    held[place(name, layer, m, chunk)] = (layer, chunk, m)  # noqa: B023

        def check(layer: int, chunk: int, *names: str) -> None:
            for name in names:
                for m in range(micro):  # noqa: B023
                    assert held[place(name, layer, m, chunk)] == (layer, chunk, m)  # noqa: B023

        for step in training_passes(train, share):
            if step.kind == "forward":
                for layer in share.layers:
                    save(layer, step.chunk, "stream", "xn")
                continue
            for segment in reversed(segments(train, share)):
                for layer in segment if full else ():
                    if layer != segment.start:
                        save(layer, step.chunk, "stream")
                    check(layer, step.chunk, "stream")
                    save(layer, step.chunk, "xn")
                for layer in reversed(segment):
                    check(layer, step.chunk, "stream", "xn")
