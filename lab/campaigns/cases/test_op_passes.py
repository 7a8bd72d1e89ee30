"""Passes that `op_passes` makes of a recurrence: equal to the chunked ones, and over ranks to the recurrence itself."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lab.op_passes import op_passes
from tests.sp.test_operators import LENGTHS, compare
from tests.support.distributed import run_distributed
from tests.support.operator_cases import make
from tests.support.recurrence import naive_of
from tests.support.sp_reference import build_scans
from zeco_train.ops.delta import DELTA
from zeco_train.ops.gla import GLA
from zeco_train.ops.operator import Kind
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import find_doc_ids

pytestmark = [pytest.mark.campaign, pytest.mark.numeric]

# An operator is tested over ranks before it has passes of its own.
OPS = {
    "slow gla": replace(GLA, portable=op_passes(naive_of(GLA), Kind.diagonal), cuda=None),
    "slow delta": replace(DELTA, portable=op_passes(naive_of(DELTA), Kind.matrix), cuda=None),
}


def suite(rank: int, world_size: int) -> None:
    scans = build_scans(tuple(range(world_size)))
    with mock.patch.dict(OPERATORS, OPS):
        for name in OPS:
            for backend, scan in scans.items():
                compare(name, backend, scan, rank, LENGTHS[world_size])
    for scan in scans.values():
        scan.drain()
    dist.barrier()  # keep ranks alive until their peers have received everything


@pytest.mark.parametrize("world_size", [1, 3])
def test_slow_operators_over_ranks_equal_their_recurrences(world_size: int) -> None:
    run_distributed(suite, world_size)


@pytest.mark.parametrize("documents", [None, (0, 70, 100)])
def test_op_passes_of_gla_equal_chunked_passes(documents: tuple[int, ...] | None) -> None:
    """State, transition and state gradient one by one, in fp64."""
    values = make("gla", 100, "mild")
    operands, incoming = [values[name] for name in GLA.operands], values["carry_in"]
    doc_ids = None if documents is None else find_doc_ids(torch.tensor(documents), 0, 100, incoming.device)
    both = []
    for passes in (GLA.select(operands), OPS["slow gla"].portable):
        forward = passes.forward(operands, 0.7, doc_ids)
        forward.overlap()
        o = forward.outputs(incoming)
        backward = passes.backward(operands, values["do"], forward.saved, incoming, 0.7, doc_ids)
        backward.overlap()
        transition, grads = forward.transition.exp(), backward.operand_grads(values["dcarry_out"])
        both.append([forward.state, transition, o, backward.state_grad, *grads])
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
