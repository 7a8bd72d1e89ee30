"""Mixtures, shuffled documents, filters and epochs, against streams that are written out in full.

Every token of every store is a different number, so a token identifies its store and position.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from data.config import Shuffle
from data.loader import Batch, DataSplit, Mixture, SequenceLoader, Source
from data.loader.loader import as_integers
from data.randomness import Permutation
from data.store import TokenStore
from data.store.documents import Documents
from tests.support.stores import write_numbered_store
from zeco_train.errors import ConfigError

SEQ_LEN = 12
SEED = 5
# Documents of one token, of exactly the filter's length, and over several sequences; the second store has as many
# sequences as the first, the third only one.
LENGTHS = ([6, 3, 15, 1, 1, 7, 40, 5, 22, 5, 30], [4, 5, 60, 2, 9, 13, 31, 7, 3, 1], [25])
WEIGHTS = [5, 2, 1]


@dataclass
class Setting:
    """How the stores are read."""

    stores: list[TokenStore]
    shuffle: Shuffle = Shuffle.documents
    shortest: int = 0
    weights: tuple[int, ...] = (5, 2, 1)

    def sources(self) -> list[Source]:
        documents = [Documents(store, self.shortest) for store in self.stores]
        return [Source(own, weight=weight) for own, weight in zip(documents, self.weights, strict=True)]

    def loader(self, global_batch: int = 4, **split: Any) -> SequenceLoader:
        part = DataSplit(**({"seq_len": SEQ_LEN} | split))
        return SequenceLoader(self.sources(), part, seed=SEED, global_batch=global_batch, shuffle=self.shuffle)


@pytest.fixture
def stores(tmp_path: Path) -> list[TokenStore]:
    return [write_numbered_store(tmp_path / str(n), lengths, first=300 * n) for n, lengths in enumerate(LENGTHS)]


def written_out(setting: Setting, number: int, epoch: int) -> list[tuple[list[int], list[int], list[int]]]:
    """All sequences of an epoch of a store: tokens, labels, and at which of their tokens documents start."""
    offsets = setting.stores[number].doc_offsets.tolist()
    documents = [list(range(300 * number + a, 300 * number + b)) for a, b in itertools.pairwise(offsets)]
    documents = [document for document in documents if len(document) >= setting.shortest]
    of = f" of store {number}" if number else ""
    if setting.shuffle is Shuffle.documents:
        order = Permutation(len(documents), SEED, epoch, f"documents{of}")
        documents = [documents[order(place)] for place in range(len(documents))]
    stream = list(itertools.chain(*documents))
    starts = {document[0] for document in documents}
    count = (len(stream) - 1) // SEQ_LEN
    sequences = []
    for first in range(0, count * SEQ_LEN, SEQ_LEN):
        tokens, labels = stream[first : first + SEQ_LEN], stream[first + 1 : first + SEQ_LEN + 1]
        sequences.append((tokens, labels, [t for t, token in enumerate(tokens) if t == 0 or token in starts]))
    if setting.shuffle is Shuffle.none:
        return sequences
    order = Permutation(count, SEED, epoch, f"sequences{of}")
    return [sequences[order(place)] for place in range(count)]


def dealt_out(weights: list[int], count: int) -> list[int]:
    """The store of each of the first places, from the definition in `Mixture`."""
    shares = [Fraction(sum(weights[: j + 1]), sum(weights)) for j in range(len(weights))]
    block = -(-sum(weights) // min(weights))
    stores: list[int] = []
    for number in range(-(-count // block)):
        upto = [[int(t * block * share) for share in shares] for t in (number, number + 1)]
        counts = [after - before for before, after in zip(*upto, strict=True)]
        slots = [j for j in range(len(weights)) for _ in range(counts[j] - (counts[j - 1] if j else 0))]
        order = Permutation(block, SEED, number, "stores")
        stores += [slots[order(place)] for place in range(block)]
    return stores[:count]


def starts_of(parts: list[Batch]) -> list[int]:
    """Positions in the sequence at which a document starts, from its shards."""
    starts = []
    for part in parts:
        pieces = part.position.cu_seqlens()[:-1].tolist()
        starts += [part.position.start + start for start in pieces if start > 0 or part.position.before() == 0]
    return starts


@pytest.mark.few
@pytest.mark.parametrize("shuffle", list(Shuffle))
@pytest.mark.parametrize("shortest", [0, 5])
@pytest.mark.parametrize(
    ("sp_size", "segments"), [(1, 1), (1, 4), (3, 2), pytest.param(12, 1, marks=pytest.mark.campaign)]
)
def test_batches_equal_written_out_streams(
    stores: list[TokenStore], shuffle: Shuffle, shortest: int, sp_size: int, segments: int
) -> None:
    """Every rank reads exactly its slice and one label more; at least two epochs of each store."""
    setting = Setting(stores, shuffle, shortest)
    split = {"sp_size": sp_size, "segments": segments, "reset_state_at_document": True}
    ranks = [setting.loader(**split, sp_rank=rank) for rank in range(sp_size)]
    epochs: dict[tuple[int, int], Any] = {}
    length, seen = SEQ_LEN // sp_size // segments, [0] * len(stores)
    for position in range(0, 5 * sum(WEIGHTS), 4):
        for micro_step in range(4):
            place = ranks[0].place(position + micro_step)
            seen[place.source] += 1
            key = place.source, place.epoch
            if key not in epochs:
                epochs[key] = written_out(setting, *key)
            parts = []
            for segment, rank in itertools.product(range(segments), range(sp_size)):
                before = [store.bytes_requested for store in stores]
                parts.append(ranks[rank].batch(position, micro_step, segment))
                read = [store.bytes_requested - b for store, b in zip(stores, before, strict=True)]
                assert read == [2 * (length + 1) if number == place.source else 0 for number in range(3)]
            tokens = torch.cat([part.input_ids for part in parts], dim=1)[0].tolist()
            labels = torch.cat([part.labels for part in parts], dim=1)[0].tolist()
            assert (tokens, labels, starts_of(parts)) in epochs[key]
    assert min(seen) >= 5


@pytest.mark.parametrize("shuffle", [Shuffle.documents, Shuffle.sequences])
def test_order_of_sequences_equals_definition(stores: list[TokenStore], shuffle: Shuffle) -> None:
    """Sequences are those of the written-out streams in the defined order, on any split of a step.

    So every epoch has each of its tokens once, in an order of its own, and a run resumes anywhere.
    """
    setting = Setting(stores, shuffle, 2)
    count, taken = 120, Counter[int]()
    epochs = {(number, epoch): written_out(setting, number, epoch) for number in range(3) for epoch in range(20)}
    expected = []
    for number in dealt_out(WEIGHTS, count):
        size = len(epochs[number, 0])
        epoch, place = divmod(taken[number], size)
        expected.append((number, epoch, place))
        taken[number] += 1
    # Within a block, a store's sequences may come in any order.
    whole = setting.loader(micro_batch=4)
    got: list[list[int]] = []
    for consumed in range(0, count, 4):
        batch = whole.batch(consumed, 0)
        assert torch.equal(batch.labels[:, :-1], batch.input_ids[:, 1:])
        got += batch.input_ids.tolist()
    for start in range(0, count, whole.mixture.block):
        block = slice(start, start + whole.mixture.block)
        stores_got = [tokens[0] // 300 for tokens in got[block]]
        assert stores_got == [number for number, _, _ in expected[block]]
        wanted = [epochs[number, epoch][place][0] for number, epoch, place in expected[block]]
        assert sorted(got[block]) == sorted(wanted)
    for dp_size, micro_batch in [(2, 1), (4, 1), (2, 2)]:
        parts = [setting.loader(dp_size=dp_size, dp_rank=rank, micro_batch=micro_batch) for rank in range(dp_size)]
        for consumed in (0, 36, 37):  # a step of a run with another batch may begin anywhere
            rows = [p.batch(consumed, step).input_ids.tolist() for p in parts for step in range(p.micro_steps)]
            assert list(itertools.chain(*rows)) == got[consumed : consumed + 4]


def test_sequence_ids_are_unique_across_stores(stores: list[TokenStore]) -> None:
    whole = Setting(stores).loader()
    counts = [reader.num_sequences for reader in whole.readers]
    assert whole.num_sequences == sum(counts)
    for position in range(100):
        source, _, sequence = whole.place(position)
        number = whole.sequence_id(whole.place(position))
        assert number == sum(counts[:source]) + sequence
        assert whole.reader_of(number) is whole.readers[source]
        assert 0 <= sequence < counts[source]


def test_mixture_of_one_store_ignores_its_weight(stores: list[TokenStore]) -> None:
    """One store with any weight equals that store without a mixture; equal-sized stores have different orders."""
    alone = Setting(stores[:1], weights=(1,)).loader()
    weighted = Setting(stores[:1], weights=(7,)).loader()
    assert [alone.place(i) for i in range(50)] == [weighted.place(i) for i in range(50)]
    assert len({reader.num_sequences for reader in Setting(stores).loader().readers[:2]}) == 1
    readers = Setting(stores).loader().readers
    assert [readers[0].find(i) for i in range(22)] != [readers[1].find(i) for i in range(22)]


@pytest.mark.parametrize("weights", [[1], [7, 2, 1], [3, 2], [999, 1], [123_456, 654_321, 1000], [1, 5, 1, 30]])
def test_stores_are_drawn_in_proportion_to_weights(weights: list[int]) -> None:
    mixture = Mixture(weights, seed=3)
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    assert mixture.shares == shares
    for first_block in (0, 10**12):
        first = first_block * mixture.block
        taken = [set() for _ in weights]  # type: list[set[int]]
        for position in range(first, first + min(6 * mixture.block, 2000) // mixture.block * mixture.block):
            store, index = mixture.place(position)
            assert index not in taken[store], "a sequence of a store is dealt out twice"
            taken[store].add(index)
            if (position + 1) % mixture.block == 0:
                for found, share in zip(taken, shares, strict=True):
                    assert len(found) == (max(found) - min(found) + 1 if found else 0), "one is left out"
                    # Counts stay within one of the exact proportion, at any position.
                    assert not found or abs(max(found) + 1 - (position + 1) * share) < 1
                assert first_block or all(not found or min(found) == 0 for found in taken)


def test_store_order_is_not_periodic() -> None:
    mixture = Mixture([1, 1], seed=0)
    dealt = [mixture.place(position)[0] for position in range(2000)]
    # With equal weights, half of every second place goes to each store: 500 ± 16, 5 deviations.
    assert 420 < sum(dealt[::2]) < 580
    assert dealt != [Mixture([1, 1], seed=1).place(position)[0] for position in range(2000)]


def test_decimal_weights_convert_to_exact_integers() -> None:
    assert as_integers([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert as_integers([2.0, 1.0]) == as_integers([0.5, 0.25]) == [2, 1]
    assert as_integers([1e-3, 1.0]) == [1, 1000]
    assert as_integers([3.0]) == [1]


def test_seq_len_beyond_filtered_corpus_is_refused(stores: list[TokenStore]) -> None:
    with pytest.raises(ConfigError) as caught:
        Setting(stores[:1], shortest=22, weights=(1,)).loader(seq_len=96)
    expected = f"longer than the corpus {stores[0].path} (its documents of 22 tokens or more) of 92 tokens"
    assert str(caught.value).startswith(f"data.seq_len=96: {expected}; largest legal value: 91")
