"""Logits of a Hugging Face folder, by our model."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.distributed.config import Strategy
from zeco_train.hf.trained import find_trained, load_trained
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange
from zeco_train.training.checks import join_ranks
from zeco_train.training.config import Dtype


def our_logits(
    folder: Path, ids: Tensor, dtype: Dtype = Dtype.fp32, strategy: Strategy | None = Strategy.zero2
) -> Tensor:
    """Of tokens [1, T] → [T, V]. Parameters have the dtype, those of decays at least fp32."""
    trained, length = find_trained(str(folder)), ids.shape[1]
    mesh = join_ranks(trained.configure(["data.seq_len=128", f"train.dtype={dtype.value}"]), Launch(0, 1, 0))
    model, scan = load_trained(trained, mesh, dtype=dtype, strategy=strategy), local_exchange()
    logits = model(ids, SequencePosition((0, length), exchange=scan))[0]
    scan.drain()
    if trained.model.mixer == "mamba2":
        wide = {name: one.dtype for name, one in model.named_parameters() if ".decay." in name}
        assert [*wide.values()] == [torch.float32] * 3 * trained.model.num_layers
        others = {one.dtype for name, one in model.named_parameters() if name not in wide}
        assert others == {torch.bfloat16 if dtype is Dtype.bf16 else torch.float32}
    dist.destroy_process_group()
    return logits


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, of 2-norms."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
