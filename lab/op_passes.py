"""Passes from any differentiable operator: the oracle for a new one, and its slow path until it has its own passes.

An operator from an initial state to a final one, differentiable by autograd, is sufficient for a scan over ranks. With
R the state before a shard, S and A its own state and transition:

    final state = A R + S                S: the final state of a zero start
    [S | A]                              the final state of values [v | 0] from the start [0 | I], K columns more
    D_loc, and the operands' gradients   by autograd, from (do, 0) and from (do, D_in)

Each document is a separate run: the first piece starts from R if it continues a document, every other one from zero;
the shard's state is the last piece's. Each pass runs the operator once more than a dedicated implementation would.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.operator import Kind, Recurrence
from zeco_train.ops.passes import Passes
from zeco_train.ops.position import find_restarts


def op_passes(op: Recurrence, kind: Kind) -> Passes:
    """The passes of an operator.

    Args:
        op: the operator; its first three operands are q, k, v, and it accepts values of any width.
        kind: of its transition. Log-decays of a diagonal one are logarithms of the products of decays.
    """
    return Passes(partial(_OpForward, op, kind), partial(_OpBackward, op))


class _OpForward:
    """See `zeco_train.ops.passes.ForwardPass`."""

    def __init__(
        self, op: Recurrence, kind: Kind, operands: Sequence[Tensor], scale: float, doc_ids: Tensor | None
    ) -> None:
        self._run = partial(_run, op, operands, scale, doc_ids)
        self.saved: tuple[Tensor, ...] = ()
        query, _, value = operands[:3]
        batch, _, heads, value_dim = value.shape
        key_dim, dtype = query.shape[-1], accumulation_dtype(value.dtype)
        zeros = value.new_zeros(batch, heads, key_dim, value_dim, dtype=dtype)
        identity = torch.eye(key_dim, dtype=dtype, device=value.device).expand(batch, heads, -1, -1)
        start = torch.cat([zeros, identity], -1)
        wide = torch.cat([value, value.new_zeros(*value.shape[:-1], key_dim)], -1)
        with torch.no_grad():
            _, end = _run(op, [*operands[:2], wide, *operands[3:]], scale, doc_ids, start)
        self.state, matrices = (part.contiguous() for part in end.split((value_dim, key_dim), -1))
        self.transition = matrices if kind is Kind.matrix else matrices.diagonal(dim1=-2, dim2=-1).log()

    def overlap(self) -> None:
        pass

    def outputs(self, incoming_state: Tensor) -> Tensor:
        with torch.no_grad():
            return self._run(incoming_state)[0]


class _OpBackward:
    """See `zeco_train.ops.passes.BackwardPass`."""

    def __init__(
        self,
        op: Recurrence,
        operands: Sequence[Tensor],
        do: Tensor,
        saved: Sequence[Tensor],
        incoming_state: Tensor | None,
        scale: float,
        doc_ids: Tensor | None,
    ) -> None:
        assert incoming_state is not None
        with _autograd():
            self._leaves = [x.detach().requires_grad_() for x in operands]
            start = incoming_state.detach().requires_grad_()
            self._o, self._end = _run(op, self._leaves, scale, doc_ids, start)
            self._do = do
            # `operand_grads` goes through the same graph, once D_in has arrived.
            (self.state_grad,) = _grads([self._o], [start], [do], retain_graph=True)

    def overlap(self) -> None:
        pass

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        with _autograd():
            return _grads([self._o, self._end], self._leaves, [self._do, incoming_grad])


def _run(
    op: Recurrence, operands: Sequence[Tensor], scale: float, doc_ids: Tensor | None, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """o, and the state after the last token, of a shard's tokens."""
    num_tokens = operands[0].shape[1]
    restarts = [] if doc_ids is None else find_restarts(doc_ids).nonzero().flatten().tolist()
    outputs, state = [], initial_state
    for start, stop in itertools.pairwise(sorted({0, *restarts, num_tokens})):
        of_document = [x[:, start:stop] for x in operands]
        before = torch.zeros_like(initial_state) if start in restarts else initial_state
        o, state = op(*of_document, scale=scale, initial_state=before)
        outputs.append(o)
    return torch.cat(outputs, dim=1), state


def _grads(
    outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor], retain_graph: bool = False
) -> tuple[Tensor, ...]:
    """Gradients of the inputs, each a separate tensor; zeros for inputs that the outputs do not depend on."""
    found = torch.autograd.grad(outputs, inputs, grads, retain_graph=retain_graph, allow_unused=True)
    return tuple(torch.zeros_like(x) if grad is None else grad.clone() for x, grad in zip(inputs, found, strict=True))


# Dispatch keys that the dispatcher excludes inside a custom op.
_AUTOGRAD = (
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.AutogradNestedTensor,
)


@contextmanager
def _autograd() -> Iterator[None]:
    """Enable autograd inside a custom op whose own gradient is written out.

    `torch.func.vjp` works there without this, but not on a `torch.autograd.Function` without `setup_context`, which
    kernel libraries use.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
