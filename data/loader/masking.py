"""The masked-token objective (BERT, Devlin et al. 2018, arXiv 1810.04805): some tokens are hidden, and are the labels.

Each token is chosen independently with probability `mask_fraction`. Of the chosen tokens 80 % become the mask token,
10 % a random token, and 10 % stay as they are; the label of each is the original token at the same position. All other
labels are −100.

Masks are a pure function of the seed, the store, the epoch, the sequence's number and the position in the whole
sequence, so every rank knows the number of masked tokens of the global batch without communication. Any token can be
chosen, ends of documents included: otherwise that number would depend on tokens that only other ranks read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.config import FIXED, FIXED_IF_READ
from data.loader.batches import Reader, Shard
from data.randomness import splitmix_words
from data.store import StoreMeta
from data.tokenizer import BYTES, ByteTokenizer
from zeco_train.errors import ConfigError
from zeco_train.system.numbers import IGNORE_INDEX

# Of the chosen tokens.
MASKED_SHARE, RANDOM_SHARE = 0.8, 0.1
# Probabilities are compared with 32 random bits.
_BITS = 32
# Words that are computed at a time: the temporaries fit in a core's cache.
_BLOCK = 1 << 14


class TaskName(Enum):
    """What the model learns: the next token (`lm`), or masked tokens (`mlm`)."""

    lm = "lm"
    mlm = "mlm"


@dataclass
class TaskConfig:
    """What the model learns.

    Attributes:
        name: `lm`: the next token, with a causal model; `mlm`: masked tokens, with model.causal=false.
        mask_fraction: probability that a token is chosen to be predicted; for `mlm` only.
        mask_token: id that hides a token; for `mlm` only. null: an id that the tokenizer never produces.
    """

    name: TaskName = field(default=TaskName.lm, metadata=FIXED)
    mask_fraction: float = field(default=0.15, metadata=FIXED_IF_READ)
    mask_token: int | None = field(default=None, metadata=FIXED_IF_READ)

    @property
    def is_masked(self) -> bool:
        return self.name is TaskName.mlm

    def validate(self) -> None:
        if not 0 < self.mask_fraction <= 1:
            raise ConfigError("task.mask_fraction", self.mask_fraction, "must be > 0 and ≤ 1")
        if self.mask_token is not None and self.mask_token < 0:
            raise ConfigError("task.mask_token", self.mask_token, "is an id: must be ≥ 0")

    def needs(self) -> Iterator[tuple[str, str, bool]]:
        yield "mask_fraction", "task=mlm", self.is_masked
        yield "mask_token", "task=mlm", self.is_masked


class MaskIds(NamedTuple):
    """The ids that replace tokens: the mask token, or a random one of first … stop − 1."""

    mask: int
    first: int
    stop: int


def find_mask_ids(mask_token: int | None, meta: StoreMeta, vocab_size: int) -> MaskIds:
    """The ids that replace tokens of a store.

    By default the mask token is an id that no text has: the byte tokenizer's id for unknown text, and of any other
    tokenizer the first id after its own, if the model's vocabulary has one.

    Raises:
        ConfigError: the id is outside the vocabulary or occurs in texts, or no id is free.
    """
    is_bytes = meta.tokenizer.get("kind") == BYTES
    first, stop = ByteTokenizer.offset if is_bytes else 0, meta.vocab_size
    if mask_token is None:
        mask_token = ByteTokenizer.unknown_id if is_bytes else stop
        if mask_token >= vocab_size:
            way = f"set model.vocab_size={stop + 1} or more, whose id {stop} is then free, or name an id"
            raise ConfigError("task.mask_token", "null", f"the tokenizer uses all {vocab_size} ids of the model; {way}")
    elif mask_token >= vocab_size:
        raise ConfigError("task.mask_token", mask_token, f"must be < model.vocab_size={vocab_size}")
    elif mask_token == meta.eos_id or (is_bytes and first <= mask_token < stop):
        free = f"; null takes {ByteTokenizer.unknown_id}, which no text has" if is_bytes else ""
        raise ConfigError("task.mask_token", mask_token, f"is a token of the texts{free}")
    return MaskIds(mask_token, first, stop)


class SequenceMasks:
    """The masks of the sequence `name`, by `splitmix_words` of the positions; tokens are chosen with `fraction`."""

    def __init__(self, fraction: float, name: str) -> None:
        digest = hashlib.blake2b(f"masks of {name}".encode(), digest_size=16).digest()
        self._of_choice, self._of_change = (int.from_bytes(digest[i : i + 8], "little") for i in (0, 8))
        # At least 1: a fraction > 0 is never none.
        self._threshold = np.uint64(max(1, round(fraction * (1 << _BITS))))

    def chosen(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the positions start … stop−1 are to be predicted."""
        chosen = np.empty(stop - start, np.bool_)
        for begin in range(start, stop, _BLOCK):
            end = min(begin + _BLOCK, stop)
            words = splitmix_words(self._of_choice, np.arange(begin, end, dtype=np.uint64))
            chosen[begin - start : end - start] = words >> np.uint64(_BITS) < self._threshold
        return chosen

    def count(self, length: int) -> int:
        return int(self.chosen(0, length).sum())

    def replace(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], ids: MaskIds) -> NDArray[np.int64]:
        """What the model reads in place of chosen tokens, given with their positions."""
        words = splitmix_words(self._of_change, positions.astype(np.uint64))
        high, low = words >> np.uint64(_BITS), words & np.uint64((1 << _BITS) - 1)
        random = ids.first + (low * np.uint64(ids.stop - ids.first) >> np.uint64(_BITS)).astype(np.int64)
        masked, changed = (round(share * (1 << _BITS)) for share in (MASKED_SHARE, MASKED_SHARE + RANDOM_SHARE))
        return np.where(high < masked, ids.mask, np.where(high < changed, random, tokens))


class MaskedReader(Reader):
    """Another reader's sequences with masked tokens.

    `name` is of the store and the seed; with epoch and number of a sequence it determines the masks.
    """

    has_labels = True

    def __init__(self, reader: Reader, fraction: float, ids: MaskIds, name: str) -> None:
        self._reader, self._fraction, self._ids, self._name = reader, fraction, ids, name
        self.split, self.num_sequences, self.description = reader.split, reader.num_sequences, reader.description
        self.is_endless, self.tokens_behind = reader.is_endless, reader.tokens_behind

    def find(self, index: int) -> tuple[int, int]:
        return self._reader.find(index)

    def shard(self, epoch: int, sequence: int, segment: int) -> Shard:
        shard, (start, stop) = self._reader.shard(epoch, sequence, segment), self.split.range(segment)
        assert shard.counts is None, self.description
        masks = self._masks(epoch, sequence)
        chosen = np.flatnonzero(masks.chosen(start, stop))
        tokens, labels = shard.tokens.copy(), np.full(stop - start, IGNORE_INDEX, np.int64)
        labels[chosen] = tokens[chosen]
        tokens[chosen] = masks.replace(tokens[chosen], chosen + start, self._ids)
        return shard._replace(tokens=tokens, labels=labels)

    def num_labels(self, epoch: int, sequence: int) -> int:
        return self._masks(epoch, sequence).count(self.split.seq_len)

    def _masks(self, epoch: int, sequence: int) -> SequenceMasks:
        return SequenceMasks(self._fraction, f"{self._name}, epoch {epoch}, sequence {sequence}")
