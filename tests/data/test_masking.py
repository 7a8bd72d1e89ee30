"""Masked tokens: statistics of the masks, their independence of the split, labels, and the ids that are refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.config import Shuffle
from data.loader.batches import DataSplit, SequenceSource
from data.loader.loader import SequenceLoader, validation_batches
from data.loader.masking import MaskIds, SequenceMasks, TaskConfig, TaskName, find_mask_ids
from data.loader.sequences import Source, for_task
from data.store import TokenStore
from data.store.documents import Documents
from tests.support.stores import write_store
from zeco_train.errors import ConfigError
from zeco_train.system.numbers import IGNORE_INDEX

pytestmark = pytest.mark.numeric

SEQ_LEN, GLOBAL_BATCH = 240, 4
# A third: short sequences then have masks of every kind.
TASK = TaskConfig(TaskName.mlm, mask_fraction=0.35)
MANY = 1 << 20
# Chosen positions among 40 … 139 of a sequence, and what is read there; 999 is the original token.
PINNED = (
    [44, 46, 48, 53, 62, 65, 68, 74, 75, 78, 79, 81, 83, 87, 93, 99, 100, 111, 112, 119, 120, 126, 137],
    [2, 2, 999, 2, 2, 2, 54, 2, 2, 2, 183, 2, 999, 2, 2, 227, 2, 999, 2, 999, 2, 2, 14],
)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    # 10 sequences of an epoch; the 11th lacks tokens.
    return Source(Documents(TokenStore.open(write_store(tmp_path / "store", num_tokens=10 * SEQ_LEN + 100))))


def masked(source: Source, task: TaskConfig = TASK) -> list[SequenceSource]:
    return for_task([source], task, vocab_size=259)


def loader(sources: list[SequenceSource], seed: int = 7, **split: Any) -> SequenceLoader:
    return SequenceLoader(sources, DataSplit(SEQ_LEN, **split), seed=seed, global_batch=GLOBAL_BATCH)


def step(sources: list[SequenceSource], consumed: int, seed: int = 7, **split: Any) -> tuple[Tensor, Tensor, set[Any]]:
    """Inputs and labels of a step's global batch, [B, T] each, from all ranks; and the step's numbers of labels."""
    dp, sp, segments = split.get("dp_size", 1), split.get("sp_size", 1), split.get("segments", 1)
    rows, counts = [], set()
    for dp_rank in range(dp):
        ranks = [loader(sources, seed, **split, dp_rank=dp_rank, sp_rank=sp_rank) for sp_rank in range(sp)]
        for micro_step in range(ranks[0].micro_steps):
            parts = [one.batch(consumed, micro_step, segment) for segment in range(segments) for one in ranks]
            rows.append(torch.stack([torch.cat([getattr(p, x) for p in parts], 1) for x in ("input_ids", "labels")]))
            counts |= {part.step_labels for part in parts}
    inputs, labels = torch.cat(rows, dim=1)
    return inputs, labels, counts


def within(count: int, total: int, share: float) -> bool:
    """Whether a count is within five standard deviations of its binomial mean."""
    return abs(count - total * share) <= 5 * (total * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("fraction", [0.15, 0.5, 1.0])
def test_chosen_share_and_80_10_10_rule(fraction: float) -> None:
    masks, ids = SequenceMasks(fraction, "seed 0"), MaskIds(mask=2, first=3, stop=259)
    positions = np.flatnonzero(masks.chosen(0, MANY))
    assert within(len(positions), MANY, fraction)
    assert masks.count(MANY) == len(positions)
    # An id that is neither the mask nor ever drawn, so that every kind of change shows.
    read = masks.replace(np.full(len(positions), 999), positions, ids)
    kept, hidden = (read == 999).sum(), (read == 2).sum()
    random = read[(read != 999) & (read != 2)]
    for count, share in ((hidden, 0.8), (len(random), 0.1), (kept, 0.1)):
        assert within(int(count), len(positions), share)
    assert (random.min(), random.max()) == (3, 258)
    assert all(within(int(count), len(random), 1 / 256) for count in np.bincount(random)[3:])


def test_masks_of_neighbours_and_of_sequences_are_independent() -> None:
    first, second = (SequenceMasks(0.5, name).chosen(0, MANY) for name in ("sequence 0", "sequence 1"))
    for lag in (1, 2, 64):
        assert within(int((first[:-lag] == first[lag:]).sum()), MANY - lag, 0.5)
    assert within(int((first == second).sum()), MANY, 0.5)


def test_masks_of_a_range_are_those_of_the_whole_sequence() -> None:
    masks = SequenceMasks(0.15, "a")
    whole = masks.chosen(0, 50_000)
    for start, stop in ((0, 1), (17, 18), (16_380, 16_390), (100, 40_000), (49_999, 50_000), (5, 5)):
        assert np.array_equal(masks.chosen(start, stop), whole[start:stop])


def test_masks_stay_the_same_between_versions() -> None:
    """A run that resumes with other masks would see other data; written down from the first version."""
    masks = SequenceMasks(0.15, "store 0, seed 0, epoch 0, sequence 0")
    positions = 40 + np.flatnonzero(masks.chosen(40, 140))
    read = masks.replace(np.full(len(positions), 999), positions, MaskIds(2, 3, 259))
    assert (positions.tolist(), read.tolist()) == PINNED


def test_labels_are_the_hidden_tokens_at_their_own_positions(source: Source) -> None:
    tokens, _, _ = step([source], 0)
    inputs, labels, counts = step(masked(source), 0)
    chosen = labels != IGNORE_INDEX
    assert torch.equal(labels[chosen], tokens[chosen])
    assert torch.equal(inputs[~chosen], tokens[~chosen])
    assert counts == {int(chosen.sum())}
    assert 0.25 < chosen.double().mean() < 0.45
    assert 0.7 < (inputs[chosen] == 2).double().mean() < 0.9


@pytest.mark.parametrize("split", [{"sp_size": 4, "segments": 3}, {"dp_size": 2, "micro_batch": 2, "sp_size": 3}])
def test_masks_do_not_depend_on_the_split(source: Source, split: dict[str, int]) -> None:
    # The step after 8 sequences crosses the border of epochs.
    for consumed in (0, 8):
        whole, parts = (step(masked(source), consumed, **some) for some in ({}, split))
        assert torch.equal(whole[0], parts[0])
        assert torch.equal(whole[1], parts[1])
        assert whole[2] == parts[2]


def test_masks_differ_by_epoch_sequence_seed_and_store(source: Source) -> None:
    split = DataSplit(SEQ_LEN)
    [one] = masked(source)

    def chosen(epoch: int, sequence: int, seed: int, number: int) -> tuple[bool, ...]:
        reader = one.reader(split, shuffle=Shuffle.sequences, seed=seed, number=number)
        labels = reader.shard(epoch, sequence, 0).labels
        assert labels is not None
        return tuple(labels != IGNORE_INDEX)

    found = {chosen(*key) for key in itertools.product((0, 1), repeat=4)}
    assert len(found) == 16


def test_validation_masks_are_the_same_every_time(source: Source) -> None:
    batches = [list(validation_batches(masked(source)[0].reader(DataSplit(SEQ_LEN)))) for _ in range(2)]
    assert len(batches[0]) == 10
    for first, second in zip(*batches, strict=True):
        assert torch.equal(first.input_ids, second.input_ids)
        assert torch.equal(first.labels, second.labels)
        assert (first.labels != IGNORE_INDEX).any()


@pytest.mark.parametrize(
    ("kind", "setting", "vocab_size", "expected"),
    [
        # Bytes: the id of unknown text, which UTF-8 never has; random tokens are bytes.
        ("bytes", None, 259, MaskIds(2, 3, 259)),
        ("bytes", 0, 259, MaskIds(0, 3, 259)),
        ("bytes", 300, 512, MaskIds(300, 3, 259)),
        # Others: the first id that the tokenizer lacks.
        ("huggingface", None, 260, MaskIds(259, 0, 259)),
        ("huggingface", None, 320, MaskIds(259, 0, 259)),
        ("huggingface", 4, 259, MaskIds(4, 0, 259)),
    ],
)
def test_mask_ids(tmp_path: Path, kind: str, setting: int | None, vocab_size: int, expected: MaskIds) -> None:
    meta = TokenStore.open(write_store(tmp_path / "store", kind=kind)).meta
    assert find_mask_ids(setting, meta, vocab_size) == expected


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        ("huggingface", None, r"null: the tokenizer uses all 259 ids.*set model\.vocab_size=260 or more"),
        ("huggingface", 1, r"1: is a token of the texts$"),
        ("bytes", 1, r"1: is a token of the texts; null takes 2, which no text has$"),
        ("bytes", 68, r"68: is a token of the texts; null takes 2"),
        ("bytes", 259, r"259: must be < model\.vocab_size=259$"),
    ],
)
def test_mask_tokens_that_texts_have_are_refused(tmp_path: Path, kind: str, setting: int | None, message: str) -> None:
    meta = TokenStore.open(write_store(tmp_path / "store", kind=kind)).meta
    with pytest.raises(ConfigError, match=rf"^task\.mask_token={message}"):
        find_mask_ids(setting, meta, 259)
