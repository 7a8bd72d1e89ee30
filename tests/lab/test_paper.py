"""docs/papers.md is what its data say, and what `lab.paper` measures with is exact."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from lab.paper.page import page
from lab.paper.unmasked import UnmaskedRing
from tests.support.commands import REPOSITORY
from tests.support.distributed import on_ranks
from zeco_train.collectives.wire import Wire
from zeco_train.ops.softmax.span import Span


def test_page_of_the_papers_is_generated() -> None:
    written = (REPOSITORY / "docs/papers.md").read_text(encoding="utf-8")
    assert written == page(), "run python -m lab.paper.page > docs/papers.md"


@pytest.mark.numeric
@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_unmasked_ring_is_softmax_attention_to_all_keys(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 5 * world_size, 3, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    *leaves, do = (x.clone().requires_grad_() for x in whole)
    o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), scale=0.7).transpose(1, 2)
    o.backward(do.detach())
    own = slice(5 * rank, 5 * rank + 5)
    q, k, v, do = (x[:, own].contiguous() for x in whole)
    ring = UnmaskedRing(Wire(dist.new_group(), "ring", False, timedelta(seconds=60)))
    place = Span(own.start, own.stop), range(0, 5 * world_size + 1, 5), 0.7
    attended = ring.forward(q, k, v, *place)
    found = attended.o, *ring.backward(do, q, k, v, attended, *place)
    for name, mine, expected in zip(("o", "dq", "dk", "dv"), found, (o, *(x.grad for x in leaves)), strict=True):
        assert expected is not None
        assert (mine - expected[:, own]).abs().max() <= 1e-12, name
