"""Through how many source files a state passes from its layer to the wire."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.mixers.gla import GatedLinearAttention
from models.spec import ModelSpec
from tests.support.commands import REPOSITORY
from tests.support.distributed import on_ranks
from tests.support.steps import TINY
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.all_scan_config import AllScanAlgorithm, AllScanConfig
from zeco_train.sp.backend_registry import SPConfig
from zeco_train.sp.exchange import connect

# Files with arithmetic on this rank's tokens: those that they call see no state on its road.
LOCAL = ("zeco_train/ops/gla/chunked.py",)
# Those that make the operands, before there is a state.
BEFORE = ("models/projections.py", "zeco_train/ops/__init__.py")
TOKENS = 64


@pytest.mark.processes
@on_ranks(2)
def test_a_state_passes_through_few_files(rank: int, world_size: int) -> None:
    """Those entered between the mixer's forward pass and the first send; those of the worker's thread included."""
    entered, watched = dict[str, None](), threading.Event()
    passing: list[bool] = []
    launched: list[int] = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not watched.is_set():
            return
        if frame.f_code is GatedLinearAttention.forward.__code__:
            passing.append(True)
        if frame.f_code is dist.isend.__code__:
            watched.clear()
        # From here on the main thread computes beside the scan, or is done before it sends.
        if frame.f_code.co_name == "overlap":
            launched.append(threading.get_ident())
        name, above = _name(frame), frame.f_back
        if not passing or name is None or name in BEFORE or threading.get_ident() in launched:
            return
        while above is not None:
            if _name(above) in (*LOCAL, *BEFORE):
                return
            above = above.f_back
        entered[name] = None

    # The worker's thread starts with the first scan.
    threading.setprofile(watch)
    groups = dist.new_group(), dist.new_group()
    config = SPConfig(all_scan=AllScanConfig(AllScanAlgorithm["chain"]))
    exchange = connect(config, groups, timedelta(seconds=60), torch.device("cpu"))
    model = ModelSpec(TINY).build()
    model.init_weights(0)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    shard = SequencePosition((0, TOKENS, 2 * TOKENS), rank, exchange=exchange)
    with torch.no_grad():
        model(ids, shard)
        exchange.drain()
        sys.setprofile(watch)
        watched.set()
        model(ids, shard)
        sys.setprofile(None)
    exchange.drain()
    if rank == 0:
        assert "zeco_train/collectives/wire.py" in entered
        # models/mixers/base.py among them: one formula serves a sequence and a token.
        assert len(entered) <= 10, [*entered]


def _name(frame: FrameType) -> str | None:
    """Of a file of ours; installed packages may lie in the repository, too."""
    path = Path(frame.f_code.co_filename)
    name = str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else ""
    return name if name.startswith(("models/", "zeco_train/")) else None
