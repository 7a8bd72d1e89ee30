"""The operator on one rank and over simulated ranks, against the recurrence; and the recurrence against its own sum.

All comparisons are in fp64 unless said otherwise. Both sides add up some hundred terms of order one, in another order:
1e-13 relative to the largest element leaves two digits above the largest error seen, 1.3e-15.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.support.comparison import largest
from tests.support.recurrence import naive_gla
from zeco_train.ops.documents import find_doc_ids
from zeco_train.ops.gla import chunked
from zeco_train.ops.mix import operator_of
from zeco_train.ops.operator_registry import OPERATORS

pytestmark = pytest.mark.numeric

TOLERANCE = 1e-13
NAMES = ("o", "dq", "dk", "dv", "dg", "incoming_states", "final_state", "initial_grad")


@dataclass(frozen=True)
class Case:
    """A whole sequence with the incoming gradients of its outputs and its final state."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    do: Tensor
    initial_state: Tensor
    final_grad: Tensor
    cu_seqlens: Tensor | None = None

    def doc_ids(self, before: int) -> Tensor | None:
        return find_doc_ids(self.cu_seqlens, before, self.q.shape[1], self.q.device)


def make_case(
    num_tokens: int,
    decay: str = "mixed",
    *,
    batch: int = 1,
    heads: int = 2,
    key_dim: int = 5,
    value_dim: int = 7,
    cu_seqlens: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    tokens, state = (batch, num_tokens, heads), (batch, heads, key_dim, value_dim)
    strength = torch.rand(*tokens, key_dim, dtype=torch.float64, generator=generator)
    match decay:
        case "none":
            g = torch.zeros_like(strength)
        case "weak":
            g = -0.02 * strength
        case "strong":
            g = -50.0 * strength
        case "strongest":
            g = torch.full_like(strength, -50.0)
        case _:  # another strength for every channel, from none through e^-0.05 to e^-50 a token
            g = -torch.tensor([0.0, 0.05, 1.0, 50.0, 0.3], dtype=torch.float64)[torch.arange(key_dim) % 5] * strength
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(
        q=normal(*tokens, key_dim).to(dtype),
        k=normal(*tokens, key_dim).to(dtype),
        v=normal(*tokens, value_dim).to(dtype),
        g=g.to(wide),
        do=normal(*tokens, value_dim).to(dtype),
        initial_state=normal(*state).to(wide),
        final_grad=normal(*state).to(wide),
        cu_seqlens=None if cu_seqlens is None else torch.tensor(cu_seqlens),
    )


def oracle(case: Case, edges: list[int]) -> dict[str, Tensor]:
    """The recurrence over the whole sequence, in fp64 and under autograd, and its states at the shards' edges."""
    inputs = [x.double().detach().requires_grad_() for x in (case.q, case.k, case.v, case.g)]
    initial_state = case.initial_state.double().detach().requires_grad_()
    o, final_state = naive_gla(*inputs, initial_state=initial_state, doc_ids=case.doc_ids(before=1))
    loss = (o * case.do.double()).sum() + (final_state * case.final_grad.double()).sum()
    grads = torch.autograd.grad(loss, [*inputs, initial_state])
    incoming_states = [initial_state.detach()]
    for edge in edges[1:-1]:
        head = [x[:, :edge] for x in inputs]
        with torch.no_grad():
            _, state = naive_gla(*head, initial_state=initial_state, doc_ids=cut(case.cu_seqlens, 0, edge))
        incoming_states.append(state)
    results = (o.detach(), *grads[:4], torch.stack(incoming_states), final_state.detach(), grads[4])
    return dict(zip(NAMES, results, strict=True))


def cut(cu_seqlens: Tensor | None, start: int, stop: int) -> Tensor | None:
    """The doc_ids of the tokens [start, stop). The first document of the sequence continues from the initial state."""
    if cu_seqlens is None:
        return None
    inner = cu_seqlens[(cu_seqlens > start) & (cu_seqlens < stop)]
    borders = torch.cat([torch.tensor([start]), inner, torch.tensor([stop])]) - start
    before = start - int(cu_seqlens[cu_seqlens <= start].max()) if start > 0 else 1
    return find_doc_ids(borders, before, stop - start, cu_seqlens.device)


@torch.no_grad()
def sharded(case: Case, edges: list[int]) -> dict[str, Tensor]:
    """All phases on simulated ranks, rank p holding tokens edges[p] to edges[p + 1], with plain scans between them."""
    scale = case.q.shape[-1] ** -0.5
    shards = []
    for start, stop in itertools.pairwise(edges):
        doc_ids = cut(case.cu_seqlens, start, stop)
        shards.append((*[x[:, start:stop] for x in (case.q, case.k, case.v, case.g, case.do)], doc_ids))

    state, incoming_states, o = case.initial_state, [], []
    for q, k, v, g, _, doc_ids in shards:
        chunk_states = chunked.local_states(k, v, g, doc_ids)
        incoming_states.append(state)
        state = chunk_states.log_decay.exp()[..., None] * state + chunk_states.state
        scores = chunked.intra_scores(q, k, g, doc_ids, scale)
        o.append(chunked.outputs(q, v, scores, chunk_states, incoming_states[-1], scale))
        torch.testing.assert_close(chunk_states.boundaries.states[-1], state)  # updated in place by `outputs`

    grad, grads = case.final_grad, []
    for (q, k, v, g, do, doc_ids), incoming_state in reversed(list(zip(shards, incoming_states, strict=True))):
        chunk_grads = chunked.local_state_grads(q, do, g, doc_ids, scale)
        chunk_states = chunked.local_states(k, v, g, doc_ids)
        intra = chunked.intra_grads(q, k, v, g, do, doc_ids, scale)
        incoming_grad = grad
        grad = chunk_states.log_decay.exp()[..., None] * grad + chunk_grads.state_grad
        rest = (chunk_states, incoming_state, chunk_grads, incoming_grad, intra, doc_ids, scale)
        grads.append(chunked.input_grads(q, k, v, g, *rest))
    dq, dk, dv, dg = (torch.cat(parts[::-1], dim=1) for parts in zip(*grads, strict=True))
    results = (torch.cat(o, dim=1), dq, dk, dv, dg, torch.stack(incoming_states), state, grad)
    return dict(zip(NAMES, results, strict=True))


def errors(case: Case, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest error of each result, relative to its largest element, or for dg to the largest term of its sum."""
    found = {}
    # where all decays are e^-50, dg is 1e-22 of the terms q ⊙ dq and k ⊙ dk, so only their rounding remains
    term = float((case.q.double() * expected["dq"]).abs().max())
    for name in NAMES:
        assert actual[name].shape == expected[name].shape, name
        assert actual[name].isfinite().all(), name
        largest = max(float(expected[name].abs().max()), term if name == "dg" else 0.0)
        found[name] = float((actual[name].double() - expected[name]).abs().max()) / largest
    return found


def check(case: Case, edges: list[int], tolerance: float = TOLERANCE) -> None:
    found = errors(case, sharded(case, edges), oracle(case, edges))
    assert largest(found.values()) <= tolerance, found


def closed_form(case: Case) -> tuple[Tensor, Tensor]:
    """Outputs and final state as masked attention with the decay of every pair written out, by subtraction in fp64."""
    total = case.g.cumsum(1)
    past = torch.ones(case.q.shape[1], case.q.shape[1], dtype=torch.bool).tril()
    if case.cu_seqlens is not None:
        document = torch.bucketize(torch.arange(case.q.shape[1]), case.cu_seqlens[1:-1], right=True)
        past &= document[:, None] == document[None, :]
        carried = (document == 0)[:, None, None]
        kept = document == document[-1]
    else:
        carried = kept = torch.ones(case.q.shape[1], dtype=torch.bool)
        carried = carried[:, None, None]
    difference = (total[:, :, None] - total[:, None, :]).masked_fill(~past[:, :, None, None], float("-inf"))
    scores = torch.einsum("bihk,bjhk,bijhk->bijh", case.q, case.k, difference.exp())
    o = torch.einsum("bijh,bjhv->bihv", scores, case.v)
    o = o + torch.einsum("bihk,bhkv->bihv", case.q * total.exp() * carried, case.initial_state)
    reached = case.k * (total[:, -1:] - total).exp() * kept[:, None, None]
    state = torch.einsum("bjhk,bjhv->bhkv", reached, case.v)
    if bool(kept[0]):
        state = state + total[:, -1].exp()[..., None] * case.initial_state
    return o * case.q.shape[-1] ** -0.5, state


# The oracle


@pytest.mark.parametrize("cu_seqlens", [None, [0, 20], [0, 3, 4, 4, 15, 20]])
def test_recurrence_equals_masked_attention(cu_seqlens: list[int] | None) -> None:
    case = make_case(20, "weak", batch=1 if cu_seqlens else 2, cu_seqlens=cu_seqlens)
    inputs = [x.requires_grad_() for x in (case.q, case.k, case.v, case.g, case.initial_state)]
    found = naive_gla(*inputs[:4], initial_state=inputs[4], doc_ids=case.doc_ids(before=1))
    expected = closed_form(case)
    # the sums of g are below 1 here, so subtracting them costs the closed form no digits
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
    outside = (case.do, case.final_grad)
    grads = [
        torch.autograd.grad(pair, inputs, outside, allow_unused=True, materialize_grads=True)
        for pair in (found, expected)
    ]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_recurrence_passes_gradcheck() -> None:
    case = make_case(4, "weak", heads=1, key_dim=2, value_dim=3, cu_seqlens=[0, 3, 4])
    inputs = tuple(x.requires_grad_() for x in (case.q, case.k, case.v, case.g, case.initial_state))

    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor) -> tuple[Tensor, Tensor]:
        return naive_gla(q, k, v, g, initial_state=initial_state, doc_ids=case.doc_ids(before=1))

    assert torch.autograd.gradcheck(function, inputs)


def test_recurrence_restarts_at_token_zero_unless_it_continues() -> None:
    case = make_case(9, cu_seqlens=[0, 9])
    inputs = (case.q, case.k, case.v, case.g)
    fresh = naive_gla(*inputs, initial_state=case.initial_state, doc_ids=case.doc_ids(before=0))
    for x, y in zip(fresh, naive_gla(*inputs), strict=True):
        assert torch.equal(x, y)
    continued = naive_gla(*inputs, initial_state=case.initial_state, doc_ids=case.doc_ids(before=1))
    for x, y in zip(continued, naive_gla(*inputs, initial_state=case.initial_state), strict=True):
        assert torch.equal(x, y)


# The phases on one rank and over several


@pytest.mark.parametrize(("num_tokens", "chunk"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 64)])
def test_chunk_is_smallest_size_that_fits_up_to_64(num_tokens: int, chunk: int) -> None:
    case = make_case(num_tokens)
    assert chunked.intra_scores(case.q, case.k, case.g, None, 1.0).shape[-2:] == (chunk, chunk)


@pytest.mark.few(quick=6)
@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 32, 33, 63, 64, 65, 130, 200])
@pytest.mark.parametrize("decay", ["none", "weak", "mixed", "strong", "strongest"])
def test_one_rank_equals_recurrence(num_tokens: int, decay: str) -> None:
    check(make_case(num_tokens, decay), [0, num_tokens])


@pytest.mark.few
@pytest.mark.parametrize("edges", [[0, 100, 200], [0, 1, 65, 200], [0, 64, 128, 192], [0, 3, 67, 190, 300]])
@pytest.mark.parametrize("decay", ["none", "weak", "mixed", "strong"])
def test_sharded_ranks_equal_recurrence(edges: list[int], decay: str) -> None:
    check(make_case(edges[-1], decay), edges)


@pytest.mark.few(quick=1)
@pytest.mark.parametrize("cu_seqlens", [None, [0, 560, 590]])
def test_more_than_eight_chunks_a_rank_equal_recurrence(cu_seqlens: list[int] | None) -> None:
    check(make_case(590, "weak", cu_seqlens=cu_seqlens), [0, 580, 590])


@pytest.mark.few(quick=1)
@pytest.mark.parametrize("edges", [[0, 150], [0, 20, 150]])
def test_batches_heads_and_odd_dims_equal_recurrence(edges: list[int]) -> None:
    check(make_case(150, batch=2, heads=3, key_dim=33, value_dim=17), edges)
    check(make_case(150, batch=2, heads=1, key_dim=1, value_dim=1), edges)


DOCUMENTS = {
    "many tiny, several of one token": [0, 1, 2, 3, 10, 11, 12, 40, 63, 64, 65, 66, 100, 180, 199, 200],
    "every token": list(range(201)),
    "empty doc_ids": [0, 0, 0, 7, 7, 64, 64, 64, 130, 200, 200],
    "at a chunk's edges": [0, 64, 128, 200],
    "around a chunk's edges": [0, 63, 65, 127, 129, 200],
    "one document": [0, 200],
    "last token alone": [0, 199, 200],
}


@pytest.mark.few
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("decay", ["none", "mixed", "strongest"])
def test_documents_equal_recurrence(documents: str, decay: str) -> None:
    check(make_case(200, decay, cu_seqlens=DOCUMENTS[documents]), [0, 200])


@pytest.mark.few(quick=4)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("edges", [[0, 90, 200], [0, 64, 128, 200], [0, 1, 63, 200], [0, 65, 66, 150, 200]])
def test_sharded_documents_equal_recurrence(documents: str, edges: list[int]) -> None:
    check(make_case(200, cu_seqlens=DOCUMENTS[documents]), edges)


@pytest.mark.few(quick=2)
@pytest.mark.parametrize(
    ("cu_seqlens", "edges"),
    [
        pytest.param([0, 50, 130, 260], [0, 100, 260], id="one over two shards"),
        pytest.param([0, 50, 230, 260], [0, 70, 200, 260], id="one over three shards, the middle one inside"),
        pytest.param([0, 100, 260], [0, 100, 260], id="at the shard's edge"),
        pytest.param([0, 128, 192, 260], [0, 128, 192, 260], id="each shard one document"),
        pytest.param([0, 30, 260], [0, 10, 20, 40, 260], id="a document over two shards before the restart"),
    ],
)
@pytest.mark.parametrize("decay", ["none", "mixed"])
def test_documents_straddling_shards_equal_recurrence(cu_seqlens: list[int], edges: list[int], decay: str) -> None:
    check(make_case(260, decay, cu_seqlens=cu_seqlens), edges)


@pytest.mark.few(quick=1)
@pytest.mark.parametrize("edges", [[0, 150], [0, 70, 150]])
@pytest.mark.parametrize("loud", [slice(0, 70), slice(70, 150)])
def test_no_value_or_gradient_crosses_restart(edges: list[int], loud: slice) -> None:
    quiet, other = make_case(150, "none", cu_seqlens=[0, 70, 150]), make_case(150, "none", cu_seqlens=[0, 70, 150])
    for x in (other.q, other.k, other.v, other.do):
        x[:, loud] *= 1e8
    expected, found = sharded(quiet, edges), sharded(other, edges)
    kept = slice(70, 150) if loud.start == 0 else slice(0, 70)
    # exactly, not within rounding: a restart is a product with 0
    for name in ("o", "dq", "dk", "dv", "dg"):
        assert torch.equal(expected[name][:, kept], found[name][:, kept]), name
        assert not torch.equal(expected[name][:, loud], found[name][:, loud]), name
    assert (found["dg"][:, 70] == 0).all()


def test_log_decay_of_a_restart_is_minus_infinity() -> None:
    case = make_case(130)
    inner, edge, whole = ([0, 65, 130], 0), ([0, 130], 0), ([0, 130], 5)
    for (borders, before), gone in ((inner, True), (edge, True), (whole, False)):
        doc_ids = find_doc_ids(torch.tensor(borders), before, 130, case.q.device)
        log_decay = chunked.local_states(case.k, case.v, case.g, doc_ids).log_decay
        expected = torch.full_like(log_decay, float("-inf")) if gone else case.g.sum(1)
        torch.testing.assert_close(log_decay, expected, rtol=1e-13, atol=0)


# Precision


@pytest.mark.few(quick=3)
@pytest.mark.parametrize("cu_seqlens", [None, [0, 60, 61, 170, 300]])
@pytest.mark.parametrize("decay", ["none", "weak", "mixed", "strong", "strongest"])
def test_fp32_error_is_bounded(decay: str, cu_seqlens: list[int] | None) -> None:
    # sums of up to 300 terms in fp32 (eps 6e-8): errors seen are up to 4e-7
    check(make_case(300, decay, cu_seqlens=cu_seqlens, dtype=torch.float32), [0, 100, 300], tolerance=4e-6)


@pytest.mark.few(quick=2)
@pytest.mark.parametrize("decay", ["none", "mixed", "strong"])
def test_bf16_error_is_bounded(decay: str) -> None:
    # bf16 inputs are exact in fp64, arithmetic and states are fp32, so only the rounding of the results to bf16 is left
    # (half of 2^-7 = 3.9e-3 of an element); dg and states are not rounded
    case = make_case(200, decay, dtype=torch.bfloat16)
    results = sharded(case, [0, 90, 200])
    assert [results[name].dtype for name in ("o", "dq", "dk", "dv")] == [torch.bfloat16] * 4
    assert [results[name].dtype for name in ("dg", "incoming_states", "final_state")] == [torch.float32] * 3
    found = errors(case, results, oracle(case, [0, 90, 200]))
    for name, error in found.items():
        assert error <= (4e-3 if name in ("o", "dq", "dk", "dv") else 4e-6), found


def test_long_shard_with_strong_decay_stays_finite() -> None:
    case = make_case(200, "strong", dtype=torch.float32)
    chunk_states = chunked.local_states(case.k, case.v, case.g, None)
    assert chunk_states.log_decay.isfinite().all()
    assert chunk_states.log_decay.max() < -2_000
    check(case, [0, 100, 200], tolerance=4e-6)


# Mistakes


def wrong_inputs() -> Iterator[tuple[str, dict[str, Tensor]]]:
    case = make_case(10, batch=2)
    yield "q", {"q": case.q[0]}
    yield "k", {"k": case.k[:, :9]}
    yield "k", {"k": case.k[..., :3]}
    yield "v", {"v": case.v[:, :, :1]}
    yield "v", {"v": case.v.float()}
    yield "g", {"g": case.g[..., :1]}
    yield "g", {"g": case.g.bfloat16()}
    yield "q", {"q": case.q.long()}
    yield "q", {name: getattr(case, name)[:, :0] for name in ("q", "k", "v", "g")}
    yield "documents", {"cu_seqlens": torch.tensor([0, 10])}


@pytest.mark.parametrize(("name", "wrong"), list(wrong_inputs()))
def test_invalid_tensors_are_named(name: str, wrong: dict[str, Tensor]) -> None:
    case = make_case(10, batch=2)
    arguments = {"q": case.q, "k": case.k, "v": case.v, "g": case.g} | wrong
    doc_ids = find_doc_ids(arguments.pop("cu_seqlens", None), 1, 10, case.q.device)
    with pytest.raises(ValueError, match=f"^{name}: "):
        naive_gla(*arguments.values(), doc_ids=doc_ids)
    with pytest.raises(ValueError, match=f"^{name}: "):
        OPERATORS["gla"].check([*arguments.values()], doc_ids, case.do)


def test_invalid_state_is_named() -> None:
    case = make_case(10)
    chunk_states = chunked.local_states(case.k, case.v, case.g, None)
    scores = chunked.intra_scores(case.q, case.k, case.g, None, 1.0)
    with pytest.raises(ValueError, match=r"^incoming_state: expected shape \[B, H, K, V\] = \[1, 2, 5, 7\], got"):
        chunked.outputs(case.q, case.v, scores, chunk_states, case.initial_state.mT, 1.0)


def test_unknown_operator_and_wrong_operands_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^operator: must be one of gla.*; got 'gala'$"):
        operator_of("gala", [])
    with pytest.raises(ValueError, match=r"^operands: gla takes q, k, v, g; got 3 tensors$"):
        operator_of("gla", [torch.zeros(1)] * 3)


@pytest.mark.parametrize(
    "cu_seqlens", [[0, 5, 9], [1, 10], [0, 7, 3, 10], [10], [[0, 10]], [0.0, 10.0], [0, *range(50), 9]]
)
def test_invalid_cu_seqlens_are_refused(cu_seqlens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected"):
        find_doc_ids(torch.tensor(cu_seqlens), 0, 10, torch.device("cpu"))


def test_cu_seqlens_of_other_length_are_refused() -> None:
    case = make_case(10)
    doc_ids = find_doc_ids(torch.tensor([0, 11]), 0, 11, torch.device("cpu"))
    assert find_doc_ids(None, 0, 10, torch.device("cpu")) is None
    with pytest.raises(ValueError, match=r"^documents: expected ids of shape \[10\], got \[11\]"):
        OPERATORS["gla"].check((case.q, case.k, case.v, case.g), doc_ids)
