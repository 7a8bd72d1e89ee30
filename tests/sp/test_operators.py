"""Operators over uneven ranks, by every backend, in batches whose rows have documents of their own, against their
recurrences."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.distributed import on_ranks, run_distributed
from tests.support.operator_cases import ENDS, NAMES, dims_of, expected_of_rows, in_dtype, make, own_tokens
from tests.support.sp_reference import RecordedExchange, build_scans
from zeco_train.ops.delta.chunk_states import Chunks
from zeco_train.ops.gla import GLA
from zeco_train.ops.gla.chunked import _GlaForward
from zeco_train.ops.kernel_operands import with_padded_heads
from zeco_train.ops.mix import mix
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.passes import BackwardBase, ForwardBase, Passes
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.rows import by_rows
from zeco_train.ops.seam import Exchange
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

# Of each sequence, where its documents begin.
Starts = tuple[tuple[int, ...], ...]
# Tokens of each rank; a sequence ends with the last one.
LENGTHS = {1: (9,), 2: (1, 6), 3: (4, 2, 1), 5: (1, 1, 1, 5, 2)}
# Where documents begin, by row: one that continues from the carry, several over ranks after it, one a token.
STARTS = ((), (2, 3, 6), tuple(range(10)))
# Of a convolution of 4 tokens: a state that reaches over a rank, and over all of them.
SHORT = (4, 1, 2), (1, 1, 1)
# For one operator, over several chunks of 64: inside of them and at their edges, at an edge of ranks, before the end.
LONG, LONG_STARTS = (70, 1, 66), ((), (30, 71, 100), (64, 65, 70, 136))
# Sums of tens of terms near 1, each rounded by 2^-53.
TOLERANCE = 1e-13


def shard_of(exchange: Exchange, bounds: Sequence[int], rank: int, starts: Starts = STARTS) -> SequencePosition:
    """This rank's tokens, with documents of each row."""
    start, stop = bounds[rank : rank + 2]
    doc_ids = torch.zeros(len(starts), stop - start, dtype=torch.int32)
    for row, own in zip(doc_ids, starts, strict=True):
        row[[border - start for border in own if start <= border < stop]] = 1
    shard = SequencePosition(bounds, rank, exchange=exchange)
    return shard.with_tensors(doc_ids.cumsum(1, dtype=torch.int32), torch.arange(start, stop))


def found_by(
    name: str,
    values: dict[str, Tensor],
    shard: SequencePosition,
    replayed: Tensor | None = None,
    *,
    carry: bool = True,
    want_carry: bool = True,
    loss: str = "both",
) -> dict[str, Tensor]:
    """o, carry_out and every gradient of this rank's tokens; R, what it received, of an operator that reads all.

    `loss`: the outputs that it depends on, `both`, `o` or `carry`.
    """
    keys = [key for key in OPERATORS[name].operands if key != "log_decay"] + ["carry_in"] * carry
    leaves = {key: values[key].detach().clone().requires_grad_() for key in keys}
    o, carry_out = mix(
        name,
        [leaves.get(key, values[key]) for key in OPERATORS[name].operands],
        shard,
        incoming_state=replayed,
        carry_in=leaves.get("carry_in"),
        want_carry=want_carry,
    )
    results = {"o": o.detach()}
    if OPERATORS[name].reads_whole:
        results["R"] = o.grad_fn.saved_tensors[-2]  # type: ignore[union-attr]
    pairs = {"o": (o, values["do"])}
    if carry_out is not None:
        pairs["carry"] = carry_out, values["dcarry_out"]
        assert replayed is None or carry_out.isnan().all(), "a replay made up a carry_out"
        results |= {} if replayed is not None else {"carry_out": carry_out.detach()}
    outputs, grads = zip(*(pair for key, pair in pairs.items() if loss in ("both", key)), strict=True)
    found = torch.autograd.grad(outputs, [*leaves.values()], grads)
    assert o.dtype == values["do"].dtype
    assert all(grad.dtype == x.dtype for grad, x in zip(found, leaves.values(), strict=True))
    return results | {f"d{key}": grad for key, grad in zip(leaves, found, strict=True)}


