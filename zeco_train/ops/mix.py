"""An operator over a sharded sequence: the one op that serves every operator and every backend.

The operator's passes (`zeco_train.ops.passes`) are local to a rank; the only communication is one exclusive scan of
states in the forward pass and one of state gradients, in reverse, in the backward pass (docs/mathematics.md):

    zeco::mix           local state → launch(S_loc, A) | intra-chunk scores | wait → R, outputs, finish
    zeco::mix_backward  local state gradients → launch(D_loc, Aᵀ, reverse) | states again, intra-chunk gradients
                        | wait → D_in, operand gradients, finish

An operator with matrices for transitions has little to compute beside its scan. So a mixer may give a linear layer
that reads other tensors, such as an output gate's: its product and its weight's gradient come before `wait` (`Aside`).

Both are custom ops, so a compiler sees each as one node: it neither traces inside nor moves a launch away from the
compute that overlaps it, and a compiled block has no graph break.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.library import Library, infer_schema, register_fake
from torch.nn import Parameter

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.kernel_operands import dense
from zeco_train.ops.layer_states import StateInput, StateOutput
from zeco_train.ops.linear import Aside, linear, weight_grad
from zeco_train.ops.operator import Kind, Operator, Target
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.passes import BackwardBase, BackwardPass, ForwardBase, ForwardPass, Passes, keeps_states
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.rows import by_rows
from zeco_train.ops.seam import Exchange, LaunchedScan, ScanRequest, adjoint, exchange_of

if TYPE_CHECKING:
    from zeco_train.kernels.replay import Steps


def mix(
    operator: str,
    operands: Sequence[Tensor],
    position: SequencePosition,
    *,
    scale: float | None = None,
    incoming_state: Tensor | None = None,
    carry_in: Tensor | None = None,
    want_carry: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """An operator on this rank's tokens, exact over the whole sequence.

        S_t = A_t S_{t-1} + k_t v_tᵀ,    o_t = scale · q_tᵀ S_t        for most operators

    Args:
        operator: its name (`zeco_train.ops.operator_registry`).
        operands: of this rank's tokens, as `Operator.dims`. Values are not checked, since that would synchronise with
            the device: positive log-decays give wrong results on GPUs.
        position: of these tokens, with an exchange.
        scale: factor of the outputs; if None K^-1/2, or 1 for an operator without scale.
        incoming_state: [B, H, K, V], the state R that a first forward pass received. It is replayed as a constant:
            the forward pass then communicates nothing, as recomputation requires. The backward pass still does.
        carry_in: [B, H, K, V], the state before the whole sequence: replicated over the ranks, zero if None. Its
            gradient is replicated too, never to be summed over ranks.
        want_carry: also return the state after the whole sequence. All ranks must agree.

    Returns:
        o, and carry_out, [B, H, K, V], replicated, or None. With `incoming_state` carry_out is NaN: only its gradient
        edge is valid then.

    Raises:
        ValueError: unknown operator, or invalid operands; the message names the problem.
    """
    first = operands[0]
    position, state_input = position.on(first), StateInput(incoming_state, carry_in, want_carry)
    scale = operator_of(operator, operands).scale_of(operands, scale)
    o, state_output = mix_at(operator, operands, scale, position, state_input)
    if o.grad_fn is not None:
        # The op refers to the exchange by its handle only, and a caller may drop the position before the backward pass.
        metadata: Any = o.grad_fn.metadata
        metadata["exchange"] = position.exchange
    return o, state_output.carry_out if want_carry else None


def mix_at(
    operator: str, operands: Sequence[Tensor], scale: float, position: SequencePosition, state_input: StateInput
) -> tuple[Tensor, StateOutput]:
    """`mix` as a compiler can trace it, of a position on the tokens' device: o, and the states that crossed ranks."""
    o, state_output, _ = mix_beside(operator, operands, scale, position, state_input, None)
    return o, state_output


