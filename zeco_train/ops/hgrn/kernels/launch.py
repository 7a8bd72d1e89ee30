"""Launches of the kernels of the elementwise recurrence: tiles and grids."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from zeco_train.ops.hgrn.kernels.kernels import grads_kernel, outputs_kernel, starts_kernel, summaries_kernel


class HgrnWalk(NamedTuple):
    """How the kernels over all tokens are divided.

    Attributes:
        rows: tokens whose loads are issued together, and between which states are saved.
        channels: of a program, which is one warp: with two of a thread, a load is 4 bytes in bf16, 8 in fp32.
        programs: about as many are launched: one wave on a large GPU. The same on every device, so that the sums are.
        shortest: tokens of a program, at least.
    """

    rows: int
    channels: int
    programs: int
    shortest: int

    def run(self, batch: int, tokens: int, channels: int) -> int:
        """Tokens of a program, a multiple of `rows`."""
        runs = max(1, self.programs // (batch * triton.cdiv(channels, self.channels)))
        tokens = max(triton.cdiv(tokens, runs), min(tokens, self.shortest))
        return triton.cdiv(tokens, self.rows) * self.rows


WALK = HgrnWalk(rows=16, channels=64, programs=4096, shortest=64)
# Runs whose loads are issued together, and channels of a program, one of a thread, where runs are joined.
_JOINED, _CHANNELS = 32, 32


class HgrnSummaries(NamedTuple):
    """Runs of a rank's tokens joined from a zero start, or in reverse from a zero end.

    Attributes:
        starts: [B, runs, C] fp32, what each starts from, or ends with.
        log_decays: [B, runs, C] fp32, of all runs before it, or after it.
        state: [B, H, K, 1] fp32, S_loc or D_loc.
        log_decay: [B, H, K] fp32, of all tokens.
    """

    starts: Tensor
    log_decays: Tensor
    state: Tensor
    log_decay: Tensor


def states_shape(x: Tensor) -> tuple[int, int, int]:
    """[B, ⌈T / rows⌉, C], of the states that are saved, for x [B, T, H, K]."""
    batch, tokens, heads, key_dim = x.shape
    return batch, -(-tokens // WALK.rows), heads * key_dim


def launch_summaries(x: Tensor, g: Tensor, doc_ids: Tensor | None, *, reverse: bool) -> HgrnSummaries:
    """Summarise the runs of tokens, and join them.

    Args:
        x: [B, T, H, K], contiguous, as all here; in reverse do.
        g: [B, T, H, K] fp32.
        doc_ids: [T], see `zeco_train.ops.documents`.
        reverse: from the last token to the first.
    """
    B, T, H, K = x.shape
    C, run = H * K, WALK.run(B, T, H * K)
    runs = triton.cdiv(T, run)
    starts, log_decays = torch.empty(2, B, runs, C, dtype=torch.float32, device=x.device)
    state, log_decay = torch.empty(2, B, H, K, dtype=torch.float32, device=x.device)
    summaries_kernel[(triton.cdiv(C, WALK.channels), runs, B)](
        x, g, doc_ids, starts, log_decays, run, T, C,
        ROWS=WALK.rows, BC=WALK.channels, DOCUMENTS=doc_ids is not None, REVERSE=reverse, num_warps=1,
    )  # fmt: skip
    starts_kernel[(triton.cdiv(C, _CHANNELS), B)](
        starts, log_decays, state, log_decay, runs, C, ROWS=_JOINED, BC=_CHANNELS, REVERSE=reverse, num_warps=1,
    )  # fmt: skip
    return HgrnSummaries(starts, log_decays, state.unsqueeze(-1), log_decay)


def launch_outputs(
    x: Tensor, g: Tensor, doc_ids: Tensor | None, summaries: HgrnSummaries, incoming: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute h [B, T, H, K] in the dtype of x, and the states to save (`states_shape`), fp32.

    Args:
        x: [B, T, H, K].
        g: [B, T, H, K] fp32.
        doc_ids: [T], see `zeco_train.ops.documents`.
        summaries: of the same x, g and doc_ids.
        incoming: R, [B, H, K, 1].
    """
    B, T, H, K = x.shape
    o, states = torch.empty_like(x), torch.empty(states_shape(x), dtype=torch.float32, device=x.device)
    outputs_kernel[(triton.cdiv(H * K, WALK.channels), summaries.starts.shape[1], B)](
        x, g, doc_ids, summaries.starts, summaries.log_decays, incoming.contiguous(), o, states,
        WALK.run(B, T, H * K), T, H * K,
        ROWS=WALK.rows, BC=WALK.channels, DOCUMENTS=doc_ids is not None, num_warps=1,
    )  # fmt: skip
    return o, states


def launch_grads(
    x: Tensor,
    g: Tensor,
    do: Tensor,
    doc_ids: Tensor | None,
    states: Tensor,
    summaries: HgrnSummaries,
    incoming: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute dx in the dtype of x and dg fp32, [B, T, H, K].

    Args:
        x: [B, T, H, K].
        g: [B, T, H, K] fp32.
        do: [B, T, H, K].
        doc_ids: [T], see `zeco_train.ops.documents`.
        states: of `launch_outputs`.
        summaries: in reverse, of do.
        incoming: D_in, [B, H, K, 1].
    """
    B, T, H, K = x.shape
    dx, dg = torch.empty_like(x), torch.empty_like(g)
    grads_kernel[(triton.cdiv(H * K, WALK.channels), summaries.starts.shape[1], B)](
        x, g, do, doc_ids, states, summaries.starts, summaries.log_decays, incoming.contiguous(), dx, dg,
        WALK.run(B, T, H * K), T, H * K,
        ROWS=WALK.rows, BC=WALK.channels, DOCUMENTS=doc_ids is not None, num_warps=1,
    )  # fmt: skip
    return dx, dg
