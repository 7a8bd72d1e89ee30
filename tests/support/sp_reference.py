"""Shared by the tests of sequence parallelism: whole sequences, the recurrence over them, a pass of one rank."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.positions import position_of
from tests.support.recurrence import naive_gla
from zeco_train.collectives.scan_registry import ALL_SCANS
from zeco_train.ops.mix import mix
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange, LaunchedScan, ScanRequest, StateScan
from zeco_train.sp.all_scan_config import AllScanAlgorithm, AllScanConfig
from zeco_train.sp.backend_registry import SHARING, Backend, SPConfig
from zeco_train.sp.exchange import connect
from zeco_train.sp.zeco import ZECO

TIMEOUT = timedelta(seconds=60)
BATCH, HEADS, KEY_DIM, VALUE_DIM = 2, 3, 7, 5
# Log-decays of one head's channels per token: from none to e^-50.
RATES = (0.0, 50.0, 1e-3, 1e-2, 0.1, 1.0, 5.0)
# Up to 250 tokens of terms near 1 round 2^-53 each; measured 1.8e-15 at most.
TOLERANCE = 1e-13
CONFIGS = {
    **{name: SPConfig(Backend[name]) for name in SHARING if name != ZECO.name},
    "auto": SPConfig(),
    **{
        scan.name + (f"/{blocks}" if scan.best_blocks else ""): SPConfig(
            all_scan=AllScanConfig(AllScanAlgorithm[scan.name], blocks=blocks)
        )
        for scan in ALL_SCANS
        for blocks in (("1", "3") if scan.best_blocks else ("auto",))
    },
}


@dataclass(frozen=True)
class Case:
    """A whole sequence, identical on every rank."""

    name: str  # for messages; also seeds the tensors
    lengths: tuple[tuple[int, ...], ...]  # tokens of each rank, for each segment
    rates: tuple[float, ...] = RATES
    carry: bool = False  # with `carry_in` and `carry_out`
    loss: str = "both"  # outputs that it depends on, `both`, `o` or `carry`
    poison: bool = False  # replicated values are NaN on every rank that must not read them
    strided: bool = False  # tensors and gradients are not contiguous, gradients of outputs are expanded from one value
    dtype: torch.dtype = torch.float64
    tensors: dict[str, Tensor] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        tokens = (BATCH, self.borders[-1], HEADS)
        state_shape = (BATCH, HEADS, KEY_DIM, VALUE_DIM)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        rates = torch.stack([torch.tensor(self.rates, dtype=torch.float64).roll(head) for head in range(HEADS)])
        tensors = {
            **{name: random(*tokens, KEY_DIM).to(self.dtype) for name in ("q", "k")},
            **{name: random(*tokens, VALUE_DIM).to(self.dtype) for name in ("v", "do")},
            "g": -(rates * torch.rand(*tokens, KEY_DIM, generator=generator, dtype=torch.float64)).to(wide),
            **{name: random(*state_shape).to(wide) for name in ("carry_in", "dcarry_out")},
        }
        if self.strided:
            for name in ("do", "dcarry_out"):
                tensors[name] = torch.full((), 0.5, dtype=tensors[name].dtype).expand(tensors[name].shape)
        object.__setattr__(self, "tensors", tensors)

    @property
    def borders(self) -> list[int]:
        """Starts of the pieces, those of a later segment after those of an earlier one, and the sequence's end."""
        return list(itertools.accumulate(itertools.chain(*self.lengths), initial=0))

    def piece(self, segment: int, rank: int) -> int:
        return segment * len(self.lengths[0]) + rank

    def position(self, exchange: Exchange, piece: int) -> SequencePosition:
        return position_of(exchange, *self.borders[piece : piece + 2])

    def tokens(self, piece: int) -> dict[str, Tensor]:
        """q, k, v, g as leaves, and do, of one piece."""
        start, stop = self.borders[piece : piece + 2]
        tensors = {name: self.tensors[name][:, start:stop] for name in ("q", "k", "v", "g", "do")}
        for name in ("q", "k", "v", "g"):
            tensor = tensors[name].transpose(1, 2).contiguous().transpose(1, 2) if self.strided else tensors[name]
            tensors[name] = tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        return tensors


