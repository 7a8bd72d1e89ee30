"""What connects the ranks for a model: its size decides what an `Exchange` needs.

Not in `exchange.py`: `zeco_train.functional` connects ranks in programs that have a `models` of their own.
"""

from __future__ import annotations

import torch

from models.attn import AttnShape
from models.config import LanguageModelConfig
from models.spec import spec_of
from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.seam import Exchange
from zeco_train.sp.attention.method import AttentionLoad
from zeco_train.sp.attention.method_registry import check_heads
from zeco_train.sp.backend_registry import SPConfig
from zeco_train.sp.exchange import LONG, build_exchange


def connect_model(
    config: SPConfig,
    model: LanguageModelConfig,
    mesh: ProcessMesh,
    seq_len: int = LONG,
    dtype: torch.dtype = torch.bfloat16,
    *,
    deterministic: bool = False,
) -> Exchange:
    """`build_exchange` for a model. Collective."""
    softmax = softmax_load(model, mesh.sp_size, seq_len, dtype)
    needs_halo = spec_of(model).needs_halo
    return build_exchange(config, mesh, needs_halo=needs_halo, softmax=softmax, deterministic=deterministic)


def softmax_load(
    model: LanguageModelConfig, ranks: int, seq_len: int = LONG, dtype: torch.dtype = torch.bfloat16
) -> AttentionLoad | None:
    """The size of the model's softmax layers on `ranks` that share a sequence of `seq_len`; None if it has none."""
    if not model.attn.chosen(model.num_layers):
        return None
    shape = AttnShape.of(model.attn, model.num_heads, model.hidden_size)
    return AttentionLoad(
        heads=shape.heads,
        key_heads=shape.key_heads,
        head_dim=shape.head_dim,
        tokens=seq_len // ranks,
        ranks=ranks,
        window=model.attn.window,
        itemsize=dtype.itemsize,
        wide=accumulation_dtype(dtype).itemsize,
    )


def check_softmax(config: SPConfig, model: LanguageModelConfig, ranks: int) -> None:
    """Raise `ConfigError` if the method of the model's softmax layers cannot spread their heads over the ranks."""
    if (load := softmax_load(model, ranks)) is not None:
        check_heads(config.attention, load.heads, load.key_heads, ranks)
