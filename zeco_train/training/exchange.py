"""All that the ranks of a sequence exchange for a model: states, halos of convolutions, and softmax attention."""

from __future__ import annotations

import torch

from models.attn import AttnShape
from models.config import LanguageModelConfig
from models.spec import spec_of
from zeco_train.distributed.mesh import ProcessMesh, attention_group, halo_groups
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.seam import AttentionMethod
from zeco_train.sp.attention.method import AttentionLoad, MethodSpec
from zeco_train.sp.attention.registry import build_attention, check_heads, choose
from zeco_train.sp.backend import ScanBackend
from zeco_train.sp.registry import SPConfig, build_scan

# Length for `sp.attention=auto` where lengths vary, as in generation: with a window, the choice depends on it.
LONG = 1 << 20


def build_exchange(
    config: SPConfig,
    model: LanguageModelConfig,
    mesh: ProcessMesh,
    seq_len: int = LONG,
    dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
) -> ScanBackend:
    """The scan of the configured backend, with what the model's layers need beside it. Collective.

    Args:
        config: settings of sequence parallelism.
        model: its layers.
        mesh: the ranks.
        seq_len: tokens of a sequence, see `attention_method`.
        dtype: of queries, keys and values.
        deterministic: gradients have the same bits in each run, those of softmax layers, too.

    Raises:
        ConfigError: the ranks, or the model's heads, do not support the configuration.
    """
    halo = halo_groups(mesh) if spec_of(model).needs_halo else None
    scan = build_scan(config, mesh.scan_groups, mesh.timeout, mesh.device, halo, mesh.topology)
    scan.attention = build_softmax(config, model, mesh, seq_len, dtype, deterministic) or scan.attention
    return scan


def build_softmax(
    config: SPConfig,
    model: LanguageModelConfig,
    mesh: ProcessMesh,
    seq_len: int = LONG,
    dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
) -> AttentionMethod | None:
    """The method of the model's softmax layers; None if it has none. Collective. See `build_exchange`.

    Raises:
        ConfigError: the configured method cannot spread the heads over the ranks.
    """
    method = attention_method(config, model, mesh.sp_size, seq_len, dtype)
    if method is None:
        return None
    found = build_attention(method, attention_group(mesh), mesh.timeout, mesh.device, mesh.topology.nodes)
    found.deterministic = deterministic
    return found


def attention_method(
    config: SPConfig, model: LanguageModelConfig, ranks: int, seq_len: int, dtype: torch.dtype
) -> MethodSpec | None:
    """The method of the model's softmax layers over the ranks of a sequence; None if it has none.

    Args:
        config: settings of sequence parallelism.
        model: its layers.
        ranks: that share a sequence.
        seq_len: tokens of the whole sequence.
        dtype: of queries, keys and values.

    Raises:
        ConfigError: the configured method cannot spread the heads over the ranks.
    """
    if not model.attn.chosen(model.num_layers):
        return None
    shape = AttnShape.of(model.attn, model.num_heads, model.hidden_size)
    return choose(
        config.attention,
        AttentionLoad(
            heads=shape.heads,
            key_heads=shape.key_heads,
            head_dim=shape.head_dim,
            tokens=seq_len // ranks,
            ranks=ranks,
            window=model.attn.window,
            itemsize=dtype.itemsize,
            wide=accumulation_dtype(dtype).itemsize,
        ),
    )


def check_softmax(config: SPConfig, model: LanguageModelConfig, ranks: int) -> None:
    """Check that the method of the model's softmax layers, if it has some, can spread their heads over the ranks.

    Raises:
        ConfigError: it cannot.
    """
    if model.attn.chosen(model.num_layers):
        shape = AttnShape.of(model.attn, model.num_heads, model.hidden_size)
        check_heads(config.attention, shape.heads, shape.key_heads, ranks)
