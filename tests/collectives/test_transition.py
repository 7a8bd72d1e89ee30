"""State transitions of shards, without ranks: composition and adjoint of both kinds."""

from __future__ import annotations

import pytest
import torch

from tests.collectives.test_collectives import Pairs
from zeco_train.ops.seam import adjoint, compose, fold


@pytest.mark.parametrize("matrices", [False, True])
def test_two_shards_compose_to_one(matrices: bool) -> None:
    pairs = Pairs.make(0, 3, (1, 2, 5, 3), torch.float64, False, False, matrices)
    pairs.transitions[1, 0, 0] = 0.0 if matrices else -torch.inf
    (incoming, s1, s2), (_, t1, t2) = pairs.states, pairs.transitions
    one_by_one = fold(s2, t2, fold(s1, t1, incoming))
    torch.testing.assert_close(fold(*compose((s2, t2), (s1, t1)), incoming), one_by_one, rtol=0, atol=1e-14)
    # An empty shard is the identity, a zero incoming state gives the shard's own, and a decay of 0 drops the incoming.
    zero, nothing = torch.zeros_like(incoming), torch.zeros_like(t1)
    if matrices:
        nothing.diagonal(dim1=-2, dim2=-1).fill_(1)
    assert torch.equal(fold(zero, nothing, incoming), incoming)
    assert torch.equal(fold(s1, t1, zero), s1)
    assert torch.equal(fold(s1, t1, incoming)[0, 0], s1[0, 0])


@pytest.mark.parametrize("matrices", [False, True])
def test_adjoint_equals_autograd_of_fold(matrices: bool) -> None:
    pairs = Pairs.make(1, 2, (1, 2, 5, 3), torch.float64, False, True, matrices)
    state, transition, incoming, grad = pairs.states[0], pairs.transitions[1], pairs.states[1].requires_grad_(), 0.5
    out = fold(state, transition, incoming)
    (expected,) = torch.autograd.grad(out, incoming, torch.full_like(out, grad))
    found = fold(torch.zeros_like(state), adjoint(transition), torch.full_like(out, grad))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