def mix_beside(
    operator: str,
    operands: Sequence[Tensor],
    scale: float,
    position: SequencePosition,
    state_input: StateInput,
    aside: Aside | None,
) -> tuple[Tensor, StateOutput, Tensor | None]:
    """`mix_at`, and the output [..., N] of a linear layer, computed while the operator's scan is under way."""
    assert position.doc_ids is not None or position.documents is None, "take `SequencePosition.on` first"
    beside: tuple[Any, ...] = ([], None) if aside is None else ([aside.x, aside.weight, *aside.more], aside.edge)
    where = position.handle, position.doc_ids
    call = _under_autograd if _is_plain(operands) else torch.ops.zeco.mix
    o, received, carry_out, _, _, y = call(list(operands), operator, float(scale), *where, *state_input, *beside)
    return o, StateOutput(received, carry_out), y[0] if y else None


def operator_of(name: str, operands: Sequence[Tensor]) -> Operator:
    """Look up an operator; a ValueError names an unknown name, or a wrong number of operands."""
    if name not in OPERATORS:
        raise ValueError(f"operator: must be one of {', '.join(OPERATORS)}; got {name!r}")
    operator = OPERATORS[name]
    if len(operands) != len(operator.operands):
        raise ValueError(f"operands: {name} takes {', '.join(operator.operands)}; got {len(operands)} tensors")
    return operator


# Row by row if each row of the batch has documents of its own.
def _passes(operator: Operator, operands: Sequence[Tensor], doc_ids: Tensor | None) -> Passes:
    if doc_ids is None or doc_ids.dim() == 1:
        return operator.select(operands)
    return by_rows(operator, operands, doc_ids)


# It would change the dtypes of some products, in backward passes too. To disable what is not enabled takes 5 µs.
def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


