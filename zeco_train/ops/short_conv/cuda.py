"""The passes of the short convolution on Triton kernels, for inputs up to fp32; sums are fp32.

The kernels also run on a CPU under Triton's interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.ops.passes import Passes
from zeco_train.ops.short_conv.kernels import (
    launch_grads,
    launch_last_grads,
    launch_outputs,
    launch_received_grads,
)
from zeco_train.ops.short_conv.passes import PlainBackward, PlainForward, check_state


class ShortConvKernelForward(PlainForward):
    """Forward pass on Triton kernels, see `zeco_train.ops.passes.ForwardPass`."""

    def overlap(self) -> None:
        """Convolve with zeros before the shard."""
        self._y = torch.empty_like(self._x, memory_format=torch.contiguous_format)
        launch_outputs(self._x, self._weight, self._bias, None, self._doc_ids, self._y)

    def outputs(self, incoming_state: Tensor) -> Tensor:
        """Compute y [B, T, C], given R [B, 1, w − 1, C]: its first w − 1 tokens once more, with R before them."""
        check_state(incoming_state, "incoming_state", self._x, self._weight)
        launch_outputs(self._x, self._weight, self._bias, incoming_state, self._doc_ids, self._y)
        return self._y


class ShortConvKernelBackward(PlainBackward):
    """Backward pass on Triton kernels, see `zeco_train.ops.passes.BackwardPass`."""

    def _received_grads(self) -> Tensor:
        grads = torch.empty_like(self._incoming, memory_format=torch.contiguous_format)
        launch_received_grads(self._do, self._weight, self._doc_ids, grads)
        return grads

    def overlap(self) -> None:
        """Compute dx with zeros after the shard, and dweight and dbias in parts."""
        self._dx = torch.empty_like(self._x, memory_format=torch.contiguous_format)
        self._sums = launch_grads(self._x, self._do, self._weight, self._doc_ids, self._dx)

    def operand_grads(self, incoming_grad: Tensor) -> tuple[Tensor, ...]:
        """Return dx, dweight, dbias, given D_in [B, 1, w − 1, C], the gradient of the last w − 1 inputs."""
        check_state(incoming_grad, "incoming_grad", self._x, self._weight)
        dweight, dbias = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (self._weight, self._bias)
        )
        # One launch for the last tokens and the sums: a launch costs the host more than the device.
        states, grads = (self._incoming, incoming_grad), (self._dx, dweight, dbias)
        launch_last_grads(self._do, self._weight, self._doc_ids, states, self._sums, grads)
        return grads


CUDA = Passes(ShortConvKernelForward, ShortConvKernelBackward)