class Reference:
    """The recurrence over the whole sequence in fp64 under autograd.

    Attributes:
        whole: o, dq, dk, dv, dg of all tokens.
        incoming, incoming_grad: R and D_in of each piece.
        carries: carry_out and dcarry_in.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        leaves = {name: case.tensors[name].double().clone().requires_grad_() for name in ("q", "k", "v", "g")}
        carry_in = case.tensors["carry_in"].double().clone().requires_grad_()
        borders = case.borders
        after: dict[int, Tensor] = {}
        o: list[Tensor] = []
        state = carry_in if case.carry else None
        for a, b in itertools.pairwise(borders):
            part, state = naive_gla(*(x[:, a:b] for x in leaves.values()), initial_state=state)
            o.append(part)
            # A separate node: o's dependence on the state before the border is not part of D_in.
            after[b] = state = state.clone()
        outputs, grads = [torch.cat(o, dim=1)], [case.tensors["do"].double()]
        if case.carry:
            outputs, grads = [*outputs, after[borders[-1]]], [*grads, case.tensors["dcarry_out"].double()]
        if case.loss != "both":
            grads[case.loss == "o"] = torch.zeros_like(grads[case.loss == "o"])
        ends = [after.get(border, carry_in) for border in borders]
        inputs = [*leaves.values(), carry_in, *ends[1:]]
        found = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
        filled = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, found, strict=True)]
        self.whole = {"o": outputs[0].detach(), **dict(zip(("dq", "dk", "dv", "dg"), filled, strict=False))}
        zero = torch.zeros_like(carry_in)
        self.incoming = [carry_in.detach() if case.carry else zero, *(end.detach() for end in ends[1:-1])]
        self.incoming_grad = filled[5:]
        if not case.carry:
            self.incoming_grad[-1] = zero
        self.carries = {"carry_out": ends[-1].detach(), "dcarry_in": filled[4]}

    def errors(self, results: dict[str, Tensor], piece: int) -> dict[str, float]:
        """Maximum deviation of each tensor, relative to its maximum over all ranks."""
        start, stop = self.case.borders[piece : piece + 2]
        states = {"R": self.incoming, "D_in": self.incoming_grad}
        errors = {}
        for name, actual in results.items():
            if name in self.whole:
                everywhere, expected = self.whole[name], self.whole[name][:, start:stop]
            elif name in states:
                everywhere, expected = torch.stack(states[name]), states[name][piece]
            else:
                everywhere = expected = self.carries[name]
            assert actual.shape == expected.shape, f"{name} has shape {list(actual.shape)}: {self.case.name}"
            scale = everywhere.abs().max().item() or 1.0
            errors[name] = (actual.double() - expected).abs().max().item() / scale
        return errors

    def check(self, results: dict[str, Tensor], piece: int, where: str) -> None:
        for name, error in self.errors(results, piece).items():
            message = f"{name} of piece {piece} is off by {error:.1e}: {where}, {self.case.name} {self.case.lengths}"
            assert error <= TOLERANCE, message  # a NaN fails too


class RecordingScan:
    """Wrapper of a scan that records every call and the result of each `wait` (`R` forward, `D_in` in reverse)."""

    def __init__(self, scan: StateScan, events: list[str], received: dict[str, Tensor]) -> None:
        self._scan, self.events, self.received = scan, events, received

    def launch(self, request: ScanRequest) -> RecordingPendingScan:
        self.events.append("launch reverse" if request.reverse else "launch forward")
        return RecordingPendingScan(self, self._scan.launch(request), "D_in" if request.reverse else "R")

    def drain(self) -> None:
        self._scan.drain()


class RecordingPendingScan:
    def __init__(self, record: RecordingScan, pending: LaunchedScan, name: str) -> None:
        self._record, self._pending, self._name = record, pending, name

    def wait(self) -> Tensor:
        self._record.events.append("wait")
        received = self._pending.wait()
        self._record.received[self._name] = received.clone()
        return received

    def finish(self) -> None:
        self._record.events.append("finish")
        self._pending.finish()

    def carry_out(self) -> Tensor:
        self._record.events.append("carry_out")
        return self._pending.carry_out()


class RecordedExchange(Exchange):
    """An exchange whose scan of states is recorded; not halos, where they are scans of their own."""

    events: list[str]
    received: dict[str, Tensor]

    def __init__(self, exchange: Exchange) -> None:
        events: list[str] = []
        received: dict[str, Tensor] = {}
        states = RecordingScan(exchange.states, events, received)
        halo = states if exchange.halo is exchange.states else exchange.halo
        vars(self).update(vars(exchange), states=states, halo=halo, events=events, received=received)
        self._register()


def shard_pass(
    case: Case,
    scan: RecordedExchange,
    piece: int,
    *,
    carry_in: Tensor | None = None,
    dcarry_out: Tensor | None = None,
    incoming_state: Tensor | None = None,
) -> dict[str, Tensor]:
    """Forward and backward of one piece. Returns the tensors of `Reference.errors`, except those unknown in a
    replay."""
    scan.received.clear()
    tokens = case.tokens(piece)
    do = tokens.pop("do")
    inputs = [*tokens.values()]
    if case.carry:
        assert carry_in is not None
        inputs.append(carry_in.detach().clone().requires_grad_())
    o, carry_out = mix(
        "gla",
        [*tokens.values()],
        case.position(scan, piece),
        incoming_state=incoming_state,
        carry_in=inputs[4] if case.carry else None,
        want_carry=case.carry,
    )
    assert (o.dtype, o.shape) == (do.dtype, do.shape), f"{o.dtype} {o.shape}: {case.name}"
    pairs = [(o, do)] if case.loss != "carry" else []
    if carry_out is not None and case.loss != "o":
        assert dcarry_out is not None
        pairs.append((carry_out, dcarry_out))
    outputs, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, inputs, grads)
    for tensor, grad in zip(inputs, found, strict=True):
        assert grad.dtype == tensor.dtype, f"gradient of {tensor.dtype} is {grad.dtype}: {case.name}"
    names = ("dq", "dk", "dv", "dg", "dcarry_in")
    results = {"o": o.detach(), **dict(zip(names, found, strict=False)), **scan.received}
    if carry_out is not None and incoming_state is None:
        results["carry_out"] = carry_out.detach()
    elif carry_out is not None:
        assert carry_out.isnan().all(), f"a replay made up a carry_out: {case.name}"
    return results


def ordinary_pass(case: Case, scan: RecordedExchange, rank: int) -> dict[str, Tensor]:
    """`shard_pass` of a sequence of one segment."""
    carry_in, dcarry_out = case.tensors["carry_in"], case.tensors["dcarry_out"]
    if case.poison and rank != 0:
        carry_in = torch.full_like(carry_in, torch.nan)
    if case.poison and rank != len(case.lengths[0]) - 1:
        dcarry_out = torch.full_like(dcarry_out, torch.nan)
    return shard_pass(case, scan, rank, carry_in=carry_in, dcarry_out=dcarry_out)


def replayed_pass(case: Case, scan: RecordedExchange, rank: int, first: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with R replayed from the first pass; `carry_in`'s value is not known then."""
    unknown = torch.full_like(case.tensors["carry_in"], torch.nan)
    dcarry_out = case.tensors["dcarry_out"]
    return shard_pass(case, scan, rank, carry_in=unknown, dcarry_out=dcarry_out, incoming_state=first["R"])


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), f"{name} differs in a bit: {where}"


