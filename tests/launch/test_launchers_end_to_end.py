"""The real command on real ranks, under both launchers: the same model, the same losses.

mpirun's ranks talk through mpi4py, msrun's through MindSpore's own collectives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch.helpers import small_text

pytest.importorskip("mpi4py", reason="the extra headrace[mpi] is not installed")

ROOT = Path(__file__).parents[2]
CONFIG = """
model:
  vocab_size: 260
  hidden_size: 32
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 8
  moe_intermediate_size: 32
  num_experts: 4
  num_experts_per_tok: 2
train:
  steps: 20
  seq_len: 32
  weight_dtype: float32
  grad_dtype: float32
  gradient_accumulation_steps: 2
  eval_batches: 2
optimizer:
  learning_rate: 1e-2
  warmup_steps: 3
data:
  source: {source}
offload:
  device: {capacity: 64MiB}
  host: {capacity: 64MiB}
  nvme: {capacity: 64MiB, path: store}
  prefetch_buffer_size: 1MiB
parallel:
  data_parallel: 2
  expert_parallel: 2
"""


def launch(folder: Path, launcher: str) -> dict[str, Any]:
    """Train five steps on two ranks; the report, with the losses."""
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG.replace("{source}", str(small_text())))
    command = [sys.executable, "-m", "launch", "launch", "-n", "2", "--launcher", launcher]
    command += ["train", "config.yaml", "--steps", "5", "--run-dir", "run"]
    binaries = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    lines = (folder / "run" / "steps.jsonl").read_text().splitlines()
    report["losses"] = [json.loads(line)["loss"] for line in lines]
    report["shown"] = done.stdout
    return report


def test_both_launchers_train_the_same_model(tmp_path: Path) -> None:
    mpi, msrun = (launch(tmp_path / name, name) for name in ("mpirun", "msrun"))
    assert len(mpi["losses"]) == 5 and mpi["losses"][-1] < mpi["losses"][0]
    np.testing.assert_allclose(msrun["losses"], mpi["losses"], rtol=1e-5)
    np.testing.assert_allclose(msrun["eval"][-1]["loss"], mpi["eval"][-1]["loss"], rtol=1e-5)
    for report in (mpi, msrun):
        assert "mesh: 2 ranks" in report["shown"]
        assert len(report["ranks"]) == 2 and report["comm"]["ranks"] == 2
        assert 0 < report["comm"]["share"] < 1
        assert report["comm"]["by_kind"]["all_to_all"]["calls"] > 0
        assert report["comm"]["by_kind"]["reduce_scatter"]["calls"] > 0
