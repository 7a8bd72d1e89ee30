"""Gated linear attention on one rank: the oracle, the chunked phases, and the choice of an implementation."""

from __future__ import annotations

from types import ModuleType

import torch

from zeco_train.ops import chunked
from zeco_train.ops.chunk_layout import CHUNK, accumulation_dtype
from zeco_train.ops.chunked import (
    ChunkStateGrads,
    ChunkStates,
    IntraGrads,
    input_grads,
    intra_grads,
    intra_scores,
    local_state_grads,
    local_states,
    outputs,
)
from zeco_train.ops.documents import Documents
from zeco_train.ops.naive import naive_gla

__all__ = [
    "CHUNK",
    "ChunkStateGrads",
    "ChunkStates",
    "Documents",
    "IntraGrads",
    "accumulation_dtype",
    "input_grads",
    "intra_grads",
    "intra_scores",
    "local_state_grads",
    "local_states",
    "naive_gla",
    "outputs",
    "select",
]


def select(device: torch.device) -> ModuleType:
    """The module whose functions are the phases on this device; their names and signatures are those of `chunked`.

    The only place where a device gets an implementation. `chunked` is plain PyTorch, right on every device, and so far
    the only one: kernels for CUDA are to be returned here.
    """
    return chunked
