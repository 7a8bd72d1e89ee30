"""What the operators' kernels are given: contiguous tensors that start at 16 bytes, and head dims in multiples of 16.

Triton compiles a kernel once for tensors and dims of that kind, and once more for all others, whose tiles are loaded a
number at a time. The second form is slower, and ptxas 12.8 miscompiles one of them: in the kernel of GLA's states in
bf16, with K from 33 to 64 and tiles of at most 32 values, two words of a wgmma descriptor hold a shared-memory address
that was not shifted (lab/campaigns/descriptors.py). So kernels have no second form: other tensors are copied, and
other head dims are padded with zeros, which change no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from zeco_train.ops.operator import KernelRule
from zeco_train.ops.passes import BackwardBase, BackwardPass, ForwardBase, ForwardPass, Passes, check_state

# Head dims are multiples of it, in elements; tensors start at multiples of it, in bytes. Triton's own threshold.
_ALIGNMENT = 16
# Numbers of a program that pads or cuts.
_RESIZED = 4096


def dense(x: Tensor) -> Tensor:
    """Return x itself if it is contiguous and starts at a multiple of 16 bytes, else a copy."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def sum_heads(grads: Tensor, groups: int) -> Tensor:
    """[B, T, H, K] → [B, T, G, K], over the heads that share queries and keys; sums are fp32 inside."""
    return grads if grads.shape[2] == groups else grads.unflatten(2, (groups, -1)).sum(3)


def with_padded_heads(passes: Passes, values: Sequence[int] = (2,)) -> Passes:
    """The same passes for head dims of any size: K and V are padded with zeros to multiples of 16 where necessary.

    Of the operands of four dimensions those at the positions `values` are [..., V], all others [..., K]; outputs are as
    wide as the third operand. `needs_incoming` must be False.
    """
    assert not passes.needs_incoming

    def forward(operands: Sequence[Tensor], scale: float, doc_ids: Tensor | None) -> ForwardPass:
        if not _is_odd(operands, values):
            return passes.forward(operands, scale, doc_ids)
        return _PaddedForward(operands, scale, doc_ids, passes, values, operands[2].shape[-1])

    def backward(
        operands: Sequence[Tensor],
        do: Tensor,
        saved: Sequence[Tensor],
        incoming_state: Tensor | None,
        scale: float,
        doc_ids: Tensor | None,
    ) -> BackwardPass:
        if not _is_odd(operands, values) or do.shape != operands[2].shape:
            return passes.backward(operands, do, saved, incoming_state, scale, doc_ids)
        return _PaddedBackward(operands, do, saved, incoming_state, scale, doc_ids, passes, values)

    def saved_like(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not _is_odd(operands, values):
            return passes.saved_like(operands)
        padded = [x.new_empty((*x.shape[:-1], _aligned(x))) if x.dim() == 4 else x for x in operands]
        return _cut_replaced(passes, operands, passes.saved_like(padded))

    return passes._replace(forward=forward, backward=backward, saved_like=saved_like)


@dataclass(eq=False)
class _PaddedForward(ForwardBase):
    passes: Passes
    values: Sequence[int]
    width: int  # of the outputs

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._operands = operands
        self._inner = self.passes.forward(_padded(operands), self.scale, self.doc_ids)
        self.lazy, self._shape = getattr(self._inner, "lazy", False), _state_shape(operands, self.values)

    @cached_property
    def state(self) -> Tensor:
        return self._inner.state[..., : self._shape[2], : self._shape[3]].contiguous()

    @property
    def transition(self) -> Tensor:
        whole, K = self._inner.transition, self._shape[2]
        return (whole[..., :K] if whole.dim() == 3 else whole[..., :K, :K]).contiguous()

    def overlap(self) -> None:
        self._inner.overlap()

    def outputs(self, incoming_state: Tensor) -> Tensor:
        check_state(incoming_state, "incoming_state", self._shape)
        o = _resized(self._inner.outputs(_pad_state(incoming_state)), self.width)
        self.saved = _cut_replaced(self.passes, self._operands, self._inner.saved)
        return o


@dataclass(eq=False)
class _PaddedBackward(BackwardBase):
    passes: Passes
    values: Sequence[int]

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        self._operands = operands
        self._inner = self.passes.backward(
            _padded(operands), _resized(self.do, _aligned(self.do)), self.saved, None, self.scale, self.doc_ids
        )
        self.lazy, self._shape = getattr(self._inner, "lazy", False), _state_shape(operands, self.values)

    @cached_property
    def state_grad(self) -> Tensor:
        return self._inner.state_grad[..., : self._shape[2], : self._shape[3]].contiguous()

    def overlap(self) -> None:
        self._inner.overlap()

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        check_state(incoming_grad, "incoming_grad", self._shape)
        if isinstance(self._inner, BackwardBase):
            self._inner.unpadded = self._shape[2]
        grads = self._inner.operand_grads(_pad_state(incoming_grad))
        return tuple(
            grad if grad.shape == x.shape else _resized(grad, x.shape[-1])
            for grad, x in zip(grads, self._operands, strict=True)
        )


def _state_shape(operands: Sequence[Tensor], values: Sequence[int]) -> torch.Size:
    K = next(x.shape[-1] for position, x in enumerate(operands) if position not in values)
    B, _, H, V = operands[values[0]].shape
    return torch.Size((B, H, K, V))


def _is_odd(operands: Sequence[Tensor], values: Sequence[int]) -> bool:
    of_heads = [(x.shape[-1], position in values) for position, x in enumerate(operands) if x.dim() == 4]
    if not any(dim % _ALIGNMENT for dim, _ in of_heads):
        return False
    # Not if head dims do not fit each other, which the passes then refuse.
    *_, K, V = _state_shape(operands, values)
    return len(of_heads) > 2 and all(dim == (V if is_value else K) for dim, is_value in of_heads) and K > 0 and V > 0


def _pad_state(x: Tensor) -> Tensor:
    return F.pad(x, [size for dim in (1, 2) for size in (0, -x.shape[-dim] % _ALIGNMENT)])


def _padded(operands: Sequence[Tensor]) -> list[Tensor]:
    return [_resized(x, _aligned(x)) if x.dim() == 4 else x for x in operands]


def _aligned(x: Tensor) -> int:
    return x.shape[-1] + -x.shape[-1] % _ALIGNMENT


def _resized(x: Tensor, width: int) -> Tensor:
    """X [..., D], cut or filled with zeros to [..., width]; on a GPU in one pass, of which torch takes two to three."""
    if x.shape[-1] == width:
        return x
    if not KernelRule().serves(x, x) or not x.is_contiguous():
        return F.pad(x, [0, width - x.shape[-1]])
    from zeco_train.kernels.rows import resize_kernel  # late: here is no Triton needed

    y = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    resize_kernel[(-(-y.numel() // _RESIZED),)](x, y, y.numel(), x.shape[-1], width, _RESIZED, num_warps=8)
    return y


def _cut_replaced(passes: Passes, operands: Sequence[Tensor], saved: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # Those first that take the place of operands, in the shapes of these.
    count = len(passes.replaced)
    cut = (
        x if x.shape == operands[position].shape else x[..., : operands[position].shape[-1]].contiguous()
        for position, x in zip(passes.replaced, saved[:count], strict=True)
    )
    return *cut, *saved[count:]
