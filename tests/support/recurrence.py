"""The second oracle: the recurrences of all operators, token by token under plain autograd."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tests.support.naive.delta import naive_delta, naive_gated_delta
from tests.support.naive.gla import naive_gla
from tests.support.naive.scalar_decay import naive_fixed_decay, naive_scalar_decay
from tests.support.naive.short_conv import naive_short_conv
from tests.support.naive.unmasked import naive_unmasked
from zeco_train.ops.passes import Operator, Recurrence
from zeco_train.ops.registry import OPERATORS

_NAIVE = {
    "gla": naive_gla,
    "scalar_decay": naive_scalar_decay,
    "fixed_decay": naive_fixed_decay,
    "delta": naive_delta,
    "gated_delta": naive_gated_delta,
    "kda": naive_gated_delta,
    "short_conv": naive_short_conv,
    "unmasked": naive_unmasked,
}


def naive_of(operator: Operator) -> Recurrence:
    """The recurrence of an operator, of other passes or names of operands too."""
    return next(naive for name, naive in _NAIVE.items() if OPERATORS[name].step is operator.step)


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
        of_documents["pieces"] = torch.zeros(do.shape[1], dtype=torch.int32).index_fill(0, torch.tensor(restarts), 1)
        of_documents["pieces"] = of_documents["pieces"].cumsum(0, dtype=torch.int32)
    initial = {} if OPERATORS[operator].reads_whole else {"initial_state": before.requires_grad_()}
    o, after = naive_of(OPERATORS[operator])(*leaves.values(), **initial, **of_documents)
    dcarry_out = torch.zeros_like(after) if dcarry_out is None else dcarry_out
    inputs = [*leaves.values(), *initial.values()]
    found = torch.autograd.grad([o, after], inputs, [do, dcarry_out], materialize_grads=True)
    names = [*(f"d{name}" for name in leaves), "dcarry_in"]
    return {"o": o.detach(), "carry_out": after.detach(), **dict(zip(names, found, strict=False))}
