"""The second oracle: the recurrences of all operators, token by token under plain autograd, equation by equation.

Slow, and their graphs hold T states: for small cases, preferably in fp64. Each takes the operands, by default the scale
K^-1/2, no `initial_state` [B, H, K, V] and no `doc_ids` [T], and returns the outputs in the dtype of v, and the last
state, in fp64 if v is fp64, else fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.operator import Operator, Recurrence
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.passes import check_state
from zeco_train.ops.position import find_restarts


def _affine(
    name: str,
    *operands: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    doc_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = (I − β_t k_t k_tᵀ) Diag(exp(g_t)) S_{t-1} + β_t k_t v_tᵀ,    o_t = scale · q_tᵀ S_t.

    Without β it is S_t = Diag(exp(g_t)) S_{t-1} + k_t v_tᵀ, without g the state does not decay; `log_decay` [H] is a
    constant g of all tokens (GLA: arXiv 2312.06635, section 4.1; scalar decays 2405.21060; delta rules 2102.11174,
    2412.06464, 2510.26692).
    """
    OPERATORS[name].check(operands, doc_ids)
    q, k, v, *rest = operands
    beta = rest.pop() if name in ("delta", "gated_delta", "kda") else None
    g = rest[0] if rest else q.new_zeros(1)
    if name in ("delta", "fixed_decay"):
        g = g.detach().expand(v.shape[:3])
    return _run(q, k, v, g, beta, scale, initial_state, doc_ids)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    doc_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    dtype, key_dim = accumulation_dtype(v.dtype), q.shape[-1]
    batch, num_tokens, heads, value_dim = v.shape
    zero = torch.zeros(batch, heads, key_dim, value_dim, dtype=dtype, device=v.device)
    if initial_state is not None:
        check_state(initial_state, "initial_state", zero.shape)
    state = zero if initial_state is None else initial_state.to(dtype)
    restarts = [False] * num_tokens if doc_ids is None else find_restarts(doc_ids).tolist()
    scale = key_dim**-0.5 if scale is None else scale

    q, k = (x.repeat_interleave(heads // q.shape[2], dim=2) for x in (q, k))
    decays = (g if g.dim() == 4 else g[..., None]).to(dtype).exp()
    # unbind: the gradient of indexing `q[:, t]` would be a zero tensor of T tokens for every token
    tokens = [x.to(dtype).unbind(1) for x in (q, k, v, decays)]
    strengths = [None] * num_tokens if beta is None else beta.to(dtype).unbind(1)
    o = []
    for q_t, k_t, v_t, decay_t, beta_t, restart in zip(*tokens, strengths, restarts, strict=True):
        carried = zero if restart else decay_t[..., None] * state
        change = v_t
        if beta_t is not None:
            change = beta_t[..., None] * (v_t - (k_t[..., None, :] @ carried).squeeze(-2))
        state = carried + k_t[..., None] * change[..., None, :]
        o.append((q_t[..., None, :] @ state).squeeze(-2))
    return (scale * torch.stack(o, dim=1)).to(v.dtype), state


def naive_short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    doc_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """window = [S_{t−1}; x_t],    y_t = bias + Σ_j weight[:, 0, j] ⊙ window_j,    S_t = window less its first row."""
    OPERATORS["short_conv"].check((x, weight, bias), doc_ids)
    dtype = accumulation_dtype(x.dtype)
    zero = x.new_zeros(x.shape[0], weight.shape[2] - 1, x.shape[2], dtype=dtype)
    if initial_state is not None:
        check_state(initial_state, "initial_state", zero[:, None].shape)
    state = zero if initial_state is None else initial_state[:, 0].to(dtype)
    taps = weight[:, 0].mT.to(dtype)
    restarts = [False] * x.shape[1] if doc_ids is None else find_restarts(doc_ids).tolist()
    y = []
    for x_t, restart in zip(x.to(dtype).unbind(1), restarts, strict=True):
        window = torch.cat([zero if restart else state, x_t[:, None]], dim=1)
        y.append(bias.to(dtype) + (taps * window).sum(1))
        state = window[:, 1:]
    return torch.stack(y, dim=1).to(x.dtype), state[:, None]


def naive_unmasked(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o_i = scale · Σ_j (q_i · k_j) v_j over all tokens j, earlier and later ones; the state is Σ_j k_j v_jᵀ."""
    OPERATORS["unmasked"].check((q, k, v), None)
    if initial_state is not None:
        raise ValueError("initial_state: an unmasked operator has none, since each token reads the whole sequence")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = (x.to(accumulation_dtype(v.dtype)) for x in (q, k, v))
    scores = torch.einsum("bihk,bjhk->bhij", query, key)
    o = scale * torch.einsum("bhij,bjhv->bihv", scores, value)
    return o.to(v.dtype), torch.einsum("bjhk,bjhv->bhkv", key, value)


def naive_hgrn(
    x: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    doc_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(g_t) ⊙ h_{t−1} + x_t (arXiv 2311.04823); states are [B, H, K, 1]."""
    OPERATORS["hgrn"].check((x, g), doc_ids)
    assert scale in (None, 1.0), scale
    dtype = accumulation_dtype(x.dtype)
    zero = x.new_zeros(x.shape[0], *x.shape[2:], dtype=dtype)
    if initial_state is not None:
        check_state(initial_state, "initial_state", zero[..., None].shape)
    h = zero if initial_state is None else initial_state.squeeze(-1).to(dtype)
    restarts = [False] * x.shape[1] if doc_ids is None else find_restarts(doc_ids).tolist()
    o = []
    for x_t, decay_t, restart in zip(x.to(dtype).unbind(1), g.to(dtype).exp().unbind(1), restarts, strict=True):
        h = x_t if restart else decay_t * h + x_t
        o.append(h)
    return torch.stack(o, dim=1).to(x.dtype), h[..., None]


def naive_gsa(
    q: Tensor,
    k: Tensor,
    s: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    doc_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = Diag(exp(g_t)) S_{t−1} + s_t k_tᵀ,    o_t = scale · S_t q_t (arXiv 2409.07146); states are [B, H, K, V]."""
    OPERATORS["gsa"].check((q, k, s, g), doc_ids)
    dtype, scale = accumulation_dtype(s.dtype), q.shape[-1] ** -0.5 if scale is None else scale
    zero = torch.zeros(*s.shape[:1], *s.shape[2:], q.shape[-1], dtype=dtype, device=s.device)
    if initial_state is not None:
        check_state(initial_state, "initial_state", zero.shape)
    state = zero if initial_state is None else initial_state.to(dtype)
    restarts = [False] * s.shape[1] if doc_ids is None else find_restarts(doc_ids).tolist()
    o, by_token = [], (x.to(dtype).unbind(1) for x in (q, k, s, g.exp()))
    for q_t, k_t, s_t, decay_t, restart in zip(*by_token, restarts, strict=True):
        state = (0 if restart else decay_t[..., None] * state) + s_t[..., None] * k_t[..., None, :]
        o.append(scale * (state * q_t[..., None, :]).sum(-1))
    return torch.stack(o, dim=1).to(s.dtype), state


def naive_mamba1(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    doc_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(Δ_t A) ⊙ h_{t−1} + Δ_t x_t B_t, o_t = Σ_k C_t ⊙ h_t + D ⊙ x_t (arXiv 2312.00752, algorithm 2)."""
    OPERATORS["mamba1"].check((x, dt, A_log, B, C, D, dt_bias), doc_ids)
    assert scale in (None, 1.0), scale
    dtype, given = accumulation_dtype(x.dtype), x.dtype
    x, dt, A_log, B, C, D, dt_bias = (y.to(dtype) for y in (x, dt, A_log, B, C, D, dt_bias))
    zero = x.new_zeros(x.shape[0], *A_log.shape)
    if initial_state is not None:
        check_state(initial_state, "initial_state", zero[..., None].shape)
    h = zero if initial_state is None else initial_state.squeeze(-1).to(dtype)
    restarts = [False] * x.shape[1] if doc_ids is None else find_restarts(doc_ids).tolist()
    o = []
    for x_t, dt_t, B_t, C_t, restart in zip(*(y.unbind(1) for y in (x, dt, B, C)), restarts, strict=True):
        step = nn.functional.softplus(dt_t + dt_bias)[..., None]
        h = (zero if restart else torch.exp(-step * A_log.exp()) * h) + step * x_t[..., None] * B_t[:, None]
        o.append((h * C_t[:, None]).sum(-1) + D * x_t)
    return torch.stack(o, dim=1).to(given), h[..., None]


naive_gla = partial(_affine, "gla")


def naive_of(operator: Operator) -> Recurrence:
    """The recurrence of an operator, of other passes or names of operands too."""
    known = OPERATORS.items()
    name = next(name for name, x in known if (x.one_token, x.dims) == (operator.one_token, operator.dims))
    others = {"short_conv": naive_short_conv, "unmasked": naive_unmasked, "hgrn": naive_hgrn, "gsa": naive_gsa}
    others["mamba1"] = naive_mamba1
    return others.get(name, partial(_affine, name))


def recurrence(
    operator: str,
    operands: Mapping[str, Tensor],
    do: Tensor,
    starts: Iterable[int] = (),
    carry_in: Tensor | None = None,
    dcarry_out: Tensor | None = None,
) -> dict[str, Tensor]:
    """o, the gradients of the operands, carry_out and dcarry_in of consecutive tokens.

    `starts`: the tokens before which the state restarts.
    """
    leaves = {name: x.detach().clone().requires_grad_() for name, x in operands.items()}
    shape = OPERATORS[operator].state_shape([*operands.values()])
    before = do.new_zeros(shape) if carry_in is None else carry_in.detach().clone()
    of_documents = {}
    if restarts := [*starts]:
        of_documents["doc_ids"] = torch.zeros(do.shape[1], dtype=torch.int32).index_fill(0, torch.tensor(restarts), 1)
        of_documents["doc_ids"] = of_documents["doc_ids"].cumsum(0, dtype=torch.int32)
    initial = {} if OPERATORS[operator].reads_whole else {"initial_state": before.requires_grad_()}
    o, after = naive_of(OPERATORS[operator])(*leaves.values(), **initial, **of_documents)
    dcarry_out = torch.zeros_like(after) if dcarry_out is None else dcarry_out
    inputs = [*leaves.values(), *initial.values()]
    found = torch.autograd.grad([o, after], inputs, [do, dcarry_out], materialize_grads=True)
    names = [*(f"d{name}" for name in leaves), "dcarry_in"]
    return {"o": o.detach(), "carry_out": after.detach(), **dict(zip(names, found, strict=False))}
