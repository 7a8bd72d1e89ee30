"""Slices of a state for owners that each scan one of them.

A state is taken as H·V *columns* of K elements, ordered by head, then V: owner j has columns [j·w, (j+1)·w), with
w = ⌈H·V / owners⌉. K is never cut, since a transition may mix a column's elements; an owner also needs the transitions
of its columns' heads, which are few.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from zeco_train.collectives.cost_model import Load
from zeco_train.ops.seam import cut as transition_rows
from zeco_train.ops.seam import join


class Slices:
    """Columns and heads of each owner."""

    def __init__(self, heads: int, value_dim: int, owners: int) -> None:
        self._heads, self._value_dim, self._owners = heads, value_dim, owners
        columns = heads * value_dim
        # Columns per owner, w; those of the last owners may be padding.
        self.width = -(-columns // owners)
        # Heads that an owner's columns touch, at most: messages have equal length. Owners past the last column have
        # padding only, and no start here.
        starts = range(0, columns, self.width)
        self.rows = max(
            (min(start + self.width, columns) - 1) // value_dim - start // value_dim + 1 for start in starts
        )

    def pack(self, state: Tensor, transition: Tensor) -> Tensor:
        """The messages to the owners, [owners, B, w + rows, K], or [owners, B, w + rows · K, K] with matrices."""
        columns = state.transpose(2, 3).flatten(1, 2)
        padding = self._owners * self.width - columns.shape[1]
        slices = functional.pad(columns, (0, 0, 0, padding)).unflatten(1, (self._owners, self.width))
        # Computed on the device: indices from a host list would synchronise.
        first_head = torch.arange(self._owners, device=state.device) * self.width // self._value_dim
        touched = first_head[:, None] + torch.arange(self.rows, device=state.device)
        transitions = transition_rows(transition, touched.clamp(max=self._heads - 1))
        return torch.cat((slices, transitions), dim=2).transpose(0, 1).contiguous()

    def unpack(self, message: Tensor, owner: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """A message [B, w + …, K] to an owner as the state and transition of the heads that its columns touch.

        Returns [B, rows, K, C] and a transition of the kind of `like`, [B, rows, K] or [B, rows, K, K]; one head has C
        = w columns, several have C = V each, with zeros in other owners' columns.
        """
        columns, rows = message.split((self.width, message.shape[1] - self.width), dim=1)
        return self.as_heads(columns, owner), join(rows, like)

    def repack(self, state: Tensor, transition: Tensor, owner: int) -> Tensor:
        rows = transition_rows(transition, torch.arange(self.rows, device=state.device))
        return torch.cat((self.as_columns(state, owner), rows), dim=1)

    def as_heads(self, columns: Tensor, owner: int) -> Tensor:
        """An owner's columns as states of the heads that they touch: [B, w, K] → [B, rows, K, C], see `unpack`."""
        columns = functional.pad(columns, (0, 0, *self._padding(owner)))
        return columns.unflatten(1, (self.rows, -1)).transpose(2, 3)

    def as_columns(self, states: Tensor, owner: int) -> Tensor:
        """Inverse of `as_heads`."""
        before, after = self._padding(owner)
        columns = states.transpose(2, 3).flatten(1, 2)
        return functional.pad(columns, (0, 0, -before, -after))

    def whole(self, slices: Tensor) -> Tensor:
        """The state of all owners' columns: [owners, B, w, K] → [B, H, K, V], contiguous."""
        _, batch, _, key_dim = slices.shape
        columns = slices.transpose(0, 1).reshape(batch, -1, key_dim)[:, : self._heads * self._value_dim]
        return columns.unflatten(1, (self._heads, self._value_dim)).transpose(2, 3).contiguous()

    def _padding(self, owner: int) -> tuple[int, int]:
        # Numbers of other owners' columns among an owner's heads, before and after its own; negative if its own include
        # padding.
        if self.rows == 1:
            return 0, 0
        before = owner * self.width % self._value_dim
        return before, self.rows * self._value_dim - before - self.width


def slice_bytes(load: Load, owners: int) -> tuple[float, float]:
    """Bytes of an owner's columns, and of the transitions that go with them."""
    _, heads, key_dim, value_dim = load.shape
    slices, column = Slices(heads, value_dim, owners), load.state_bytes / load.columns
    return slices.width * column, slices.rows * (key_dim if load.matrices else 1) * column
