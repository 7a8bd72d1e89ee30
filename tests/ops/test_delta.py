"""Delta rules on one rank and over simulated ranks, against the recurrence under autograd, in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.ops.test_ops import DOCUMENTS, cut
from tests.support.delta_cases import DECAYS, HEADS, KEY_DIM, RULES, VALUE_DIM, Case, make
from tests.support.few import one_of
from tests.support.recurrence import naive_gla, naive_of
from zeco_train.ops.delta import chunked, forward_flops, recomputed_flops
from zeco_train.ops.documents import find_doc_ids
from zeco_train.ops.operator_registry import OPERATORS

pytestmark = pytest.mark.numeric

SCALE = 0.7
# Relative to the largest element: sums of some hundred terms of order one; measured at most 5e-15.
TOLERANCE = 1e-13
EACH = pytest.mark.parametrize("rule", RULES)
# A negative control is wrong by at least this much.
WRONG = 1e-3


def sharded(
    rule: str,
    case: Case,
    edges: list[int],
    cu_seqlens: Tensor | None,
    *,
    forward_transition: Callable[[Tensor, list[Tensor]], Tensor] | None = None,
    adjoint: Callable[[Tensor], Tensor] = lambda transition: transition.mT,
) -> dict[str, Tensor]:
    """Simulated ranks, rank p with the tokens from edges[p] to edges[p + 1], and plain scans between them."""
    operands, state, do, grad = case
    operator = OPERATORS[rule]
    shards = [
        ([x[:, start:stop] for x in operands], do[:, start:stop], cut(cu_seqlens, start, stop))
        for start, stop in itertools.pairwise(edges)
    ]
    passes, incoming, transitions, o = operator.select(operands), [], [], []
    for local, _, doc_ids in shards:
        forward = passes.forward(local, SCALE, doc_ids)
        contribution, transition = forward.state.clone(), forward.transition.clone()
        assert forward.state.is_contiguous()
        assert forward.transition.is_contiguous()
        assert (*forward.state.shape,) == operator.state_shape(local)
        assert (*transition.shape,) == operator.transition_shape(local)
        forward.overlap()
        o.append(forward.outputs(state))
        # A scan may still read them.
        assert torch.equal(forward.state, contribution)
        assert torch.equal(forward.transition, transition)
        incoming.append(state)
        transitions.append(transition)
        used = transition if forward_transition is None else forward_transition(transition, local)
        state = used @ state + contribution
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
        grad = adjoint(transition) @ grad + contribution
    joined = [torch.cat(x, dim=1) for x in zip(*grads[::-1], strict=True)]
    return {"o": torch.cat(o, 1), "state": state, "initial_grad": grad, **_named(rule, joined)}


def _named(rule: str, grads: list[Tensor] | tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {f"d{name}": grad for name, grad in zip(OPERATORS[rule].operands, grads, strict=False)}


def expected(rule: str, case: Case, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    """The recurrence over the whole sequence, whose first document continues from the initial state."""
    operands, state, do, grad = case
    leaves = [x.detach().clone().requires_grad_() for x in (*operands, state)]
    doc_ids = find_doc_ids(cu_seqlens, 1, do.shape[1], do.device)
    o, end = naive_of(OPERATORS[rule])(*leaves[:-1], scale=SCALE, initial_state=leaves[-1], doc_ids=doc_ids)
    found = torch.autograd.grad([o, end], leaves, [do, grad], allow_unused=True, materialize_grads=True)
    return {"o": o.detach(), "state": end.detach(), "initial_grad": found[-1], **_named(rule, found)}


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The largest of each result, relative to its largest element, or for dg to the largest term of its sum."""
    assert found.keys() == wanted.keys()
    term = float(wanted["dq"].abs().max())
    return {
        name: float((found[name] - x).abs().max()) / max(float(x.abs().max()), term if name == "dg" else 1e-280)
        for name, x in wanted.items()
    }


def check(rule: str, case: Case, edges: list[int], documents: list[int] | None = None) -> None:
    cu_seqlens = None if documents is None else torch.tensor(documents)
    worst = errors(sharded(rule, case, edges, cu_seqlens), expected(rule, case, cu_seqlens))
    assert all(error <= TOLERANCE for error in worst.values()), worst


