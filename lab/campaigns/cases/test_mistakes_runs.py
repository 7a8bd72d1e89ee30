"""More errors in a run's data and folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from data.store import shard_name
from tests.config import test_mistakes_runs as gate
from tests.config.test_mistakes_runs import (
    CONFIG,
    DATA,
    _empty,
    _keep,
    finished,
    run,
    store,
)

# Fixtures.
__all__ = ["finished", "run", "store"]
pytestmark = pytest.mark.campaign


def _truncate(store: Path) -> None:
    os.truncate(store / shard_name(0), 7999)


@pytest.mark.parametrize(
    ("damage", "overrides", "code", "parts"),
    [
        (_empty, [], DATA, ["data.path=", "an empty folder, not a token store"]),
        (_truncate, [], DATA, ["tokens-00000.bin: truncated: 7999 bytes, meta.json says 8000"]),
        (
            _keep,
            ["data.seq_len=4000"],
            CONFIG,
            ["data.seq_len=4000: longer than", " of 4000 tokens; largest legal value: 3999"],
        ),
        (
            _keep,
            ["data.validation_path=/nope", "train.eval_sequences=1"],
            DATA,
            ["data.validation_path=/nope: no such"],
        ),
    ],
)
def test_unusable_token_store_is_reported(
    damage: Callable[[Path], None], overrides: list[str], code: int, parts: list[str], store: Path, tmp_path: Path
) -> None:
    gate.test_unusable_token_store_is_reported(damage, overrides, code, parts, store, tmp_path)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model=gla_340m", "model.name=gla_340m: the run in RUN has gla_tiny"),
        ("train.dtype=fp64", "train.dtype=fp64: the run in RUN has fp32"),
        ("data.path=OTHER_TOKENIZER", "data.tokenizer={'kind': 'huggingface'}: the run in RUN has {'kind': 'bytes'}"),
    ],
)
def test_resume_with_changed_identity_is_refused(
    override: str, part: str, run: Path, store: Path, tmp_path: Path
) -> None:
    gate.test_resume_with_changed_identity_is_refused(override, part, run, store, tmp_path)
