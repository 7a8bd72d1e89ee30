"""Softmax attention on one device: spans of queries, and blocks of keys, against masks by definition."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from zeco_train.ops.oracle import exact_softmax
from zeco_train.ops.softmax import sdpa
from zeco_train.ops.softmax.sdpa import attend, attend_backward
from zeco_train.ops.softmax.span import Span

pytestmark = pytest.mark.numeric

TOKENS, BATCH, HEADS, KEY_HEADS, WIDTH, SCALE = 13, 2, 4, 2, 5, 0.6
BORDERS = (None, (0, 13), (0, 1, 6, 7, 13))
WINDOWS = (None, 1, 3, 13, 50)
TOLERANCE = 1e-13


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of queries in a span."""
    monkeypatch.setattr(sdpa, "_BLOCK", 4)


def _visible(borders: tuple[int, ...] | None, window: int | None) -> Tensor:
    """[queries, keys] of the whole sequence."""
    rows = []
    for query in range(TOKENS):
        start = max(border for border in borders or (0,) if border <= query)
        rows.append([start <= key <= query and query - key < (window or TOKENS) for key in range(TOKENS)])
    return torch.tensor(rows)


def _span(start: int, stop: int, borders: tuple[int, ...] | None, window: int | None) -> Span:
    return Span(start, stop, None if borders is None else torch.tensor(borders), window)


@pytest.mark.few
@pytest.mark.parametrize("borders", BORDERS)
@pytest.mark.parametrize("window", WINDOWS)
def test_spans_know_the_keys_of_each_query(borders: tuple[int, ...] | None, window: int | None) -> None:
    whole = _visible(borders, window)
    for start, stop in itertools.combinations(range(TOKENS + 1), 2):
        span, rows = _span(start, stop, borders, window), whole[start:stop]
        firsts = [int(row.nonzero()[0]) for row in rows]
        assert span.first_keys().tolist() == firsts
        assert span.first_key == firsts[0] == min(firsts)
        assert torch.equal(span.visible(0, TOKENS, torch.device("cpu")), rows)
        assert torch.equal(span.visible(2, 9, torch.device("cpu")), rows[:, 2:9])
        middle = (start + stop) // 2
        assert span.part(middle, stop).first_keys().tolist() == firsts[middle - start :]


def test_span_without_queries_reads_no_key() -> None:
    for start in range(TOKENS + 1):
        span = _span(start, start, (0, 5, TOKENS), 3)
        assert span.first_key == start
        assert span.first_keys().tolist() == []


def _tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = {"q": HEADS, "k": KEY_HEADS, "v": KEY_HEADS, "do": HEADS}
    return {
        name: torch.randn(BATCH, TOKENS, count, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        for name, count in heads.items()
    }


def _naive(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """o, and the log-sum-exp; each query must read a key."""
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (k, v))
    scores = (SCALE * torch.einsum("bihk,bjhk->bhij", q, k)).masked_fill(~visible, -torch.inf)
    return torch.einsum("bhij,bjhv->bihv", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.few
@pytest.mark.parametrize("borders", BORDERS)
@pytest.mark.parametrize("window", WINDOWS)
def test_blocks_of_keys_add_up_to_the_gradients_of_the_whole(
    borders: tuple[int, ...] | None, window: int | None
) -> None:
    values = _tensors()
    q, k, v = (values[name].requires_grad_() for name in ("q", "k", "v"))
    expected, sums = _naive(q, k, v, _visible(borders, window))
    grads = torch.autograd.grad(expected, (q, k, v), values["do"])
    found = attend(q, k, v, whole := _span(0, TOKENS, borders, window), 0, SCALE)
    torch.testing.assert_close(found.o, expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(found.lse, sums, rtol=TOLERANCE, atol=TOLERANCE)
    totals = [torch.zeros_like(x) for x in (q, k, v)]
    for start, stop in ((0, 5), (5, 6), (6, 13)):
        part = k[:, start:stop], v[:, start:stop]
        dq, dk, dv = attend_backward(values["do"], q, *part, found, whole, start, SCALE)
        totals[0] += dq
        totals[1][:, start:stop] += dk
        totals[2][:, start:stop] += dv
    for total, grad in zip(totals, grads, strict=True):
        torch.testing.assert_close(total, grad, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("block", "window"), [(256, None), (512, 600)])
def test_gradients_of_many_keys(monkeypatch: pytest.MonkeyPatch, block: int, window: int | None) -> None:
    monkeypatch.setattr(sdpa, "_BLOCK", block)
    generator = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(1, 700, 1, WIDTH, generator=generator, dtype=torch.float64) for _ in range(4))
    span = _span(0, 700, (0, 20, 700), window)
    wanted = exact_softmax(q, k, v, do, borders=torch.tensor((0, 20, 700)), window=window)
    found = attend(q, k, v, span, 0, WIDTH**-0.5)
    grads = attend_backward(do, q, k, v, found, span, 0, WIDTH**-0.5)
    for name, x in zip(("o", "dq", "dk", "dv"), (found.o, *grads), strict=True):
        torch.testing.assert_close(x, wanted[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_queries_without_keys_give_zero_and_no_nan(dtype: torch.dtype) -> None:
    """Only keys 4 … 8 are here, which most queries do not read."""
    values = _tensors(dtype)
    span, keys = _span(0, TOKENS, (0, 6, 10, TOKENS), 3), slice(4, 9)
    reads = _visible((0, 6, 10, TOKENS), 3)[:, keys].any(1)
    q, k, v = values["q"], values["k"][:, keys], values["v"][:, keys]
    found = attend(q, k, v, span, 4, SCALE)
    assert (~reads).sum() > 4
    assert (found.o[:, ~reads] == 0).all()
    assert (found.lse[:, :, ~reads] == -torch.inf).all()
    assert found.lse[:, :, reads].isfinite().all()
    whole = attend(q, values["k"], values["v"], span, 0, SCALE)
    dq, dk, dv = attend_backward(values["do"], q, k, v, whole, span, 4, SCALE)
    assert (dq[:, ~reads] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x.dtype for x in (whole.lse, dq, dk, dv)} == {wide}


def test_keys_that_no_query_reads_do_not_matter() -> None:
    values = _tensors()
    span = _span(6, TOKENS, (0, 6, TOKENS), None)
    queries = {name: values[name][:, 6:] for name in ("q", "do")}
    known = attend(queries["q"], values["k"], values["v"], span, 0, SCALE)
    k, v = (values[name].clone() for name in ("k", "v"))
    k[:, :6] = v[:, :6] = torch.nan
    found = attend(queries["q"], k, v, span, 0, SCALE)
    assert torch.equal(found.o, known.o)
    grads = attend_backward(queries["do"], queries["q"], k, v, found, span, 0, SCALE)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[1][:, :6] == 0).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_channels_need_not_lie_side_by_side(name: str) -> None:
    """The kernel of CPUs reads them as if they did."""
    torch.manual_seed(0)
    tensors = {each: torch.randn(1, 7, 2, 4, dtype=torch.float64) for each in ("q", "k", "v", "do")}
    strided = {**tensors, name: tensors[name].mT.contiguous().mT}
    span, results = Span(0, 7), []
    for x in (tensors, strided):
        attended = attend(x["q"], x["k"], x["v"], span, 0, 0.5)
        grads = attend_backward(x["do"], x["q"], x["k"], x["v"], attended, span, 0, 0.5)
        results.append((attended.o, attended.lse, *grads))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