# Returns o, received and carry_out; for the backward pass the transition and `ForwardPass.saved`; and the output of the
# linear layer `aside`: x, W and what else `linear` takes, or empty. Absent tensors are [0]. Only autograd reads `edge`.
def _mix(
    operands: list[Tensor],
    operator: str,
    scale: float,
    handle: Tensor,
    doc_ids: Tensor | None,
    incoming_state: Tensor | None,
    carry_in: Tensor | None,
    want_carry: bool,
    aside: list[Tensor],
    edge: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    chosen, exchange = operator_of(operator, operands), exchange_of(handle)
    chosen.check_carries(carry_in, want_carry)
    if "log_decay" in chosen.operands and operands[-1].requires_grad:
        raise ValueError("log_decay: expected a constant, got a tensor that requires a gradient; use scalar_decay")
    wanted = want_carry or chosen.reads_whole
    passed, sends = _passes_through(exchange, carry_in, want_carry), wanted or not exchange.is_last
    like, is_first_pass = operands[chosen.output], incoming_state is None
    from_zero = is_first_pass and exchange.is_first and carry_in is None

    # In three parts, which the calls of `next` and `send` below run: before the scan, beside it, and after it.
    def steps() -> Steps:
        chosen.check(operands, doc_ids)
        local = _passes(chosen, operands, doc_ids).forward(operands, scale, doc_ids)
        is_lazy = _is_lazy(chosen, local)
        is_read = (sends and is_first_pass) or not is_lazy
        state = local.state if is_read else _unread(chosen.state_shape(operands), like)
        passed_on = local.transition if passed or not is_lazy else _unread(chosen.transition_shape(operands), like)
        yield state, passed_on, is_read
        if isinstance(local, ForwardBase):
            local.from_zero = from_zero
        local.overlap()
        o = local.outputs((yield))
        # Contiguous, as `_mix_shapes` promises the compiler.
        yield o.contiguous(), list(local.saved)

    # Triton and streams use the current device.
    with torch.cuda.device_of(like), _without_autocast(like):
        # What the scan takes, it checks; a given state is checked by the steps, once for its kind.
        given = None if incoming_state is None else (incoming_state.shape, incoming_state.dtype, incoming_state.device)
        form = "forward", chosen, scale, passed, sends, from_zero, given
        call = _call(form, *operands, doc_ids, steps=steps)
        state, transition, is_read = next(call)
        pending = None
        if is_first_pass:
            carry = carry_in if is_read or not exchange.is_first or carry_in is not None else state
            request = ScanRequest(state, transition, False, carry, wanted, chosen.cuts(operands))
            pending = (exchange.halo if chosen.state_is_halo else exchange.states).launch(request)
        next(call)
        beside = [linear(aside[0], aside[1], aside[2:])] if aside else []
        if pending is None:
            o, saved = call.send(dense(cast(Tensor, incoming_state)))
            received = transition.new_empty(0)
            shape = chosen.state_shape(operands) if want_carry else (0,)
            carry_out = like.new_full(shape, torch.nan, dtype=accumulation_dtype(like.dtype))
        else:
            received = _whole(pending) if chosen.reads_whole else pending.wait()
            o, saved = call.send(dense(received))
            if not chosen.reads_whole:
                pending.finish()
            carry_out = pending.carry_out() if want_carry else transition.new_empty(0)
            # Over one rank a scan returns carry_in itself, and the output of a custom op must not alias an input.
            received = received.clone() if received is carry_in else received
        return o, received, carry_out, transition, saved, beside


# The steps of a pass (`zeco_train.kernels.replay`), as they are or replayed.
def _call(form: Hashable, first: Tensor, *others: Tensor | None, steps: Callable[[], Steps]) -> Steps:
    target = Target.of(first.device)
    if target.kind != "cuda" or first.device.type != "cuda":
        return steps()
    from zeco_train.kernels import replay  # late: imports Triton

    return replay.call((form, target, keeps_states()), [first, *others], steps)


# Whether a state passes through this rank's tokens, so that their transition must be known. Before the first rank the
# state is 0 without a carry, and the one after the last rank is unread unless it is wanted. In reverse the same
# gradients are 0 or unread, so the transition multiplies zeros in all of its uses.
def _passes_through(exchange: Exchange, carry_in: Tensor | None, want_carry: bool) -> bool:
    return (carry_in is not None or not exchange.is_first) and (want_carry or not exchange.is_last)


def _is_lazy(operator: Operator, local: ForwardPass | BackwardPass) -> bool:
    return operator.kind is Kind.matrix or getattr(local, "lazy", False)


# In place of what is costly, and no rank reads. On a rank that is the first, too, zeros are also what it receives.
def _unread(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return like.new_zeros(shape, dtype=accumulation_dtype(like.dtype))


# The state of the whole sequence, for outputs that read it: `finish` cannot wait until after them.
def _whole(pending: LaunchedScan) -> Tensor:
    pending.wait()
    pending.finish()
    return pending.carry_out()


def _mix_shapes(operands: list[Tensor], operator: str, *rest: Any) -> tuple[Any, ...]:
    _, _, doc_ids, incoming_state, _, want_carry, aside, _ = rest
    chosen = operator_of(operator, operands)
    like = operands[chosen.output]
    state, dtype = chosen.state_shape(operands), accumulation_dtype(like.dtype)
    shapes = ((state if there else (0,)) for there in (incoming_state is None, want_carry))
    received, carry_out, transition = (
        like.new_empty(shape, dtype=dtype) for shape in (*shapes, chosen.transition_shape(operands))
    )
    saved = _passes(chosen, operands, doc_ids).saved_like(operands)
    beside = [aside[0].new_empty(*aside[0].shape[:-1], len(aside[1]))] if aside else []
    return like.new_empty(like.shape), received, carry_out, transition, list(saved), beside


# The gradients of the operands, dcarry_in, which is [0] unless it is wanted, and the gradient of a weight if `aside`
# has the gradient of its layer's output, and the layer's input.
def _mix_backward(
    operands: list[Tensor],
    do: Tensor,
    saved: list[Tensor],
    transition: Tensor,
    incoming_state: Tensor | None,
    dcarry_out: Tensor | None,
    operator: str,
    scale: float,
    handle: Tensor,
    doc_ids: Tensor | None,
    want_dcarry: bool,
    aside: list[Tensor],
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    chosen, exchange = operator_of(operator, operands), exchange_of(handle)
    wanted = want_dcarry or chosen.reads_whole
    sends, from_zero = wanted or not exchange.is_first, exchange.is_last and dcarry_out is None

    def steps() -> Steps:
        chosen.check(operands, doc_ids, do)
        local = _passes(chosen, operands, doc_ids).backward(operands, do, saved, incoming_state, scale, doc_ids)
        is_read = sends or not _is_lazy(chosen, local)
        yield local.state_grad if is_read else _unread(chosen.state_shape(operands), do), is_read
        if isinstance(local, BackwardBase):
            local.from_zero = from_zero
        local.overlap()
        yield [grad.contiguous() for grad in local.operand_grads((yield))]

    with torch.cuda.device_of(do), _without_autocast(do):
        form = "backward", chosen, scale, sends, from_zero
        call = _call(form, *operands, do, *saved, incoming_state, doc_ids, steps=steps)
        grad, is_read = next(call)
        carry = dcarry_out if is_read or not exchange.is_last or dcarry_out is not None else grad
        request = ScanRequest(grad, adjoint(transition), True, carry, wanted, chosen.cuts(operands))
        pending = (exchange.halo if chosen.state_is_halo else exchange.states).launch(request)
        next(call)
        dweights = [weight_grad(*aside)] if aside else []
        incoming_grad = _whole(pending) if chosen.reads_whole else pending.wait()
        grads = call.send(dense(incoming_grad))
        if not chosen.reads_whole:
            pending.finish()
        dcarry_in = pending.carry_out() if want_dcarry else transition.new_empty(0)
        return grads, dcarry_in.clone() if dcarry_in is dcarry_out else dcarry_in, dweights


def _mix_backward_shapes(operands: list[Tensor], *rest: Any) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    _, _, transition, _, _, operator, *_, want_dcarry, aside = rest
    state = operator_of(operator, operands).state_shape(operands)
    dweights = [aside[1].new_empty(aside[0].shape[-1], aside[1].shape[-1])] if aside else []
    return [x.new_empty(x.shape) for x in operands], transition.new_empty(state if want_dcarry else (0,)), dweights


# Whether no mode, compiler or profiler needs to see an op: PyTorch's ways to it take 40 µs of a call.
def _is_plain(tensors: Sequence[Tensor]) -> bool:
    if torch.compiler.is_compiling() or not all(type(x) in (Tensor, Parameter) for x in tensors):
        return False
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return not (modes or torch.autograd._profiler_enabled() or torch._C._functorch.peek_interpreter_stack())


# `zeco::mix` under autograd, with its lists flattened: `torch.library.register_autograd` would flatten and unflatten
# them by pytrees, which takes more host time than everything else here.
class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        operator, scale, handle, doc_ids, incoming_state, carry_in, want_carry, num_operands, _, *tensors = inputs
        operands, aside = tensors[:num_operands], tensors[num_operands:]
        # Otherwise the call would be dispatched to the autograd kernel, that is, here again.
        call = _untraced(_mix) if _is_plain(operands) else torch.ops.zeco.mix.default
        with torch._C._AutoDispatchBelowAutograd():
            o, received, carry_out, transition, saved, beside = call(
                operands, operator, scale, handle, doc_ids, incoming_state, carry_in, want_carry, aside, None
            )
        ctx.mark_non_differentiable(received, transition, *saved)
        ctx.set_materialize_grads(False)
        passes = _passes(operator_of(operator, operands), operands, doc_ids)
        incoming_state = received if incoming_state is None else incoming_state
        kept = [x for position, x in enumerate(operands) if position not in passes.replaced]
        incoming_state = incoming_state if passes.needs_incoming else None
        ctx.save_for_backward(handle, *kept, *saved, transition, incoming_state, doc_ids, *aside[:1])
        ctx.operator, ctx.scale, ctx.want_carry = operator, scale, want_carry
        ctx.num_operands, ctx.replaced, ctx.num_aside = num_operands, passes.replaced, len(aside)
        return o, received, carry_out, transition, *saved, *beside

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, _: None, dcarry_out: Tensor | None, *rest: Any) -> tuple[Any, ...]:
        handle, *kept = ctx.saved_tensors
        x = [kept.pop()] if ctx.num_aside else []
        *kept, transition, incoming_state, doc_ids = kept
        num_kept = ctx.num_operands - len(ctx.replaced)
        operands, saved = kept[:num_kept], kept[num_kept:]
        # The first saved tensors take the place of the operands that were not kept (`Passes.replaced`).
        for position in ctx.replaced:
            operands.insert(position, saved.pop(0))
        # Index 5: carry_in, by its position among the arguments of `forward`.
        want_dcarry = ctx.needs_input_grad[5]
        do = torch.zeros_like(operands[operator_of(ctx.operator, operands).output]) if do is None else do
        # A compiler passes zeros for undefined gradients.
        dcarry_out = dcarry_out if ctx.want_carry else None
        where = ctx.operator, ctx.scale, handle, doc_ids
        # Of the linear layer: its output comes last, its tensors after the operands.
        dy, wanted = rest[-1] if x else None, ctx.needs_input_grad[9 + ctx.num_operands :]
        pair = [dy, *x] if dy is not None and wanted[1] else []
        call = _untraced(_mix_backward) if _is_plain([*operands, do]) else torch.ops.zeco.mix_backward.default
        with torch._C._AutoDispatchBelowAutograd():
            grads, dcarry_in, dweights = call(
                operands, do, saved, transition, incoming_state, dcarry_out, *where, want_dcarry, pair
            )
        if torch.is_grad_enabled():  # by `create_graph`
            *grads, dcarry_in = _Final.apply((*grads, dcarry_in), do, dcarry_out, *operands)
        more = [dy.flatten(0, -2).sum(0) if dy is not None and each else None for each in wanted[2:]]
        of_aside = [None, *(dweights or [None]), *more] if x else []
        return None, None, None, None, None, dcarry_in if want_dcarry else None, None, None, dy, *grads, *of_aside


# Gradients, which depend on the other arguments.
class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grads: tuple[Tensor, ...], *arguments: Tensor | None) -> tuple[Tensor, ...]:
        return grads

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        raise RuntimeError("zeco::mix has no second derivatives")


_untraced = cache(torch._disable_dynamo)


def _under_autograd(operands: list[Tensor], *settings: Any) -> tuple[Any, ...]:
    *others, aside, edge = settings
    found = _Differentiable.apply(*others, len(operands), edge, *operands, *aside)
    saved = len(found) - bool(aside)
    return *found[:4], list(found[4:saved]), list(found[saved:])


# Not by `custom_op`, which registers an autograd kernel of its own, and checks each call for aliases.
_LIBRARY = Library("zeco", "FRAGMENT")
for _function, _shapes in ((_mix, _mix_shapes), (_mix_backward, _mix_backward_shapes)):
    _name = _function.__name__[1:]
    _LIBRARY.define(f"{_name}{infer_schema(_function, mutates_args=())}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _untraced(_function), "CompositeExplicitAutograd")
    register_fake(f"zeco::{_name}", _shapes, lib=_LIBRARY)
_LIBRARY.impl("mix", _under_autograd, "Autograd")
