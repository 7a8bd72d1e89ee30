"""Makes synthetic tasks: recall of symbols, and facts told in text; pure functions of (seed, index, length, depth).

An example is pieces inserted into an endless filler, of which any slice can be generated independently. As a training
source a task is an endless stream of examples, whose only state is the number consumed.

A text is assembled from pieces that are tokenised separately, so a piece has the same ids at every position. They are
inserted between whole filler sentences; only the first sentence may be truncated, so that every length is met exactly.
"""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from data.config import DataConfig, Shuffle
from data.loader.batches import DataSplit, OpenedData, Reader, SequenceSource, Shard
from data.randomness import Draws
from data.synthetic import FIRST_SYMBOL, NUM_SYMBOLS, SyntheticConfig, Task
from data.tokenizer import Tokenizer, load_tokenizer
from zeco_train.errors import ConfigError

Tokens = NDArray[np.int64]


class Filler(Protocol):
    """Tokens between the pieces."""

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of it, [stop − start] int64."""


class Piece(NamedTuple):
    """Tokens at a position of an example."""

    start: int
    tokens: Tokens


class Answer(NamedTuple):
    """Tokens [start, stop) of an example to be predicted, right or wrong as a whole."""

    start: int
    stop: int


@dataclass(frozen=True)
class Example:
    """A sequence of `length` tokens, plus one: the label of the last."""

    length: int
    filler: Filler
    pieces: Sequence[Piece]  # sorted by position, without overlap
    answers: Sequence[Answer]  # sorted by position

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop), [stop − start] int64, with 0 ≤ start ≤ stop ≤ length + 1; generates only these."""
        assert 0 <= start <= stop <= self.length + 1, (start, stop, self.length)
        parts, place = [], start
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for number in range(first, len(self.pieces)):
            piece = self.pieces[number]
            if piece.start >= stop:
                break
            end = piece.start + len(piece.tokens)
            if end <= place:
                continue
            if place < piece.start:
                parts.append(self._fill(number, place, piece.start))
                place = piece.start
            parts.append(piece.tokens[place - piece.start : min(stop, end) - piece.start])
            place = min(stop, end)
        if place < stop:
            parts.append(self._fill(bisect.bisect_left(self._starts, stop), place, stop))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def counts(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Mask of the counted labels of tokens [start, stop), [stop − start]; a token's label is the next token."""
        counts = np.zeros(stop - start, dtype=np.bool_)
        for answer in self.answers:
            counts[max(0, answer.start - 1 - start) : max(0, answer.stop - 1 - start)] = True
        return counts

    @property
    def num_labels(self) -> int:
        return sum(answer.stop - answer.start for answer in self.answers)

    @cached_property
    def _starts(self) -> list[int]:
        return [piece.start for piece in self.pieces]

    @cached_property
    def _before(self) -> list[int]:
        # Total tokens of the pieces before each piece, and of all pieces.
        return [0, *np.cumsum([len(piece.tokens) for piece in self.pieces]).tolist()]

    def _fill(self, number: int, start: int, stop: int) -> Tokens:
        # Positions of the example, between pieces `number` − 1 and `number`.
        return self.filler.read(start - self._before[number], stop - self._before[number])


# Invented, without digits, not taken from any corpus.
_COLOURS = (
    "amber", "ashen", "azure", "beige", "bronze", "cobalt", "copper", "coral", "crimson", "ebony", "emerald", "golden",
    "indigo", "ivory", "jade", "lilac", "maroon", "olive", "pearl", "purple", "russet", "scarlet", "silver", "violet",
)  # fmt: skip
_PLACES = (
    "anchor", "arch", "barn", "bridge", "cabin", "canal", "castle", "cellar", "chapel", "garden", "gate", "harbour",
    "island", "lantern", "market", "meadow", "mill", "orchard", "quarry", "stable", "temple", "tower", "tunnel", "well",
)  # fmt: skip
# The longest come last, where `_Longest` takes them.
COLOURS, PLACES = (tuple(sorted(words, key=len)) for words in (_COLOURS, _PLACES))
# Parts of filler sentences: subject, predicate, adverbial.
_WHO = ("The miller", "A tall child", "The old sailor", "Our neighbour", "A quiet nurse", "The baker", "Some traveller")
_DOES = ("sweeps the yard", "counts the clouds", "mends a net", "looks for a coat", "sings", "waits", "peels an apple")
_WHERE = ("by the river", "until noon", "under the oak", "before the rain", "behind the hill", "with a smile", "again")

SENTENCES = tuple(f" {who} {does} {where}." for who in _WHO for does in _DOES for where in _WHERE)

_NUM_NAMES = len(COLOURS) * len(PLACES)


class ExampleMaker(ABC):
    """Makes the examples of a task."""

    vocab_size: int  # every id is below it
    chance: float  # accuracy of a uniform guess among all answers of the right form; for several answers, of the first
    shortest: int  # tokens of a sequence
    content: str  # what needs these tokens

    def check(self, length: int, field: str) -> None:
        """Raise `ConfigError`, which names `field`, if sequences are too short for the task."""
        if length < self.shortest:
            raise ConfigError(field, length, f"too short for {self.content}; least legal value: {self.shortest}")

    @abstractmethod
    def example(self, length: int, draws: Draws, depth: float | None = None) -> Example:
        """Generate an example.

        Args:
            length: tokens of the sequence; must pass `check`.
            depth: from 0 to 1: relative position, in the part before the questions, of the (first) fact asked about;
                None for a random position.
        """


class Noise:
    """Random symbols that are neither keys nor values."""

    def __init__(self, draws: Draws, first: int) -> None:
        self._draws, self._first = draws, first

    def read(self, start: int, stop: int) -> Tokens:
        end = FIRST_SYMBOL + NUM_SYMBOLS
        return self._first + self._draws.many_below(end - self._first, start, stop, "noise")


class Recall(ExampleMaker):
    """Multi-query associative recall, with all pairs before all queries.

        … key value … key value … | … key → value … key → value …

    So with an even number of ranks per sequence, pairs and queries are always on different ranks.

    The keys of an example are distinct, values may repeat. A query is a key, and the label of that token is its value;
    with more queries than pairs, keys repeat. Without a depth the pairs are scattered over the first half; with a depth
    they are contiguous.
    """

    vocab_size = FIRST_SYMBOL + NUM_SYMBOLS

    def __init__(self, config: SyntheticConfig) -> None:
        self._pairs, self._queries = config.num_facts, config.num_queries
        self._keys, self._alphabet = config.num_keys, config.alphabet
        self.chance = 1 / config.alphabet
        # Each half holds whole pairs only; the second has one more token, the label of the last.
        self.shortest = max(4 * self._pairs, 4 * self._queries)
        self.content = f"{self._pairs} pairs and {self._queries} queries of recall"

    def example(self, length: int, draws: Draws, depth: float | None = None) -> Example:
        half = length // 2
        if depth is None:
            places = [2 * slot for slot in sorted(draws.pick(self._pairs, half // 2, "pairs"))]
        else:
            first = round(depth * (half - 2 * self._pairs))
            places = list(range(first, first + 2 * self._pairs, 2))
        keys = draws.pick(self._pairs, self._keys, "keys")
        values = [draws.below(self._alphabet, f"value {number}") for number in range(self._pairs)]
        questions = sorted(draws.pick(self._queries, (length + 1 - half) // 2, "questions"))
        asked = draws.pick(self._pairs, self._pairs, "asked")
        pieces = [self._piece(place, key, value) for place, key, value in zip(places, keys, values, strict=True)]
        answers = []
        for number, slot in enumerate(questions):
            start, pair = half + 2 * slot, asked[number % self._pairs]
            pieces.append(self._piece(start, keys[pair], values[pair]))
            answers.append(Answer(start + 1, start + 2))
        return Example(length, Noise(draws, FIRST_SYMBOL + 2 * self._alphabet), pieces, answers)

    def _piece(self, place: int, key: int, value: int) -> Piece:
        return Piece(place, np.array([FIRST_SYMBOL + key, FIRST_SYMBOL + self._alphabet + value]))


class Sentences:
    """The last `length` tokens of a random sequence of sentences, with `table`, the tokens of each possible sentence.

    `borders` are the positions where a piece may be inserted: the ends of all sentences within the length. Stores the
    sentences' end positions, 8 bytes per sentence; tokens are generated slice by slice.
    """

    def __init__(self, table: Sequence[Tokens], draws: Draws, length: int) -> None:
        self._table, self.length = table, length
        # Enough even if every sentence drawn is the shortest one.
        most = length // min(len(tokens) for tokens in table) + 1
        self._choices = draws.many_below(len(table), 0, most, "sentences")
        ends = np.cumsum(np.array([len(tokens) for tokens in table])[self._choices])
        used = int(np.searchsorted(ends, length)) + 1
        self._choices = self._choices[:used]
        # Truncate at the front, so that the question follows a full stop.
        self._ends = ends[:used] - (ends[used - 1] - length)
        self.borders: list[int] = self._ends[self._ends >= 0].tolist()

    def read(self, start: int, stop: int) -> Tokens:
        if start == stop:
            return np.empty(0, np.int64)
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right").tolist()
        tokens = np.concatenate([self._table[choice] for choice in self._choices[first : last + 1].tolist()])
        begin = int(self._ends[first]) - len(self._table[int(self._choices[first])])
        return tokens[start - begin : stop - begin]


@dataclass(frozen=True)
class _Script:
    told: Sequence[str]  # the relevant facts, in order; the first is at the depth, the others anywhere after it
    beside: Sequence[str]  # distractors, anywhere
    question: str  # at the end
    answers: Sequence[str]  # after the question, in order

    @property
    def ending(self) -> list[str]:
        # Separated by commas; answers have odd indices.
        before = [self.question, *[","] * (len(self.answers) - 1)]
        return [text for pair in zip(before, self.answers, strict=True) for text in pair]


class Texts(ExampleMaker):
    """The tasks that are text."""

    def __init__(self, config: SyntheticConfig, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer
        self.vocab_size = tokenizer.vocab_size
        of_others = 1 / (9 * 10 ** (config.digits - 1))
        self.chance = {Task.counting: 1 / config.num_facts, Task.variables: 1 / _NUM_NAMES}.get(config.task, of_others)
        # At most one token per byte, and a prefix token before each piece.
        script = self._script(_Longest("", 0, 0))
        pieces = (*script.told, *script.beside, *script.ending, max(SENTENCES, key=len))
        self.shortest = sum(len(text) + 1 for text in pieces)
        self.content = f"what {config.task.value} states and asks"

    def example(self, length: int, draws: Draws, depth: float | None = None) -> Example:
        script = self._script(draws)
        told, beside = self._encode(script.told), self._encode(script.beside)
        ending = self._encode(script.ending)
        filled = length + 1 - sum(len(tokens) for tokens in (*told, *beside, *ending))
        assert filled > 0, (filled, length)
        filler = Sentences(self._table, draws, filled)
        places = self._places(filler.borders, len(told), len(beside), draws, depth)
        # Pieces at the same position keep their order.
        laid = sorted(zip(places, range(len(places)), (*told, *beside), strict=True), key=lambda entry: entry[:2])
        pieces, before = [], 0
        for place, _, tokens in laid:
            pieces.append(Piece(place + before, tokens))
            before += len(tokens)
        answers, start = [], filled + before
        for number, tokens in enumerate(ending):
            pieces.append(Piece(start, tokens))
            if number % 2:
                answers.append(Answer(start, start + len(tokens)))
            start += len(tokens)
        return Example(length, filler, pieces, answers)

    @cached_property
    def _table(self) -> list[Tokens]:
        return self._encode(SENTENCES)

    def _encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.asarray(tokens, dtype=np.int64) for tokens in self._tokenizer.encode(texts)] if texts else []

    @staticmethod
    def _places(borders: list[int], told: int, beside: int, draws: Draws, depth: float | None) -> list[int]:
        if depth is None:
            first = draws.below(len(borders), "depth")
        else:
            wanted = depth * borders[-1]
            after = min(bisect.bisect_left(borders, wanted), len(borders) - 1)
            first = after - 1 if after and wanted - borders[after - 1] < borders[after] - wanted else after
        others = sorted(first + draws.below(len(borders) - first, f"told {number}") for number in range(1, told))
        anywhere = [draws.below(len(borders), f"beside {number}") for number in range(beside)]
        return [borders[number] for number in (first, *others, *anywhere)]

    def _script(self, draws: Draws) -> _Script:
        count, digits = self._config.num_facts, self._config.digits
        lowest = 10 ** (digits - 1)

        def number(of: str) -> str:
            return str(lowest + draws.below(9 * lowest, f"number {of}"))

        def names(many: int) -> list[str]:
            chosen = draws.pick(many, _NUM_NAMES, "names")
            return [f"{COLOURS[name // len(PLACES)]} {PLACES[name % len(PLACES)]}" for name in chosen]

        match self._config.task:
            case Task.needle | Task.needle_multikey | Task.needle_multivalue:
                is_multivalue = self._config.task is Task.needle_multivalue
                named = names(1 if is_multivalue else count)
                numbers = [number(str(place)) for place in range(count)]
                told = [
                    f" The code of the {name} is {code}." for name, code in zip(named * count, numbers, strict=False)
                ]
                asked = count if is_multivalue else 1
                plural = f" All {count} codes, in order: the codes" if is_multivalue and count > 1 else " The code"
                question = f" What was said?{plural} of the {named[0]} {'are' if asked > 1 else 'is'}"
                return _Script(told[:asked], told[asked:], question, [f" {code}" for code in numbers[:asked]])
            case Task.variables:
                boxes = names(2 * count)
                held = [str(lowest + code) for code in draws.pick(2, 9 * lowest, "held")]
                told, beside = (_chain(boxes[part::2], held[part]) for part in range(2))
                question = f" Which boxes hold {held[0]}? They are, in order,"
                return _Script(told, beside, question, [f" {box}" for box in boxes[0::2]])
            case Task.counting:
                rings, horns = (1 + draws.below(count, of) for of in ("rings", "horns"))
                question = " How often did the bell ring? It rang"
                return _Script([" The bell rings."] * rings, [" The horn sounds."] * horns, question, [f" {rings}"])
            case _:
                raise AssertionError(self._config.task)


class _Longest(Draws):
    # Draws that yield the longest pieces.
    def pick(self, count: int, n: int, of: str) -> list[int]:
        return [n - 1] * count


def _chain(boxes: Sequence[str], number: str) -> list[str]:
    later = (f" The {box} box holds what the {before} box holds." for before, box in itertools.pairwise(boxes))
    return [f" The {boxes[0]} box holds {number}.", *later]


def make_task(config: SyntheticConfig, tokenizer: Tokenizer, vocab_size: int) -> ExampleMaker:
    """The task of a valid configuration; `tokenizer` is used by text tasks only.

    Raises ConfigError if the task's vocabulary exceeds `vocab_size`, the model's.
    """
    task = Texts(config, tokenizer) if config.task.is_text else Recall(config)
    if task.vocab_size > vocab_size:
        allowed = f"the task has {task.vocab_size} ids; allowed: {task.vocab_size} or more"
        raise ConfigError("model.vocab_size", vocab_size, allowed)
    return task


def draws_for(config: SyntheticConfig, purpose: str, seed: int, index: int) -> Draws:
    """The draws of example `index`; different for each purpose, such as training and validation."""
    return Draws(f"{purpose}, {config.task.value}", seed, index)


class ExampleReader(Reader):
    """Generates one sequence-parallel rank's shards of examples, each from its number; only labels of answers count.

    Args:
        example: number → the example.
        count: of the examples; None: endless.
    """

    has_labels = True

    def __init__(
        self, example: Callable[[int], Example], count: int | None, split: DataSplit, description: str = "examples"
    ) -> None:
        self._example, self.split, self.description = example, split, description
        # An endless stream has a number for sums over sources only.
        self.is_endless, self.num_sequences = count is None, 1 << 40 if count is None else count

    def shard(self, epoch: int, sequence: int, segment: int) -> Shard:
        """This rank's shard, padded if the split's sequences are longer; generates only its tokens."""
        example, (start, stop) = self._example(sequence), self.split.range(segment)
        end = example.length + 1
        tokens = example.read(min(start, end), min(stop + 1, end))
        padded = np.pad(tokens, (0, stop - start + 1 - len(tokens)))
        return Shard(padded, example.counts(start, stop))

    def num_labels(self, epoch: int, sequence: int) -> int:
        return self._example(sequence).num_labels


@dataclass(frozen=True)
class SyntheticSource(SequenceSource):
    """Examples of a task, different ones for each `purpose`, "training" or "validation"."""

    config: SyntheticConfig
    task: ExampleMaker
    purpose: str

    @property
    def description(self) -> str:
        return f"the synthetic task {self.config.task.value}"

    def reader(
        self, split: DataSplit, shuffle: Shuffle = Shuffle.none, seed: int = 0, number: int = 0
    ) -> ExampleReader:
        """A reader of an endless stream. Raises ConfigError if sequences are too short for the task."""
        self.task.check(split.seq_len, "data.seq_len")

        # Cached: each example of a step is used for its tokens and for its number of labels.
        @lru_cache(maxsize=64)
        def example(sequence: int) -> Example:
            return self.task.example(split.seq_len, draws_for(self.config, self.purpose, seed, sequence))

        return ExampleReader(example, None, split, self.description)

    def describe(self, shuffle: Shuffle, seq_len: int, num_sequences: float) -> str:
        return f"{self.description}: {num_sequences:,.0f} different sequences of {seq_len:,} tokens"


@dataclass(frozen=True)
class OpenedSynthetic(OpenedData):
    """A task, with different examples for training and validation."""

    train: list[SyntheticSource]
    validation: list[SyntheticSource]

    def identity(self) -> dict[str, Any]:
        config = self.train[0].config
        settings = {
            "task": config.task.value,
            "facts": config.num_facts,
            "queries": config.num_queries,
            "alphabet": config.alphabet,
            "keys": config.num_keys,
            "digits": config.digits,
        }
        own = {f"data.synthetic.{name}": value for name, value in settings.items()}
        return {**own, "data.tokenizer": load_tokenizer(config.tokenizer).info}

    def tokenizer_files(self) -> Path | None:
        folder = Path(self.train[0].config.tokenizer)
        return folder if folder.is_dir() else None


def open_synthetic(config: DataConfig, *, vocab_size: int, validate: bool) -> OpenedSynthetic:
    """Open the task of a configuration.

    Raises:
        ConfigError: sequences are too short for the task, or its vocabulary exceeds the model's.
        DataError: the tokenizer cannot be loaded.
    """
    settings = config.synthetic
    task = make_task(settings, load_tokenizer(settings.tokenizer), vocab_size)
    task.check(config.seq_len, "data.seq_len")
    held_out = [SyntheticSource(settings, task, "validation")] if validate else []
    return OpenedSynthetic([SyntheticSource(settings, task, "training")], held_out, [])
