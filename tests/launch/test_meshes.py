"""Every mesh trains the same model as one rank does: real ranks under `mpirun`.

`make test` runs a mesh of each kind, one of 2 and one of 4 ranks in two ways; `make test-parallel`
every mesh of 2, 4 and 8 ranks, and more ways.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch.mesh_ranks import Case, to_json
from tests.mpirun import run_ranks

pytest.importorskip("mpi4py", reason="the extra headrace[mpi] is not installed")

BFLOAT16 = {"weight_dtype": "bfloat16", "grad_dtype": "bfloat16"}
SHORT = {"steps": 6, "sequences": 4}
BFLOAT16_CASE = {"train": BFLOAT16, "rate": 1e-3}
Results = dict[str, dict[str, Any]]


def mesh(
    name: str = "", pp: int = 1, dp: int = 1, op: int = 1, ep: int = 1, **options: Any
) -> Case:
    """A case; `options` are further keys of `parallel` or fields of `Case`."""
    fields = {key: options.pop(key) for key in list(options) if key in Case.__dataclass_fields__}
    parallel = {
        "pipeline_stage": pp,
        "data_parallel": dp,
        "model_parallel": op,
        "expert_parallel": ep,
        **options,
    }
    return Case(name or f"pp{pp}-dp{dp}-op{op}-ep{ep}", parallel, **fields)


def every_mesh(ranks: int) -> list[Case]:
    """Every mesh of so many ranks over data, operator, expert and pipeline parallelism."""
    powers = [1, 2, 4, 8]
    return [
        mesh(pp=pp, dp=dp, op=op, ep=ep)
        for pp in powers
        for dp in powers
        for op in powers
        for ep in powers
        if pp * dp * op == ranks and dp % ep == 0 and pp <= 4
    ]


def train(ranks: int, cases: list[Case], path: Path, seconds_max: float) -> Results:
    path.mkdir(parents=True)
    (path / "cases.json").write_text(to_json(cases))
    result = run_ranks(
        ranks,
        "tests.launch.mesh_ranks",
        str(path / "cases.json"),
        str(path),
        seconds_max=seconds_max,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found = {}
    for case in cases:
        found[case.name] = json.loads((path / f"{case.name}.json").read_text())
        with np.load(path / f"{case.name}.npz") as arrays:
            found[case.name]["gradients"] = dict(arrays)
    return found


KINDS = {
    "float32": Case("float32"),
    "bfloat16": Case("bfloat16", **BFLOAT16_CASE),
    "untied": Case("untied", model={"tie_word_embeddings": False}),
}


def one_rank(path: Path, **options: Any) -> Results:
    """One rank, in the arithmetic of each kind of case."""
    return train(1, [replace(case, **options) for case in KINDS.values()], path, 900)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return one_rank(tmp_path_factory.mktemp("alone") / "run", **SHORT)


@pytest.fixture(scope="module")
def alone_20_steps(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return one_rank(tmp_path_factory.mktemp("alone20") / "run")


def largest_difference(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Of the gradients of step 1, relative to the largest element of each tensor."""
    assert whole(found).keys() == whole(wanted).keys()
    return max(
        float(np.max(np.abs(values - whole(wanted)[name])) / np.max(np.abs(whole(wanted)[name])))
        for name, values in whole(found).items()
    )


def whole(results: dict[str, Any]) -> dict[str, np.ndarray]:
    """Whole tensors from blocks of rows, whatever the mesh cut them into."""
    blocks: dict[str, list[tuple[int, np.ndarray]]] = {}
    for key, values in results["gradients"].items():
        name, _, row0 = key.rpartition(":")
        blocks.setdefault(name, []).append((int(row0), values))
    return {
        name: np.concatenate([values for _, values in sorted(rows, key=lambda row: row[0])])
        for name, rows in blocks.items()
    }


