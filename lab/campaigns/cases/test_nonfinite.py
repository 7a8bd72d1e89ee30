"""Addresses of NaN in all kinds of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.test_nonfinite import FAULTS, LATER, check_addresses

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
