"""Steps as CUDA graphs, emulated on CPUs: more settings, and two ranks."""

from __future__ import annotations

import pytest

from tests.support.distributed import run_distributed
from tests.training.test_graphs import run_again

pytestmark = pytest.mark.campaign
SETTINGS = [
    [],
    ["data.reset_state_at_document=true"],
    ["data.reset_state_at_document=true", "model.mixer=mamba2"],
    ["parallel=ddp"],
    ["parallel=zero3"],
    ["train.recompute=full"],
    ["optim=muon"],
    ["model.mixer=mamba2"],
    ["model.mixer=retnet", "model.attn.every=2"],
    ["model.mixer=retnet", "train.compile=never"],
    ["train.segments=4", "model.mixer=retnet"],
    ["train.segments=2", "data.reset_state_at_document=true", "model.mixer=mamba2"],
    ["train.segments=4", "parallel=zero3", "train.recompute=full"],
    # With the columns of a normaliser, uncompiled.
    ["model=cosformer_tiny", "data.reset_state_at_document=true", "train.compile=never"],
]


@pytest.mark.parametrize(
    ("cases", "ranks"),
    [
        (SETTINGS[2:3], 2),
        (SETTINGS[10:11], 2),
        ([["parallel=ddp"], ["parallel=zero3", "train.recompute=full", "optim=muon"], *SETTINGS[8:9]], 2),
        ([SETTINGS[12], SETTINGS[11]], 2),
        ([SETTINGS[4], SETTINGS[4], SETTINGS[10]], 1),
        ([["parallel=zero1"]], 2),
    ],
    ids=["documents and convolutions", "segments", "others", "segments of others", "one rank of others", "zero1"],
)
def test_steps_read_all_that_changes_from_tensors(cases: list[list[str]], ranks: int) -> None:
    run_distributed(run_again, ranks, cases)