def build_scans(ranks: tuple[int, ...], *names: str, with_halo: bool = True) -> dict[str, RecordedExchange]:
    """These, or all, backends on separate groups. Must be called on all ranks, including those not in `ranks`."""
    scans = {}
    for name in names or (*CONFIGS, *(["dp"] if len(ranks) == 1 else [])):
        groups = dist.new_group(ranks), dist.new_group(ranks)
        halo = (dist.new_group(ranks), dist.new_group(ranks)) if with_halo and len(ranks) > 1 else None
        config = CONFIGS.get(name, SPConfig(Backend["dp"]))
        scans[name] = RecordedExchange(connect(config, groups, TIMEOUT, halo=halo))
    return scans


def check_segments(case: Case, scan: RecordedExchange, rank: int, reference: Reference, where: str) -> None:
    """A sequence also cut into segments: all segments forward, then from the last one back, each replayed."""
    scan.events.clear()
    carry: Tensor | None = case.tensors["carry_in"] if case.carry else None
    slots = []
    with torch.no_grad():
        for segment in range(len(case.lengths)):
            piece = case.piece(segment, rank)
            tokens = case.tokens(piece)
            del tokens["do"]
            o, carry = mix("gla", [*tokens.values()], case.position(scan, piece), carry_in=carry, want_carry=True)
            slots.append(scan.received["R"])
            reference.check({"o": o, "R": slots[-1]}, piece, where)
    assert carry is not None
    reference.check({"carry_out": carry}, piece, where)
    dcarry = case.tensors["dcarry_out"]
    for segment in reversed(range(len(case.lengths))):
        piece = case.piece(segment, rank)
        unknown = torch.full_like(dcarry, torch.nan)
        results = shard_pass(case, scan, piece, carry_in=unknown, dcarry_out=dcarry, incoming_state=slots[segment])
        dcarry = results.pop("dcarry_in")
        reference.check(results, piece, where)
    reference.check({"dcarry_in": dcarry}, piece, where)
    for direction in ("forward", "reverse"):
        count = scan.events.count(f"launch {direction}")
        assert count == len(case.lengths), f"{count} scans {direction} for {len(case.lengths)} segments: {where}"
