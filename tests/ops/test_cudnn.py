"""cuDNN's attention for spans: what it is told, by a stand-in that does as it is told, and on a GPU its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from zeco_train.ops.operator import Target, assume
from zeco_train.ops.slow_paths import Call, find_slow_paths
from zeco_train.ops.softmax import attention, cudnn, flash, sdpa
from zeco_train.ops.softmax.span import Attended, Span

pytestmark = pytest.mark.numeric
DOCUMENTS = (None, (0, 4, 8), (0, 2, 4, 6), (0, 1, 3, 7))
SCALE = 0.6


def _sequences(plan: Any, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The operands of each sequence, [heads, tokens, channels], views."""
    for index in range(count := plan.graph.operands[0].dims[0]):
        views = []
        for operand, x in zip(plan.graph.operands, tensors, strict=True):
            (_, heads, tokens, channels), strides = operand.dims, operand.strides
            if operand.side is None:
                start = index * strides[0]
            else:
                lengths = [*plan.lengths[operand.side], *[0] * count]
                start, tokens = sum(lengths[:index]) * strides[2], lengths[index]
            views.append(x.as_strided((heads, tokens, channels), strides[1:], x.storage_offset() + start))
        yield views


def _as_told(plan: Any, tensors: Sequence[Tensor]) -> None:
    """In place of `cudnn._run`: the same results in the dtype of the tensors."""
    graph = plan.graph
    # Of a batch they must be packed, or cuDNN before 9.26 refuses its backward pass.
    assert graph.operands[0].side is not None or (
        tensors[4].is_contiguous() and graph.operands[4].strides[2:] == (1, 1)
    )
    for q, k, v, o, sums, *others in _sequences(plan, tensors):
        shared = q.shape[0] // k.shape[0]
        wide = [x.repeat_interleave(shared, 0).to(q.dtype) for x in (k, v)]
        row, column = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        seen = seen & (column <= row) if graph.is_causal else seen
        seen = seen if graph.left is None else seen & (column > row - graph.left)
        assert seen.any(1).all(), "cuDNN is asked for queries without keys"
        scores = (graph.scale * q @ wide[0].mT).masked_fill(~seen, -torch.inf)
        if not others:
            sums.copy_(scores.logsumexp(-1, keepdim=True))
            o.copy_(scores.softmax(-1) @ wide[1])
            continue
        do, dq, dk, dv = others
        weights = (scores - sums).exp()
        of_scores = weights * (do @ wide[1].mT - (do * o).sum(-1, keepdim=True)) * graph.scale
        dq.copy_(of_scores @ wide[0])
        for grad, of_heads in ((dk, of_scores.mT @ q), (dv, weights.mT @ do)):
            grad.copy_(of_heads.unflatten(0, (-1, shared)).sum(1))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Graphs that were run; layouts of one length in steps of 2 tokens."""
    graphs: list[Any] = []

    def run(plan: Any, tensors: Sequence[Tensor]) -> None:
        graphs.append(plan.graph)
        _as_told(plan, tensors)

    def forget() -> None:
        cudnn._plan.cache_clear()
        cudnn._count_of.cache_clear()

    monkeypatch.setattr(cudnn, "_run", run)
    monkeypatch.setattr(cudnn, "_STEP", 2)
    forget()
    yield graphs
    forget()


def _random(seed: int, batch: int, queries: int, keys: int, device: str = "cpu", **dims: int) -> list[Tensor]:
    """q, k, v, do in fp64, of 4 heads, or as given."""
    sizes = {"heads": 4, "key_heads": 2, "key_dim": 8, "value_dim": 16} | dims
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (queries, sizes["heads"], sizes["key_dim"]),
        (keys, sizes["key_heads"], sizes["key_dim"]),
        (keys, sizes["key_heads"], sizes["value_dim"]),
        (queries, sizes["heads"], sizes["value_dim"]),
    )
    drawn = (torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(device) for x in drawn]


def _compare(span: Span, keys: tuple[int, int], tensors: Sequence[Tensor], limit: float) -> None:
    """Attention to keys, and gradients for the output over them or over more keys, against SDPA in fp64."""
    q, k, v, do = tensors
    wide = [x.double() for x in tensors]
    want = sdpa.attend(*wide[:3], span, keys[0], SCALE)
    found = cudnn.attend(q, k, v, span, keys[0], SCALE)
    assert torch.equal(found.lse.isinf(), want.lse.isinf())
    known = Attended(want.o.to(q.dtype), want.lse.float())
    grads = cudnn.attend_backward(do, q, k, v, known, span, keys[0], SCALE)
    wanted = sdpa.attend_backward(wide[3], *wide[:3], want, span, keys[0], SCALE)
    results = (found.o, found.lse.nan_to_num(neginf=0), *grads), (want.o, want.lse.nan_to_num(neginf=0), *wanted)
    for name, x, y in zip(("o", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert x.isfinite().all(), name
        # dq and dk of a query with one key are 0.
        assert (x - y).norm() <= limit * (y.norm() + 0.1 * do.norm()), (name, span, keys)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("window", [None, 1, 3])
def test_each_span_is_told_as_it_is(documents: tuple[int, ...] | None, window: int | None, told: list[Any]) -> None:
    tokens, batch = 8, 2
    borders = None if documents is None else torch.tensor([*(x for x in documents if x < tokens), tokens])
    for start, stop in ((0, 8), (0, 3), (4, 8), (3, 8), (5, 6), (7, 8), (4, 4)):
        for key_start, key_stop in ((0, 8), (0, start), (start, stop), (0, stop), (2, 4)):
            if key_start > start or start < key_stop < stop or key_start == key_stop:
                continue
            tensors = _random(start + 10 * key_start, batch, stop - start, key_stop - key_start)
            _compare(Span(start, stop, borders, window), (key_start, key_stop), tensors, 1e-6)
    assert told


@pytest.mark.parametrize(("key_start", "key_stop"), [(3, 9), (0, 4)])
def test_keys_that_begin_or_end_among_the_queries_are_refused(key_start: int, key_stop: int) -> None:
    q, k, v, _ = _random(0, 1, 4, key_stop - key_start)
    with pytest.raises(ValueError, match="begin or end among the queries 2 to 6"):
        cudnn.attend(q, k, v, Span(2, 6), key_start, SCALE)


def test_few_layouts_are_built(told: list[Any]) -> None:
    """One for each length in steps, and for all others one up to a power of 2: also in another number of documents."""
    for tokens in (3, 5, 7, 8, 8):
        q, k, v, _ = _random(tokens, 1, tokens, tokens)
        cudnn.attend(q, k, v, Span(0, tokens), 0, SCALE)
    assert [graph.operands[0].dims[2] for graph in told] == [4, 8, 8, 8, 8]
    assert [graph.operands[0].side for graph in told] == [0, 0, 0, None, None]
    assert told[1] == told[2] != told[3] == told[4]
    told.clear()
    for documents in ((0, 1, 5, 8), (0, 3, 7, 8), (0, 2, 3, 4, 8), (0, 2, 4, 6, 8)):
        q, k, v, _ = _random(0, 1, 8, 8)
        cudnn.attend(q, k, v, Span(0, 8, torch.tensor(documents)), 0, SCALE)
    assert [graph.operands[0].dims[0] for graph in told] == [4, 4, 4, 4]
    assert told[0].operands[0].dims[2] == 4
    assert told[0].operands == told[1].operands
    assert told[3].operands[0].side is None


def test_views_are_read_in_place(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values side by side in a projection's output; channels apart, or an odd start, are copied.

    So are all views in a backward pass of sequences one behind the other: cuDNN's gradients of them are wrong.
    """
    seen: list[Sequence[Tensor]] = []
    monkeypatch.setattr(cudnn, "_run", lambda plan, tensors: seen.append(tensors))
    for tokens in (8, 7):
        joined, span = torch.zeros(1, tokens, 12, 8, dtype=torch.bfloat16), Span(0, tokens)
        q, k, v = joined.split((8, 2, 2), 2)
        do = q.transpose(1, 2).contiguous().transpose(1, 2)
        attended = cudnn.attend(q, k, v, span, 0, SCALE)
        pointers = [x.data_ptr() for x in (q, k, v)]
        assert [x.data_ptr() for x in seen.pop()[:3]] == pointers
        cudnn.attend_backward(do, q, k, v, attended, span, 0, SCALE)
        given = seen.pop()
        assert ([x.data_ptr() for x in given[:3]] == pointers) == (tokens == 8)
        assert tokens == 8 or all(x.is_contiguous() for x in given)
        one = cudnn._of_tokens(given[0][:, :1].shape, joined[:, :1].stride(), 0, 1, 128)
        assert one.strides[2] == 8 * 8  # of a single token any step would do, and this one is that of its gradient
        odd = torch.zeros(1 + k.numel(), dtype=k.dtype)[1:].view_as(k)
        cudnn.attend(q.mT.contiguous().mT, odd, v, span, 0, SCALE)
        assert all(x.data_ptr() % 16 == 0 for x in seen.pop())


