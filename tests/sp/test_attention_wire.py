"""Methods of softmax attention on a wire of ranks that answer nothing: memory, messages, and each rank's heads."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo  # else imported by the first operation in `Living`, with exceptions that keep its tensors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeco_train.collectives.wire import Message
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.sp.attention import all_gather, ring, ulysses
from zeco_train.sp.attention.method import AttentionLoad
from zeco_train.sp.attention.method_registry import METHODS
from zeco_train.sp.attention.pipelined import LEAST_TOKENS, NUM_PARTS, PipelinedAttention, num_parts

pytestmark = pytest.mark.numeric

MODULES: dict[str, ModuleType] = {"all_gather": all_gather, "ring": ring, "ulysses": ulysses}
TOKENS, HEAD_DIM = 96, 8


class Living(TorchDispatchMode):
    """Bytes of the tensors that are made inside: those that live, and the most that did."""

    def __init__(self) -> None:
        super().__init__()
        self.living = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            storage = x.untyped_storage() if isinstance(x, Tensor) else None
            if storage is not None and id(storage) not in self._known | given:
                self._known.add(id(storage))
                self.living += storage.nbytes()
                weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        self.peak = max(self.peak, self.living)
        return found

    def _free(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.living -= size


class SilentTransfer:
    """Holds its tensors until `wait`, and with its work until it is freed, as NCCL's do."""

    def __init__(self, events: list[str], *tensors: Tensor) -> None:
        self._events, self._tensors, self._of_work = events, tensors, tensors[0]
        self._number = events.count("send")

    def wait(self) -> None:
        self._tensors = ()
        self._events.append(f"wait {self._number}")


class SilentWire:
    """A wire of ranks that answer nothing: messages have any content; notes messages and waits in their order."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.events: list[str] = []

    def all_to_all(self, into: Tensor, parts: Tensor, *_: Any) -> SilentTransfer:
        self.events.append("send")
        return SilentTransfer(self.events, into, parts)

    def send_and_receive(self, sent: Sequence[Message], received: Sequence[Message]) -> list[SilentTransfer]:
        return [SilentTransfer(self.events, message.tensor) for message in (*sent, *received)]


def _gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """As large as those of the kernel of GPUs."""
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@pytest.mark.few
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "ranks", "window"),
    [
        *(("all_gather", ranks, window) for ranks in (2, 4) for window in (None, 5, 150)),
        ("ulysses", 4, None),
        # With fewer ranks, or a window, blocks are fewer or shorter than the planner counts.
        ("ring", 4, None),
    ],
)
def test_peak_of_a_backward_pass_is_what_the_planner_counts(
    name: str, ranks: int, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between what a method holds, and that with the gradients of the layer's own tokens, which the layer lists."""
    monkeypatch.setattr(MODULES[name], "attend_backward", _gradients)
    wide = accumulation_dtype(dtype)
    for heads, key_heads, replayed in ((4, 4, True), (8, 4, True), (8, 4, False)):
        load = AttentionLoad(heads, key_heads, HEAD_DIM, TOKENS, ranks, window, dtype.itemsize, wide.itemsize)
        load = load._replace(replayed=replayed)
        held, listed = METHODS[name].costs(load).held, wide.itemsize * (load.queries + TOKENS * load.keys_per_token)
        peak = max(_peak(name, rank, load, dtype) for rank in range(ranks))
        # Beside them: log-sum-exps, and gradients of the few keys that the first half of a pair reads.
        assert 0.9 * held <= peak <= 1.02 * (held + listed), (heads, peak, held, listed)


