"""Cross-entropy of a linear head that materialises the logits of one chunk of tokens at a time.

At a million tokens and a vocabulary of 32k the logits alone would take 64 GB in bf16. Here the head is applied chunk by
chunk, and the gradients of a chunk are computed in the forward pass, while its logits exist:

    loss = Σ_t lse(z_t) − z_t[y_t],   z = h Wᵀ,   dz = softmax(z) − onehot(y),   dh = dz W,   dW = dzᵀ h

The loss ends the forward pass and starts the backward pass, so what is kept in between (dh in place of h, and dW) does
not raise the peak, and one of four matrix products is saved. The upstream gradient is a scalar, multiplied in later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeco_train.ops import accumulation_dtype
from zeco_train.system.numbers import IGNORE_INDEX

# Tokens per chunk: large products fill a GPU, and each chunk's dW update is a pass over a tensor of the head's size.
_CHUNK_TOKENS = {"cpu": 2048, "cuda": 8192}


def token_losses(logits: Tensor, targets: Tensor, loss_dtype: torch.dtype, want_grad: bool) -> tuple[Tensor, Tensor]:
    """Summed loss of one chunk of logits [n, vocab], in `loss_dtype`, and dlogits ([0] unless wanted) in their dtype.

    Targets are [n] int64. Logits that are already in `loss_dtype` are overwritten.
    """
    wide = logits.to(loss_dtype)
    ignored = targets == IGNORE_INDEX
    # Replace ignored labels only: any other label out of range must fail in gather.
    index = targets.masked_fill(ignored, 0).unsqueeze(-1)
    lse = wide.logsumexp(dim=-1, keepdim=True)
    loss = (lse - wide.gather(-1, index)).squeeze(-1).masked_fill(ignored, 0).sum()
    if not want_grad:
        return loss, logits.new_empty(0)
    if torch.compiler.is_compiling():
        # One pass over the logits; comparing every logit with the label would be an extra pass in eager mode.
        is_target = torch.arange(logits.shape[-1], device=logits.device) == index
        dlogits = (wide - lse).exp() - is_target.to(loss_dtype)
        return loss, dlogits.masked_fill(ignored.unsqueeze(-1), 0).to(logits.dtype)
    dlogits = wide.sub_(lse).exp_()
    dlogits.scatter_(-1, index, dlogits.gather(-1, index) - 1)
    return loss, dlogits.masked_fill_(ignored.unsqueeze(-1), 0).to(logits.dtype)


def scale_into(sources: Sequence[Tensor], factor: Tensor, targets: Sequence[Tensor]) -> None:
    """Write sources · factor, a scalar, to `targets`, multiplied in the dtype of the factor and rounded once.

    Sources have no wider dtype than the factor; targets are contiguous, and each may be its source.
    """
    for source, target in zip(sources, targets, strict=True):
        # GPUs would first round a factor without dimensions to the dtype of the source. CPUs do not, and one with a
        # dimension makes them copy the source.
        torch.mul(source, factor.reshape(1) if source.device.type == "cuda" else factor, out=target)


class LossParts(NamedTuple):
    """The passes over tensors of the loss, besides products: this module's, eager or compiled."""

    token_losses: Callable[[Tensor, Tensor, torch.dtype, bool], tuple[Tensor, Tensor]] = token_losses
    scale_into: Callable[[Sequence[Tensor], Tensor, Sequence[Tensor]], None] = scale_into

    @classmethod
    def compiled(cls, **options: Any) -> LossParts:
        """The same, compiled, with these options of `torch.compile`."""
        compile_ = functools.partial(torch.compile, fullgraph=True, **options)
        return cls(compile_(token_losses), compile_(scale_into))


