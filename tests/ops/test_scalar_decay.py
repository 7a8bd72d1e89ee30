"""Scalar and fixed decays on one rank and over simulated ranks, against the recurrence under autograd, in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.ops.test_ops import DOCUMENTS, cut
from tests.support.recurrence import naive_of
from tests.support.scalar_cases import HEADS, KEY_DIM, VALUE_DIM, Case, log_decays, make
from zeco_train.ops import CHUNK
from zeco_train.ops.documents import find_doc_ids
from zeco_train.ops.gla import GLA
from zeco_train.ops.mix import mix
from zeco_train.ops.operator import Operator
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.scalar_decay import FIXED_DECAY, SCALAR_DECAY, forward_flops, recomputed_flops
from zeco_train.ops.scalar_decay.chunked import CHUNKED_SCALAR, decay_matrix
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

SCALE = 0.7
# Relative to the largest element: sums of some hundred terms of order one; measured at most 3e-15.
TOLERANCE = 1e-13
BOTH = pytest.mark.parametrize("operator", [SCALAR_DECAY, FIXED_DECAY], ids=["scalar", "fixed"])
DECAYS = ("none", "weak", "mixed", "strong", "underflow")


def of_tokens(operands: list[Tensor], start: int, stop: int) -> list[Tensor]:
    return [x if x.dim() == 1 else x[:, start:stop] for x in operands]


def sharded(operator: Operator, case: Case, edges: list[int], cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    """Simulated ranks, rank p with the tokens from edges[p] to edges[p + 1], and plain scans between them."""
    operands, state, do, grad = case
    shards = [
        (of_tokens(operands, start, stop), do[:, start:stop], cut(cu_seqlens, start, stop))
        for start, stop in itertools.pairwise(edges)
    ]
    passes, incoming, transitions, o = operator.select(operands), [], [], []
    for local, _, doc_ids in shards:
        forward = passes.forward(local, SCALE, doc_ids)
        contribution, transition = forward.state.clone(), forward.transition
        assert forward.state.is_contiguous()
        assert transition.is_contiguous()
        assert (*forward.state.shape,) == operator.state_shape(local)
        assert (*transition.shape,) == operator.transition_shape(local)
        forward.overlap()
        o.append(forward.outputs(state))
        # A scan may still read it.
        assert torch.equal(forward.state, contribution)
        incoming.append(state)
        transitions.append(transition.exp()[..., None])
        state = transitions[-1] * state + contribution
    grads = []
    for (local, of_outputs, doc_ids), received, transition in reversed(
        list(zip(shards, incoming, transitions, strict=True))
    ):
        backward = passes.backward(local, of_outputs, (), received, SCALE, doc_ids)
        contribution = backward.state_grad.clone()
        backward.overlap()
        grads.append(backward.operand_grads(grad))
        assert torch.equal(backward.state_grad, contribution)
        for x, dx in zip(local, grads[-1], strict=True):
            assert (dx.shape, dx.dtype, dx.is_contiguous()) == (x.shape, x.dtype, True)
        grad = transition * grad + contribution
    joined = [torch.cat(x, dim=1) if x[0].dim() > 1 else torch.stack(x).sum(0) for x in zip(*grads[::-1], strict=True)]
    names = "o", "state", "initial_grad", "dq", "dk", "dv", "dg"
    return dict(zip(names, (torch.cat(o, 1), state, grad, *joined), strict=True))


def expected(operator: Operator, case: Case, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    """The recurrence over the whole sequence, whose first document continues from the initial state."""
    operands, state, do, grad = case
    leaves = [x.detach().clone().requires_grad_() for x in (*operands, state)]
    doc_ids = find_doc_ids(cu_seqlens, 1, do.shape[1], do.device)
    o, end = naive_of(operator)(*leaves[:4], scale=SCALE, initial_state=leaves[4], doc_ids=doc_ids)
    found = torch.autograd.grad([o, end], leaves, [do, grad], allow_unused=True, materialize_grads=True)
    return dict(
        zip(("o", "state", "dq", "dk", "dv", "dg", "initial_grad"), (o.detach(), end.detach(), *found), strict=True)
    )


def check(operator: Operator, case: Case, edges: list[int], documents: list[int] | None = None) -> None:
    cu_seqlens = None if documents is None else torch.tensor(documents)
    wanted = expected(operator, case, cu_seqlens)
    found = sharded(operator, case, edges, cu_seqlens)
    for name, x in wanted.items():
        # dg too is relative to itself, not to the terms that cancel in it.
        error = float((found[name] - x).abs().max()) / max(float(x.abs().max()), 1e-280)
        assert error <= TOLERANCE, f"{name} off by {error:.1e}"


@pytest.mark.few
@BOTH
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 64, 65, 130])
@pytest.mark.parametrize("decay", DECAYS)
def test_one_rank_equals_recurrence(operator: Operator, num_tokens: int, decay: str) -> None:
    check(operator, make(operator, num_tokens, decay), [0, num_tokens])


@pytest.mark.few
@BOTH
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("batch", [1, 2])
def test_every_grouping_of_heads_equals_recurrence(operator: Operator, groups: int, batch: int) -> None:
    check(operator, make(operator, 70, groups=groups, batch=batch), [0, 20, 70])


@pytest.mark.few(quick=3)
@BOTH
@pytest.mark.parametrize("edges", [[0, 100, 200], [0, 1, 65, 200], [0, 64, 128, 192], [0, 3, 67, 190, 200]])
@pytest.mark.parametrize("decay", DECAYS)
def test_sharded_ranks_equal_recurrence(operator: Operator, edges: list[int], decay: str) -> None:
    check(operator, make(operator, edges[-1], decay), edges)


@pytest.mark.slow
@BOTH
def test_more_than_eight_chunks_a_rank_equal_recurrence(operator: Operator) -> None:
    check(operator, make(operator, 700, "weak"), [0, 650, 700])


@pytest.mark.few(quick=4)
@BOTH
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("edges", [[0, 200], [0, 65, 66, 150, 200]])
@pytest.mark.parametrize("decay", ["none", "mixed"])
def test_documents_equal_recurrence(operator: Operator, documents: str, edges: list[int], decay: str) -> None:
    check(operator, make(operator, 200, decay), edges, DOCUMENTS[documents])


@pytest.mark.few(quick=2)
@BOTH
@pytest.mark.parametrize("loud", [slice(0, 70), slice(70, 150)])
def test_no_value_or_gradient_crosses_restart(operator: Operator, loud: slice) -> None:
    quiet, other = make(operator, 150, "none"), make(operator, 150, "none")
    for x in (*other[0][:3], other[2]):
        x[:, loud] *= 1e8
    borders = torch.tensor([0, 70, 150])
    wanted, found = (sharded(operator, case, [0, 150], borders) for case in (quiet, other))
    kept = slice(70, 150) if loud.start == 0 else slice(0, 70)
    # exactly, not within rounding: a restart is a product with 0
    for name in ("o", "dq", "dk", "dv") + (("dg",) if operator is SCALAR_DECAY else ()):
        assert torch.equal(wanted[name][:, kept], found[name][:, kept]), name
        assert not torch.equal(wanted[name][:, loud], found[name][:, loud]), name
    assert operator is FIXED_DECAY or ((found["dg"][:, 70] == 0).all() and (found["dg"][:, [69, 71]] != 0).any())


def test_decay_matrix_is_the_product_of_the_decays_between_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    g = log_decays("weak", 1, 40, 2, 3, generator=generator)
    found = decay_matrix(g, find_doc_ids(torch.tensor([0, 13, 40]), 1, 40, g.device), torch.float64)
    assert found.shape == (1, 1, 2, 3, 64, 64)
    for i, j in [(0, 0), (5, 5), (12, 0), (13, 12), (13, 13), (39, 13), (39, 2), (2, 39), (31, 29), (32, 31)]:
        apart = j > i or j < 13 <= i
        between = torch.zeros(2, 3, dtype=torch.float64) if apart else g[0, j + 1 : i + 1].sum(0).exp()
        torch.testing.assert_close(found[0, 0, :, :, i, j], between, rtol=1e-14, atol=0)


@pytest.mark.few(quick=1)
@pytest.mark.parametrize("groups", [2, 6])
@pytest.mark.parametrize("documents", [None, [0, 3, 70, 150]])
def test_scalar_decay_equals_gla_with_expanded_decays(groups: int, documents: list[int] | None) -> None:
    (q, k, v, g), state, do, grad = make(SCALAR_DECAY, 150, groups=groups)
    per_group = HEADS // groups
    of_channels = g[..., None].expand(*g.shape, KEY_DIM).contiguous()
    wide = [*(x.repeat_interleave(per_group, 2) for x in (q, k)), v, of_channels]
    cu_seqlens = None if documents is None else torch.tensor(documents)
    found = sharded(SCALAR_DECAY, ([q, k, v, g], state, do, grad), [0, 40, 150], cu_seqlens)
    of_gla = sharded(GLA, (wide, state, do, grad), [0, 40, 150], cu_seqlens)
    for name in ("dq", "dk"):
        of_gla[name] = of_gla[name].unflatten(2, (groups, per_group)).sum(3)
    of_gla["dg"] = of_gla["dg"].sum(-1)
    for name, x in of_gla.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-11)


def test_fixed_decay_equals_scalar_decay_of_equal_tokens() -> None:
    ((q, k, v, log_decay), *rest) = make(FIXED_DECAY, 100)
    g = log_decay.expand(1, 100, HEADS)
    scalar = sharded(SCALAR_DECAY, ([q, k, v, g], *rest), [0, 30, 100], None)
    fixed = sharded(FIXED_DECAY, ([q, k, v, log_decay], *rest), [0, 30, 100], None)
    assert torch.equal(fixed.pop("dg"), torch.zeros(HEADS, dtype=torch.float64))
    for name, x in fixed.items():
        assert torch.equal(x, scalar[name]), name


@pytest.mark.few(quick=3)
@BOTH
@pytest.mark.parametrize("decay", ["none", "mixed", "strong"])
def test_fp32_error_is_bounded(operator: Operator, decay: str) -> None:
    operands, *rest = make(operator, 300, decay)
    narrow = [x.float() for x in operands]
    wanted = expected(operator, ([x.double() for x in narrow], *rest), None)
    found = sharded(operator, (narrow, rest[0].float(), rest[1].float(), rest[2].float()), [0, 100, 300], None)
    for name, x in wanted.items():
        # Sums of up to 300 terms in fp32, eps 6e-8.
        assert found[name].dtype == torch.float32
        assert (found[name] - x).norm() <= 4e-6 * x.norm(), name


@pytest.mark.few(quick=1)
@BOTH
def test_bf16_tokens_are_computed_in_fp32(operator: Operator) -> None:
    operands, state, do, grad = make(operator, 100)
    tokens = [*(x.bfloat16() for x in operands[:3]), operands[3].float()]
    narrow: Case = tokens, state.float(), do.bfloat16(), grad.float()
    wide: Case = ([x.float() for x in narrow[0]], narrow[1], narrow[2].float(), narrow[3])
    found, wanted = (sharded(operator, case, [0, 40, 100], None) for case in (narrow, wide))
    for name, x in wanted.items():
        of_tokens = name in ("o", "dq", "dk", "dv")
        assert found[name].dtype == (torch.bfloat16 if of_tokens else torch.float32)
        assert torch.equal(found[name], x.to(found[name].dtype)), name


# One token


@pytest.mark.few
@BOTH
@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.bfloat16, 4e-3)])
def test_steps_equal_recurrence_and_update_the_state_in_place(
    operator: Operator, groups: int, dtype: torch.dtype, tolerance: float
) -> None:
    operands, state, _, _ = make(operator, 20, groups=groups, batch=2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    operands = [*(x.to(dtype) for x in operands[:3]), operands[3].to(wide)]
    updated = state.to(wide)
    wanted, end = naive_of(operator)(*(x.double() for x in operands), scale=SCALE, initial_state=updated.double())
    o = [operator.step(*of_tokens(operands, t, t + 1), updated, SCALE) for t in range(20)]
    assert o[0].dtype == dtype
    assert (torch.cat(o, 1) - wanted).norm() <= tolerance * wanted.norm()
    assert (updated - end).norm() <= min(tolerance, 1e-6) * end.norm()


def test_scale_of_a_step_is_by_default_that_of_the_recurrence() -> None:
    operands, state, _, _ = make(SCALAR_DECAY, 1)
    wanted, _ = naive_of(SCALAR_DECAY)(*operands, initial_state=state)
    torch.testing.assert_close(SCALAR_DECAY.step(*operands, state.clone()), wanted, rtol=1e-13, atol=1e-14)


def test_mismatched_states_of_a_step_are_refused() -> None:
    operands, state, _, _ = make(SCALAR_DECAY, 1)
    with pytest.raises(ValueError, match=r"^state: expected shape \[B, H, K, V\]"):
        SCALAR_DECAY.step(*operands, state[:, :2])
    with pytest.raises(ValueError, match=r"^state: expected torch.float64"):
        SCALAR_DECAY.step(*operands, state.float())
    with pytest.raises(ValueError, match=r"^state: expected a contiguous tensor"):
        SCALAR_DECAY.step(*operands, state.mT.contiguous().mT)
    with pytest.raises(ValueError, match=r"^q: expected one token"):
        SCALAR_DECAY.step(*make(SCALAR_DECAY, 2)[0], state)


# FLOPs


@pytest.mark.parametrize("groups", [1, pytest.param(3, marks=pytest.mark.campaign), 6])
def test_products_of_forward_pass_equal_flops_and_scores_count_once_a_group(groups: int) -> None:
    operands, state, _, _ = make(SCALAR_DECAY, 2 * CHUNK, groups=groups)
    with FlopCounterMode(display=False) as counter:
        forward = CHUNKED_SCALAR.forward(operands, SCALE, None)
        local = counter.get_total_flops()
        forward.overlap()
        forward.outputs(state)
    assert local == 2 * CHUNK * recomputed_flops(HEADS, KEY_DIM, VALUE_DIM, groups=groups)
    # PyTorch computes the whole square of a chunk's pairs, of which the formula counts the causal half.
    upper = (CHUNK - 1) * (HEADS * VALUE_DIM + groups * KEY_DIM)
    per_token = forward_flops(HEADS, KEY_DIM, VALUE_DIM, groups=groups) + upper
    assert counter.get_total_flops() == 2 * CHUNK * per_token
    assert forward_flops(4, 32, 16) == forward_flops(4, 32, 16, groups=4) == GLA.forward_flops(4, 32, 16)
    assert recomputed_flops(4, 32, 16) == GLA.recomputed_flops(4, 32, 16)


# Operands that are refused


def test_fixed_decay_that_requires_a_gradient_is_refused() -> None:
    operands, *_ = make(FIXED_DECAY, 4)
    operands[0].requires_grad_()
    shard = SequencePosition((0, 4), exchange=local_exchange())
    o, _ = mix("fixed_decay", operands, shard)
    o.sum().backward()
    operands[3].requires_grad_()
    with pytest.raises(ValueError, match=r"^log_decay: expected a constant, got a tensor that requires a gradient"):
        mix("fixed_decay", operands, shard)


@pytest.mark.parametrize(
    ("position", "shape", "message"),
    [
        (0, (1, 4, 4, KEY_DIM), r"k: expected shape \[B, T, G, K\]"),
        (2, (1, 4, 5, VALUE_DIM), r"q: expected a number of groups that divides the 5 heads of v, got 2"),
        (2, (1, 3, HEADS, VALUE_DIM), r"v: expected shape \[B, T, H, V\]"),
        (3, (1, 4, HEADS, KEY_DIM), r"g: expected shape \[B, T, H\], got"),
        (3, (1, 4, 5), r"g: expected shape \[B, T, H\] = "),
    ],
)
def test_invalid_shapes_are_named(position: int, shape: tuple[int, ...], message: str) -> None:
    operands, *_ = make(SCALAR_DECAY, 4)
    if message.startswith("q"):
        operands[3] = torch.zeros(1, 4, 5, dtype=torch.float64)
    operands[position] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"^{message}"):
        naive_of(SCALAR_DECAY)(*operands)
    with pytest.raises(ValueError, match=f"^{message}"):
        mix("scalar_decay", operands, SequencePosition((0, 4), exchange=local_exchange()))


def test_log_decays_of_other_heads_or_dtypes_are_refused() -> None:
    operands, *_ = make(FIXED_DECAY, 4)
    for wrong, message in (
        (operands[3][:5], r"log_decay: expected shape \[H\] = \[6\], got \[5\]"),
        (operands[3].bfloat16(), "log_decay: expected float32 or float64"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            mix("fixed_decay", [*operands[:3], wrong], SequencePosition((0, 4), exchange=local_exchange()))
