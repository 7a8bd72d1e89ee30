"""Parts of the heads in softmax attention: their number, and what is under way while one of them is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.sp.attention import all_gather, ulysses
from zeco_train.sp.attention.method import AttentionLoad
from zeco_train.sp.attention.method_registry import METHODS
from zeco_train.sp.attention.pipelined import LEAST_TOKENS, NUM_PARTS, PipelinedAttention, num_parts

pytestmark = pytest.mark.numeric

TOKENS, RANKS = 8, 2


def test_parts_are_whole_heads_and_pay() -> None:
    many = LEAST_TOKENS
    assert [num_parts(heads, 1, many, 2) for heads in (1, 2, 3, 4, 6, 16)] == [1, 2, 3, 4, 3, 4]
    # A part of ulysses has heads of keys for each rank.
    assert [num_parts(heads, 4, many, 2) for heads in (2, 4, 8, 12, 16)] == [1, 1, 2, 3, 4]
    assert num_parts(16, 1, many - 1, 2) == num_parts(16, 1, many, 1) == 1
    assert [num_parts(16, 1, 1, 1, most) for most in (1, 2, 8)] == [1, 2, 8]


@pytest.mark.parametrize(("name", "hidden"), [("all_gather", 1 - 1 / NUM_PARTS), ("ulysses", 0.5), ("ring", 1.0)])
def test_costs_say_what_travels_under_compute(name: str, hidden: float) -> None:
    load = AttentionLoad(16, 8, 64, LEAST_TOKENS, 4, None, 2, 4, nodes=2)
    assert METHODS[name].costs(load).hidden == hidden
    if name != "ring":
        assert METHODS[name].costs(load._replace(tokens=LEAST_TOKENS // 2)).hidden == 0.0
        assert METHODS[name].costs(load._replace(nodes=1)).hidden == 0.0


class Recorder:
    """A wire of ranks that answer nothing, which writes down messages, waits and compute in their order."""

    rank, size = 0, RANKS

    def __init__(self) -> None:
        self.events: list[str] = []
        self._messages = 0

    def all_to_all(self, into: Tensor, parts: Tensor, *_: Any) -> Any:
        self._messages += 1
        self.events.append(f"send {self._messages}")
        return type("Transfer", (), {"wait": lambda _, number=self._messages: self.events.append(f"wait {number}")})()


@pytest.mark.parametrize("module", [all_gather, ulysses])
def test_messages_of_a_part_travel_while_others_are_computed(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Recorder()

    def compute(q: Tensor, *_: Any) -> Attended:
        wire.events.append("compute")
        return Attended(q, q.new_zeros(q.shape[0], q.shape[2], q.shape[1]))

    def compute_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        wire.events.append("compute")
        return q, k, v

    monkeypatch.setattr(module, "attend", compute)
    monkeypatch.setattr(module, "attend_backward", compute_backward)
    methods = {all_gather: all_gather.AllGather, ulysses: ulysses.Ulysses}
    method: PipelinedAttention = methods[module](wire, num_parts=2)
    q, k, v, do = (torch.zeros(1, TOKENS, 4, 2) for _ in range(4))
    span = Span(0, TOKENS)
    attended = Attended(do, torch.zeros(1, 4, TOKENS))
    for run in (
        lambda: method.forward(q, k, v, span, (0, TOKENS, 2 * TOKENS), 1.0),
        lambda: method.backward(do, q, k, v, attended, span, (0, TOKENS, 2 * TOKENS), 1.0),
    ):
        wire.events.clear()
        run()
        kinds = [event.split()[0] for event in wire.events]
        first, last = kinds.index("compute"), len(kinds) - 1 - kinds[::-1].index("compute")
        # The second part's operands are sent before the first is computed, and its results before the second is.
        sends = [place for place, kind in enumerate(kinds) if kind == "send"]
        to_compute = sum(place < first for place in sends)
        back = len(sends) - to_compute
        assert (to_compute % 2, back % 2) == (0, 0)
        assert min(to_compute, back) > 0
        assert sum(first < place < last for place in sends) == back // 2
        # Results are waited for in the end only, and each message once.
        assert sum(kind == "wait" for kind in kinds) == len(sends)
        assert kinds[last + 1 :] == ["send"] * (back // 2) + ["wait"] * back