def test_missing_package_is_named_on_gpus_that_would_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper, ampere = Target("cuda"), Target("cuda", (8, 0))
    call = Call("softmax", attention.KERNELS, torch.bfloat16, 128, 128)
    for installed, names in (
        (None, ("FlashAttention 2", "FlashAttention 2")),
        ("cudnn", ("cuDNN", "FlashAttention 2")),
    ):
        monkeypatch.setattr(cudnn.importlib.util, "find_spec", lambda name, installed=installed: installed)
        cudnn.missing.cache_clear()
        assert tuple(attention.kernel_name(target, True) for target in (hopper, ampere)) == names
        assert not find_slow_paths([("", call)], ampere)
        warnings = find_slow_paths([("layer 3", call)], hopper)
        assert bool(warnings) == (installed is None)
        assert all("nvidia-cudnn-frontend is not installed" in str(warning) for warning in warnings)
    cudnn.missing.cache_clear()


GPU_CASES = {
    "whole": (Span(0, 640), (0, 640)),
    "odd": (Span(0, 777), (0, 777)),
    "one token": (Span(0, 1), (0, 1)),
    "window": (Span(0, 640, None, 100), (0, 640)),
    "odd, window": (Span(0, 777, None, 33), (0, 777)),
    "keys before": (Span(600, 900), (0, 900)),
    "block before": (Span(512, 1024), (128, 384)),
    "block before, window": (Span(512, 1024, None, 300), (256, 512)),
    "keys before, window": (Span(600, 900, None, 100), (501, 900)),
    "documents": (Span(0, 900, torch.tensor([0, 5, 70, 71, 500, 900])), (0, 900)),
    "equal documents": (Span(0, 1024, torch.tensor([0, 256, 512, 768, 1024])), (0, 1024)),
    "documents, keys before, window": (Span(300, 900, torch.tensor([0, 5, 500, 900]), 290), (0, 900)),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("key_heads", "dims"), [(4, (64, 64)), (2, (128, 128)), (1, (256, 256)), (2, (40, 192))])
