"""Synthetic tasks: contents of examples, independent generation of slices, and batches of a run."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from data.config import DataConfig, DataKind
from data.loader.batches import DataSplit
from data.loader.loader import SequenceLoader, validation_batches
from data.loader.opening import open_data
from data.synthetic import FIRST_SYMBOL, SyntheticConfig, Task
from data.synthetic.tasks import Example, Texts, draws_for, make_task
from data.tokenizer import ByteTokenizer
from zeco_train.config.schema import load_config
from zeco_train.errors import ConfigError
from zeco_train.system.numbers import IGNORE_INDEX

pytestmark = pytest.mark.numeric

TOKENIZER = ByteTokenizer()
LENGTH = 1024


def make(config: SyntheticConfig, index: int = 0, length: int = LENGTH, depth: float | None = None) -> Example:
    config.validate()
    return make_task(config, TOKENIZER, 259).example(length, draws_for(config, "test", 3, index), depth)


def text_of(example: Example) -> str:
    return TOKENIZER.decode(example.read(0, example.length + 1))


def answers_of(example: Example) -> list[str]:
    return [TOKENIZER.decode(example.read(*answer)) for answer in example.answers]


@pytest.mark.parametrize("task", list(Task))
def test_slices_do_not_depend_on_how_they_are_cut(task: Task) -> None:
    config = SyntheticConfig(task=task)
    for index, depth in enumerate([None, 0.0, 1.0]):
        example = make(config, index, depth=depth)
        whole = example.read(0, LENGTH + 1)
        assert whole.shape == (LENGTH + 1,)
        assert whole.dtype == np.int64
        for size in (1, 100, 1000) if index == 0 else (100,):
            borders, again = [*range(0, LENGTH + 1, size), LENGTH + 1], make(config, index, depth=depth)
            parts = [again.read(*pair) for pair in itertools.pairwise(borders)]
            assert np.array_equal(np.concatenate(parts), whole), (depth, index, size)
            counted = [example.counts(a, min(b, LENGTH)) for a, b in itertools.pairwise(borders) if a < LENGTH]
            assert np.array_equal(np.concatenate(counted), example.counts(0, LENGTH))
        assert example.counts(0, LENGTH).sum() == example.num_labels
        labelled = whole[1:][example.counts(0, LENGTH)]
        assert np.array_equal(labelled, np.concatenate([example.read(*answer) for answer in example.answers]))
        assert example.answers[-1].stop == LENGTH + 1 or task is Task.recall
        assert not np.array_equal(whole, make(config, index + 1, depth=depth).read(0, LENGTH + 1))


@pytest.mark.parametrize("keys", [None, 12, 8])
def test_recall_queries_keys_of_the_first_half(keys: int | None) -> None:
    config = SyntheticConfig(facts=8, queries=8, alphabet=16, keys=keys)
    for index, depth in itertools.product(range(8), [None, 0.0, 0.5, 1.0]):
        example = make(config, index, 128, depth)
        tokens = example.read(0, 129)
        is_key = (tokens >= FIRST_SYMBOL) & (tokens < FIRST_SYMBOL + 16)
        places = np.flatnonzero(is_key[:-1])
        told, asked = places[places < 64], places[places >= 64]
        values = {int(tokens[place]): int(tokens[place + 1]) for place in told}
        assert len(values) == len(asked) == 8
        assert max(values) < FIRST_SYMBOL + (keys or 16)
        assert {int(tokens[place]) for place in asked} == set(values)
        assert [answer.start for answer in example.answers] == [place + 1 for place in asked]
        assert all(values[int(tokens[place])] == tokens[place + 1] for place in asked)
        assert all(FIRST_SYMBOL + 16 <= value < FIRST_SYMBOL + 32 for value in values.values())
        if depth is not None:
            assert told.tolist() == list(range(round(depth * 48), round(depth * 48) + 16, 2))


@pytest.mark.parametrize("facts", [1, 4])
def test_multikey_needle_asks_for_one_key(facts: int) -> None:
    for index in range(8):
        example = make(SyntheticConfig(task=Task.needle_multikey, facts=facts), index)
        text = text_of(example)
        told = re.findall(r"The code of the (\w+ \w+) is (\d{4})\.", text)
        asked = re.search(r"What was said\? The code of the (\w+ \w+) is (\d{4})$", text)
        assert asked is not None
        assert len(dict(told)) == facts
        assert dict(told)[asked[1]] == asked[2]
        assert answers_of(example) == [f" {asked[2]}"]


def test_multivalue_needle_asks_for_all_values_in_order() -> None:
    for index in range(8):
        example = make(SyntheticConfig(task=Task.needle_multivalue, facts=3, digits=7), index, depth=0.2)
        told = re.findall(r"The code of the \w+ \w+ is (\d{7})\.", text_of(example))
        assert answers_of(example) == [f" {code}" for code in told]
        assert len(told) == 3


def test_variables_task_asks_for_boxes_of_one_chain() -> None:
    for index in range(8):
        example = make(SyntheticConfig(task=Task.variables, facts=3), index, depth=None)
        text = text_of(example)
        holds: dict[str, str] = {}
        for box, number, before in re.findall(
            r"The ([a-z]+ [a-z]+) box holds (?:(\d+)|what the (.+?) box holds)\.", text
        ):
            holds[box] = number or holds.get(before, "?")
        asked = re.search(r"Which boxes hold (\d+)\?", text)
        assert asked is not None
        assert len(set(holds.values()) - {"?"}) == 2
        found = [f" {box}" for box, number in holds.items() if number == asked[1]]
        assert answers_of(example) == found


def test_counting_task_answer_is_number_of_rings() -> None:
    counts = set()
    for index in range(16):
        example = make(SyntheticConfig(task=Task.counting, facts=5), index)
        rang = text_of(example).count("The bell rings.")
        assert answers_of(example) == [f" {rang}"]
        counts.add(rang)
    assert counts <= set(range(1, 6))
    assert len(counts) > 2


def test_needle_position_follows_depth() -> None:
    longest = 60
    for length, depth in itertools.product([512, 8192], [0.0, 0.25, 0.5, 0.9, 1.0]):
        text = text_of(make(SyntheticConfig(task=Task.needle), 1, length, depth))
        before = text.index(" The code of the ")
        haystack = len(text) - len(re.findall(r" The code of the .+? is \d+\.| What was said.*", text)[0]) - 60
        assert abs(before - depth * haystack) <= longest, (length, depth, before)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SyntheticConfig(facts=0), "data.synthetic.facts=0: must be from 1 to 64 (pairs of a key and a value)"),
        (SyntheticConfig(facts=5, keys=4), "data.synthetic.facts=5: must be from 1 to 4 (pairs of a key and a value)"),
        (SyntheticConfig(keys=65), "data.synthetic.keys=65: must be from 1 to 64"),
        (SyntheticConfig(alphabet=128), "data.synthetic.alphabet=128: must be from 1 to 127"),
        (SyntheticConfig(digits=3), "data.synthetic.digits=3: is not for recall, but for needle, needle_multikey"),
        (SyntheticConfig(task=Task.counting, facts=10), "data.synthetic.facts=10: must be from 1 to 9 (rings at most)"),
    ],
)
def test_invalid_synthetic_config_is_refused(config: SyntheticConfig, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.validate()
    assert str(caught.value).startswith(expected)


@pytest.mark.few(3)
@pytest.mark.parametrize("task", list(Task))
def test_shortest_accepted_length_fits_every_example(task: Task) -> None:
    config = SyntheticConfig(task=task)
    made = make_task(config, TOKENIZER, 259)
    with pytest.raises(ConfigError, match=r"^L=1: too short .* least legal value: (\d+)$") as caught:
        made.check(1, "L")
    shortest = int(str(caught.value).rpartition(" ")[2])
    made.check(shortest, "L")
    for index in range(15):
        # A fact may start at the first token, but not before it.
        assert make(config, index, shortest, depth=0.0).pieces[0].start >= 0
        make(config, index, shortest).read(0, shortest + 1)


def loader(split: DataSplit, global_batch: int = 8, **changes: object) -> SequenceLoader:
    synthetic = SyntheticConfig(task=Task.needle_multikey, facts=2)
    data = replace(DataConfig(kind=DataKind.synthetic, synthetic=synthetic, seq_len=split.seq_len), **changes)  # type: ignore[arg-type]
    return SequenceLoader(open_data(data, vocab_size=259).train, split, seed=5, global_batch=global_batch)


def test_ranks_and_segments_read_parts_of_same_sequences() -> None:
    whole = loader(DataSplit(768, micro_batch=8)).batch(16, 0)
    assert whole.step_labels == int((whole.labels != IGNORE_INDEX).sum()) == 8 * 5
    for sp_size, segments, dp_size in [(2, 1, 1), (3, 2, 2), (1, 4, 4)]:
        for dp_rank, sp_rank, segment in itertools.product(range(dp_size), range(sp_size), range(segments)):
            split = DataSplit(768, 8 // dp_size, dp_rank, dp_size, sp_rank, sp_size, segments=segments)
            part = loader(split).batch(16, 0, segment)
            rows = slice(dp_rank * 8 // dp_size, (dp_rank + 1) * 8 // dp_size)
            columns = slice(part.position.start, part.position.stop)
            assert part.input_ids.equal(whole.input_ids[rows, columns])
            assert part.labels.equal(whole.labels[rows, columns])
            assert part.step_labels == whole.step_labels
            assert part.position.before() == part.position.start


def test_large_step_counts_labels_once() -> None:
    """With more examples than the cache holds, micro-batches do not regenerate all of them."""
    with mock.patch.object(Texts, "example", autospec=True, side_effect=Texts.example) as made:
        large = loader(DataSplit(768), global_batch=100)
        assert {large.batch(0, micro_step).step_labels for micro_step in range(10)} == {100 * 5}
    assert made.call_count <= 110


def test_validation_examples_differ_from_training() -> None:
    data = DataConfig(kind=DataKind.synthetic, seq_len=64)
    opened = open_data(data, vocab_size=259)
    [batch] = validation_batches(opened.validation[0].reader(DataSplit(64, 4), seed=0), max_sequences=4)
    trained = opened.train[0].reader(DataSplit(64, 4), seed=0).read([0, 1, 2, 3])
    assert not batch.input_ids.equal(trained.input_ids)
    assert not open_data(data, vocab_size=259, validate=False).validation


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data=synthetic", "model.vocab_size=258"], None),
        (["data.synthetic.task=needle"], "data.synthetic.task=needle: would be ignored; it needs data=synthetic"),
        (["data=synthetic", "data.shuffle=documents"], "data.shuffle=documents: would be ignored; it needs data=embe"),
        (["data=synthetic", "data.path=x"], "data.path=x: data=synthetic takes none"),
        (["data=synthetic", "data.synthetic.task=bell"], "data.synthetic.task=bell: must be one of recall, needle"),
    ],
)
def test_invalid_synthetic_overrides_are_refused(overrides: list[str], expected: str | None) -> None:
    if expected is None:
        config = load_config(overrides)
        with pytest.raises(ConfigError, match=r"^model\.vocab_size=258: the task has 259 ids"):
            open_data(config.data, vocab_size=config.model.vocab_size)
        return
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    assert str(caught.value).startswith(expected)
