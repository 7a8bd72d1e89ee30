"""Layers that compute in their own code what others call a function for: their forward functions are replaced.

A replacement is for one text of a class, by its digest: a library that changes it is refused.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco_train.attach.forward import Frame, Layer, class_of
from zeco_train.attach.linear import convolution, mamba2_chunk_scan, refuse_unknown
from zeco_train.ops import accumulation_dtype


def lightning_attention(
    frame: Frame,
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """`MiniMaxLightningAttention` of transformers: x [B, T, D] → y; head h decays by e^−slope."""
    refuse_unknown(frame, "forward", {"attention_mask": attention_mask, **rest})
    x = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(-1, (layer.num_attention_heads, 3 * layer.head_dim))
    q, k, v = x.split(layer.head_dim, dim=-1)
    decays = -layer.slope_rate.flatten().to(accumulation_dtype(v.dtype))
    o = layer.norm(frame.mix("fixed_decay", (q, k, v, decays), 1.0).flatten(-2))
    return layer.out_proj(F.sigmoid(layer.output_gate(hidden_states)) * o), None


def fla_mamba2(
    frame: Frame,
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **rest: Any,
) -> tuple[Tensor, None, None]:
    """`Mamba2` of fla: x [B, T, D] → y."""
    refuse_unknown(frame, "forward", {"attention_mask": attention_mask, "past_key_values": past_key_values, **rest})
    heads, states = layer.num_heads, layer.n_groups * layer.ssm_state_size
    widths = [layer.intermediate_size, layer.conv_dim, heads]
    gate, x, dt = layer.in_proj(hidden_states)[..., -sum(widths) :].split(widths, dim=-1)
    x = layer.act(convolution(frame, x, layer.conv1d.weight[:, 0], layer.conv1d.bias))
    x, B, C = x.split([layer.intermediate_size, states, states], dim=-1)
    B, C = (part.unflatten(-1, (layer.n_groups, -1)) for part in (B, C))
    if not _has_kernels(layer):
        # Its kernels give consecutive heads one group, its own code every n_groups-th.
        B, C = (part.repeat(1, 1, heads // layer.n_groups, 1) for part in (B, C))
    A = -torch.exp(layer.A_log.to(accumulation_dtype(x.dtype)))
    options = {"dt_bias": layer.dt_bias, "dt_softplus": True, "dt_limit": layer.dt_limit}
    y = mamba2_chunk_scan(frame, x.unflatten(-1, (heads, -1)), dt, A, B, C, D=layer._get_D(), **options).flatten(-2)
    y = layer.norm(y, gate) if layer.rmsnorm else y * layer.act(gate)
    return layer.out_proj(y.to(hidden_states.dtype)), None, None


def _has_kernels(layer: Any) -> bool:
    known = inspect.unwrap(class_of(layer).forward).__globals__["is_fast_path_available"]
    return bool(known) and layer.in_proj.weight.device.type == "cuda"


_REPLACED: dict[tuple[str, str], tuple[str, Callable[..., Any]]] = {
    ("transformers", "MiniMaxLightningAttention"): ("46819f0c74f5b0d5", lightning_attention),
    ("fla", "Mamba2"): ("da9f939a9fb8b32d", fla_mamba2),
}


def inline_of(layer: Layer) -> Callable[..., Any] | None:
    """What replaces the forward function of a layer with known code of its own. Raises AttachError if that changed."""
    kind = class_of(layer.module)
    keys = ((base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__)
    digest, replacement = next((_REPLACED[key] for key in keys if key in _REPLACED), (None, None))
    if replacement is not None and digest_of(kind) != digest:
        raise layer.error("its code has changed: what replaces its forward function was written for another text")
    return replacement


def digest_of(kind: type) -> str:
    """Of the text of a class; empty if the text is not there."""
    try:
        text = inspect.getsource(kind)
    except OSError:
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
