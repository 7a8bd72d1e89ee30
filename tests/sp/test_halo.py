"""The halo scan: the short convolution in segments, beside a backend, and what it sends.

`test_operators.py` compares the convolution over ranks, also over some shorter than its state, with its recurrence.
"""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.distributed import on_ranks, run_distributed
from tests.support.operator_cases import expected_of_rows, make
from tests.support.positions import position_of
from tests.support.sp_reference import TIMEOUT, RecordedExchange
from zeco_train.collectives import ScanWorker
from zeco_train.collectives.cost_model import Costs, Link, Load
from zeco_train.collectives.halo import HALO
from zeco_train.distributed.mesh import halo_groups, init_mesh
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.mix import mix
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import ScanRequest
from zeco_train.sp.backend import SpecScan
from zeco_train.sp.backend_registry import SPConfig
from zeco_train.sp.exchange import connect
from zeco_train.sp.exposed import ExposedMeter

pytestmark = pytest.mark.numeric

# Sums of tens of terms near 1, each rounded by 2^-53.
TOLERANCE = 1e-13


def check(found: Tensor, wanted: Tensor, where: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE, msg=where)


@pytest.mark.parametrize(("world_size", "share"), [pytest.param(3, 4, marks=pytest.mark.campaign), (2, 1)])
@on_ranks()
def test_segments_carry_inputs_and_their_gradients(rank: int, world_size: int, share: int) -> None:
    """A sequence in three segments, each replayed; with 2 tokens a segment, inputs pass through whole segments."""
    halo, count = dist.new_group(), 3
    exchange = connect(SPConfig(), (dist.new_group(), dist.new_group()), TIMEOUT, halo=(halo, dist.new_group()))
    scan = RecordedExchange(exchange.replaced(states=exchange.halo))
    values = make("short_conv", count * share * world_size, "mild", B=2)
    wanted = expected_of_rows("short_conv", values, ((), ()), carry_in=True, carry_out=True)
    starts = range(rank * share, count * share * world_size, world_size * share)
    parts = [slice(start, start + share) for start in starts]
    carry, received = values["carry_in"], []
    with torch.no_grad():
        for part in parts:
            operands = [values["x"][:, part], values["weight"], values["bias"]]
            shard = position_of(scan, part.start, part.stop)
            y, after = mix("short_conv", operands, shard, carry_in=carry, want_carry=True)
            assert after is not None
            carry = after
            received.append(scan.received["R"])
            check(y, wanted["o"][:, part], f"y from {part.start}")
    check(carry, wanted["carry_out"], "the last segment")
    dcarry = values["dcarry_out"]
    for part, incoming in reversed([*zip(parts, received, strict=True)]):
        operands = [values["x"][:, part], values["weight"], values["bias"]]
        leaves = [tensor.clone().requires_grad_() for tensor in (*operands, torch.full_like(carry, torch.nan))]
        shard = position_of(scan, part.start, part.stop)
        y, after = mix("short_conv", leaves[:3], shard, incoming_state=incoming, carry_in=leaves[3], want_carry=True)
        dx, _, _, dcarry = torch.autograd.grad([y, after], leaves, [values["do"][:, part], dcarry])
        check(dx, wanted["dx"][:, part], f"dx from {part.start}")
    check(dcarry, wanted["dcarry_in"], "the first segment")
    scan.drain()


@on_ranks(2)
def test_backend_takes_a_halo_beside_it(rank: int, world_size: int) -> None:
    """A halo of a mesh's groups: prepared, taken by the shard's place, measured and drained with its backend."""
    mesh = init_mesh(Launch(rank, world_size, rank), 2, torch.device("cpu"), timedelta(seconds=60))
    halo = halo_groups(mesh)
    exchange, meter = connect(SPConfig(), mesh.scan_groups, mesh.timeout, mesh.device, halo), ExposedMeter()
    assert exchange.halo is not exchange.states
    shard = SequencePosition((0, 4, 8), mesh.sp_rank, exchange=exchange)
    values, own = make("short_conv", 8, "mild", B=1), slice(shard.start, shard.stop)
    wanted = expected_of_rows("short_conv", values, ((),), carry_in=False, carry_out=False)
    with meter.measuring():
        y, _ = mix("short_conv", [values["x"][:, own], values["weight"], values["bias"]], shard)
    assert meter.take() is not None
    check(y, wanted["o"][:, own], "by a mesh")
    exchange.drain()
    dist.barrier()
    alone = init_mesh(Launch(rank, world_size, rank), 1, torch.device("cpu"), timedelta(seconds=60))
    assert halo_groups(alone) is None
    exchange = connect(SPConfig(), alone.scan_groups, alone.timeout)
    assert exchange.halo is exchange.states


def messages(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Bytes and number of the messages of a scan in which each state goes one rank on, or a row passes rank 1."""
    group, found = dist.new_group(), []
    for short in (False, True):
        halo = SpecScan((ScanWorker(group, TIMEOUT),), HALO)
        state, transition = torch.full((2, 1, 3, 5), rank + 1.0), torch.zeros(2, 1, 3, 3)
        passes = short and rank == 1
        transition[..., 0, 2] = float(passes)
        with mock.patch.object(dist, "isend", wraps=dist.isend) as isend:
            pending = halo.launch(ScanRequest(state, transition, want_carry=True, cuts=not passes))
            wanted = [rank + float(short and rank == 2), rank, rank]
            assert pending.wait()[0, 0, :, 0].tolist() == wanted
            assert bool((pending.carry_out() == world_size).all())
            halo.drain()
        found.append((sum(call.args[0].nbytes for call in isend.call_args_list), isend.call_count))
    return found


def test_each_rank_but_the_last_sends_one_state() -> None:
    load = Load(3, (2, 1, 3, 5), 4, matrices=True)
    assert run_distributed(messages, 3) == [[(load.state_bytes, 1)] * 2] * 2 + [[(0, 0)] * 2]
    assert HALO.bytes_sent(load, False) == load.state_bytes
    costs = Costs(Link.gloo, 1e-3, 1e-6, 0.0, 0.0, 0.0)
    assert HALO.seconds(costs, load, None) == pytest.approx(1e-3 + 120e-6)
