"""32 real ranks on whatever cores there are: `make test-32` (10 minutes, 16 GiB of memory)."""

from __future__ import annotations

import pytest

from tests.launch.mesh_ranks import Case
from tests.launch.test_meshes import check, mesh, train

pytest.importorskip("mpi4py", reason="the extra headrace[mpi] is not installed")

STEPS = 5


@pytest.mark.long
def test_32_ranks_train_the_model_of_one_rank(tmp_path):
    """The target cluster's shape: operator groups in a machine of four, experts over all data."""
    cases = [
        mesh("wide", dp=8, op=4, ep=8, steps=STEPS),
        mesh("deep", pp=2, dp=4, op=4, steps=STEPS),
    ]
    alone = train(1, [Case("alone", steps=STEPS)], tmp_path / "alone", 600)["alone"]
    found = train(32, cases, tmp_path / "ranks", 3600)
    for case in cases:
        check(found[case.name], alone)
