"""Addresses of NaN in all kinds of steps, and skipped steps of resumed runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.distributed import run_distributed
from tests.support.training import train
from tests.training.test_nonfinite import FAULTS, LATER, SETTINGS, check_addresses, check_skipped, poisoned, skipping
from zeco_train.errors import NonFiniteError

pytestmark = pytest.mark.campaign


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("settings", "graphs"),
    [
        (["train.segments=2", "data.reset_state_at_document=true", "model.mixer=mamba2"], True),
        (["sp=dp"], True),
        (["sp=lasp1", "parallel=ddp"], False),
        (["sp=lasp2", "parallel=zero3"], True),
        (["parallel=hsdp", "train.recompute=full"], False),
        (["train.segments=2", "train.recompute=selective", "data.micro_batch=2"], False),
        (["model.mixer=retnet", "model.attn.every=2"], False),
        (["model.mixer=gated_deltanet", "train.matmul=fp8", "train.dtype=bf16"], False),
        (["train.compile=always"], False),
        (["train.compile=always", "train.recompute=full", "parallel=zero3", "train.segments=2"], True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else ("launched", "replayed")[value],
)
def test_addresses_of_all_kinds_of_steps(settings: list[str], graphs: bool, tmp_path: Path) -> None:
    check_addresses(tmp_path, settings, LATER if graphs else FAULTS, graphs=graphs)


def _resumed(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    settings = [*SETTINGS, "checkpoint.every=1"]
    results = skipping(rank, world_size, folder, *settings)
    with poisoned(results["reference"], rank):
        train(rank, world_size, f"{folder}/resumed", *settings, "train.nonfinite=skip:2", "train.steps=3")
        if rank == 0:
            shutil.copytree(Path(folder, "resumed"), Path(folder, "stopped"))
        dist.barrier()
        five = [*settings, "train.steps=5"]
        results["resumed"] = train(rank, world_size, f"{folder}/resumed", *five, "train.nonfinite=skip:2")
        # The count of skipped steps continues from the checkpoint.
        with pytest.raises(NonFiniteError) as error:
            train(rank, world_size, f"{folder}/stopped", *five, "train.nonfinite=skip:1")
        results["stopped"] = str(error.value)
    return results


def test_resumed_run_skips_on(tmp_path: Path) -> None:
    by_rank = run_distributed(_resumed, 2, str(tmp_path))
    activation = check_skipped(by_rank, ["skipped", "resumed"], tmp_path)
    for results in by_rank:
        assert results["stopped"] == f"step 4: {activation}; skipped before it, by train.nonfinite: 1 in a row"
