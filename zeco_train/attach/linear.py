"""Linear layers' functions in transformers and fla, by name, answered by the operators of `zeco_train.ops`.

An answer takes the arguments of its function by their names, and refuses by name what would change the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco_train.attach.forward import AttachError, Frame
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.gated_norm import l2_normalised

Answer = Callable[..., Any]
_ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {None: lambda x: x, "silu": F.silu, "swish": F.silu}

# Arguments of a whole model that transformers passes on to every layer: they change nothing inside one.
PASSED_ON = {
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "shift_labels",
    "use_cache",
}


def refuse_unknown(frame: Frame, function: str, arguments: dict[str, Any], **wanted: Any) -> None:
    """Refuse arguments that are neither absent (None, False), as `wanted`, nor of a whole model."""
    for name, value in arguments.items():
        absent = value is None or value is False or name in PASSED_ON
        if absent or (name in wanted and (wanted[name] is ... or value == wanted[name])):
            continue
        raise _layer_error(frame, f"{function} is called with {name}, which is unknown over ranks")


def _layer_error(frame: Frame, problem: str) -> AttachError:
    return AttachError(problem) if frame.layer is None else frame.layer.error(problem)


def _activation(frame: Frame, name: str | None) -> Callable[[Tensor], Tensor]:
    if name not in _ACTIVATIONS:
        raise _layer_error(frame, f"activation {name!r} of a convolution; known: {[*_ACTIVATIONS]}")
    return _ACTIVATIONS[name]


def convolution(frame: Frame, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X [B, T, C], weight [C, w], bias [C] or None → y as x, without activation."""
    if weight.shape[1] < 2:
        y = x * weight[:, 0]
        return y if bias is None else y + bias
    return frame.mix("short_conv", (x, weight[:, None], weight.new_zeros(len(weight)) if bias is None else bias))


def causal_conv1d_fn(
    frame: Frame,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **rest: Any,
) -> Tensor:
    """transformers: x [B, C, T], weight [C, w] → y as x."""
    refuse_unknown(frame, "causal_conv1d_fn", rest)
    act, x = _activation(frame, activation), hidden_states.transpose(1, 2).to(weight.dtype)
    return act(convolution(frame, x, weight, bias)).to(hidden_states.dtype).transpose(1, 2)


def delta_rule(
    frame: Frame,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    unit_norm: bool = False,
    scale: float | None = None,
) -> Tensor:
    """q, k [B, T, G, K], v [B, T, H, V], g [B, T, H] or [B, T, H, K] or None, beta [B, T, H] → o as v."""
    dtype = accumulation_dtype(value.dtype)
    if unit_norm:
        query, key = l2_normalised(query), l2_normalised(key)
    query, key = (x.to(value.dtype) for x in (query, key))
    operands = query, key, value, *(() if g is None else (g.to(dtype),)), beta.to(dtype)
    operator = "delta" if g is None else "kda" if g.dim() == 4 else "gated_delta"
    return frame.mix(operator, operands, scale)


def chunk_gated_delta_rule(
    frame: Frame,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    use_qk_l2norm_in_kernel: bool = False,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Transformers' gated delta rule, and Kimi's with a decay a channel: g is the log-decay, beta the strength."""
    refuse_unknown(frame, "the delta rule", rest)
    return delta_rule(frame, query, key, value, g, beta, unit_norm=use_qk_l2norm_in_kernel), None


def mamba2_chunk_scan(
    frame: Frame,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **rest: Any,
) -> Tensor:
    """X [B, T, H, P], dt [B, T, H], A [H], B and C [B, T, G, N], D [H] or [H, P] → y [B, T, H, P]."""
    refuse_unknown(frame, "mamba2_chunk_scan", rest)
    x, dtype = hidden_states, accumulation_dtype(hidden_states.dtype)
    dt = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    y = frame.mix("scalar_decay", (C, B, (x * dt[..., None]).to(x.dtype), A.to(dtype) * dt), 1.0)
    if D is None:
        return y
    D = D if D.dim() == 2 else D[:, None]
    return (y + x * D.to(dtype)).to(x.dtype)


def _left_out(frame: Frame, *args: Any, **kwargs: Any) -> None:
    """A fused function, which is optional: returning None makes the caller use its unfused path."""


def causal_conv1d(
    frame: Frame,
    x: Tensor,
    weight: Any = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """fla: x [B, T, C], weight [C, w] → y as x."""
    refuse_unknown(frame, "causal_conv1d", {**rest, "no weight": weight is None}, backend=...)
    act = _activation(frame, activation)
    y = act(convolution(frame, x, weight, bias))
    return y if residual is None else y + residual, None


def fla_delta_rule(
    frame: Frame,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Fla's delta rules, with a decay a head, a channel, or none; g and beta may be what a kernel makes gates of."""
    # Of states and of kernels' forms.
    refuse_unknown(frame, "the delta rule", rest, state_v_first=True, safe_gate=True)
    dtype = accumulation_dtype(v.dtype)
    strength = torch.ones_like(q[..., 0]) if beta is None else beta.to(dtype)
    if use_beta_sigmoid_in_kernel:
        strength = strength.sigmoid() * (2 if allow_neg_eigval else 1)
    if g is not None and use_gate_in_kernel:
        per_head = (-1, g.shape[-1]) if g.dim() == 4 else (-1,)
        g = g.to(dtype) if dt_bias is None else g + dt_bias.to(dtype).view(per_head)
        rate = 1.0 if A_log is None else A_log.to(dtype).exp().view(*per_head[:1], *(1,) * (g.dim() - 3))
        g = -rate * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)
    return delta_rule(frame, q, k, v, g, strength, unit_norm=use_qk_l2norm_in_kernel, scale=scale), None


