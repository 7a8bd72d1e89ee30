"""Matrix products of linear layers in fp8, one scale for each row of both operands.

`rows` rounds the rows of a matrix to fp8, `scaled` multiplies two such matrices: on GPUs by their fp8 units, elsewhere
emulated. `models.projections` uses both for y = x Wᵀ and dx = dy W:

    y   a scale for each token of x, and for each output of W
    dx  a scale for each token of dy, and for each input of W
    dW  in the compute dtype: it sums over tokens, so its scales would depend on how a sequence is split over ranks

A scale of a token depends on that token alone, and FSDP gathers a weight before its use, so the loss depends on neither
split. torchao's recipe `rowwise_with_gw_hp` has the same products, with one scale for the whole W in dx.
"""

from __future__ import annotations

from enum import Enum


class Matmul(Enum):
    """Format of the operands of the blocks' linear layers. `bf16`: the compute dtype, whichever it is."""

    bf16 = "bf16"
    fp8 = "fp8"
