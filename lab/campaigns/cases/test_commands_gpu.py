"""`bench` and `verify` on GPUs, by torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.commands import TORCHRUN, Command
from tests.verify.test_verify import torchrun

pytestmark = [pytest.mark.campaign, pytest.mark.gpu, pytest.mark.processes]


@pytest.mark.parametrize(
    "arguments",
    [
        ["collectives", "sizes_mb=[0.5]"],
        ["operator", "heads=[4]", "dims=[[64,128]]", "tokens=[2048]", "variants=[dp,copy,lasp1,lasp2,zeco]"],
    ],
)
def test_cases_on_gpus(tmp_path: Path, arguments: list[str]) -> None:
    """Eager and in CUDA graphs, with traces: every row has a time or a note."""
    ranks = min(2, torch.cuda.device_count())
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)]
    case, *rest = [*arguments, "runs=3", "graph=true", f"out={tmp_path}"]
    rest += ["trace=true"] if case == "operator" else []
    with Command([*launcher, "-m", "zeco_train.bench", case, *rest], tmp_path) as running:
        outcome = running.wait()
    assert outcome.code == 0, outcome
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(row.get("median_ms", 0) > 0 or row.get("note") for row in results["rows"])
    modes = {(row["variant"], row["mode"]) for row in results["rows"] if row.get("median_ms")}
    assert {("zeco", "eager"), ("zeco", "graph")} <= modes
    if case == "operator":
        assert len(list(tmp_path.glob("trace_*.json"))) == 5
        assert sum(note.startswith("trace of ") for note in results["notes"]) == 3


def test_model_case_on_gpus(tmp_path: Path) -> None:
    ranks = min(2, torch.cuda.device_count())
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)]
    arguments = ["model=gla_125m", "model.num_layers=2", "heads=[6]", "tokens=[2048,4096]", "steps=4"]
    arguments += ["variants=[dp,products,lasp1,lasp2,zeco]", f"out={tmp_path}"]
    with Command([*launcher, "-m", "zeco_train.bench", "model", *arguments], tmp_path) as running:
        outcome = running.wait()
    assert outcome.code == 0, outcome
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["tokens"], row["variant"]) for row in rows] == [
        (tokens, name) for tokens in (2048, 4096) for name in ("dp", "products", "lasp1", "lasp2", "zeco")
    ]
    for row in rows:
        if row["variant"] == "products":
            assert row["ratio"] > 1
            assert row["peak_gb"] < 1.5
        else:
            assert 0 < row["median_ms"] <= row["p90_ms"]
        assert row["peak_gb"] > 0


def test_verification_passes_on_gpus(tmp_path: Path) -> None:
    ranks = 1 << min(torch.cuda.device_count(), 4).bit_length() - 1
    with torchrun(ranks, tmp_path, ["-m", "zeco_train.verify"], "tokens=[1000]", "out=results.json") as run:
        outcome = run.wait()
    print(outcome.out)
    assert outcome.code == 0, outcome
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["dtype"] for row in rows} == {"fp32", "bf16"}
    assert not [row for row in rows if not row["ok"]]
    skipped = [row["skipped"] for row in rows if row["skipped"]]
    devices = range(ranks)
    if all(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b):
        assert not skipped, "the GPUs reach each other's memory"
    assert all("NVLink" in reason for reason in skipped)