def _peak(name: str, rank: int, load: AttentionLoad, dtype: torch.dtype) -> int:
    method = METHODS[name].build(SilentWire(rank, load.ranks))  # type: ignore[arg-type]
    do = torch.zeros(1, TOKENS, load.heads, HEAD_DIM, dtype=dtype)
    over = 1 if load.replayed else method.heads_over
    q, k, v, o = (
        torch.zeros(1, TOKENS * over, heads // over, HEAD_DIM, dtype=dtype)
        for heads in (load.heads, load.key_heads, load.key_heads, load.heads)
    )
    attended = Attended(o, torch.zeros(1, load.heads // over, TOKENS * over, dtype=accumulation_dtype(dtype)))
    span = Span(rank * TOKENS, (rank + 1) * TOKENS, None, load.window)
    with Living() as found:
        method.backward(do, q, k, v, attended, span, range(0, load.ranks * TOKENS + 1, TOKENS), 1.0)
    assert found.living == 0
    return found.peak


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


@pytest.mark.parametrize(("module", "batch", "parts"), [(all_gather, 1, 2), (ulysses, 1, 2), (ulysses, 2, 1)])
def test_messages_of_a_part_travel_while_others_are_computed(
    module: Any, batch: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of the heads, and in the backward pass the sequences of a batch."""
    wire = SilentWire(0, 2)

    def compute(q: Tensor, *_: Any) -> Attended:
        wire.events.append("compute")
        return Attended(q, q.new_zeros(q.shape[0], q.shape[2], q.shape[1]))

    def compute_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        wire.events.append("compute")
        return q, k, v

    monkeypatch.setattr(module, "attend", compute)
    monkeypatch.setattr(module, "attend_backward", compute_backward)
    methods = {all_gather: all_gather.AllGather, ulysses: ulysses.Ulysses}
    method: PipelinedAttention = methods[module](wire, num_parts=parts)
    q, k, v, do = (torch.zeros(batch, 8, 4, 2) for _ in range(4))
    span = Span(0, 8)
    attended = Attended(do, torch.zeros(batch, 4, 8))
    for run, turns in (
        (lambda: method.forward(q, k, v, span, (0, 8, 2 * 8), 1.0), parts),
        (lambda: method.backward(do, q, k, v, attended, span, (0, 8, 2 * 8), 1.0), 2),
    ):
        wire.events.clear()
        run()
        kinds = [event.split()[0] for event in wire.events]
        first, last = kinds.index("compute"), len(kinds) - 1 - kinds[::-1].index("compute")
        # All operands are sent before the first part is computed, and its results before the second is.
        sends = [place for place, kind in enumerate(kinds) if kind == "send"]
        to_compute = sum(place < first for place in sends)
        back = len(sends) - to_compute
        assert (to_compute % 2, back % 2) == (0, 0)
        assert min(to_compute, back) > 0
        assert sum(first < place < last for place in sends) == back - back // turns
        # Results are waited for in the end only, and each message once.
        assert sum(kind == "wait" for kind in kinds) == len(sends)
        assert kinds[last + 1 :] == ["send"] * (back // turns) + ["wait"] * back


@pytest.mark.parametrize(("key_heads", "ranks"), [(2, 4), (1, 3), (4, 2), (2, 6)])
def test_ranks_get_the_heads_of_keys_that_their_queries_read(key_heads: int, ranks: int) -> None:
    """By Ulysses, also where fewer heads of keys than ranks are repeated; their gradients are summed."""
    heads, wire, sent = 2 * max(key_heads, ranks), SilentWire(0, ranks), []
    wire.all_to_all = lambda into, parts, *_: sent.append(parts) or SilentTransfer([], into)  # type: ignore[func-returns-value, method-assign, misc]
    method = ulysses.Ulysses(wire, num_parts=1)  # type: ignore[arg-type]
    q, k = (torch.arange(float(count)).view(1, 1, count, 1) for count in (heads, key_heads))
    method.forward(q, k, k, Span(0, 1), range(ranks + 1), 1.0)
    of_queries, of_keys = (parts.view(ranks, -1) for parts in sent[:2])
    read = of_queries // (heads // key_heads)
    assert torch.equal(read, of_keys.repeat_interleave(read.shape[1] // of_keys.shape[1], 1))
    repeated = torch.ones(1, 1, of_keys.numel(), 1)
    assert torch.equal(method._summed(repeated, k), torch.full_like(k, of_keys.numel() / key_heads))