class TokenScores(NamedTuple):
    """Loss and prediction of each token, [...]."""

    losses: Tensor  # fp32 (fp64 for fp64): cross-entropy with the label; 0 where the label is −100
    predictions: Tensor  # int64: the id with the largest logit; −100 where the label is −100


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int | None = None,
    parts: LossParts = LossParts(),  # noqa: B008
) -> Tensor:
    """Sum over tokens of the cross-entropy of softmax(hidden weightᵀ).

    Args:
        hidden: [..., D], bf16, fp32 or fp64.
        weight: [vocab, D], same dtype; may be a tied embedding.
        labels: [...] int64, in [0, vocab), or −100 for ignored tokens.
        chunk_tokens: tokens whose logits exist at one time. Besides the two gradients (that of the weight in fp32, fp64
            for fp64), peak memory is about two tensors [chunk_tokens, vocab] in fp32 (fp64). None: 2,048, or 8,192 on
            CUDA.
        parts: eager or compiled.

    Returns:
        Scalar, fp32 (fp64 for fp64): the sum, so that ranks and micro-batches add up; 0 if no token counts. Under
        `torch.no_grad` no gradient is computed. Its backward can run once.

    Raises:
        ValueError: shapes that do not fit, or chunk_tokens < 1.
    """
    chunk_tokens = _check(hidden, weight, labels, chunk_tokens)
    # Grad mode is always off inside a Function's forward, so `want_grad` is passed explicitly.
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens, torch.is_grad_enabled(), parts)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None) -> int:
    if hidden.shape[:-1] != labels.shape or weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)} do not fit: "
            "[..., D], [vocab, D], [...]"
        )
    if chunk_tokens is None:
        chunk_tokens = _CHUNK_TOKENS.get(hidden.device.type, 2048)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: must be ≥ 1")
    return chunk_tokens


@torch.no_grad()
def linear_token_scores(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None = None) -> TokenScores:
    """The cross-entropy of softmax(hidden weightᵀ) and the most likely id of each token, without gradients.

    Arguments and errors are those of `linear_cross_entropy`. Only tokens whose label counts cost anything.
    """
    chunk_tokens = _check(hidden, weight, labels, chunk_tokens)
    losses = torch.zeros(labels.shape, dtype=accumulation_dtype(hidden.dtype), device=hidden.device).view(-1)
    predictions = torch.full_like(labels, IGNORE_INDEX).view(-1)
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    for piece in (targets != IGNORE_INDEX).nonzero().squeeze(-1).split(chunk_tokens):
        logits = (rows[piece] @ weight.T).to(losses.dtype)
        losses[piece] = logits.logsumexp(-1) - logits.gather(-1, targets[piece].unsqueeze(-1)).squeeze(-1)
        predictions[piece] = logits.argmax(-1)
    return TokenScores(losses.view(labels.shape), predictions.view(labels.shape))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk_tokens: int,
        grad_enabled: bool,
        parts: LossParts,
    ) -> Tensor:
        want_hidden, want_weight = (needed and grad_enabled for needed in ctx.needs_input_grad[:2])
        loss_dtype = accumulation_dtype(hidden.dtype)
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        dhidden = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) if want_hidden else None
        # Not bf16: a sum over many chunks would lose the small contributions.
        dweight = torch.zeros(weight.shape, dtype=loss_dtype, device=weight.device) if want_weight else None

        losses = []
        for start in range(0, rows.shape[0], chunk_tokens):
            piece = slice(start, start + chunk_tokens)
            logits = rows[piece] @ weight.T
            loss, dlogits = parts.token_losses(logits, targets[piece], loss_dtype, want_hidden or want_weight)
            # Otherwise they stay alive beside dlogits during both products.
            del logits
            losses.append(loss)
            if dhidden is not None:
                torch.mm(dlogits, weight, out=dhidden[piece])
            if dweight is not None:
                _add_product(dweight, dlogits.T, rows[piece])

        ctx.save_for_backward(dhidden, dweight)
        ctx.hidden_shape, ctx.weight_dtype, ctx.scale_into = hidden.shape, weight.dtype, parts.scale_into
        return torch.stack(losses).sum() if losses else rows.new_zeros((), dtype=loss_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # In place: another [tokens, D] is expensive. Autograd refuses a second backward because a saved tensor has
        # changed.
        dhidden, dweight = ctx.saved_tensors
        sources = [grad for grad in (dhidden, dweight) if grad is not None]
        dtypes = [ctx.weight_dtype if grad is dweight else grad.dtype for grad in sources]
        targets = [
            grad if grad.dtype is dtype else torch.empty_like(grad, dtype=dtype)
            for grad, dtype in zip(sources, dtypes, strict=True)
        ]
        ctx.scale_into(sources, dloss, targets)
        if dhidden is not None:
            dhidden = dhidden.view(ctx.hidden_shape)
        if dweight is not None:
            dweight = targets[-1]
        return dhidden, dweight, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    # In fp32 or fp64; on GPUs, and if all have one dtype, without rounding a b before.
    if total.dtype is a.dtype:
        torch.addmm(total, a, b, out=total)
    elif total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
