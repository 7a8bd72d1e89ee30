"""The elementwise recurrence of HGRN (Qin et al., 2023, arXiv 2311.04823): each channel has a state of one number.

    h_t = exp(g_t) ⊙ h_{t-1} + x_t,    o_t = h_t

x, g, o [B, T, H, K]; g is log-decays, fp32 or fp64, finite and at most 0. Heads are groups of channels, by which scans
over ranks cut the state, [B, H, K, 1]: they change no result. There is no scale.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeco_train.ops.hgrn.chunked import CHUNKED
from zeco_train.ops.hgrn.flops import forward_flops, recomputed_flops
from zeco_train.ops.hgrn.oracle import by_sums
from zeco_train.ops.hgrn.step import hgrn_step
from zeco_train.ops.operator import KernelRule, Kind, Operator, Peer
from zeco_train.ops.passes import Passes


class ElementwiseRecurrence(Operator):
    """The operator; its states have one column, V = 1."""

    def state_shape(self, operands: Sequence[Tensor]) -> tuple[int, int, int, int]:
        """(B, H, K, 1)."""
        batch, _, heads, key_dim = operands[0].shape
        return batch, heads, key_dim, 1


def _cuda() -> Passes:
    from zeco_train.ops.hgrn.cuda import CUDA  # imports Triton

    return CUDA


HGRN = ElementwiseRecurrence(
    operands=("x", "g"),
    dims=("BTHK", "BTHK"),
    kind=Kind.diagonal,
    portable=CHUNKED,
    oracle=by_sums,
    one_token=hgrn_step,
    forward_flops=forward_flops,
    recomputed_flops=recomputed_flops,
    output=0,
    has_scale=False,
    cuda=_cuda,
    kernels=KernelRule(),
    peers=(Peer("fla.ops.hgrn", "chunk_hgrn", joins_heads=True),),
)
