"""Operators over ranks, with every backend, against their recurrence on one: `op_passes`, and passes of their own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.distributed import run_distributed
from tests.support.op_passes import op_passes
from tests.support.positions import position_of
from tests.support.recurrence import naive_of
from tests.support.sp_reference import RecordedExchange, build_scans
from zeco_train.ops.delta import DELTA, GATED_DELTA, KDA
from zeco_train.ops.delta.chunk_states import Chunks
from zeco_train.ops.documents import find_doc_ids
from zeco_train.ops.gla import GLA
from zeco_train.ops.hgrn import HGRN
from zeco_train.ops.mix import mix
from zeco_train.ops.operator import Kind
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.scalar_decay import FIXED_DECAY, SCALAR_DECAY
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

BATCH, HEADS, KEY_DIM, VALUE_DIM = 1, 3, 6, 5
SCALE = 0.7
# Tokens of each rank; borders of documents: over two or three ranks, at an edge, inside; none.
LENGTHS = (17, 9, 20, 14)
DOCUMENTS = {
    "one document": None,
    "over ranks and from an edge": (0, 5, 12, 26, 40),
    "over three ranks": (0, 3, 46),
    "of one token": (0, 1, 17, 18),
}
# Sums of up to 60 terms near 1, each rounded by 2^-53; measured at most 6e-15.
TOLERANCE = 1e-13


# Operands are named as in `tensors`, where scalar decays have names of their own for other shapes.
OPS = {
    "slow gla": replace(GLA, portable=op_passes(naive_of(GLA), Kind.diagonal), cuda=None),
    "slow delta": replace(DELTA, portable=op_passes(naive_of(DELTA), Kind.matrix), cuda=None),
    "delta": DELTA,
    "gated_delta": replace(GATED_DELTA, operands=("shared_q", "shared_unit_k", "v", "scalar_g", "beta")),
    "kda": KDA,
    "scalar_decay": replace(SCALAR_DECAY, operands=("shared_q", "shared_k", "v", "scalar_g")),
    "fixed_decay": FIXED_DECAY,
    "hgrn": HGRN,
}
# Operands without a gradient, the same for all tokens.
CONSTANTS = ("log_decay",)


def tensors(name: str, num_tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64)

    tokens, state = (num_tokens, HEADS), (HEADS, KEY_DIM, VALUE_DIM)
    found = {
        "q": random(*tokens, KEY_DIM),
        "k": torch.nn.functional.normalize(random(*tokens, KEY_DIM), dim=-1),
        "v": random(*tokens, VALUE_DIM),
        "g": -0.2 * random(*tokens, KEY_DIM).abs(),
        "beta": 2 * random(*tokens).sigmoid(),
        # All heads share the queries and keys of one group.
        "shared_q": random(num_tokens, 1, KEY_DIM),
        "shared_k": random(num_tokens, 1, KEY_DIM),
        "shared_unit_k": torch.nn.functional.normalize(random(num_tokens, 1, KEY_DIM), dim=-1),
        "scalar_g": -0.2 * random(*tokens).abs(),
        "log_decay": torch.tensor([0.0, -0.05, -0.4], dtype=torch.float64),
        "do": random(*tokens, VALUE_DIM),
        "carry_in": random(*state),
        "dcarry_out": random(*state),
        "x": random(*tokens, KEY_DIM),
    }
    # Not all have values of V numbers.
    width = OPS[name].state_shape([found[x] for x in OPS[name].operands])[3]
    states = {x: found[x][..., :width] for x in ("carry_in", "dcarry_out")}
    return found | states | ({} if "v" in OPS[name].operands else {"do": random(*tokens, KEY_DIM)})


def scale_of(name: str) -> float:
    return SCALE if OPS[name].has_scale else 1.0


def operands_of(name: str, values: dict[str, Tensor], start: int, stop: int) -> list[Tensor]:
    """The operands of the tokens [start, stop)."""
    return [values[x] if x in CONSTANTS else values[x][:, start:stop] for x in OPS[name].operands]


def expected(
    name: str, documents: Sequence[int] | None, num_tokens: int, carry: bool, want_carry: bool
) -> dict[str, Tensor]:
    """The recurrence over the whole sequence, document by document."""
    values = tensors(name, num_tokens)
    inputs = {x: values[x].requires_grad_() for x in OPS[name].operands if x not in CONSTANTS}
    zero = torch.zeros_like(values["carry_in"])
    carry_in = (values["carry_in"] if carry else zero).requires_grad_()
    o, state = [], carry_in
    # The first document continues from the carry.
    for a, b in itertools.pairwise([*(documents or (0,)), num_tokens]):
        before = state if a == 0 else zero
        part, state = naive_of(OPS[name])(*operands_of(name, values, a, b), scale=scale_of(name), initial_state=before)
        o.append(part)
    outputs, grads = [torch.cat(o, dim=1), state], [values["do"], values["dcarry_out"] if want_carry else zero]
    found = torch.autograd.grad(outputs, [*inputs.values(), carry_in], grads, allow_unused=True)
    of_operands = dict(zip(inputs, found, strict=False))
    dcarry_in = zero if found[-1] is None else found[-1]
    return {"o": outputs[0].detach(), **of_operands, "carry_out": state.detach(), "carry_in": dcarry_in}


def of_rank(
    name: str,
    scan: RecordedExchange,
    documents: Sequence[int] | None,
    start: int,
    stop: int,
    num_tokens: int,
    carry: bool,
    want_carry: bool,
) -> dict[str, Tensor]:
    """The same on the tokens [start, stop) of a rank, checked against a replay of the received state."""
    values = tensors(name, num_tokens)
    whole = None if documents is None else [border for border in documents if border < num_tokens] + [num_tokens]
    # The sequence's first document continues from the carry.
    shard = position_of(scan, start, stop, whole, continues=True)
    results: list[dict[str, Tensor]] = []
    for replay in (False, True):
        operands = [x.clone() for x in operands_of(name, values, start, stop)]
        differentiable = {
            what: x.requires_grad_()
            for what, x in zip(OPS[name].operands, operands, strict=True)
            if what not in CONSTANTS
        }
        carry_in = values["carry_in"].clone().requires_grad_() if carry else None
        incoming = scan.received["R"] if replay else None
        o, carry_out = mix(
            name,
            operands,
            shard,
            scale=scale_of(name),
            incoming_state=incoming,
            carry_in=carry_in,
            want_carry=want_carry,
        )
        outputs, grads = [o], [values["do"][:, start:stop]]
        inputs = [*differentiable.values()]
        if carry_in is not None:
            inputs.append(carry_in)
        if carry_out is not None:
            outputs, grads = [o, carry_out], [*grads, values["dcarry_out"]]
        found = torch.autograd.grad(outputs, inputs, grads)
        result = {"o": o.detach(), **dict(zip((*differentiable, "carry_in"), found, strict=False))}
        if carry_out is not None and not replay:
            result["carry_out"] = carry_out.detach()
        results.append(result)
    for what, x in results[1].items():
        assert torch.equal(x, results[0][what]), f"{what} of a replay"
    return results[0]


# Documents, a carry, or whether it is wanted. The last two: the first and the last of several segments.
CASES = [(layout, carry, carry) for layout in DOCUMENTS for carry in (False, True)]
CASES += [("one document", False, True), ("one document", True, False)]
QUICK = [("over ranks and from an edge", True, True)]


def quick_suite(rank: int, world_size: int) -> None:
    """Every operator with few backends each, one of matrices with all."""
    scans = build_scans(tuple(range(world_size)))
    for number, name in enumerate(OPS):
        chosen = [*scans][number % len(scans)]
        if name == "delta":
            compare(rank, world_size, name, QUICK, scans)
        else:
            compare(rank, world_size, name, QUICK, {chosen: scans[chosen]})


def suite(rank: int, world_size: int, name: str) -> None:
    compare(rank, world_size, name, CASES, build_scans(tuple(range(world_size))))


def compare(
    rank: int,
    world_size: int,
    name: str,
    cases: Sequence[tuple[str, bool, bool]],
    scans: dict[str, RecordedExchange],
) -> None:
    borders = [*itertools.accumulate(LENGTHS[:world_size], initial=0)]
    start, stop = borders[rank : rank + 2]
    with mock.patch.dict(OPERATORS, OPS):
        for layout, carry, want_carry in cases:
            documents = DOCUMENTS[layout]
            inside = None if documents is None else [border for border in documents if border < borders[-1]]
            whole = expected(name, inside, borders[-1], carry, want_carry)
            for backend, scan in scans.items():
                found = of_rank(name, scan, inside, start, stop, borders[-1], carry, want_carry)
                for what, x in found.items():
                    wanted = whole[what] if what.startswith("carry") else whole[what][:, start:stop]
                    error = (x - wanted).abs().max().item() / whole[what].abs().max().clamp(min=1e-3).item()
                    case = f"{name}, {backend}, {layout}, {carry=}, {want_carry=}"
                    assert error <= TOLERANCE, f"{what} off by {error:.1e}: {case}"
    for scan in scans.values():
        scan.drain()
    dist.barrier()  # keep ranks alive until their peers have received everything


@pytest.mark.slow
def test_every_operator_over_ranks_equals_its_recurrence() -> None:
    run_distributed(quick_suite, 3)


@pytest.mark.campaign
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_operators_over_ranks_equal_whole_recurrence(world_size: int, name: str) -> None:
    run_distributed(suite, world_size, name)


def made_matrices(rank: int, world_size: int) -> dict[tuple[bool, bool], int]:
    """How many of two passes (one a replay) of this rank make the matrix, by carry_in and want_carry."""
    scan, made = build_scans(tuple(range(world_size)), "two_shot")["two_shot"], {}
    borders = [*itertools.accumulate(LENGTHS[:world_size], initial=0)]
    for carry, want_carry in itertools.product((False, True), repeat=2):
        with mock.patch.object(Chunks, "transition", autospec=True, side_effect=Chunks.transition) as make:
            of_rank("delta", scan, None, *borders[rank : rank + 2], borders[-1], carry, want_carry)
        made[carry, want_carry] = make.call_count
    scan.drain()
    dist.barrier()
    return made


def test_matrices_are_made_only_where_a_state_passes_through() -> None:
    ranks = run_distributed(made_matrices, 3)
    none, first, last, always = (False, False), (False, True), (True, False), (True, True)
    assert [made[none] for made in ranks] == [0, 2, 0]
    assert [made[first] for made in ranks] == [0, 2, 2]
    assert [made[last] for made in ranks] == [2, 2, 0]
    assert [made[always] for made in ranks] == [2, 2, 2]


@pytest.mark.parametrize("documents", [None, (0, 70, 100)])
def test_op_passes_of_gla_equal_chunked_passes(documents: tuple[int, ...] | None) -> None:
    """State, transition and state gradient one by one, in fp64."""
    values = tensors("slow gla", 100)
    operands, incoming = [values[name] for name in GLA.operands], values["carry_in"]
    doc_ids = None if documents is None else find_doc_ids(torch.tensor(documents), 0, 100, incoming.device)
    both = []
    for passes in (GLA.select(operands), op_passes(naive_of(GLA), Kind.diagonal)):
        forward = passes.forward(operands, SCALE, doc_ids)
        forward.overlap()
        o = forward.outputs(incoming)
        backward = passes.backward(operands, values["do"], forward.saved, incoming, SCALE, doc_ids)
        backward.overlap()
        transition, grads = forward.transition.exp(), backward.operand_grads(values["dcarry_out"])
        both.append([forward.state, transition, o, backward.state_grad, *grads])
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_unknown_operator_and_wrong_operands_are_refused() -> None:
    shard = SequencePosition((0, 4), exchange=local_exchange())
    x = torch.ones(1, 4, 1, 2)
    with pytest.raises(ValueError, match=r"^operator: must be one of gla.*; got 'gal'$"):
        mix("gal", [x] * 4, shard)
    with pytest.raises(ValueError, match=r"^operands: gla takes q, k, v, g; got 3 tensors$"):
        mix("gla", [x] * 3, shard)
