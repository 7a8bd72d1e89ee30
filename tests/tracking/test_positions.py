"""Token scores and the loss by position."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from zeco_train.ops.loss import TokenScores, linear_cross_entropy, linear_token_scores
from zeco_train.system.numbers import IGNORE_INDEX
from zeco_train.tracking.charts import VALIDATION_FILE, plot_validations, position_figure
from zeco_train.tracking.metrics import LineWriter
from zeco_train.tracking.positions import PositionLosses, PositionSums, bucket_edges

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_token_scores_equal_losses_and_argmax_of_logits(chunk_tokens: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 6, dtype=torch.float64, generator=generator)
    weight = torch.randn(11, 6, dtype=torch.float64, generator=generator)
    labels = torch.randint(11, (2, 9), generator=generator)
    labels[0, 3:7] = IGNORE_INDEX
    scores = linear_token_scores(hidden, weight, labels, chunk_tokens)
    logits = hidden @ weight.T
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 9)
    torch.testing.assert_close(scores.losses, expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(scores.predictions, logits.argmax(-1).masked_fill(labels == IGNORE_INDEX, IGNORE_INDEX))
    torch.testing.assert_close(scores.losses.sum(), linear_cross_entropy(hidden, weight, labels), rtol=1e-13, atol=0)
    with pytest.raises(ValueError, match="do not fit"):
        linear_token_scores(hidden, weight, labels[:, :3])


def test_ignored_tokens_have_zero_loss_without_logits() -> None:
    # The weight is NaN: computing logits of ignored tokens would give NaN.
    scores = linear_token_scores(
        torch.ones(1, 4, 3), torch.full((5, 3), math.nan), torch.full((1, 4), IGNORE_INDEX, dtype=torch.int64)
    )
    assert scores.losses.tolist() == [[0.0] * 4]


@pytest.mark.parametrize("seq_len", [1, 2, 3, 15, 16, 17, 23, 24, 64, 1000, 2048, 1 << 20])
def test_buckets_cover_every_position_once(seq_len: int) -> None:
    edges = bucket_edges(seq_len)
    assert (edges[0], edges[-1]) == (0, seq_len)
    assert all(before < after for before, after in pairwise(edges))
    # Log-spaced: each edge is between 1.18 and about 2 times the previous one.
    assert all(after <= 2 * before + 1 and after >= 1.18 * before for before, after in pairwise(edges[1:]))
    assert len(edges) <= 2 * math.log2(max(seq_len, 2)) + 2


def test_position_sums_over_shards_give_mean_and_error() -> None:
    seq_len, sequences = 100, 5
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(sequences, seq_len, dtype=torch.float64, generator=generator)
    counts = torch.rand(sequences, seq_len, generator=generator) < 0.7
    losses *= counts
    sums = PositionSums(sequences, seq_len, torch.device("cpu"))
    for rows in ([0, 1], [2, 3], [4]):
        for offset in range(0, seq_len, 25):
            piece = slice(offset, offset + 25)
            predictions = torch.where(counts, 7, IGNORE_INDEX)[rows, piece]
            sums.add(rows, offset, TokenScores(losses[rows, piece], predictions))
    mean, error = sums.whole()
    assert mean.item() == pytest.approx(losses.sum().item() / counts.sum().item(), rel=1e-14)
    # Bootstrap estimate of the error.
    drawn = torch.randint(sequences, (20_000, sequences), generator=generator)
    again = losses.sum(1)[drawn].sum(1) / counts.sum(1)[drawn].sum(1)
    assert error.item() == pytest.approx(again.std().item() * math.sqrt(sequences / (sequences - 1)), rel=0.05)
    by_position = PositionLosses.of_sums([sums], [1.0])
    for (before, after), loss in zip(pairwise(by_position.edges), by_position.losses, strict=True):
        expected = losses[:, before:after].sum() / counts[:, before:after].sum()
        assert loss == pytest.approx(expected.item(), rel=1e-14), (before, after)


@pytest.mark.parametrize("seed", range(5))
def test_single_sequence_has_no_error_whatever_is_rounded(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sums = PositionSums(1, 999, torch.device("cpu"))
    sums.add([0], 0, TokenScores(torch.rand(1, 999, generator=generator), torch.full((1, 999), 3)))
    for mean, error in (sums.whole(), sums.by_bucket()):
        assert mean.isfinite().all()
        assert error.isnan().all()


def test_single_sequence_has_nan_error_stored_as_null(tmp_path: Path) -> None:
    sums = PositionSums(1, 20, torch.device("cpu"))
    counts = torch.full((1, 20), 3)
    counts[0, 4:8] = IGNORE_INDEX
    sums.add([0], 0, TokenScores(torch.ones(1, 20), counts))
    losses = PositionLosses.of_sums([sums], [1.0])
    assert all(math.isnan(error) for error in losses.errors)
    record = losses.as_dict()
    assert record["losses"] == [1.0, 1.0, 1.0, None, 1.0, 1.0]
    assert math.isnan(PositionLosses.from_dict(record).losses[3])
    position_figure("$a$", {20: losses}, 10)
    with LineWriter(tmp_path / VALIDATION_FILE) as writer:
        for step in range(1, 30):
            writer.append({"step": step, "by_position": record})
    picture = plot_validations(tmp_path)
    assert picture is not None
    assert picture.is_file()