def check(found: dict[str, Any], wanted: dict[str, Any], later: float = 1e-5) -> None:
    """Step 1 within 1e-5, all losses within `later`; relative."""
    losses, expected = found["losses"], wanted["losses"]
    np.testing.assert_allclose(losses[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(losses, expected, rtol=later)
    np.testing.assert_allclose(found["norms"][0], wanted["norms"][0], rtol=1e-5)
    # A run used to count what idled on one rank only, another number on every mesh.
    assert found["idle"][0] == wanted["idle"][0] > 0
    np.testing.assert_allclose(found["evals"], wanted["evals"], rtol=later)
    if later == 1e-5:
        assert largest_difference(found, wanted) <= 1e-5


def check_all(found: Results, cases: list[Case], alone: Results) -> None:
    """Each case beside one rank in the same arithmetic."""
    for case in cases:
        kind = case.name.rpartition("-")[2]
        later = 1e-3 if kind == "bfloat16" else 1e-5
        check(found[case.name], alone.get(kind, alone["float32"]), later)


ONE_F_ONE_B = {"pipeline_schedule": "1f1b", "train": {"micro_batch_order": "batch_major"}}
TWO = [
    mesh(dp=2, ep=2),
    mesh("sequence-parallel", op=2, use_seq_parallel=True),
    mesh("looped", pp=2, pp_interleave_num=2),
]
FOUR = [
    mesh("dp2-op2-ep2-bfloat16", dp=2, op=2, ep=2, **BFLOAT16_CASE),
    mesh("1f1b-untied", pp=2, op=2, model={"tie_word_embeddings": False}, **ONE_F_ONE_B),
]
SPECIAL = [
    mesh("looped", pp=2, dp=2, pp_interleave_num=2),
    mesh("1f1b", pp=4, **ONE_F_ONE_B),
    mesh("1f1b-wide", pp=2, dp=2, ep=2, **ONE_F_ONE_B),
    mesh("sequence-parallel", dp=2, op=2, use_seq_parallel=True),
    mesh("sequence-parallel-experts", dp=2, op=2, ep=2, use_seq_parallel=True),
    mesh("replicas", dp=4, optimizer_parallel=False),
    mesh("uneven", pp=2, dp=2, ep=2, pipeline_layers=[1, 3]),
    mesh("pp2-dp2-untied", pp=2, dp=2, model={"tie_word_embeddings": False}),
    mesh("op2-dp2-untied", op=2, dp=2, model={"tie_word_embeddings": False}),
]


def check_bits(found: dict[str, Any], wanted: dict[str, Any], name: str) -> None:
    for key in ("losses", "norms", "evals", "digest", "idle"):
        assert found[key] == wanted[key], (name, key)


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)])
def test_a_mesh_trains_the_model_of_one_rank(tmp_path, alone, ranks, cases):
    """And the first of them has the same bits when everything about memory is otherwise."""
    short = [replace(case, **SHORT) for case in cases]
    first = short[0]
    otherwise = replace(
        first,
        name="otherwise",
        smallest=True,
        train=first.train | {"recompute": "full"},
        offload={"pipeline": "sync", "idle_expert_policy": "dense"},
    )
    found = train(ranks, [*short, otherwise], tmp_path / "run", 900)
    check_all(found, short, alone)
    check_bits(found["otherwise"], found[first.name], first.name)


def same_bits(path: Path, ranks: int, case: Case) -> None:
    """Promise 1: the same mesh again, with the least budgets, and otherwise."""
    cases = [
        case,
        replace(case, name="again"),
        replace(case, name="least", smallest=True),
        replace(case, name="sync", smallest=True, offload={"pipeline": "sync"}),
        replace(case, name="recompute", train=case.train | {"recompute": "full"}),
        replace(case, name="dense", offload={"idle_expert_policy": "dense"}),
    ]
    found = train(ranks, cases, path, 1800)
    for name, results in found.items():
        check_bits(results, found[case.name], f"{case.name}: {name}")


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [mesh(dp=2, ep=2, train=BFLOAT16), mesh(op=2, train=BFLOAT16)],
    ids=lambda x: x.name,
)
def test_two_ranks_give_the_same_bits_again_and_under_any_budget(tmp_path, case):
    same_bits(tmp_path / "run", 2, replace(case, steps=3, sequences=4, evaluate=False))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        mesh(dp=2, op=2, ep=2, train=BFLOAT16),
        mesh(pp=2, dp=2, train=BFLOAT16),
        mesh("speculative", dp=4, ep=2, optimizer={"update_schedule": "speculative"}),
    ],
    ids=lambda x: x.name,
)
def test_four_ranks_give_the_same_bits_again_and_under_any_budget(tmp_path, case):
    same_bits(tmp_path / "run", 4, replace(case, steps=6))


@pytest.mark.long
def test_every_way_to_train_on_a_mesh_gives_the_model_of_one_rank(tmp_path, alone_20_steps):
    check_all(train(4, SPECIAL, tmp_path / "run", 3600), SPECIAL, alone_20_steps)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_mesh_trains_the_model_of_one_rank(tmp_path, alone_20_steps, ranks):
    cases = every_mesh(ranks)
    half = [
        replace(case, name=f"{case.name}-bfloat16", **BFLOAT16_CASE)
        for case in cases[:: ranks // 2]
    ]
    found = train(ranks, [*cases, *half], tmp_path / "run", 7200)
    check_all(found, [*cases, *half], alone_20_steps)