# The oracle


def test_recurrence_multiplies_the_state_by_its_matrices() -> None:
    """Written out with matrices, decay first."""
    (q, k, v, g, beta), state, _, _ = make("kda", 9)
    q, k = (x.repeat_interleave(HEADS // 2, dim=2) for x in (q, k))
    o, end = naive_of(OPERATORS["kda"])(q, k, v, g, beta, scale=SCALE, initial_state=state)
    eye = torch.eye(KEY_DIM, dtype=torch.float64)
    for t in range(9):
        k_t, b_t = k[:, t, :, :, None], beta[:, t, :, None, None]
        state = (eye - b_t * k_t @ k_t.mT) @ torch.diag_embed(g[:, t].exp()) @ state + b_t * k_t @ v[:, t, :, None, :]
        torch.testing.assert_close(o[:, t], SCALE * (q[:, t, :, None, :] @ state)[:, :, 0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(end, state, rtol=1e-12, atol=1e-13)


def test_rules_are_special_cases_of_the_one_with_decays_by_channel() -> None:
    (q, k, v, g, beta), state, _, _ = make("gated_delta", 20)
    wide = g[..., None].expand(*g.shape, KEY_DIM)
    gated, kda, delta, still = (
        naive_of(OPERATORS[rule])(*operands, initial_state=state)
        for rule, operands in (
            ("gated_delta", (q, k, v, g, beta)),
            ("kda", (q, k, v, wide, beta)),
            ("delta", (q, k, v, beta)),
            ("kda", (q, k, v, 0 * wide, beta)),
        )
    )
    for ours, theirs in zip((*gated, *delta), (*kda, *still), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_orthogonal_keys_make_gated_linear_attention() -> None:
    """Nothing is replaced then: each token only adds β k vᵀ. Not with other keys."""
    (q, _, v, g, beta), state, _, _ = make("kda", KEY_DIM, groups=HEADS)
    k = torch.eye(KEY_DIM, dtype=torch.float64)[None, :, None].expand(q.shape)
    o, end = naive_of(OPERATORS["kda"])(q, k, v, g, beta, initial_state=0 * state)
    wanted, wanted_end = naive_gla(q, k, beta[..., None] * v, g)
    torch.testing.assert_close(o, wanted, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(end, wanted_end, rtol=1e-12, atol=1e-13)


# Chunks


@pytest.mark.few(quick=4)
@EACH
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 64, 65, 130])
@pytest.mark.parametrize("decay", DECAYS)
def test_one_rank_equals_recurrence(rule: str, num_tokens: int, decay: str) -> None:
    check(rule, make(rule, num_tokens, decay), [0, num_tokens])


@pytest.mark.few(quick=2)
@EACH
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_every_grouping_of_heads_equals_recurrence(rule: str, groups: int, batch: int) -> None:
    check(rule, make(rule, 70, groups=groups, batch=batch), [0, 20, 70])


@pytest.mark.few(quick=4)
@EACH
@pytest.mark.parametrize("edges", [[0, 100, 140], [0, 1, 65, 140], [0, 64, 128, 192], [0, 3, 67, 130, 140]])
@pytest.mark.parametrize("decay", DECAYS)
def test_sharded_ranks_equal_recurrence(rule: str, edges: list[int], decay: str) -> None:
    check(rule, make(rule, edges[-1], decay), edges)


@pytest.mark.slow
@pytest.mark.parametrize("rule", one_of(RULES, "kda"))
def test_more_than_eight_chunks_a_rank_equal_recurrence(rule: str) -> None:
    case = make(rule, 590, "weak")
    # Else nothing of an incoming state is left after 8 chunks, and later ones need not be in the transition.
    case[0][1][:, :540, :, KEY_DIM // 2 :] = 0.0
    check(rule, case, [0, 580, 590])


@pytest.mark.few(quick=4)
@EACH
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("edges", [[0, 200], [0, 65, 66, 150, 200]])
def test_documents_equal_recurrence(rule: str, documents: str, edges: list[int]) -> None:
    check(rule, make(rule, 200), edges, DOCUMENTS[documents])


@pytest.mark.few
@EACH
@pytest.mark.parametrize("loud", [slice(0, 70), slice(70, 150)])
def test_no_value_or_gradient_crosses_restart(rule: str, loud: slice) -> None:
    quiet, other = make(rule, 150, "weak"), make(rule, 150, "weak")
    for x in (other[0][0], other[0][2], other[2]):
        x[:, loud] *= 1e8
    borders = torch.tensor([0, 70, 150])
    wanted, found = (sharded(rule, case, [0, 150], borders) for case in (quiet, other))
    kept = slice(70, 150) if loud.start == 0 else slice(0, 70)
    # exactly, not within rounding: a restart is a product with 0
    for name in ("o", *(f"d{name}" for name in OPERATORS[rule].operands)):
        assert torch.equal(wanted[name][:, kept], found[name][:, kept]), name
        assert not torch.equal(wanted[name][:, loud], found[name][:, loud]), name
    assert rule == "delta" or ((found["dg"][:, 70] == 0).all() and (found["dg"][:, [69, 71]] != 0).any())


def test_transition_is_zero_after_a_restart_and_no_expansion_otherwise() -> None:
    for rule in RULES:
        operands = make(rule, 100, "weak")[0]
        passes = OPERATORS[rule].select(operands)
        restarted = passes.forward(
            operands, SCALE, find_doc_ids(torch.tensor([0, 40, 100]), 1, 100, operands[0].device)
        )
        continued = passes.forward(operands, SCALE, find_doc_ids(torch.tensor([0, 100]), 1, 100, operands[0].device))
        assert (restarted.transition == 0).all()
        assert 0 < torch.linalg.matrix_norm(continued.transition, 2).max() <= 1


# What goes wrong without its parts


def test_scanning_decays_in_place_of_matrices_is_wrong() -> None:
    case, edges = make("kda", 48, "weak"), [0, 16, 32, 48]
    right = expected("kda", case, None)
    decays = lambda _, local: torch.diag_embed(local[3].sum(1).exp())  # noqa: E731
    wrong = errors(sharded("kda", case, edges, None, forward_transition=decays), right)
    assert min(wrong["state"], wrong["o"]) > WRONG


def test_reverse_scan_without_transposition_is_wrong() -> None:
    case, edges = make("kda", 48, "weak"), [0, 16, 32, 48]
    found = errors(
        sharded("kda", case, edges, None, adjoint=lambda transition: transition), expected("kda", case, None)
    )
    assert found["o"] <= TOLERANCE
    assert all(found[name] > WRONG for name in ("initial_grad", "dk", "dv", "dg", "dbeta")), found


@pytest.mark.few(quick=1)
@pytest.mark.parametrize("rule", ["gated_delta", "kda"])
def test_gradient_of_decays_without_the_term_of_the_last_state_is_wrong(rule: str) -> None:
    case, edges = make(rule, 48, "weak"), [0, 16, 32, 48]
    terms = chunked.sum_boundary_terms
    with mock.patch.object(chunked, "sum_boundary_terms", lambda states, grads: 0 * terms(states, grads)):
        found = errors(sharded(rule, case, edges, None), expected(rule, case, None))
    assert found.pop("dg") > WRONG
    assert all(error <= TOLERANCE for error in found.values()), found


# Dtypes


@pytest.mark.few
@EACH
@pytest.mark.parametrize("decay", ["none", "mixed", "strong"])
def test_fp32_error_is_bounded(rule: str, decay: str) -> None:
    operands, *rest = make(rule, 300, decay)
    narrow = [x.float() for x in operands]
    wanted = expected(rule, ([x.double() for x in narrow], *rest), None)
    found = sharded(rule, (narrow, rest[0].float(), rest[1].float(), rest[2].float()), [0, 100, 300], None)
    term = wanted["dq"].norm()
    for name, x in wanted.items():
        # Sums of up to 300 terms in fp32, eps 6e-8; those of dg cancel.
        assert found[name].dtype == torch.float32
        assert (found[name] - x).norm() <= 4e-6 * (max(x.norm(), term) if name == "dg" else x.norm()), name


@pytest.mark.few(quick=1)
@EACH
def test_bf16_tokens_are_computed_in_fp32(rule: str) -> None:
    operands, state, do, grad = make(rule, 100)
    wide_ones = ("g", "beta")
    narrow: Case = (
        [
            x.float() if name in wide_ones else x.bfloat16()
            for name, x in zip(OPERATORS[rule].operands, operands, strict=True)
        ],
        state.float(),
        do.bfloat16(),
        grad.float(),
    )
    wide: Case = ([x.float() for x in narrow[0]], narrow[1], narrow[2].float(), narrow[3])
    found, wanted = (sharded(rule, case, [0, 40, 100], None) for case in (narrow, wide))
    for name, x in wanted.items():
        assert found[name].dtype == (torch.bfloat16 if name in ("o", "dq", "dk", "dv") else torch.float32)
        assert torch.equal(found[name], x.to(found[name].dtype)), name


def test_narrow_or_misshapen_operands_are_refused() -> None:
    (q, k, v, g, beta), *_ = make("gated_delta", 5)
    naive = naive_of(OPERATORS["gated_delta"])
    with pytest.raises(ValueError, match=r"^beta: expected float32 or float64, for writing strengths"):
        naive(q, k, v, g, beta.bfloat16())
    with pytest.raises(ValueError, match=r"^g: expected float32 or float64, for log-decays"):
        naive(q, k, v, g.bfloat16(), beta)
    with pytest.raises(ValueError, match=r"^q: expected a number of groups that divides the 3 heads of v, got 2"):
        naive(q, k, v[:, :, :3], g[..., :3], beta[..., :3])
    with pytest.raises(ValueError, match=r"^g: expected shape \[B, T, H, K\] = \[1, 5, 4, 6\], got \[1, 5, 4, 7\]"):
        naive_of(OPERATORS["kda"])(q, k, v, g[..., None].expand(1, 5, 4, 7), beta)
    delta = OPERATORS["delta"]
    for plain in (naive_of(delta), lambda *tensors: delta.step(*tensors, torch.zeros(1, 4, 6, 5))):
        with pytest.raises(ValueError, match=r"^beta: expected float32 or float64, for writing strengths"):
            plain(q, k, v, beta.bfloat16())
        with pytest.raises(ValueError, match=r"^beta: expected shape \[B, T, H\]"):
            plain(q, k, v, beta[..., :3])


# One token


@EACH
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.bfloat16, 4e-3)])
def test_steps_equal_recurrence_and_update_the_state_in_place(rule: str, dtype: torch.dtype, tolerance: float) -> None:
    operands, state, _, _ = make(rule, 20, batch=2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    operands = [
        x.to(wide if name in ("g", "beta") else dtype)
        for name, x in zip(OPERATORS[rule].operands, operands, strict=True)
    ]
    updated = state.to(wide)
    wanted, end = naive_of(OPERATORS[rule])(*(x.double() for x in operands), initial_state=updated.double())
    o = [OPERATORS[rule].step(*(x[:, t : t + 1] for x in operands), updated) for t in range(20)]
    assert o[0].dtype == dtype
    assert (torch.cat(o, 1) - wanted).norm() <= tolerance * wanted.norm()
    assert (updated - end).norm() <= min(tolerance, 1e-6) * end.norm()


def test_mismatched_states_of_a_step_are_refused() -> None:
    operands, state, _, _ = make("kda", 1)
    step = OPERATORS["kda"].step
    with pytest.raises(ValueError, match=r"^state: expected shape \[B, H, K, V\]"):
        step(*operands, state[:, :2])
    with pytest.raises(ValueError, match=r"^state: expected torch.float64"):
        step(*operands, state.float())
    with pytest.raises(ValueError, match=r"^state: expected a contiguous tensor"):
        step(*operands, state.mT.contiguous().mT)
    with pytest.raises(ValueError, match=r"^q: expected one token"):
        step(*make("kda", 2)[0], state)


# The descriptor


def test_flops_count_the_chunk_form() -> None:
    # K 6, V 5, C 64: systems 63 · (2·6 + 5), states 6·30 (4·30 again), scores 65 · 11 (65 · 6 again).
    assert forward_flops(HEADS, KEY_DIM, VALUE_DIM) == HEADS * (63 * 17 + 180 + 65 * 11)
    assert recomputed_flops(HEADS, KEY_DIM, VALUE_DIM) == HEADS * (63 * 17 + 120 + 65 * 6)
