"""Batches in which each sequence has documents of its own: an operator's passes run for each, one after another.

Passes take documents for one sequence at a time, [T]. For doc_ids [B, T] each row of the batch is a batch of one to
them, and what crosses ranks is put together, so that there is one scan, as without documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.kernel_operands import dense
from zeco_train.ops.operator import Operator
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes


def by_rows(operator: Operator, operands: Sequence[Tensor], doc_ids: Tensor) -> Passes:
    """The implementation for these operands, run row by row; doc_ids [B, T], see `zeco_train.ops.position`.

    Raises:
        ValueError: another number of sequences than in the batch.
    """
    batch = operands[operator.output].shape[0]
    if len(doc_ids) != batch:
        raise ValueError(f"doc_ids: of {len(doc_ids)} sequences, for a batch of {batch}")
    rows = _Rows(operator)
    passes = operator.select(rows.split(operands)[0])

    def saved_like(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        replaced = [operands[position] for position in passes.replaced]
        of_rows = [passes.saved_like(row)[len(replaced) :] for row in rows.split(operands)]
        return *(x.new_empty(x.shape) for x in replaced), *(x for row in of_rows for x in row)

    forward = partial(_RowsForward, rows=rows, passes=passes)
    backward = partial(_RowsBackward, rows=rows, passes=passes)
    return passes._replace(forward=forward, backward=backward, saved_like=saved_like)


class _Rows:
    # Operands without B are the same for all rows.

    def __init__(self, operator: Operator) -> None:
        self._has_rows = ["B" in dims for dims in operator.dims]

    def split(self, operands: Sequence[Tensor]) -> list[list[Tensor]]:
        batch = next(x.shape[0] for x, has_rows in zip(operands, self._has_rows, strict=True) if has_rows)
        pairs = [*zip(operands, self._has_rows, strict=True)]
        return [[x[row : row + 1] if has_rows else x for x, has_rows in pairs] for row in range(batch)]

    def join(self, grads: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        pairs = zip(zip(*grads, strict=True), self._has_rows, strict=True)
        return tuple(torch.cat(of_rows) if has_rows else _sum(of_rows) for of_rows, has_rows in pairs)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    first, *more = tensors
    total = first.to(accumulation_dtype(first.dtype))
    for tensor in more:
        total = total + tensor
    return total.to(first.dtype)


@dataclass(eq=False)
class _RowsForward(ForwardBase):
    rows: _Rows
    passes: Passes

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        assert self.doc_ids is not None
        # Kernels take tensors that start at 16 bytes.
        of_rows = zip(self.rows.split(operands), map(dense, self.doc_ids), strict=True)
        self._rows = [self.passes.forward(row, self.scale, doc_ids) for row, doc_ids in of_rows]
        self.lazy = all(getattr(row, "lazy", False) for row in self._rows)

    @cached_property
    def state(self) -> Tensor:
        return torch.cat([row.state for row in self._rows])

    @property
    def transition(self) -> Tensor:
        return torch.cat([row.transition for row in self._rows])

    def overlap(self) -> None:
        for row in self._rows:
            row.overlap()

    def outputs(self, incoming_state: Tensor) -> Tensor:
        o = torch.cat([row.outputs(x) for row, x in zip(self._rows, incoming_state.split(1), strict=True)])
        # First, for the whole batch, what takes the place of operands; then each row's other tensors.
        of_rows, count = [row.saved for row in self._rows], len(self.passes.replaced)
        replaced = zip(*(row[:count] for row in of_rows), strict=True)
        self.saved = (*(torch.cat(x).contiguous() for x in replaced), *(x for row in of_rows for x in row[count:]))
        return o


@dataclass(eq=False)
class _RowsBackward(BackwardBase):
    rows: _Rows
    passes: Passes

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        assert self.doc_ids is not None
        count, incoming = len(self.saved) // len(self.doc_ids), self.incoming_state
        self._rows = [
            self.passes.backward(
                row,
                self.do[index : index + 1],
                self.saved[index * count : (index + 1) * count],
                None if incoming is None else incoming[index : index + 1],
                self.scale,
                dense(self.doc_ids[index]),
            )
            for index, row in enumerate(self.rows.split(operands))
        ]
        self.lazy = all(getattr(row, "lazy", False) for row in self._rows)

    @cached_property
    def state_grad(self) -> Tensor:
        return torch.cat([row.state_grad for row in self._rows])

    def overlap(self) -> None:
        for row in self._rows:
            row.overlap()

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(self._rows, incoming_grad.split(1), strict=True)
        return self.rows.join([row.operand_grads(x) for row, x in pairs])
