"""The short convolution over ranks, by every backend's own scan and by the halo scan, against conv1d in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.test_short_conv import NAMES, check, expected, tensors
from tests.support.distributed import run_distributed
from tests.support.positions import position_of
from tests.support.sp_reference import TIMEOUT, RecordedExchange, build_scans
from zeco_train.collectives import ScanWorker
from zeco_train.collectives.cost_model import Costs, Link, Load
from zeco_train.collectives.halo import HALO
from zeco_train.distributed.mesh import halo_groups, init_mesh
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.mix import mix
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange, ScanRequest
from zeco_train.sp.backend import SpecScan
from zeco_train.sp.backend_registry import SPConfig
from zeco_train.sp.exchange import connect
from zeco_train.sp.exposed import ExposedMeter

pytestmark = pytest.mark.numeric

LENGTHS = (7, 3, 5, 4, 6)
# With a state of 3 tokens: ranks of fewer, over several of which it reaches.
SHORT_LENGTHS = (4, 1, 2, 1, 3), (1, 1, 1, 5, 2)
DOCUMENTS = {
    "one document": None,
    "over ranks and from an edge": (0, 2, 7, 12, 15),
    "over three ranks": (0, 6, 8, 22),
    "one token each": tuple(range(25)),
}
# Ranks that a document crosses whole, in shards shorter than the state.
SHORT_DOCUMENTS = {"one document": None, "in short shards": (0, 3, 6), "from an edge": (0, 5), "one token": (0, 1)}


def of_rank(
    scan: RecordedExchange,
    values: dict[str, Tensor],
    documents: Sequence[int] | None,
    borders: Sequence[int],
    rank: int,
    carry: bool,
) -> dict[str, Tensor]:
    """y and gradients on a rank's tokens; a replay of the received state must give the same bits."""
    start, stop = borders[rank : rank + 2]
    whole = None if documents is None else [*documents, borders[-1]]
    # The sequence's first document continues from the carry.
    shard = position_of(scan, start, stop, whole, continues=True)
    results: list[dict[str, Tensor]] = []
    for replay in (False, True):
        scan.events.clear()
        x, weight, bias = (values[name].clone().requires_grad_() for name in NAMES)
        x = x[:, start:stop].detach().clone().requires_grad_()
        leaves = [x, weight, bias] + ([values["carry_in"].clone().requires_grad_()] if carry else [])
        y, carry_out = mix(
            "short_conv",
            leaves[:3],
            shard,
            scale=1.0,
            incoming_state=scan.received["R"] if replay else None,
            carry_in=leaves[3] if carry else None,
            want_carry=carry,
        )
        assert scan.events.count("launch forward") == (not replay)
        pairs = [(y, values["do"][:, start:stop])]
        if carry_out is not None:
            pairs.append((carry_out, values["dcarry_out"]))
        outputs, grads = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, leaves, grads)
        results.append(
            {"y": y.detach()} | dict(zip([f"d{name}" for name in (*NAMES, "carry_in")], found, strict=False))
        )
        if carry_out is not None and not replay:
            results[0]["carry_out"] = carry_out.detach()
    for name, tensor in results[1].items():
        assert torch.equal(tensor, results[0][name]), f"{name} of a replay"
    return results[0]


def compare(
    scans: dict[str, RecordedExchange],
    lengths: Sequence[int],
    layouts: dict[str, tuple[int, ...] | None],
    rank: int,
    widths: Sequence[int] = (2, 3, 4),
    carries: Sequence[bool] = (False, True),
) -> None:
    """Every width, layout of documents and scan, with and without a carry."""
    borders = [*itertools.accumulate(lengths, initial=0)]
    for width, (layout, documents), carry in itertools.product(widths, layouts.items(), carries):
        # One sequence as documents need it, else two.
        values = tensors(1 if documents else 2, borders[-1], width)
        inside = None if documents is None else [border for border in documents if border < borders[-1]]
        wanted = expected(values, inside, carry)
        tokens = slice(*borders[rank : rank + 2])
        mine = {name: x[:, tokens] if name in ("y", "dx") else x for name, x in wanted.items()}
        for name, scan in scans.items():
            where = f"{name}, width {width}, {layout}, {carry=}"
            found = of_rank(scan, values, inside, borders, rank, carry)
            # Every rank has the gradient by its own outputs and those of later ranks that see its inputs.
            for shared in ("dweight", "dbias"):
                dist.all_reduce(found[shared])
            check(found, mine, where)


def make_halo(world_size: int) -> Exchange:
    """All states go by the scan between neighbours."""
    exchange = connect(SPConfig(), new_groups(world_size), TIMEOUT, halo=new_groups(world_size))
    return exchange.replaced(states=exchange.halo)


