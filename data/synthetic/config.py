"""What a synthetic task asks, and the checks of everything in it that a user can get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zeco_train.errors import ConfigError


class Task(Enum):
    """What is told in the sequence, and asked for at its end.

    recall            multi-query associative recall (Arora et al., 2023, arXiv 2312.04927): pairs of a key and a value
                      among random symbols in the first half, keys in the second half, whose values are asked for
    needle            a sentence that gives a number a name, somewhere in text: which number?
    needle_multikey   several such sentences; one of the names is asked for
    needle_multivalue one name is given several numbers: which, in their order?
    variables         boxes hold a number, or the same as an earlier box: which boxes hold this number, in their order?
    counting          a bell rings some times, and a horn sounds some times: how often did the bell ring?

    All but the first are text, after the kinds of task of RULER (Hsieh et al., 2024, arXiv 2404.06654).
    """

    recall = "recall"
    needle = "needle"
    needle_multikey = "needle_multikey"
    needle_multivalue = "needle_multivalue"
    variables = "variables"
    counting = "counting"

    @property
    def is_text(self) -> bool:
        return self is not Task.recall


# Symbols are these ids, so that they do not depend on a tokenizer; those below are special ones in most vocabularies.
FIRST_SYMBOL, NUM_SYMBOLS = 3, 256
LARGEST_ALPHABET = (NUM_SYMBOLS - 1) // 2
LARGEST_COUNT = 9

# How many facts there are by default, and what they are.
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
    """Attributes:
    task: what is asked.
    facts: how many things are told that may be asked for: recall: pairs; needle_multikey: names; needle_multivalue:
        numbers; variables: boxes; counting: rings at most; None for the task's default (8, 4, 4, 4, 9).
    queries: of recall: how often a key's value is asked for; None for as often as there are facts, each once. (What is
        asked again can also be read off the first time: easier to learn, but not to be measured by.)
    alphabet: of recall: how many symbols may be keys, and how many other ones values.
    keys: of recall: only so many of the keys are used; None for all. (Fewer are easier to learn: with as many as there
        are pairs, each has a value in every example.)
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
        """`facts`, or the default."""
        return _FACTS[self.task][0] if self.facts is None else self.facts

    @property
    def num_queries(self) -> int:
        """`queries`, or the default."""
        return self.num_facts if self.queries is None else self.queries

    @property
    def num_keys(self) -> int:
        """`keys`, or the default."""
        return self.alphabet if self.keys is None else self.keys

    def validate(self, prefix: str = "data.synthetic") -> None:
        """Raise `ConfigError` for a value out of range, or one that the task does not read."""
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
                allowed = f"would be ignored by {prefix}.task={self.task.value}; it is for {needed}"
                raise ConfigError(f"{prefix}.{name}", value, allowed)
        # Keys of recall differ, and so do names and boxes; a count has one digit.
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
