"""The exact results of every operator, to which `verify` and `bench` compare: formulas in fp64 under plain autograd.

No code of the passes, of kernels, of scans or of documents inside a shard is involved: decays are exponentials of sums
over the very tokens between two tokens. Tests compare the formulas with the recurrences, token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from zeco_train.ops.operator import Operator

# Tokens of which all pairs are computed at once, and tokens that one backward pass recomputes.
_BLOCK, _PIECE = 16, 256
# Scores of softmax attention that are computed at once: 256 MiB, of which autograd keeps several copies.
_SCORES = 1 << 25


def by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    *,
    scale: float | None,
    initial_state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Linear attention with decays or a delta rule, by pairs of tokens in blocks.

        u_i = v_i, or β_i (v_i − k_iᵀ exp(G_i) S − Σ_{j<i} (k_iᵀ exp(G_i − G_j) k_j) u_j)
        o_i = scale · (q_iᵀ exp(G_i) S + Σ_{j≤i} (q_iᵀ exp(G_i − G_j) k_j) u_j)

    with S before a block and G the sums of log-decays since. Shapes as of the operators with these operands, all fp64.
    Returns o and the state after the last token.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # [B, H, T, …]
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (q, k))
    v = v.transpose(1, 2)
    if log_decay is not None:
        g = log_decay.detach().expand(v.shape[0], v.shape[2], -1)
    g = torch.zeros_like(k) if g is None else (g if g.dim() == 4 else g[..., None]).transpose(1, 2).expand(k.shape)
    state, outputs = initial_state, []
    for start in range(0, v.shape[2], _BLOCK):
        q_b, k_b, new, g_b = (x[:, :, start : start + _BLOCK] for x in (q, k, v, g))
        size = new.shape[2]
        later = torch.ones(size, size, dtype=torch.bool, device=v.device).tril(-1)
        # [B, H, i, j, K]: of the tokens after j up to i; sums of their own, since differences would cancel.
        between = (g_b[:, :, :, None] * later[..., None]).cumsum(2).exp()
        since = g_b.cumsum(2).exp()
        if beta is not None:
            strength = beta.transpose(1, 2)[:, :, start : start + _BLOCK, None]
            erased = torch.einsum("bhik,bhijk,bhjk->bhij", k_b, between, k_b) * later
            wanted = strength * (new - (since * k_b) @ state)
            system = torch.eye(size, dtype=v.dtype, device=v.device) + strength * erased
            new = torch.linalg.solve_triangular(system, wanted, upper=False)
        read = torch.einsum("bhik,bhijk,bhjk->bhij", q_b, between, k_b).tril()
        outputs.append(scale * ((since * q_b) @ state + read @ new))
        state = since[:, :, -1, :, None] * state + (between[:, :, -1] * k_b).mT @ new
    return torch.cat(outputs, 2).transpose(1, 2), state


def by_windows(
    x: Tensor, weight: Tensor, bias: Tensor, *, scale: float | None, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """A short convolution: y [B, T, C] and the last inputs, [B, 1, w − 1, C]."""
    rows = torch.cat([initial_state[:, 0], x], 1)
    return (rows.unfold(1, weight.shape[2], 1) * weight[:, 0]).sum(-1) + bias, rows[:, None, x.shape[1] :]


def by_pairs(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    """Unmasked linear attention of a whole sequence: o [B, T, H, V] and Σ_j k_j v_jᵀ, [B, H, K, V]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.einsum("bihk,bjhk->bhij", q, k)
    return scale * torch.einsum("bhij,bjhv->bihv", weights, v), torch.einsum("bjhk,bjhv->bhkv", k, v)


