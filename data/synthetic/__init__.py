"""The configuration of synthetic tasks and its validation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zeco_train.errors import ConfigError


class Task(Enum):
    """The facts stated in the sequence, and the question about them at its end.

    recall            multi-query associative recall (Arora et al., 2023, arXiv 2312.04927): key-value pairs among
                      random symbols in the first half, keys in the second half, to be answered with their values
    needle            a sentence that assigns a number to a name, somewhere in text: which number?
    needle_multikey   several such sentences; the question is about one of the names
    needle_multivalue one name has several numbers: which, in order?
    variables         boxes hold a number, or the same as an earlier box: which boxes hold this number, in order?
    counting          a bell rings some times, and a horn sounds some times: how often did the bell ring?

    All but the first are text, modelled on RULER (Hsieh et al., 2024, arXiv 2404.06654).
    """

    recall = "recall"
    needle = "needle"
    needle_multikey = "needle_multikey"
    needle_multivalue = "needle_multivalue"
    variables = "variables"
    counting = "counting"

    @property
    def is_text(self) -> bool:
        """Whether examples are text, for a tokenizer; `recall` has symbols of its own."""
        return self is not Task.recall


# Symbol ids, independent of any tokenizer; lower ids are special tokens in most vocabularies.
FIRST_SYMBOL, NUM_SYMBOLS = 3, 256
LARGEST_ALPHABET = (NUM_SYMBOLS - 1) // 2
LARGEST_COUNT = 9

# Default number of facts, and their description.
_FACTS = {
    Task.recall: (8, "pairs of a key and a value"),
    Task.needle: (1, "numbers"),
    Task.needle_multikey: (4, "names with a number"),
    Task.needle_multivalue: (4, "numbers of the name"),
    Task.variables: (4, "boxes that hold the number"),
    Task.counting: (LARGEST_COUNT, "rings at most"),
}


@dataclass
class SyntheticConfig:
    """Settings of a synthetic task.

    Attributes:
        task: the task.
        facts: number of facts: pairs for recall; names for needle_multikey; numbers for needle_multivalue; boxes for
            variables; maximum rings for counting; null for the task's default (8, 4, 4, 4, 9).
        queries: number of queries, for recall; null for one per fact. (A repeated query can be answered from its first
            answer: useful for learning, not for measuring.)
        alphabet: number of key symbols, and of value symbols, for recall.
        keys: number of keys in use, for recall; null for all. (Fewer are easier to learn: with as many keys as pairs,
            each key has a value in every example.)
        digits: of the numbers of needles and variables.
        tokenizer: of the texts: `bytes`, or the folder of a Hugging Face tokenizer.
    """

    task: Task = Task.recall
    facts: int | None = None
    queries: int | None = None
    alphabet: int = 64
    keys: int | None = None
    digits: int = 4
    tokenizer: str = "bytes"

    @property
    def num_facts(self) -> int:
        return _FACTS[self.task][0] if self.facts is None else self.facts

    @property
    def num_queries(self) -> int:
        return self.num_facts if self.queries is None else self.queries

    @property
    def num_keys(self) -> int:
        return self.alphabet if self.keys is None else self.keys

    def validate(self, prefix: str = "data.synthetic") -> None:
        """Raise `ConfigError` for a value out of range or a setting that the task does not use."""
        defaults = SyntheticConfig()
        readers: dict[str, list[Task]] = {
            "facts": [task for task in Task if task is not Task.needle],
            "queries": [Task.recall],
            "alphabet": [Task.recall],
            "keys": [Task.recall],
            "digits": [Task.needle, Task.needle_multikey, Task.needle_multivalue, Task.variables],
            "tokenizer": [task for task in Task if task.is_text],
        }
        for name, tasks in readers.items():
            value = getattr(self, name)
            if value != getattr(defaults, name) and self.task not in tasks:
                needed = ", ".join(task.value for task in tasks)
                raise ConfigError(f"{prefix}.{name}", value, f"is not for {self.task.value}, but for {needed}")
        # Keys of recall are distinct, as are names and boxes; a count has one digit.
        most_facts = {Task.recall: self.num_keys, Task.counting: LARGEST_COUNT}.get(self.task, 64)
        limits = {
            "facts": (self.num_facts, most_facts),
            "queries": (self.num_queries, 1 << 20),
            "alphabet": (self.alphabet, LARGEST_ALPHABET),
            "keys": (self.num_keys, self.alphabet),
            "digits": (self.digits, 9),
        }
        for name, (value, most) in limits.items():
            if not 1 <= value <= most:
                what = f" ({_FACTS[self.task][1]})" if name == "facts" else ""
                raise ConfigError(f"{prefix}.{name}", value, f"must be from 1 to {most}{what}")
