"""docs/papers.md is what its data say, what `lab.paper` measures with is exact, and `lab.lasp1` ablates no result."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from lab.lasp1 import _ablate
from lab.paper import losses
from lab.paper.losses import result_file, rows
from lab.paper.page import load, page
from lab.paper.store import in_names
from lab.paper.unmasked import UnmaskedRing, unmasked_softmax
from tests.sp.test_operators import found_by
from tests.support.commands import REPOSITORY, run_here
from tests.support.distributed import on_ranks
from tests.support.operator_cases import make, own_tokens
from tests.support.sp_reference import build_scans
from zeco_train.collectives.cost_model import Load
from zeco_train.collectives.scan_registry import SCANS
from zeco_train.collectives.wire import Wire
from zeco_train.config.schema import load_config
from zeco_train.ops import mix
from zeco_train.ops.operator import Operator
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.softmax.span import Span
from zeco_train.sp.attention.method import AttentionLoad
from zeco_train.sp.attention.method_registry import METHODS


def test_page_of_the_papers_is_generated() -> None:
    written = (REPOSITORY / "docs/papers.md").read_text(encoding="utf-8")
    assert written == page(), "run python -m lab.paper.page > docs/papers.md"


def test_counted_bytes_are_those_of_the_formulas() -> None:
    """Of the stored table: of the scans, and of the methods of softmax attention."""
    table = load("paper_table_1")
    heads, dim, tokens = (table[name] for name in ("heads", "dim", "tokens"))
    scans = {"gla:lasp1": "serial", "gla:lasp2": "all_gather", "gla:zeco": "chain"}
    for row in table["rows"]:
        name, ranks, sent = row["variant"], row["ranks"], row["bytes_forward"]
        if name in scans:
            assert sent == SCANS[scans[name]].bytes_sent(Load(ranks, (1, heads, dim, dim), 4), False), row
        elif name in METHODS:
            softmax = AttentionLoad(heads, heads, dim, tokens, ranks, None, itemsize=4, wide=4)
            assert sent == METHODS[name].costs(softmax).forward, row


def test_rows_of_losses_are_runs_that_can_start() -> None:
    """At the paper's shape; Based's window is that of its recipe."""
    with unmasked_softmax():
        configs = [
            load_config(row.overrides("llama3_1b", 0, 2, Path("run"))).model
            for table in ("modules", "unmasked")
            for row in rows(table)
        ]
    assert {(model.num_layers, model.hidden_size, model.num_heads) for model in configs} == {(16, 2048, 16)}
    assert sum(not model.causal for model in configs) == 2
    recipe = load_config(["+experiment=based_1b_window"]).model
    assert recipe.attn in [model.attn for model in configs if model.mixer == "based"]


def test_rows_of_another_size_or_machine_have_a_file_of_their_own() -> None:
    """So that none count as measured; other steps need `--out`."""
    machines = ("2 CPU ranks", "1 CPU rank", "2 × H100 80GB HBM3", "4 × H200")
    assert [in_names(machine) for machine in machines] == ["2cpu", "1cpu", "2xh100", "4xh200"]
    assert result_file("modules", "tiny", machines[0]).name == "paper_modules_2cpu.json"
    assert result_file("modules", "llama3_1b", machines[2]).name == "paper_modules_llama3_1b_2xh100.json"
    before = result_file("modules", "tiny", machines[0]).read_bytes()
    for wrong, says in (("--steps 7", "its rows have --size tiny --steps 60; choose"), ("--only gsa", "no row")):
        assert says in run_here(losses.main, "modules", *wrong.split()).errors[0]
    assert result_file("modules", "tiny", machines[0]).read_bytes() == before


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


@pytest.mark.numeric
@pytest.mark.processes
@on_ranks(2)
def test_ablations_change_no_gradient(rank: int, world_size: int) -> None:
    """Of Lightning Attention's operator: without the state cache a layer's backward pass scans once more."""
    scan = build_scans((0, 1), "lasp1")["lasp1"]
    bounds = 0, 70, 103
    own = own_tokens("fixed_decay", make("fixed_decay", bounds[-1]), slice(*bounds[rank : rank + 2]))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        # Both are restored at the end.
        patch.setattr(Operator, "select", Operator.select)
        patch.setattr(mix._Differentiable, "backward", mix._Differentiable.backward)
        for cached in (True, False):
            _ablate(fused=False, cached=cached)
            scan.events.clear()
            found.append(found_by("fixed_decay", own, SequencePosition(bounds, rank, exchange=scan), carry=False))
            launches = [event for event in scan.events if "launch" in event]
            assert launches == ["launch forward"] * (2 - cached) + ["launch reverse"]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())
