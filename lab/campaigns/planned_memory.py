"""Question: is planned memory within 5 % of that of a GPU, in three recompute modes?
Command: python -m lab.campaigns.planned_memory [CASE …]
Date: 27 November 2026, one H100 (88b393ac).
Answer: yes, all 15: 1.000 to 1.008 of the measured, but for `full` of kda (7.56 GB planned, 7.95 measured: 0.951) and
of mamba2 (5.34, 5.11: 1.045). Before, `full` was up to 1.19: it had all gathered weights, and buffers of reductions
that one rank does not make, in the first block's backward pass.

On one GPU each case trains five steps by `train.py`, whose metrics have the peak of torch's allocator, and is planned
for the same GPU. A line for each: case, recompute mode, planned GB, measured GB, their ratio. Without CUDA graphs;
lab/campaigns/cases/test_measured.py has whole models with them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from zeco_train.ops.recompute import Recompute
from zeco_train.plan.case import build_case
from zeco_train.plan.config import parse
from zeco_train.plan.memory import plan_memory

_LAYERS, _TOKENS = 4, 16384
CASES = {
    "gla": ["model=gla_1b"],
    "mamba2": ["model=mamba2_1b"],
    "kda": ["model=kda_1b"],
    "hgrn": ["model=hgrn_1b"],
    "hybrid": ["model=gla_1b", "model.attn.every=4"],
}


def main(names: list[str]) -> int:
    """Print planned and measured memory; 1 if a pair differs by more than 5 %, or a run failed."""
    if {"-h", "--help"} & {*names}:
        print(__doc__)
        return 0
    gpu = "h200" if torch.cuda.get_device_properties(0).total_memory > 100e9 else "h100"
    bad = 0
    print("case      recompute   planned GB  measured GB  ratio")
    for name in names or CASES:
        for recompute in Recompute:
            settings = [
                *CASES[name],
                f"model.num_layers={_LAYERS}",
                f"data.seq_len={_TOKENS}",
                "data.global_batch=1",
                "sp=dp",
                "train.dtype=bf16",
                "train.cuda_graphs=off",
                f"train.recompute={recompute.value}",
            ]
            planned = plan_memory(build_case(parse([*settings, f"gpu={gpu}", "world_size=1"]))[0], 0.05).peak / 1e9
            measured = _measure(settings)
            ratio = planned / measured
            bad += not 0.95 <= ratio <= 1.05
            print(f"{name:9} {recompute.value:10} {planned:11.2f} {measured:12.2f} {ratio:6.3f}", flush=True)
    return int(bad > 0)


def _measure(settings: list[str]) -> float:
    """GB at the peak of five steps, without the validation after the last one; NaN if the run failed."""
    with tempfile.TemporaryDirectory() as folder:
        own = [f"run_dir={folder}/run", "name=planned_memory", "train.steps=5", "train.log_every=1"]
        command = [sys.executable, "train.py", *settings, *own, "checkpoint.every=0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            print(done.stderr[-500:], file=sys.stderr)
            return float("nan")
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return float(rows[-2]["memory_gb"])  # the last row has the peak since the start, validation's too


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