def new_groups(world_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    ranks = list(range(world_size))
    return dist.new_group(ranks), dist.new_group(ranks)


def suite(rank: int, world_size: int, quick: bool) -> None:
    scans = build_scans(tuple(range(world_size)), with_halo=False)
    scans["halo"] = RecordedExchange(make_halo(world_size))
    if quick:
        halo = {"halo": scans["halo"]}
        compare(
            scans, LENGTHS[:world_size], {"over ranks": DOCUMENTS["over ranks and from an edge"]}, rank, [4], [True]
        )
        for lengths in SHORT_LENGTHS:
            compare(halo, lengths[:world_size], SHORT_DOCUMENTS, rank, [4], [lengths is SHORT_LENGTHS[0]])
        compare(halo, LENGTHS[:world_size], {"one document": None}, rank, [2], [False])
    else:
        compare(scans, SHORT_LENGTHS[0][:world_size], SHORT_DOCUMENTS, rank)
        compare({"halo": scans["halo"]}, SHORT_LENGTHS[1][:world_size], SHORT_DOCUMENTS, rank)
        compare(scans, LENGTHS[:world_size], DOCUMENTS, rank)
    for scan in scans.values():
        scan.drain()
    dist.barrier()  # keep ranks alive until their peers have received everything


@pytest.mark.parametrize(
    ("world_size", "quick"), [(3, True), *(pytest.param(n, False, marks=pytest.mark.campaign) for n in range(1, 6))]
)
def test_convolution_over_ranks_equals_conv1d(world_size: int, quick: bool) -> None:
    run_distributed(suite, world_size, quick)


def segments(rank: int, world_size: int, share: int) -> None:
    """A sequence in three segments, the last one first in the backward pass, each replayed."""
    halo = RecordedExchange(make_halo(world_size))
    count = 3
    values = tensors(2, count * share * world_size, 4)
    wanted = expected(values, None, carry=True)
    starts = [(segment * world_size + rank) * share for segment in range(count)]
    carry, received = values["carry_in"], []
    with torch.no_grad():
        for start in starts:
            operands = [values["x"][:, start : start + share], values["weight"], values["bias"]]
            shard = position_of(halo, start, start + share)
            y, after = mix("short_conv", operands, shard, scale=1.0, carry_in=carry, want_carry=True)
            assert after is not None
            carry = after
            received.append(halo.received["R"])
            check({"y": y}, {"y": wanted["y"][:, start : start + share]}, f"y from {start}")
    check({"carry_out": carry}, wanted, "the last segment")
    dcarry = values["dcarry_out"]
    for start, incoming in reversed([*zip(starts, received, strict=True)]):
        operands = [values["x"][:, start : start + share], values["weight"], values["bias"]]
        leaves = [tensor.clone().requires_grad_() for tensor in (*operands, torch.full_like(carry, torch.nan))]
        shard = position_of(halo, start, start + share)
        y, after = mix(
            "short_conv", leaves[:3], shard, scale=1.0, incoming_state=incoming, carry_in=leaves[3], want_carry=True
        )
        assert after is not None
        do = values["do"][:, start : start + share]
        dx, _, _, dcarry = torch.autograd.grad([y, after], leaves, [do, dcarry])
        check({"dx": dx}, {"dx": wanted["dx"][:, start : start + share]}, f"dx from {start}")
    check({"dcarry_in": dcarry}, wanted, "the first segment")
    halo.drain()
    dist.barrier()


@pytest.mark.parametrize(("world_size", "share"), [pytest.param(3, 4, marks=pytest.mark.campaign), (2, 1)])
def test_segments_carry_inputs_and_their_gradients(world_size: int, share: int) -> None:
    """With 2 tokens a segment, inputs pass through whole segments."""
    run_distributed(segments, world_size, share)


def beside_a_backend(rank: int, world_size: int) -> None:
    """A halo of a mesh's groups: prepared, taken by the shard's place, measured and drained with its backend."""
    mesh = init_mesh(Launch(rank, world_size, rank), 2, torch.device("cpu"), timedelta(seconds=60))
    halo = halo_groups(mesh)
    exchange, meter = connect(SPConfig(), mesh.scan_groups, mesh.timeout, mesh.device, halo), ExposedMeter()
    assert exchange.halo is not exchange.states
    shard = SequencePosition((0, 4, 8), mesh.sp_rank, exchange=exchange)
    values = tensors(1, 8, 4)
    with meter.measuring():
        tokens = values["x"][:, shard.start : shard.stop]
        y, _ = mix("short_conv", [tokens, values["weight"], values["bias"]], shard, scale=1.0)
    assert meter.take() is not None
    check({"y": y}, {"y": expected(values, None, False)["y"][:, shard.start : shard.stop]}, "by a mesh")
    exchange.drain()
    dist.barrier()
    alone = init_mesh(Launch(rank, world_size, rank), 1, torch.device("cpu"), timedelta(seconds=60))
    assert halo_groups(alone) is None
    exchange = connect(SPConfig(), alone.scan_groups, alone.timeout)
    assert exchange.halo is exchange.states


def test_backend_takes_a_halo_beside_it() -> None:
    run_distributed(beside_a_backend, 2)


def messages(rank: int, world_size: int, short: bool) -> tuple[int, int]:
    """Bytes sent point to point by a scan, and its message count; if `short`, a row passes through rank 1."""
    group, sent = dist.new_group(), []
    halo, send = SpecScan((ScanWorker(group, TIMEOUT),), HALO), dist.isend
    state, transition = torch.full((2, 1, 3, 5), rank + 1.0), torch.zeros(2, 1, 3, 3)
    passes = short and rank == 1
    transition[..., 0, 2] = float(passes)
    with mock.patch.object(dist, "isend", lambda tensor, **to: (sent.append(tensor.nbytes), send(tensor, **to))[1]):
        pending = halo.launch(ScanRequest(state, transition, want_carry=True, cuts=not passes))
        wanted = [rank + float(short and rank == 2), rank, rank]
        assert pending.wait()[0, 0, :, 0].tolist() == wanted
        assert bool((pending.carry_out() == world_size).all())
        halo.drain()
    dist.barrier()
    return sum(sent), len(sent)


@pytest.mark.parametrize("short", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_rank_but_the_last_sends_one_state(short: bool) -> None:
    load = Load(3, (2, 1, 3, 5), 4, matrices=True)
    assert run_distributed(messages, 3, short) == [(load.state_bytes, 1)] * 2 + [(0, 0)]
    assert HALO.bytes_sent(load, False) == load.state_bytes
    costs = Costs(Link.gloo, 1e-3, 1e-6, 0.0, 0.0, 0.0)
    assert HALO.seconds(costs, load, None) == pytest.approx(1e-3 + 120e-6)
