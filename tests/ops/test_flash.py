"""Calls of the FlashAttention kernel for spans: which pairs they have, and on a GPU their results."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from zeco_train.ops.softmax import flash, sdpa
from zeco_train.ops.softmax.span import Span

pytestmark = pytest.mark.numeric
DOCUMENTS = (None, (0, 3), (0, 1, 2, 7))


def _borders(documents: tuple[int, ...] | None, num_tokens: int) -> Tensor | None:
    return None if documents is None else torch.tensor([*(x for x in documents if x < num_tokens), num_tokens])


def _pairs(span: Span, key_start: int, key_stop: int) -> Tensor:
    """[queries, keys] bool: the pairs that the kernel sees, whose last query and key of a sequence are aligned."""
    seen = torch.zeros(span.stop - span.start, key_stop - key_start, dtype=torch.bool)
    call = span.call(key_start, key_stop)
    if call is None:
        return seen
    borders = zip(itertools.pairwise(call.query_borders), itertools.pairwise(call.key_borders), strict=True)
    for (first_query, query_stop), (first_key, key_end) in borders:
        for query, key in itertools.product(range(query_stop - first_query), range(key_end - first_key)):
            aligned = query + (key_end - first_key) - (query_stop - first_query)
            is_seen = (not call.causal or key <= aligned) and (call.left < 0 or key >= aligned - call.left)
            seen[call.queries.start + first_query + query, call.keys.start + first_key + key] = is_seen
    return seen


@pytest.mark.few
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("window", [None, 1, 3, 30])
def test_calls_have_the_visible_pairs_and_no_others(documents: tuple[int, ...] | None, window: int | None) -> None:
    for num_tokens in (1, 8):
        borders = _borders(documents, num_tokens)
        for start, stop in itertools.combinations(range(num_tokens + 1), 2):
            span = Span(start, stop, borders, window)
            for key_start, key_stop in itertools.combinations(range(num_tokens + 1), 2):
                if key_start > start or start < key_stop < stop:
                    continue
                expected = span.visible(key_start, key_stop, torch.device("cpu"))
                assert torch.equal(_pairs(span, key_start, key_stop), expected), (span, key_start, key_stop)


@pytest.mark.parametrize(("key_start", "key_stop"), [(3, 9), (0, 4)])
def test_keys_that_begin_or_end_among_the_queries_are_refused(key_start: int, key_stop: int) -> None:
    with pytest.raises(ValueError, match="begin or end among the queries 2 to 6"):
        Span(2, 6).call(key_start, key_stop)


def test_layers_and_passes_share_borders_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied once for each stream; on a CPU, which pins no memory."""
    stream, copied = SimpleNamespace(cuda_stream=1), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: copied.append(x) or x)
    flash._borders.cache_clear()
    call, device = Span(4, 9, torch.tensor([0, 2, 6, 7, 20])).call(0, 20), torch.device("cpu")
    assert call is not None
    for _ in range(6):
        queries, keys, longest_query, longest_key = flash._lengths(call, 2, device)
        assert queries.tolist() == [0, 2, 3, 5, 7, 8, 10]
        assert keys.tolist() == [0, 4, 5, 7, 11, 12, 14]
        assert (queries.dtype, longest_query, longest_key) == (torch.int32, 2, 4)
    assert len(copied) == 2
    assert flash._lengths(call, 1, device)[0].tolist() == [0, 2, 3, 5]
    assert len(copied) == 4
    stream.cuda_stream = 2
    flash._lengths(call, 1, device)
    assert len(copied) == 6
    flash._borders.cache_clear()


@pytest.mark.parametrize("part", [slice(0, 5), slice(0, 3), slice(2, 5)])
def test_gradients_of_a_call_are_placed_among_the_given_tokens(part: slice) -> None:
    found, like = torch.rand(2 * (part.stop - part.start), 3, 4), torch.rand(2, 5, 3, 4)
    placed = flash._placed(found, part, like)
    assert placed.shape == like.shape
    assert torch.equal(placed[:, part].flatten(0, 1), found)
    assert placed.sum().item() == pytest.approx(found.sum().item())


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [None, (0, 5, 70, 71, 500)])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_flash_equals_fp64(documents: tuple[int, ...] | None, window: int | None, key_heads: int) -> None:
    """The last third of a sequence: against all keys, and against blocks before its own with the merged result."""
    device, tokens, batch = torch.device("cuda"), 900, 2 if documents is None else 1
    generator = torch.Generator().manual_seed(0)
    q, do = (torch.randn(batch, 300, 8, 64, generator=generator).to(device).bfloat16() for _ in range(2))
    k, v = (torch.randn(batch, tokens, key_heads, 64, generator=generator).to(device).bfloat16() for _ in range(2))
    span = Span(600, 900, _borders(documents, tokens), window)
    exact = sdpa.attend(q.double(), k.double(), v.double(), span, 0, 0.125)
    wide = (x.double() for x in (do, q, k, v))
    expected = (exact.o, exact.lse, *sdpa.attend_backward(*wide, exact, span, 0, 0.125))
    found = flash.attend(q, k, v, span, 0, 0.125)
    results = (*found, *flash.attend_backward(do, q, k, v, found, span, 0, 0.125))
    for name, result, want in zip(("o", "lse", "dq", "dk", "dv"), results, expected, strict=True):
        error = (result.double() - want).norm() / want.norm()
        assert error <= 1e-2, (name, error)
    parts = [
        flash.attend_backward(do, q, k[:, a:b], v[:, a:b], found, span, a, 0.125) for a, b in ((0, 600), (600, 900))
    ]
    for name, result, want in zip(
        ("dk", "dv"), zip(*(part[1:] for part in parts), strict=True), expected[3:], strict=True
    ):
        error = (torch.cat(result, 1).double() - want).norm() / want.norm()
        assert error <= 1e-2, (name, error)