def fla_gla(
    frame: Frame,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    scale: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """q, k, g [B, T, H, K], v [B, T, H, V] → o as v; the log-decays are `g`, or `gk`."""
    decays: Any = gk if g is None else g
    refuse_unknown(frame, "gated linear attention", {**rest, "no decays": decays is None}, state_v_first=True)
    operands = q.to(v.dtype), k.to(v.dtype), v, decays.to(accumulation_dtype(v.dtype))
    return frame.mix("gla", operands, scale), None


def fla_retention(
    frame: Frame, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **rest: Any
) -> tuple[Tensor, None]:
    """q, k [B, T, H, K], v [B, T, H, V] → o as v; head h decays by 1 − 2^(−5 − h)."""
    refuse_unknown(frame, "retention", rest)
    heads = torch.arange(v.shape[2], dtype=accumulation_dtype(v.dtype), device=v.device)
    decays = torch.log1p(-(2.0 ** (-5.0 - heads)))
    return frame.mix("fixed_decay", (q.to(v.dtype), k.to(v.dtype), v, decays), scale), None


def fla_hgrn(frame: Frame, x: Tensor, g: Tensor, **rest: Any) -> tuple[Tensor, None]:
    """x, g [B, T, D] → the states h_t = e^g_t h_(t−1) + x_t."""
    refuse_unknown(frame, "hgrn", rest)
    o = frame.mix("hgrn", (x[:, :, None], g[:, :, None].to(accumulation_dtype(x.dtype))))
    return o[:, :, 0], None


def rotary_embedding(
    frame: Frame, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, **rest: Any
) -> Tensor:
    """fla: x [B, T, H, D] rotated by positions in the documents, of which a layer knows only those on its rank."""
    refuse_unknown(frame, "rotary_embedding", rest, seqlen_offsets=0)
    assert frame.layer is not None
    module: Any = frame.layer.module
    if module.scale is not None:
        raise frame.layer.error("scales by a table that depends on a rank's own length")
    positions = frame.of.positions_of(x)
    # The tables are as long as the longest sequence until now.
    module._update_cos_sin_cache(frame.of.position.seq_len, device=x.device, dtype=x.dtype)
    cos, sin = (table[positions][:, :, None] for table in (module._cos_cached, module._sin_cached))
    width = 2 * cos.shape[-1]
    turned, rest_of_x = x[..., :width], x[..., width:]
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).mT
    first, second = pairs.unbind(-1)
    rotated = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return torch.cat([(rotated if interleaved else rotated.mT).flatten(-2), rest_of_x], dim=-1)


# By the name of the function in the module of its layer: transformers', then fla's.
REPLACEMENTS: dict[str, Answer] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_gated_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba2_split_conv1d_scan_combined": _left_out,
    "causal_conv1d": causal_conv1d,
    **{
        f"{form}_{rule}": fla_delta_rule
        for form in ("chunk", "fused_recurrent")
        for rule in ("delta_rule", "gated_delta_rule", "kda")
    },
    **{f"{form}_gla": fla_gla for form in ("chunk", "fused_chunk", "fused_recurrent")},
    **{f"{form}_retention": fla_retention for form in ("chunk", "fused_chunk", "fused_recurrent", "parallel")},
    **{f"{form}_hgrn": fla_hgrn for form in ("chunk", "fused_recurrent")},
    "rotary_embedding": rotary_embedding,
}
