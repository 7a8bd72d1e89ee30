"""The passes of every operator on one rank and over simulated ranks, and its steps, against the recurrence in fp64.

Both sides add up some hundred terms of order one, in another order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.support.operator_cases import (
    DECAYS,
    NAMES,
    SIZES,
    doc_ids_of,
    errors,
    expected,
    has_tokens,
    in_dtype,
    log_decays,
    make,
    operands_of,
    sharded,
    tokens_of,
)
from tests.support.recurrence import naive_of
from zeco_train.ops import CHUNK, delta, scalar_decay
from zeco_train.ops.chunks import chunk_size
from zeco_train.ops.mix import mix
from zeco_train.ops.operator import WIDE, Kind
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.passes import keeping_states
from zeco_train.ops.position import SequencePosition, find_doc_ids
from zeco_train.ops.scalar_decay.chunked import decay_matrix
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

# Relative to the largest element; measured at most 1e-14.
TOLERANCE = 1e-13
EACH = pytest.mark.parametrize("name", NAMES)


def check(
    name: str,
    values: dict[str, Tensor],
    edges: Sequence[int],
    starts: Sequence[int] | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    found = errors(sharded(name, values, edges, starts), expected(name, values, starts))
    assert all(error <= tolerance for error in found.values()), found


# The recurrence


@pytest.mark.parametrize("width", [2, 3, 4])
def test_naive_convolution_equals_conv1d(width: int) -> None:
    """After other inputs, also document by document: the first one continues from them."""
    for batch, starts in ((2, (0,)), (1, (0, 3, 4))):
        values = make("short_conv", 11, B=batch, W=width)
        operands, carry_in = [*operands_of("short_conv", values).values()], values["carry_in"]
        doc_ids = doc_ids_of(starts[1:] or None, 0, 11)
        y, state = naive_of(OPERATORS["short_conv"])(*operands, initial_state=carry_in, doc_ids=doc_ids)
        x, weight, bias = operands
        parts = []
        for start, stop in itertools.pairwise([*starts, 11]):
            before = carry_in[:, 0] if start == 0 else torch.zeros_like(carry_in[:, 0])
            joined = torch.cat([before, x[:, start:stop]], dim=1)
            parts.append(F.conv1d(joined.mT, weight, bias, groups=x.shape[2]).mT)
        torch.testing.assert_close(y, torch.cat(parts, 1), rtol=TOLERANCE, atol=TOLERANCE)
        assert torch.equal(state, joined[:, None, 1 - width :])


def test_shape_of_a_convolutions_state_and_where_it_is_cut() -> None:
    conv, operands = OPERATORS["short_conv"], [torch.zeros(2, 3, 5), torch.zeros(5, 1, 4), torch.zeros(5)]
    assert conv.state_shape(operands) == (2, 1, 3, 5)
    assert conv.transition_shape(operands) == (2, 1, 3, 3)
    assert conv.cuts(operands)
    assert not conv.cuts([operands[0][:, :2], *operands[1:]])
    assert conv.forward_flops(1, 3, 5) == conv.recomputed_flops(1, 3, 5) == 0


# Lengths, ranks and documents


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 64)])
def test_chunk_is_smallest_size_that_fits_up_to_64(tokens: int, chunk: int) -> None:
    assert chunk_size(tokens) == chunk


@pytest.mark.few(quick=8)
@EACH
@pytest.mark.parametrize("tokens", [15, 1, 65, 2, 17, 63, 3, 33, 64, 130, 16])
@pytest.mark.parametrize("decay", DECAYS[:5])
def test_one_rank_equals_recurrence(name: str, tokens: int, decay: str) -> None:
    check(name, make(name, tokens, decay), [0, tokens])


@pytest.mark.parametrize(("edges", "starts"), [((0, 1), None), ((0, 130), (0, 64, 70)), ((0, 64, 65, 66, 130), None)])
def test_kept_states_give_the_same_gradients(edges: Sequence[int], starts: Sequence[int] | None) -> None:
    """Chunk states of gla, kept in place of those computed again, over up to four ranks; a second time, too."""
    with keeping_states():
        check("gla", make("gla", edges[-1], B=1), edges, starts)
        leaves = [x.clone().requires_grad_() for x in operands_of("gla", make("gla", 130)).values()]
        o, _ = mix("gla", leaves, SequencePosition((0, 130), exchange=local_exchange()))
    first, second = (torch.autograd.grad(o.sum(), leaves, retain_graph=True) for _ in range(2))
    o, _ = mix("gla", leaves, SequencePosition((0, 130), exchange=local_exchange()))
    for kept, again, found in zip(first, second, torch.autograd.grad(o.sum(), leaves), strict=True):
        assert torch.equal(kept, again)
        assert (kept - found).abs().max() <= TOLERANCE


def test_decays_of_the_eleventh_chunk_are_its_own() -> None:
    check("gated_delta", make("gated_delta", 11 * CHUNK, B=1), [0, 11 * CHUNK])


@pytest.mark.few(quick=8)
@EACH
@pytest.mark.parametrize("edges", [[0, 100, 140], [0, 1, 65, 140], [0, 64, 128, 192], [0, 2, 67, 139, 140]])
@pytest.mark.parametrize("decay", DECAYS[:5])
def test_sharded_ranks_equal_recurrence(name: str, edges: list[int], decay: str) -> None:
    check(name, make(name, edges[-1], decay), edges)


@EACH
def test_a_second_call_of_a_shape_has_its_own_operands_and_decays(name: str) -> None:
    for decay in ("mixed", "weak"):
        check(name, make(name, 33, decay), [0, 16, 33])
        check(name, make(name, 33, decay), [0, 16, 33], (5, 20))


@pytest.mark.parametrize(
    "name", ["gla", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scalar_decay", "kda"))]
)
def test_more_than_eight_chunks_a_rank_equal_recurrence(name: str) -> None:
    values = make(name, 590, "weak")
    if name == "kda":
        # Else nothing of an incoming state is left after 8 chunks, and later ones need not be in the transition.
        values["k"][:, :540, :, SIZES["K"] // 2 :] = 0.0
    check(name, values, [0, 580, 590])
    if name == "gla":
        check(name, values, [0, 580, 590], [560])


@pytest.mark.few(quick=4)
@EACH
@pytest.mark.parametrize(
    "sizes",
    [
        {"B": 2, "H": 3, "G": 3, "K": 33, "V": 17},
        {"B": 2, "H": 6, "G": 2, "W": 2},
        {"H": 1, "G": 1, "K": 1, "V": 1, "C": 1, "W": 3},
        {"B": 2, "H": 6, "G": 3},
    ],
)
def test_batches_groups_and_odd_dims_equal_recurrence(name: str, sizes: dict[str, int]) -> None:
    # Where the gradient of a state is one number, its terms cancel to a thousandth of the largest.
    tolerance = 10 * TOLERANCE if sizes.get("K") == 1 else TOLERANCE
    check(name, make(name, 70, **sizes), [0, 20, 70], tolerance=tolerance)


DOCUMENTS = {
    "many tiny, several of one token": (1, 2, 3, 10, 11, 12, 40, 63, 64, 65, 66, 100, 180, 199),
    "around a chunk's edges": (63, 65, 127, 129),
    "every token": tuple(range(200)),
    "at a chunk's edges": (64, 128),
    "one document": (),
    "last token alone": (0, 199),
    "over several ranks": (50, 170),
}


@pytest.mark.few(quick=8)
@EACH
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("edges", [[0, 65, 66, 150, 200], [0, 200], [0, 64, 128, 200]])
@pytest.mark.parametrize("decay", ["mixed", "none", "strong"])
def test_documents_equal_recurrence(name: str, documents: str, edges: list[int], decay: str) -> None:
    check(name, make(name, 200, decay), edges, DOCUMENTS[documents])


@EACH
def test_a_border_among_the_first_tokens_of_a_rank_cuts_what_it_received_off(name: str) -> None:
    check(name, make(name, 60), [0, 20, 40, 60], (21, 42))


@EACH
@pytest.mark.parametrize("loud", [slice(0, 70), pytest.param(slice(70, 150), marks=pytest.mark.slow)])
def test_no_value_or_gradient_crosses_restart(name: str, loud: slice) -> None:
    """Exactly, not within rounding: a restart is a product with 0."""
    quiet, other = make(name, 150, "weak"), make(name, 150, "weak")
    for key in {"q", "v", "x", "do"} & other.keys():
        other[key][:, loud] *= 1e8
    wanted, found = (sharded(name, values, [0, 150], [70]) for values in (quiet, other))
    kept = slice(70, 150) if loud.start == 0 else slice(0, 70)
    for key in ("o", *(f"d{operand}" for operand in OPERATORS[name].operands if has_tokens(name, operand))):
        assert torch.equal(wanted[key][:, kept], found[key][:, kept]), key
        assert not torch.equal(wanted[key][:, loud], found[key][:, loud]), key
    assert "dg" not in found or ((found["dg"][:, 70] == 0).all() and (found["dg"][:, [69, 71]] != 0).any())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "short_conv"])
def test_transition_is_zero_after_a_restart_and_no_expansion_otherwise(name: str) -> None:
    values = make(name, 130, "weak")
    operands = tokens_of(name, values, 0, 130)
    passes = OPERATORS[name].select(operands)
    for starts, gone in (((65,), True), ((0,), True), ((), False), (None, False)):
        transition = passes.forward(operands, 1.0, doc_ids_of(starts, 0, 130)).transition
        if OPERATORS[name].kind is Kind.matrix:
            assert (transition == 0).all() if gone else 0 < torch.linalg.matrix_norm(transition, 2).max() <= 1
        elif gone:
            assert (transition == float("-inf")).all()
        else:
            if name == "mamba1":
                steps = F.softplus(values["dt"] + values["dt_bias"]).sum(1)
                g = -values["A_log"].exp() * steps[..., None]
            else:
                g = 130 * operands[3][None] if name == "fixed_decay" else operands[-1].sum(1)
            wanted = g if g.dim() == 3 else g[..., None].expand(transition.shape)
            torch.testing.assert_close(transition, wanted, rtol=1e-13, atol=1e-13)


# Precision


@pytest.mark.few(quick=6)
@EACH
@pytest.mark.parametrize("decay", ["strong", "none", "mixed", "weak"])
@pytest.mark.parametrize("starts", [None, (60, 61, 170)])
def test_fp32_error_is_bounded(name: str, decay: str, starts: tuple[int, ...] | None) -> None:
    values = in_dtype(name, make(name, 300, decay), torch.float32)
    found, wanted = sharded(name, values, [0, 100, 300], starts), expected(name, values, starts)
    for key, x in wanted.items():
        assert found[key].dtype == torch.float32
        # Sums of up to 300 terms in fp32, eps 6e-8; those of dg may cancel.
        size = max(x.norm(), 0.1 * wanted["dq"].norm()) if key == "dg" and "dq" in wanted else x.norm()
        assert (found[key] - x).norm() <= 4e-6 * size, key


@EACH
def test_bf16_tokens_are_computed_in_fp32_and_rounded_once(name: str) -> None:
    narrow = in_dtype(name, make(name, 100), torch.bfloat16)
    wide = {key: x.float() for key, x in narrow.items()}
    found, wanted = (sharded(name, values, [0, 40, 100], [9]) for values in (narrow, wide))
    for key, x in wanted.items():
        of_tokens = key == "o" or (key[1:] in OPERATORS[name].operands and key[1:] not in WIDE)
        assert found[key].dtype == (torch.bfloat16 if of_tokens else torch.float32)
        # Sums over ranks of what has no tokens are those of rounded parts.
        if key == "o" or has_tokens(name, key[1:]):
            assert torch.equal(found[key], x.to(found[key].dtype)), key


# One token


@EACH
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 4e-3)])
def test_steps_equal_recurrence_and_update_the_state_in_place(name: str, dtype: torch.dtype, tolerance: float) -> None:
    values = make(name, 20, B=2)
    values = values if dtype == torch.float64 else in_dtype(name, values, dtype)
    wanted, state = expected(name, values), values["carry_in"].clone()
    pointer = state.data_ptr()
    o = [OPERATORS[name].step(*tokens_of(name, values, t, t + 1), state) for t in range(20)]
    assert o[0].dtype == dtype
    assert (torch.cat(o, 1) - wanted["o"]).norm() <= tolerance * wanted["o"].norm()
    assert (state - wanted["carry_out"]).norm() <= min(tolerance, 1e-6) * wanted["carry_out"].norm()
    assert state.data_ptr() == pointer


@EACH
def test_mismatched_states_of_a_step_are_refused(name: str) -> None:
    values, operator = make(name, 2, B=2), OPERATORS[name]
    operands, state = tokens_of(name, values, 0, 1), values["carry_in"]
    for wrong, message in (
        (state[:1], r"^state: expected shape \[B, H, K, V\]"),
        (state.float(), r"^state: expected torch.float64, got torch.float32$"),
        (state.mT.contiguous().mT, r"^state: expected a contiguous tensor"),
    ):
        if name not in ("hgrn", "mamba1") or "contiguous" not in message:
            with pytest.raises(ValueError, match=message):
                operator.step(*operands, wrong)
    with pytest.raises(ValueError, match=rf"^{operator.operands[0]}: expected one token of each sequence, got 2$"):
        operator.step(*tokens_of(name, values, 0, 2), state)
    if not operator.has_scale:
        with pytest.raises(ValueError, match=r"^scale: the operator has none, expected 1; got 0.5$"):
            operator.step(*operands, state, 0.5)


# Parts


def test_decay_matrix_is_the_product_of_the_decays_between_tokens() -> None:
    g = log_decays("weak", (1, 40, 2, 3), torch.Generator().manual_seed(0))
    found = decay_matrix(g, doc_ids_of((13,), 0, 40), torch.float64)
    assert found.shape == (1, 1, 2, 3, 64, 64)
    for i, j in [(0, 0), (5, 5), (12, 0), (13, 12), (13, 13), (39, 13), (39, 2), (2, 39), (31, 29), (32, 31)]:
        apart = j > i or j < 13 <= i
        between = torch.zeros(2, 3, dtype=torch.float64) if apart else g[0, j + 1 : i + 1].sum(0).exp()
        torch.testing.assert_close(found[0, 0, :, :, i, j], between, rtol=1e-14, atol=0)


@pytest.mark.parametrize("groups", [1, 6])
def test_products_of_forward_pass_equal_flops_and_scores_count_once_a_group(groups: int) -> None:
    H, K, V = 6, SIZES["K"], SIZES["V"]
    values, passes = make("scalar_decay", 2 * CHUNK, H=H, G=groups), OPERATORS["scalar_decay"].portable
    with FlopCounterMode(display=False) as counter:
        forward = passes.forward([*operands_of("scalar_decay", values).values()], 1.0, None)
        local = counter.get_total_flops()
        forward.overlap()
        forward.outputs(values["carry_in"])
    assert local == 2 * CHUNK * scalar_decay.recomputed_flops(H, K, V, groups=groups)
    # PyTorch computes the whole square of a chunk's pairs, of which the formula counts the causal half.
    upper = (CHUNK - 1) * (H * V + groups * K)
    assert counter.get_total_flops() == 2 * CHUNK * (scalar_decay.forward_flops(H, K, V, groups=groups) + upper)
    gla = OPERATORS["gla"]
    assert scalar_decay.forward_flops(4, 32, 16) == gla.forward_flops(4, 32, 16)
    assert scalar_decay.recomputed_flops(4, 32, 16) == gla.recomputed_flops(4, 32, 16)


def test_flops_of_delta_rules_count_the_chunk_form() -> None:
    # K 6, V 5, C 64: systems 63 · (2·6 + 5), states 6·30 (4·30 again), scores 65 · 11 (65 · 6 again).
    assert delta.forward_flops(4, 6, 5) == 4 * (63 * 17 + 180 + 65 * 11)
    assert delta.recomputed_flops(4, 6, 5) == 4 * (63 * 17 + 120 + 65 * 6)


# Mistakes


@pytest.mark.parametrize(
    ("name", "key", "change", "message"),
    [
        ("gla", "q", lambda x: x[0], r"shape \[B, T, H, K\], got"),
        ("gla", "k", lambda x: x[:, :9], r"shape \[B, T, H, K\] = "),
        ("gla", "k", lambda x: x[..., :3], "shape"),
        ("gla", "v", lambda x: x[:, :, :1], "shape"),
        ("gla", "v", lambda x: x.float(), "torch.float64, the dtype of q"),
        ("gla", "g", lambda x: x.bfloat16(), "float32 or float64, for log-decays"),
        ("gla", "q", lambda x: x.long(), "a floating point dtype"),
        ("gla", "do", lambda x: x[..., :3], "shape"),
        ("unmasked", "k", lambda x: x[:, :-1], "shape"),
        ("unmasked", "v", lambda x: x[:, :-1], "shape"),
        ("scalar_decay", "g", lambda x: x[..., None].expand(*x.shape, 6), r"shape \[B, T, H\], got"),
        ("fixed_decay", "log_decay", lambda x: x[:3], r"shape \[H\] = \[4\], got \[3\]"),
        ("fixed_decay", "log_decay", lambda x: x.bfloat16(), "float32 or float64"),
        ("gated_delta", "beta", lambda x: x.bfloat16(), "float32 or float64, for writing strengths"),
        ("kda", "g", lambda x: x[..., :5], r"shape \[B, T, H, K\] = \[2, 10, 4, 6\], got \[2, 10, 4, 5\]"),
        ("delta", "beta", lambda x: x[..., :3], r"shape \[B, T, H\]"),
        ("hgrn", "g", lambda x: x[:, :3], r"shape \[B, T, H, K\] = "),
        ("short_conv", "x", lambda x: x[0], r"shape \[B, T, C\]"),
        ("short_conv", "weight", lambda x: x[..., :1], "a width of at least 2, got 1"),
        ("short_conv", "weight", lambda x: x.repeat(1, 2, 1), r"shape \[C, 1, W\] = \[7, 1, 4\]"),
        ("short_conv", "bias", lambda x: x[:4], r"shape \[C\] = \[7\], got \[4\]$"),
        ("short_conv", "bias", lambda x: x.long(), "a floating point dtype; got torch.int64$"),
    ],
)
def test_invalid_operands_are_named(name: str, key: str, change: object, message: str) -> None:
    values = make(name, 10, B=2)
    values[key] = change(values[key])  # type: ignore[operator]
    with pytest.raises(ValueError, match=f"^{key}: expected {message}"):
        OPERATORS[name].check([*operands_of(name, values).values()], None, values["do"])


def test_groups_empty_tensors_documents_and_gradients_of_constants_are_refused_by_name() -> None:
    shared, plain = make("scalar_decay", 10, H=5), make("gla", 10)
    with pytest.raises(ValueError, match=r"^q: expected a number of groups that divides the 5 heads of v, got 2"):
        OPERATORS["scalar_decay"].check([*operands_of("scalar_decay", shared).values()], None)
    with pytest.raises(ValueError, match=r"^q: no dimension may be 0"):
        OPERATORS["gla"].check(tokens_of("gla", plain, 0, 0), None)
    operands = [*operands_of("gla", plain).values()]
    with pytest.raises(ValueError, match=r"^documents: expected ids of shape \[10\], got \[11\]"):
        OPERATORS["gla"].check(operands, torch.zeros(11))
    with pytest.raises(ValueError, match=r"^documents: expected ids of shape \[2, 10\], got \[10\]"):
        OPERATORS["gla"].check([torch.cat([x, x]) for x in operands], torch.zeros(10))
    for name in NAMES:
        values = make(name, 10)
        forward = OPERATORS[name].portable.forward([*operands_of(name, values).values()], 1.0, None)
        forward.overlap()
        with pytest.raises(ValueError, match=r"^incoming_state: expected shape \[B, H, K, V\] = "):
            forward.outputs(values["carry_in"][..., :0])
    q, k, v, log_decay = operands_of("fixed_decay", make("fixed_decay", 4)).values()
    position = SequencePosition((0, 4), exchange=local_exchange())
    mix("fixed_decay", [q.requires_grad_(), k, v, log_decay], position)[0].sum().backward()
    with pytest.raises(ValueError, match=r"^log_decay: expected a constant, got a tensor that requires a gradient"):
        mix("fixed_decay", [q, k, v, log_decay.requires_grad_()], position)


@pytest.mark.parametrize(
    "cu_seqlens", [[0, 5, 9], [1, 10], [0, 7, 3, 10], [10], [[0, 10]], [0.0, 10.0], [0, *range(50), 9]]
)
def test_invalid_cu_seqlens_are_refused(cu_seqlens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected"):
        find_doc_ids(torch.tensor(cu_seqlens), 0, 10, torch.device("cpu"))


def test_documents_restart_unless_the_first_continues_and_may_be_empty() -> None:
    borders, cpu = torch.tensor([0, 0, 7, 7, 9, 10]), torch.device("cpu")
    assert find_doc_ids(borders, 0, 10, cpu).tolist() == [1] * 7 + [2] * 2 + [3]
    assert find_doc_ids(borders, 5, 10, cpu).tolist() == [0] * 7 + [1] * 2 + [2]
    assert find_doc_ids(None, 5, 10, cpu) is None
