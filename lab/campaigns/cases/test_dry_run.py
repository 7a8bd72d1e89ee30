"""Dry runs of a rank with other strategies, methods and layers than the gate's."""

from __future__ import annotations

import pytest

from tests.plan.test_dry_run import CPU, check_rank_0, run
from tests.support.planning import make_case
from zeco_train.plan.traffic import count_scans

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(
    "arguments",
    [
        ["parallel=zero3", "sp.size=32", "data.seq_len=65536", "data.global_batch=16", "data.micro_batch=2"],
        ["parallel=hsdp", "sp.size=32", "data.seq_len=65536", "data.global_batch=8", "train.segments=2"],
        ["parallel=zero2", "parallel.shard_size=8", "sp.size=256", "data.seq_len=262144", "data.global_batch=1"],
        ["parallel=ddp", "sp=lasp2", "sp.size=16", "data.seq_len=32768", "data.global_batch=16", "optim=muon"],
    ],
    ids=["zero3, two sequences", "hsdp, segments", "zero2 in nodes", "ddp, lasp2, muon"],
)
def test_rank_0_of_256_has_the_planned_shards(arguments: list[str]) -> None:
    check_rank_0(arguments)


@pytest.mark.parametrize("model", [["model=mamba2_tiny"], ["model=gla_tiny", "model.attn.layers=[1]"]])
def test_layers_beside_scans_run_too(model: list[str]) -> None:
    """Halos of convolutions, or softmax attention over ranks, and documents."""
    small = ["world_size=32", "sp.size=32", "data.seq_len=32768", "data.global_batch=1"]
    arguments = [*model, *small, "data.reset_state_at_document=true"]
    scans = count_scans(make_case(*CPU, *arguments))
    assert run(*arguments, rank=17)[0].scans == (scans.forward, scans.backward)
