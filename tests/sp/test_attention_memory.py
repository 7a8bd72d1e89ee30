"""Memory of the methods of softmax attention: tensors that live at the peak of a backward pass, against `held`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeco_train.collectives.wire import Message
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.sp.attention import all_gather, ring, ulysses
from zeco_train.sp.attention.method import AttentionLoad
from zeco_train.sp.attention.method_registry import METHODS

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

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors, self._of_work = tensors, tensors[0]

    def wait(self) -> None:
        self._tensors = ()


class SilentWire:
    """A wire of ranks that answer nothing: messages arrive with any content."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_to_all(self, into: Tensor, parts: Tensor, *_: Any) -> SilentTransfer:
        return SilentTransfer(into, parts)

    def exchange(self, sent: Sequence[Message], received: Sequence[Message]) -> list[SilentTransfer]:
        return [SilentTransfer(message.tensor) for message in (*sent, *received)]


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
    for heads, key_heads in ((4, 4), (8, 4)):
        load = AttentionLoad(heads, key_heads, HEAD_DIM, TOKENS, ranks, window, dtype.itemsize, wide.itemsize)
        held, listed = METHODS[name].costs(load).held, wide.itemsize * (load.queries + TOKENS * load.keys_per_token)
        peak = max(_peak(name, rank, load, dtype) for rank in range(ranks))
        # Beside them: log-sum-exps, and gradients of the few keys that the first half of a pair reads.
        assert 0.9 * held <= peak <= 1.02 * (held + listed), (heads, peak, held, listed)


def _peak(name: str, rank: int, load: AttentionLoad, dtype: torch.dtype) -> int:
    method = METHODS[name].build(SilentWire(rank, load.ranks))  # type: ignore[arg-type]
    do, q, o = (torch.zeros(1, TOKENS, load.heads, HEAD_DIM, dtype=dtype) for _ in range(3))
    k, v = (torch.zeros(1, TOKENS, load.key_heads, HEAD_DIM, dtype=dtype) for _ in range(2))
    attended = Attended(o, torch.zeros(1, load.heads, TOKENS, dtype=accumulation_dtype(dtype)))
    span = Span(rank * TOKENS, (rank + 1) * TOKENS, None, load.window)
    with Living() as found:
        method.backward(do, q, k, v, attended, span, range(0, load.ranks * TOKENS + 1, TOKENS), 1.0)
    assert found.living == 0
    return found.peak