class ExactTokens:
    """Consecutive tokens of a sequence: once forward from the state before them, then once backward.

    The backward pass recomputes them in pieces, so memory is that of a piece and of the states between pieces.
    `operands` are by name, in fp64; before the tokens `starts` the state restarts; `scale` is K^-1/2 for None.
    """

    def __init__(
        self,
        operator: Operator,
        operands: Mapping[str, Tensor],
        do: Tensor,
        starts: Iterable[int] = (),
        scale: float | None = None,
    ) -> None:
        self._operator, self._do, self._starts, self._scale = operator, do, set(starts), scale
        self._operands = {name: x.detach() for name, x in operands.items()}
        num_tokens = do.shape[1]
        cuts = {0, num_tokens} if operator.reads_whole else {*range(0, num_tokens, _PIECE), *self._starts, num_tokens}
        self._ranges = [*itertools.pairwise(sorted(cuts))]
        self._states: list[Tensor] = []
        self._grads = {name: torch.zeros_like(x) for name, x in self._operands.items() if name != "log_decay"}
        # o, and the gradients of all operands but constants, filled by the passes.
        self.results = {"o": torch.zeros_like(do), **{f"d{name}": x for name, x in self._grads.items()}}

    def zero_state(self) -> Tensor:
        """[B, H, K, V]."""
        return self._do.new_zeros(self._operator.state_shape([*self._operands.values()]))

    def forward(self, state: Tensor) -> Tensor:
        """Fill o, given the state before these tokens; the state after them."""
        for a, b in self._ranges:
            self._states.append((torch.zeros_like(state) if a in self._starts else state).detach())
            with torch.no_grad():
                self.results["o"][:, a:b], state = self._run(self._cut(self._operands, a, b), self._states[-1])
        return state

    def backward(self, grad: Tensor) -> Tensor:
        """Fill the gradients of the operands, given the state's after these tokens; return the state's before them."""
        for a, b in reversed(self._ranges):
            into = self._cut(self._grads, a, b)
            leaves = {name: x.clone() for name, x in self._cut(self._operands, a, b).items()}
            before = self._states.pop().clone().requires_grad_()
            inputs = [*(leaves[name].requires_grad_() for name in into), before]
            with torch.enable_grad():
                ends = self._run(leaves, before)
            found = torch.autograd.grad(ends, inputs, [self._do[:, a:b], grad], materialize_grads=True)
            for x, part in zip(into.values(), found, strict=False):
                x += part
            grad = torch.zeros_like(before) if a in self._starts else found[-1]
        return grad

    def _run(self, operands: Mapping[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        return self._operator.oracle(**operands, scale=self._scale, initial_state=state)

    def _cut(self, tensors: Mapping[str, Tensor], a: int, b: int) -> dict[str, Tensor]:
        dims = self._operator.dims_of
        return {name: x[:, a:b] if "T" in dims[name] else x for name, x in tensors.items()}


def exact_results(operator: Operator, operands: Mapping[str, Tensor], do: Tensor) -> dict[str, Tensor]:
    """o, and the gradients of all operands but constants, of a whole sequence that starts from no state, in fp64."""
    tokens = ExactTokens(operator, {name: x.double() for name, x in operands.items()}, do.double())
    tokens.forward(tokens.zero_state())
    tokens.backward(tokens.zero_state())
    return tokens.results


def exact_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    offset: int = 0,
    borders: Tensor | None = None,
    window: int | None = None,
) -> dict[str, Tensor]:
    """Causal softmax attention by the formula, with a mask by definition, a few queries at a time.

    The queries q and do [B, T, H, …] are of consecutive tokens from position `offset` on, keys k and values v [B, S, G,
    …] of the whole sequence; G divides H. `borders` of documents, [D + 1] from 0 to S, are on the CPU; a query reads
    `window` keys at most, itself among them. Returns o and dq, and what these queries add to dk and dv, in fp64.
    """
    q, k, v, do = (x.detach().double() for x in (q, k, v, do))
    results = {name: torch.zeros_like(x) for name, x in (("o", do), ("dq", q), ("dk", k), ("dv", v))}
    groups = k.shape[2]
    size = max(1, _SCORES // (q.shape[0] * q.shape[2] * k.shape[1]))
    for a in range(0, q.shape[1], size):
        b = min(a + size, q.shape[1])
        query, key = torch.arange(offset + a, offset + b)[:, None], torch.arange(offset + b)
        seen = (key <= query) & (query - key < (window or k.shape[1]))
        if borders is not None:
            seen &= torch.bucketize(query, borders, right=True) == torch.bucketize(key, borders, right=True)
        read = slice(int(seen.any(0).nonzero()[0]), offset + b)
        cuts = {"dq": slice(a, b), "dk": read, "dv": read}
        parts = [x[:, cut].clone().requires_grad_() for x, cut in zip((q, k, v), cuts.values(), strict=True)]
        with torch.enable_grad():
            heads = parts[0].unflatten(2, (groups, -1)) * q.shape[-1] ** -0.5
            scores = torch.einsum("bighk,bjgk->bghij", heads, parts[1])
            weights = scores.masked_fill(~seen[:, read].to(q.device), -torch.inf).softmax(-1)
            o = torch.einsum("bghij,bjgv->bighv", weights, parts[2]).flatten(2, 3)
        results["o"][:, a:b] = o.detach()
        for (name, cut), grad in zip(cuts.items(), torch.autograd.grad(o, parts, do[:, a:b]), strict=True):
            results[name][:, cut] += grad
    return results
