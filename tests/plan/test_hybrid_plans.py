"""Plans of hybrids: softmax layers in memory, time and on the wire; bytes against those that the methods send."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.config import SOFTMAX
from tests.support.distributed import run_distributed
from tests.support.planning import EAGER, GLA_1B, command, counted, make, make_case
from zeco_train.collectives.wire import Wire
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.plan.advice import legal_segments
from zeco_train.plan.attention_costs import (
    attention_blocks,
    attention_seconds,
    method_costs,
    plan_exchanges,
    problem_of,
)
from zeco_train.plan.memory import plan_memory
from zeco_train.plan.report import _attention
from zeco_train.plan.step_time import plan_step
from zeco_train.plan.traffic import count_scans, step_bytes
from zeco_train.sp.attention.method import AttentionLoad
from zeco_train.sp.attention.method_registry import METHODS, build_attention
from zeco_train.sp.backend_registry import BACKENDS

HYBRID = [*GLA_1B, "model.attn.every=4", EAGER]
TOKENS, HEADS, KEY_HEADS, HEAD_DIM = 12, 4, 2, 6


def _sent(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    """Bytes that this rank sends to others, forward, backward, and backward in a replay, by method and window."""
    group, sent, found = dist.group.WORLD, Counter[str](), {}
    assert group is not None
    way = "forward"

    def parts_of_others(_: Any, parts: torch.Tensor, __: Any = None, to: Any = None, **___: Any) -> int:
        return (parts.numel() - (len(parts) // world_size if to is None else to[rank])) * parts.element_size()

    def add(count: int) -> None:
        sent[way] += count

    def tensor(heads: int) -> torch.Tensor:
        return torch.randn(1, TOKENS, heads, HEAD_DIM, dtype=dtype)

    with (
        counted(dist, "all_to_all_single", parts_of_others, add),
        counted(Wire, "send_and_receive", lambda _, messages, __: sum(each.tensor.nbytes for each in messages), add),
    ):
        for name, spec in METHODS.items():
            for window in (None, 5, 30):
                method = build_attention(spec, group, timedelta(seconds=60), torch.device("cpu"))
                sent.clear()
                bounds = [*range(0, world_size * TOKENS + 1, TOKENS)]
                span = Span(rank * TOKENS, (rank + 1) * TOKENS, None, window)
                q, k, v = tensor(HEADS), tensor(KEY_HEADS), tensor(KEY_HEADS)
                way = "forward"
                o, lse, *kept = method.forward(q, k, v, span, bounds, 1.0)
                way = "backward"
                q_kept, k_kept, v_kept, o_kept = kept or (q, k, v, o)
                do = tensor(HEADS)
                method.backward(do, q_kept, k_kept, v_kept, Attended(o_kept, lse), span, bounds, 1.0)
                way = "replayed"
                method.backward(do, q, k, v, Attended(o, lse), span, bounds, 1.0)
                found[f"{name} {window}"] = sent["forward"], sent["backward"], sent["replayed"]
    return found


@pytest.mark.parametrize(
    ("ranks", "dtype"), [(2, torch.float32), pytest.param(4, torch.bfloat16, marks=pytest.mark.slow)]
)
def test_bytes_of_each_method_are_those_of_the_rank_that_sends_most(ranks: int, dtype: torch.dtype) -> None:
    of_ranks = run_distributed(_sent, ranks, dtype)
    for name, spec in METHODS.items():
        for window in (None, 5, 30):
            shape = HEADS, KEY_HEADS, HEAD_DIM, TOKENS, ranks, window
            load = AttentionLoad(*shape, dtype.itemsize, accumulation_dtype(dtype).itemsize)
            costs = (*spec.costs(load)[:2], spec.costs(load._replace(replayed=True)).backward)
            most = tuple(max(sent[f"{name} {window}"][way] for sent in of_ranks) for way in range(3))
            assert costs == pytest.approx(most, rel=1e-12), (name, window)


def test_gradients_by_cudnn_travel_as_wide_as_they_are_computed() -> None:
    """As many bytes go back as forth: do, dq, dk and dv for q, k, v and o. FlashAttention's are sums in fp32."""
    arguments = [*HYBRID, "data.seq_len=131072", "world_size=8", "sp.attention=ulysses", "gpu=h200"]
    for setting, wider in (("train.deterministic=false", 0), ("train.deterministic=true", 3)):
        case = make_case(*arguments, setting)
        ((block, shape),) = attention_blocks(case)
        costs, queries = method_costs(case, block), 7 / 8 * case.tokens * shape.heads * shape.head_dim * 2
        assert (costs.forward, costs.backward) == (4 * queries, (4 + wider) * queries)