# Of all backends.
@functools.cache
def known(
    name: str, num_tokens: int, starts: Starts, decay: str, carry: bool, want_carry: bool, loss: str, strided: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole sequences, and their results; `strided`: gradients of the outputs are expanded from one value."""
    whole = make(name, num_tokens, decay, B=len(starts))
    if strided:
        whole |= {key: torch.full_like(whole[key][:1, :1, :1, :1], 0.5).expand_as(whole[key]) for key in ENDS[::2]}
    factors = {"both": {}, "o": {"dcarry_out": 0.0}, "carry": {"do": 0.0}}[loss]
    judged = whole | {key: factor * whole[key] for key, factor in factors.items()}
    return whole, expected_of_rows(name, judged, starts, carry_in=carry, carry_out=want_carry)


def compare(
    name: str,
    backend: str,
    exchange: RecordedExchange,
    rank: int,
    lengths: Sequence[int],
    starts: Starts = STARTS,
    *,
    decay: str = "mild",
    carry: bool = True,
    want_carry: bool = True,
    loss: str = "both",
    strided: bool = False,
) -> None:
    """On this rank's tokens; a replay of what it received launches no scan forward, and has the same bits.

    What only one rank may read is NaN on the others. `strided`: neither tensors nor gradients are contiguous.
    """
    bounds = [*itertools.accumulate(lengths, initial=0)]
    tokens = slice(*bounds[rank : rank + 2])
    # Scans of states are recorded, those of halos are not.
    shard = shard_of(exchange.replaced(halo=exchange.states), bounds, rank, starts)
    if is_whole := OPERATORS[name].reads_whole:
        carry = want_carry = False
        starts = ((),) * len(starts)
        shard = SequencePosition(bounds, rank, exchange=exchange)
    whole, wanted = known(name, bounds[-1], starts, decay, carry, want_carry, loss, strided)
    own, where = own_tokens(name, whole, tokens), f"{name}, {backend}, {lengths}, {carry=}, {want_carry=}, {loss=}"
    if strided:
        own |= {key: own[key].transpose(1, 2).contiguous().transpose(1, 2) for key in OPERATORS[name].operands}
    unknown = torch.full_like(whole["carry_in"], torch.nan)
    own |= {"carry_in": unknown} if rank else {}
    own |= {"dcarry_out": unknown} if rank < len(lengths) - 1 else {}
    options: dict[str, Any] = {"carry": carry, "want_carry": want_carry, "loss": loss}
    exchange.events.clear()
    found = found_by(name, own, shard, **options)
    assert [event for event in exchange.events if "launch" in event] == ["launch forward", "launch reverse"], where
    check(name, found, wanted, tokens, where)
    received = found["R"] if is_whole else exchange.received["R"]
    exchange.events.clear()
    again = found_by(name, own | {"carry_in": unknown}, shard, received, **options)
    assert [event for event in exchange.events if "launch" in event] == ["launch reverse"], where
    assert all(torch.equal(x, found[key]) for key, x in again.items()), f"a replay: {where}"
    if OPERATORS[name].state_is_halo:
        check(name, found_by(name, own, shard.over(exchange)), wanted, tokens, f"{where}, by a halo")


def check(name: str, found: dict[str, Tensor], wanted: dict[str, Tensor], tokens: slice, where: str) -> None:
    mine = own_tokens(name, wanted, tokens)
    for key, x in found.items():
        if key == "R":
            states = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(states, x)
            assert all(torch.equal(x, other) for other in states), f"R differs between ranks: {where}"
            continue
        if not {"T", "B"} & {*dims_of(name, key)}:
            # Of an operand of all tokens: each rank has its part of the gradient.
            dist.all_reduce(x := x.clone())
        assert x.shape == mine[key].shape, f"{key}: {where}"
        error = (x - mine[key]).abs().max().item() / max(1.0, wanted[key].abs().max().item())
        assert error <= TOLERANCE, f"{key} is off by {error:.1e}: {where}"


@pytest.mark.parametrize(
    ("world_size", "quick"), [(3, True), *(pytest.param(n, False, marks=pytest.mark.campaign) for n in (1, 2, 3, 5))]
)
@on_ranks()
def test_rows_with_documents_of_their_own_equal_their_recurrences(rank: int, world_size: int, quick: bool) -> None:
    """Quick: each operator with one backend, and each backend with an operator."""
    scans = build_scans(tuple(range(world_size)))
    for number, name in enumerate(OPERATORS):
        for backend in [[*scans][number % len(scans)]] if quick else scans:
            compare(name, backend, scans[backend], rank, LENGTHS[world_size])
    if quick:
        compare("gla", "chain/3", scans["chain/3"], rank, LONG, LONG_STARTS)
        for lengths in SHORT:
            compare("short_conv", "lasp2", scans["lasp2"], rank, lengths)
    for scan in scans.values():
        scan.drain()


def made_matrices(rank: int, world_size: int) -> list[int]:
    """How often two passes (one a replay) of three rows make the matrix, without and with a carry in, and out."""
    scan, made = build_scans(tuple(range(world_size)), "two_shot")["two_shot"], []
    for carry, want_carry in itertools.product((False, True), repeat=2):
        with mock.patch.object(Chunks, "transition", autospec=True, side_effect=Chunks.transition) as make:
            compare("delta", "two_shot", scan, rank, LENGTHS[world_size], carry=carry, want_carry=want_carry)
        made.append(make.call_count)
    scan.drain()
    return made


def test_matrices_are_made_only_where_a_state_passes_through() -> None:
    assert run_distributed(made_matrices, 3) == [[0, 0, 6, 6], [6, 6, 6, 6], [0, 6, 0, 6]]


def test_unknown_operator_and_wrong_operands_are_refused() -> None:
    shard = SequencePosition((0, 4), exchange=local_exchange())
    x = torch.ones(1, 4, 1, 2)
    for name, count, field in (("gal", 4, "operator"), ("gla", 3, "operands")):
        with pytest.raises(ValueError, match=f"^{field}: .*(gal|q, k, v, g)"):
            mix(name, [x] * count, shard)


def by_rows_and_alone(name: str, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The results of a batch over one rank, and of each of its sequences alone."""
    shard = shard_of(local_exchange(), [0, values["do"].shape[1]], 0)
    shard = shard.with_tensors(shard.doc_ids.to(values["do"].device), shard.positions)
    alone = []
    for row, doc_ids in enumerate(shard.doc_ids):
        own = {key: x[row : row + 1] if "B" in dims_of(name, key) else x for key, x in values.items()}
        alone.append(found_by(name, own, shard.with_tensors(doc_ids, shard.positions)))
    return found_by(name, values, shard), alone


def check_same_bits(name: str, values: dict[str, Tensor]) -> None:
    found, alone = by_rows_and_alone(name, values)
    for key, x in found.items():
        of_rows = [row[key] for row in alone]
        if "B" in dims_of(name, key):
            assert torch.equal(x, torch.cat(of_rows)), f"{name}: {key}"
        else:
            wide = [grad.float() if grad.dtype == torch.bfloat16 else grad for grad in of_rows]
            assert torch.equal(x, sum(wide[1:], wide[0]).to(x.dtype)), f"{name}: {key}"


def rows_in_bf16(name: str, tokens: int) -> dict[str, Tensor]:
    return in_dtype(name, make(name, tokens, "mild", B=len(STARTS)), torch.bfloat16)


@pytest.mark.few(quick=3)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_bits_that_it_has_alone(name: str) -> None:
    check_same_bits(name, rows_in_bf16(name, 9))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_kernels_give_a_row_the_bits_that_it_has_alone(name: str) -> None:
    """Rows of odd lengths do not start at 16 bytes. Nothing synchronises the host."""
    values = {key: x.cuda() for key, x in rows_in_bf16(name, 203).items()}
    check_same_bits(name, values)
    shard = shard_of(local_exchange(), [0, 203], 0)
    shard = shard.with_tensors(shard.doc_ids.cuda(), shard.positions)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found_by(name, values, shard)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Keeping(_GlaForward):
    """GLA's forward pass, which saves 2g in place of g, and its states, as kernels do."""

    def outputs(self, incoming_state: Tensor) -> Tensor:
        o = super().outputs(incoming_state)
        self.saved = 2 * self._g, incoming_state.clone(), self.state.mT.contiguous()
        return o


def keeping_backward(
    operands: Sequence[Tensor],
    do: Tensor,
    saved: Sequence[Tensor],
    incoming: Tensor | None,
    scale: float,
    doc_ids: Tensor | None,
) -> object:
    q, k, v, doubled = operands
    incoming_state, turned = saved
    assert incoming is None
    assert turned.mT.shape == incoming_state.shape
    return GLA.select(operands).backward([q, k, v, doubled / 2], do, (), incoming_state, scale, doc_ids)


def keeping_saved(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    g = operands[3]
    B, H, K, V = GLA.state_shape(operands)
    return g.new_empty(g.shape), g.new_empty(B, H, K, V), g.new_empty(B, H, V, K)


KEEPING = Passes(Keeping, keeping_backward, keeping_saved, replaced=(3,), needs_incoming=False)


@pytest.mark.slow
def test_saved_tensors_return_to_their_rows() -> None:
    """Those in place of operands too."""
    values = make("gla", 9, "mild", B=len(STARTS))
    wanted, _ = by_rows_and_alone("gla", values)
    with mock.patch.dict(OPERATORS, {"gla": replace(GLA, portable=KEEPING, cuda=None)}):
        found, _ = by_rows_and_alone("gla", values)
    assert all(torch.equal(x, found[key]) for key, x in wanted.items())


@dataclass(eq=False)
class Unread(ForwardBase):
    lazy = True

    def __post_init__(self, operands: Sequence[Tensor]) -> None:
        pass

    @property
    def state(self) -> Tensor:
        raise AssertionError("no rank reads this state")

    transition = state


@dataclass(eq=False)
class UnreadBackward(BackwardBase):
    lazy = True
    __post_init__ = Unread.__post_init__

    @property
    def state_grad(self) -> Tensor:
        raise AssertionError("no rank reads this state")


def test_padded_heads_and_rows_compute_no_state_that_is_unread() -> None:
    """A last rank's, without a carry, and a first one's gradient; as operators that say so by `lazy`."""
    lazy = Passes(Unread, UnreadBackward, lambda operands: (), needs_incoming=False)
    narrow, operands = ([torch.zeros(2, 4, 3, dim) for _ in range(4)] for dim in (6, 8))
    doc_ids = torch.zeros(2, 4, dtype=torch.int32)
    rows = by_rows(replace(GLA, portable=lazy, cuda=None), operands, doc_ids)
    for passes, given, ids in ((with_padded_heads(lazy), narrow, None), (rows, operands, doc_ids)):
        halves = passes.forward(given, 1.0, ids), passes.backward(given, given[2], (), None, 1.0, ids)
        for half, name in zip(halves, ("state", "state_grad"), strict=True):
            assert getattr(half, "lazy", False)
            with pytest.raises(AssertionError, match="no rank reads"):
                getattr(half, name)


def test_wrong_pieces_are_refused() -> None:
    operands = [torch.zeros(2, 4, 3, 6) for _ in range(4)]
    doc_ids = torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^doc_ids: of 3 sequences, for a batch of 2$"):
        by_rows(GLA, operands, doc_ids)
    with pytest.raises(ValueError, match=r"^documents: expected ids of shape \[2, 4\], got \[2, 3\]$"):
        GLA.check(operands, doc_ids[:2, :3])
