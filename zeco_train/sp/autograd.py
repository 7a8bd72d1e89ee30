"""Gated linear attention over a sharded sequence: the one operator that serves every backend.

The operator's phases (`zeco_train.ops`) are local to a rank; the only thing that crosses ranks is one exclusive scan
of states in the forward pass and one of state gradients, in reverse, in the backward pass (DESIGN, section 3). `→`
marks it:

    zeco::gla           local states → launch(S_loc, G_tot) | intra-chunk scores | wait → R, outputs, finish
    zeco::gla_backward  local state gradients → launch(D_loc, G_tot, reverse) | states again, intra-chunk gradients
                        | wait → D_in, input gradients, finish

Both are custom ops, so a compiler sees each as one node: it neither looks inside nor moves a launch away from the work
that covers it, and a compiled block has no graph break.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd

from zeco_train import ops
from zeco_train.collectives.transition import adjoint
from zeco_train.ops import Documents
from zeco_train.sp.base import Boundary, Place, SequenceShard
from zeco_train.sp.handles import scan_of


class Crossing(NamedTuple):
    """What one layer's tokens got from other ranks and left to others.

    Attributes:
        received: [B, H, K, V], R, for a later replay; [0] in a replay.
        carry_out: [B, H, K, V], the state after the whole sequence; [0] unless it was wanted.
    """

    received: Tensor
    carry_out: Tensor


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    shard: SequenceShard,
    incoming_state: Tensor | None = None,
    carry_in: Tensor | None = None,
    want_carry: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal gated linear attention of this rank's tokens, exact over the whole sequence.

        S_t = exp(g_t) ⊙_K S_{t-1} + k_t v_tᵀ,    o_t = K^-1/2 · q_tᵀ S_t

    Args:
        q, k: [B, T, H, K], this rank's tokens; bf16, fp32 or fp64.
        v: [B, T, H, V], same dtype.
        g: [B, T, H, K], log-decay ≤ 0 and finite; fp32 (fp64 for fp64 inputs). Not checked, for that would wait for
            the device: positive values give wrong results on GPUs.
        shard: where these tokens lie, and the scan that joins them to the rest of the sequence.
        incoming_state: [B, H, K, V], the state R that a first forward pass received. It is replayed as a constant:
            the forward pass then communicates nothing, as recomputation requires. The backward pass still does.
        carry_in: [B, H, K, V], the state before the whole sequence: replicated over the ranks, zero if None. Its
            gradient is replicated too, never to be summed over ranks.
        want_carry: also return the state after the whole sequence. All ranks must agree.

    Returns:
        o, [B, T, H, V] in the dtype of v, and carry_out, [B, H, K, V], replicated, or None. With `incoming_state`
        the value of carry_out is not known here and is NaN: only its gradient edge is of use then.
    """
    place = shard.place(q.shape[1], q.device)
    o, crossing = gla_at(q, k, v, g, place, Boundary(incoming_state, carry_in, want_carry))
    if o.grad_fn is not None:
        # The op knows the scan by name only, and a caller may drop the shard before the backward pass.
        metadata: Any = o.grad_fn.metadata
        metadata["scan"] = shard.scan
    return o, crossing.carry_out if want_carry else None


def gla_at(q: Tensor, k: Tensor, v: Tensor, g: Tensor, place: Place, boundary: Boundary) -> tuple[Tensor, Crossing]:
    """`gla` in terms that a compiler can trace. The caller keeps the scan of `place` until the backward pass is over.

    Returns:
        o, [B, T, H, V] in the dtype of v; and what crossed ranks.
    """
    o, received, carry_out, *_ = _gla(q, k, v, g, *place, *boundary)
    return o, Crossing(received, carry_out)


