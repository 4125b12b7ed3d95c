"""Steps of one model on 1, 2 and 4 ranks of this machine, with the share of communication.

Every number of ranks trains the same batches through `headrace train` under mpirun, data-parallel
with sharded units, on the same cores; rounds alternate. One JSON line for each number of ranks:

- `seconds`: median step time; `ratio`: over that of one rank, paired by round. Ranks share the
  cores here, so 1 would be the least there is; what is above it is what ranks cost.
- `comm_share`: share of the step in which compute waited in collectives (rank 0).
- `state_bytes_ratio`: the largest rank's state over the whole one's, times the number of ranks: 1
  means that state falls as 1 / ranks.

    python -m benchmarks.bench_parallel [--rounds 3] [--steps 6]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RANKS = (1, 2, 4)
BATCH_SEQUENCES = 8
TIMEOUT_SECONDS = 900
CONFIG = """
model:
  vocab_size: 260
  hidden_size: 256
  num_hidden_layers: 4
  num_attention_heads: 8
  num_key_value_heads: 4
  head_dim: 32
  moe_intermediate_size: 512
  num_experts: 8
  num_experts_per_tok: 2
train:
  steps: 1000
  seq_len: 128
  micro_batch_size: 2
  eval_batches: 1
optimizer:
  learning_rate: 1e-3
  warmup_steps: 10
offload:
  device:
    capacity: 64MiB
  host:
    capacity: 1GiB
  nvme:
    capacity: 4GiB
    path: store
  prefetch_buffer_size: 16MiB
runtime:
  threads: 0
"""


def run(folder: Path, ranks: int, steps: int) -> dict[str, Any]:
    """Train `steps` steps on so many ranks; the report, with the seconds of each later step."""
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "launch", "train", str(folder / "config.yaml")]
    if ranks > 1:
        mpirun = [str(Path(sys.executable).parent / "mpirun"), "-n", str(ranks)]
        mpirun += ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            mpirun.append("--allow-run-as-root")
        command = mpirun + command
    accumulation = BATCH_SEQUENCES // 2 // ranks
    for setting in (
        f"parallel.data_parallel={ranks}",
        f"train.gradient_accumulation_steps={max(1, accumulation)}",
        f"train.micro_batch_size={2 if accumulation else 1}",
        f"offload.nvme.path={folder / 'store'}",
    ):
        command += ["--set", setting]
    command += ["--steps", str(steps), "--run-dir", str(folder / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks ended with {done.returncode}:\n{done.stderr[-2000:]}")
    report = json.loads((folder / "run" / "report.json").read_text())
    lines = (folder / "run" / "steps.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][1:]  # the first step warms up
    report["step_seconds"] = statistics.median(record["seconds"] for record in records)
    seconds = sum(record["seconds"] for record in records)
    report["comm_share"] = sum(record["comm_seconds"] for record in records) / seconds
    report["losses"] = [record["loss"] for record in records]
    return report


def main() -> None:
    """Run the rounds and print a line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    found: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in RANKS}
    with tempfile.TemporaryDirectory(prefix="bench-parallel-") as folder:
        for number in range(options.rounds):
            order = RANKS if number % 2 == 0 else RANKS[::-1]
            for ranks in order:
                path = Path(folder) / f"{number}-{ranks}"
                found[ranks].append(run(path, ranks, options.steps))
    alone = found[1]
    whole = alone[0]["ranks"][0]["state_bytes"]
    for ranks in RANKS:
        rounds = found[ranks]
        ratios = [a["step_seconds"] / b["step_seconds"] for a, b in zip(rounds, alone)]
        difference = max(
            abs(a - b) / b for a, b in zip(rounds[0]["losses"], alone[0]["losses"], strict=True)
        )
        largest = max(rank["state_bytes"] for rank in rounds[0]["ranks"])
        record = {
            "name": f"parallel_step_{ranks}_ranks",
            "seconds": statistics.median(x["step_seconds"] for x in rounds),
            "ratio": statistics.median(ratios),
            "ratios": [min(ratios), max(ratios)],
            "comm_share": statistics.median(x["comm_share"] for x in rounds),
            "comm_by_kind": rounds[0]["comm"]["by_kind"],
            "state_bytes_max": largest,
            "state_bytes_ratio": largest * ranks / whole,
            "loss_difference": difference,
            "rounds": options.rounds,
            "cores": len(os.sched_getaffinity(0)),
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