@pytest.mark.slow
def test_plan_of_hybrid_lists_softmax_layers_and_methods() -> None:
    code, text, err = command(*HYBRID, "data.seq_len=1048576", "world_size=64")
    assert (code, err) == (0, "")
    assert "softmax attention at 5 layers (16 heads of 128, 16 of keys)" in text
    assert "\n  ulysses          needs ranks that divide the 16 heads of queries, not 64" in text
    assert text.count("(as planned)") == 3  # the backend, the method, and the setting
    (found,) = _attention(make_case(*HYBRID, "data.seq_len=131072", "world_size=8", "sp.attention=all_gather"))
    assert (found["layers"], found["heads"], found["window"]) == (5, 16, None)
    assert [name for name, row in found["methods"].items() if row["planned"]] == ["all_gather"]
    assert found["methods"]["all_gather"]["held_bytes"] > 3 * found["methods"]["ulysses"]["held_bytes"]
    assert not any(attention_blocks(make_case(*GLA_1B)))


def test_scans_and_operator_time_are_those_of_layers_with_states() -> None:
    arguments = ["data.seq_len=131072", "world_size=8"]
    hybrid, plain = make_case(*HYBRID, *arguments), make_case(*GLA_1B, EAGER, *arguments)
    assert (count_scans(hybrid).total, count_scans(plain).total) == (2 * 15, 2 * 20)
    for scan in BACKENDS["zeco"].scans:
        assert step_bytes(hybrid, scan) == pytest.approx(0.75 * step_bytes(plain, scan))
    for backend in BACKENDS.values():
        mixed, whole = (plan_step(case.by(backend)).seconds for case in (hybrid, plain))
        assert mixed["operator"] == pytest.approx(0.75 * whole["operator"])
        assert mixed["attention"] > 0
        assert "attention" not in whole
        assert (mixed["exchanges"] == 0) is (not backend.scans)
    everywhere = make_case(*HYBRID, *arguments, "model.attn.every=1")
    assert (count_scans(everywhere).total, everywhere.state_bytes) == (0, 0)
    assert plan_step(everywhere).seconds["scans"] == plan_step(everywhere).seconds["operator"] == 0


@pytest.mark.slow
def test_full_recompute_keeps_outputs_of_softmax() -> None:
    case = make_case(*HYBRID[:-1], "train.recompute=full", "world_size=1", "data.seq_len=16384")
    own = {name: case.measured(name).kept.by_token for name in case.spec.blocks}
    assert own == {"gla": 2 * 2048, SOFTMAX: 2 * 2048 + 2 * 2048 + 4 * 16}


@pytest.mark.slow
def test_more_ranks_are_not_advised_where_a_method_has_no_heads_for_them() -> None:
    small = [*HYBRID, "data.seq_len=65536", "world_size=16", "memory_gb=4", "sp.attention=ulysses"]
    assert make(*small).elsewhere is None
    assert problem_of(make_case(*small), "auto") is None


def test_ring_computes_longest_and_holds_least() -> None:
    arguments = [*HYBRID, "data.seq_len=131072", "world_size=8"]
    cases = {name: make_case(*arguments, f"sp.attention={name}") for name in METHODS}
    seconds = {name: attention_seconds(case) for name, case in cases.items()}
    assert seconds["ring"] == pytest.approx((2 - 1 / 8) * seconds["ulysses"])
    held = {name: plan_memory(case, 0.05).peak for name, case in cases.items()}
    assert held["ring"] < held["all_gather"]
    # Blocks travel under the attention that they are read by.
    assert plan_exchanges(cases["ring"]).seconds < plan_exchanges(cases["all_gather"]).seconds / 5


def test_softmax_layers_take_no_segments() -> None:
    assert legal_segments(make_case(*HYBRID, "data.seq_len=65536", "world_size=1")) == [1]