def test_kernels_equal_fp64(key_heads: int, dims: tuple[int, int]) -> None:
    for span, keys in GPU_CASES.values():
        sizes = {"key_dim": dims[0], "value_dim": dims[1], "key_heads": key_heads}
        batch = 1 if span.borders is not None else 2
        drawn = _random(0, batch, span.stop - span.start, keys[1] - keys[0], "cuda", **sizes)
        packed = [x.bfloat16() for x in drawn]
        # Of a wider tensor, and heads first.
        views = [torch.cat([x, x.new_full(x.shape, torch.nan)], 2)[:, :, : x.shape[2]] for x in packed[:3]]
        _compare(span, keys, packed, 6e-3)
        _compare(span, keys, [*views, packed[3].transpose(1, 2).contiguous().transpose(1, 2)], 6e-3)


def test_what_cudnn_does_wrong_or_in_any_order_goes_to_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "serves", lambda target: True)
    small, large = (torch.empty(1, tokens, 8, 128, dtype=torch.bfloat16, device="meta") for tokens in (64, 2**21))
    joined = torch.empty(1, 2**20, 24, 128, dtype=torch.bfloat16, device="meta")[:, :, :8]
    with assume(Target("cuda")):
        assert attention._kernels(small, small, small) is cudnn
        assert attention._kernels(small, small, small, deterministic=True) is flash
        assert attention._kernels(large, small, small) is attention._kernels(small, joined, small) is flash
        wide = small.new_empty(1, 64, 8, 264)
        assert attention._kernels(wide, wide, wide) is sdpa
