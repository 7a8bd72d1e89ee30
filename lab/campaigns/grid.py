"""The catalogue of planted faults: what each one changes, and where it stands in the grid."""

from __future__ import annotations

import random
import tomllib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = ("dropped term", "wrong sign", "off by one", "stale buffer", "wrong order", "missing decay", "wrong rank")
# What a case must have to show the fault.
WHEN = (
    "everywhere",
    "one rank",
    "one head",
    "reverse",
    "second call",
    "many chunks",
    "odd shape",
    "carry",
    "documents",
)
_FOLDER = Path(__file__).parent / "faults"


@dataclass(frozen=True)
class Fault:
    """A fault that a maintainer could make.

    Attributes:
        id: its name.
        place: operator, scan, method or part of a step that it is in.
        kind: one of `KINDS`.
        when: one of `WHEN`.
        file: path in the repository.
        old: text that occurs once in the file.
        new: its replacement.
        wrong: what is wrong, in a line.
        unchanged: the proof that no result changes by more than rounding; empty if one does.
    """

    id: str
    place: str
    kind: str
    when: str
    file: str
    old: str
    new: str
    wrong: str
    unchanged: str = ""

    @property
    def room(self) -> str:
        """Folder of the tests of its file's room."""
        first, second, *_ = self.file.split("/")
        return second if first == "zeco_train" else first


def catalogue(files: str = "*.toml") -> list[Fault]:
    """All faults of these files, in the order of the files; `kernels/*.toml` are those that need an interpreter."""
    paths = sorted(_FOLDER.glob(files))
    return [Fault(**fields) for path in paths for fields in tomllib.loads(path.read_text())["fault"]]


def draw(faults: Sequence[Fault], number: int, seed: int) -> list[Fault]:
    """As many faults of each place as of any other, as far as there are, without replacement."""
    generator, by_place = random.Random(seed), defaultdict(list)
    for fault in faults:
        by_place[fault.place].append(fault)
    for of_place in by_place.values():
        generator.shuffle(of_place)
    places = list(by_place)
    drawn: list[Fault] = []
    while len(drawn) < min(number, len(faults)):
        generator.shuffle(places)
        drawn += [by_place[place].pop() for place in places if by_place[place]]
    return sorted(drawn[:number], key=list(faults).index)


def faulty(fault: Fault, text: str) -> str:
    """The file's text with the fault.

    Raises:
        ValueError: the text that it replaces does not occur exactly once, or the result does not compile.
    """
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.id}: its old text occurs {count} times in {fault.file}")
    changed = text.replace(fault.old, fault.new)
    try:
        compile(changed, fault.file, "exec")
    except SyntaxError as error:
        raise ValueError(f"{fault.id}: {fault.file} does not compile: {error}") from error
    return changed


def places_by_kinds(faults: Sequence[Fault]) -> str:
    """The grid: numbers of faults by place and kind."""
    counts = Counter((fault.place, fault.kind) for fault in faults)
    rows = [f"{'':14}" + "".join(f"{kind:>14}" for kind in KINDS) + f"{'all':>6}"]
    for place in dict.fromkeys(fault.place for fault in faults):
        numbers = [counts[place, kind] for kind in KINDS]
        rows.append(f"{place:14}" + "".join(f"{number:14}" for number in numbers) + f"{sum(numbers):6}")
    sums = [sum(fault.kind == kind for fault in faults) for kind in KINDS]
    return "\n".join([*rows, f"{'all':14}" + "".join(f"{number:14}" for number in sums) + f"{len(faults):6}"])