@custom_op("zeco::gla", mutates_args=())
def _gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scan: str,
    restarts: Tensor | None,
    pieces: Tensor | None,
    incoming_state: Tensor | None,
    carry_in: Tensor | None,
    want_carry: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, received, carry_out, and for the backward pass log_decay and the three tensors that `ForwardPass.saved` gives;
    [0] stands for what there is not."""
    with _alone(q):
        passes = ops.select(q, g)
        local = passes.forward(q, k, v, g, _documents(restarts, pieces), _scale(q))
        received, carry_out = (local.state.new_empty(0) for _ in range(2))
        if incoming_state is None:
            pending = scan_of(scan).launch(local.state, local.log_decay, carry_in=carry_in, want_carry=want_carry)
            local.overlap()
            received = pending.wait()
            o = local.outputs(received)
            pending.finish()
            carry_out = pending.carry_out() if want_carry else carry_out
            # Over one rank a scan gives back its carry_in itself, and an op may not.
            received = received.clone() if received is carry_in else received
        else:
            local.overlap()
            o = local.outputs(incoming_state)
            carry_out = torch.full_like(local.state, torch.nan) if want_carry else carry_out
        saved_a, saved_b, saved_c = local.saved if passes.saved_like is not None else _nothing(g)
        return o.contiguous(), received, carry_out, local.log_decay, saved_a, saved_b, saved_c


@_gla.register_fake
def _gla_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scan: str,
    restarts: Tensor | None,
    pieces: Tensor | None,
    incoming_state: Tensor | None,
    carry_in: Tensor | None,
    want_carry: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    state = q.shape[0], q.shape[2], q.shape[3], v.shape[3]
    received, carry_out = (g.new_empty(state if there else (0,)) for there in (incoming_state is None, want_carry))
    like = ops.select(q, g).saved_like
    saved_a, saved_b, saved_c = like(k, v, g) if like is not None else _nothing(g)
    return v.new_empty(v.shape), received, carry_out, g.new_empty(state[:3]), saved_a, saved_b, saved_c


@custom_op("zeco::gla_backward", mutates_args=())
def _gla_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    incoming_state: Tensor | None,
    log_decay: Tensor,
    saved_a: Tensor,
    saved_b: Tensor,
    saved_c: Tensor,
    do: Tensor,
    dcarry_out: Tensor | None,
    scan: str,
    restarts: Tensor | None,
    pieces: Tensor | None,
    want_dcarry: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg, dcarry_in; the last one [0] unless it is wanted."""
    with _alone(q):
        passes = ops.select(q, log_decay)
        saved: tuple[Tensor, ...] = saved_a, saved_b, saved_c
        if passes.saved_like is None:
            assert g is not None
            assert incoming_state is not None
            saved = g, incoming_state
        local = passes.backward(q, k, v, do, saved, _documents(restarts, pieces), _scale(q))
        pending = scan_of(scan).launch(
            local.state_grad, adjoint(log_decay), reverse=True, carry_in=dcarry_out, want_carry=want_dcarry
        )
        local.overlap()
        dq, dk, dv, dg = (grad.contiguous() for grad in local.input_grads(pending.wait()))
        pending.finish()
        dcarry_in = pending.carry_out() if want_dcarry else log_decay.new_empty(0)
        return dq, dk, dv, dg, dcarry_in.clone() if dcarry_in is dcarry_out else dcarry_in


@_gla_backward.register_fake
def _gla_backward_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    incoming_state: Tensor | None,
    log_decay: Tensor,
    saved_a: Tensor,
    saved_b: Tensor,
    saved_c: Tensor,
    do: Tensor,
    dcarry_out: Tensor | None,
    scan: str,
    restarts: Tensor | None,
    pieces: Tensor | None,
    want_dcarry: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dcarry_in = log_decay.new_empty((*log_decay.shape, v.shape[3]) if want_dcarry else (0,))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), log_decay.new_empty(q.shape), dcarry_in


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, g, scan, restarts, pieces, incoming_state, _, want_carry = inputs
    _, received, _, log_decay, *saved = output
    incoming_state = received if incoming_state is None else incoming_state
    # What an implementation keeps by itself stands in for the decays, which are as large as q and k together in bf16.
    own = ops.select(q, g).saved_like is not None
    instead = (None, None) if own else (g, incoming_state)
    ctx.save_for_backward(q, k, v, *instead, log_decay, *saved, restarts, pieces)
    ctx.scan, ctx.want_carry = scan, want_carry
    ctx.mark_non_differentiable(received, log_decay, *saved)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, _: None, dcarry_out: Tensor | None, *rest: None) -> tuple[Any, ...]:
    *kept, restarts, pieces = ctx.saved_tensors
    want_dcarry = ctx.needs_input_grad[8]
    do = torch.zeros_like(kept[2]) if do is None else do
    # A compiler fills in gradients that there are not.
    dcarry_out = dcarry_out if ctx.want_carry else None
    *grads, dcarry_in = _gla_backward(*kept, do, dcarry_out, ctx.scan, restarts, pieces, want_dcarry)
    return *grads, None, None, None, None, dcarry_in if want_dcarry else None, None


register_autograd("zeco::gla", _backward, setup_context=_setup_context)


def _nothing(g: Tensor) -> tuple[Tensor, ...]:
    """In place of what an implementation would save."""
    return tuple(g.new_empty(0) for _ in range(3))


def _documents(restarts: Tensor | None, pieces: Tensor | None) -> Documents | None:
    return None if restarts is None or pieces is None else Documents(restarts, pieces)


def _scale(q: Tensor) -> float:
    return float(q.shape[-1]) ** -0.5


class _alone:
    """On the device of the tokens, which need not be the current one and which Triton and streams would take; and
    without autocast, which would change the dtypes of some products, in backward passes, too."""

    def __init__(self, q: Tensor) -> None:
        self._device, self._autocast = torch.cuda.device_of(q), torch.autocast(q.device.type, enabled=False)

    def __enter__(self) -> None:
        self._device.__enter__()
        self._autocast.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._autocast.__exit__(*exception)
        self._device.__exit__(*exception)
