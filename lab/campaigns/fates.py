"""Question: what became of each test, command, option, key and page of d2b9b8f, the commit before the redesign?
Command: python -m lab.campaigns.fates [NEW]; --tests for the test ids alone, half a minute instead of four
Date: 2026-11-26
Answer: results/test_ids_d2b9b8f.csv and results/features_d2b9b8f.md, which it writes.

NEW is what `lab.campaigns.surface` reads: a commit, a folder or a written list; this checkout if it is left out. The
names before are stored in results/surface_d2b9b8f.jsonl.xz, the reasons in surface_changes.toml; where that has none, a
test's is of its history. A name that is gone without a reason gives exit code 1.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from lab.campaigns.surface import PARTS, Fate, Surface, entries, fates, read

RESULTS = Path(__file__).with_name("results")
BEFORE = "d2b9b8f"
HEADS = ("before", "kept", "renamed", "in lab/", "deleted", "UNEXPLAINED", "new")
# Kinds whose names are listed, with their heading; of the other kinds the table has the numbers only.
LISTED = {
    "command": "Commands",
    "option": "Options of commands",
    "key": "Configuration keys",
    "config file": "Files of configs/",
    "page": "Pages",
}
COUNTED = ("metric", "wandb", "tensorboard", "run", "store", "export", "state", "test")


def became(fate: Fate) -> str:
    if not fate.is_explained:
        return "UNEXPLAINED"
    if not fate.now:
        return "deleted"
    if fate.now == fate.name:
        return "kept"
    return "in lab/" if fate.now.startswith(("lab/", "-m lab.", "tests/lab/")) else "renamed"


def write_tests(path: Path, found: Iterable[Fate]) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("id before", "what became of it", "id now", "reason"))
        words = {"renamed": "moved to", "in lab/": "moved to", "deleted": "deleted because"}
        for fate in found:
            what = became(fate)
            rows.writerow((fate.name, words.get(what, what), fate.now, fate.because))


def page(found: list[Fate], new: Surface) -> Iterator[str]:
    yield f"# What became of the commands, options, keys and pages of {BEFORE}\n"
    yield "Written by `python -m lab.campaigns.fates`. A value in `configs/` counts as a name: FILE KEY.\n"
    yield "| kind | " + " | ".join(HEADS) + " |"
    yield "|---" * (len(HEADS) + 1) + "|"
    reached = {(fate.kind, fate.now) for fate in found}
    added = [name for name in new if name not in reached]
    for kind in (*LISTED, *COUNTED):
        counts = Counter(became(fate) for fate in found if fate.kind == kind)
        counts |= {"before": counts.total(), "new": sum(name[0] == kind for name in added)}
        yield f"| {kind} | " + " | ".join(str(counts[head]) for head in HEADS) + " |"
    for kind, heading in LISTED.items():
        yield f"\n## {heading}\n"
        own = [fate for fate in found if fate.kind == kind]
        if gone := [fate for fate in own if became(fate) != "kept"]:
            yield "| before | became | now | reason |\n|---|---|---|---|"
            for fate in gone:
                yield f"| `{fate.name}` | {became(fate)} | {f'`{fate.now}`' if fate.now else ''} | {fate.because} |"
            yield ""
        yield from _lines("Kept", kind, [fate.name for fate in own if became(fate) == "kept"])
        yield from _lines("New", kind, [name for each, name in added if each == kind])


def _lines(heading: str, kind: str, names: list[str]) -> Iterator[str]:
    """One list item for each command or section, with what it has."""
    groups: dict[str, list[str]] = {}
    for name in names:
        words = name.split()
        # An option's command is one word, or two of them: -m MODULE.
        at = {"option": 1 + (words[0] == "-m"), "config file": 1}.get(kind, 0)
        group, own = (" ".join(words[:at]), " ".join(words[at:])) if at else ("", name)
        if kind == "key":
            group = name.partition(".")[0] if "." in name else ""
        groups.setdefault(group, []).append(own)
    for group, items in groups.items():
        listed = ", ".join(f"`{name}`" for name in items if name)
        yield f"- {heading}{f', `{group}`' if group else ''}{f': {listed}' if listed else ''}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="what became of each test, command, option, key and page")
    parser.add_argument("new", metavar="COMMIT|FOLDER|LIST", nargs="?", default=str(Path(__file__).parents[2]))
    parser.add_argument("--tests", action="store_true", help="the test ids alone")
    given = parser.parse_args(arguments)
    old = read(str(RESULTS / f"surface_{BEFORE}.jsonl.xz"))
    new = read(given.new, ["tests"] if given.tests else tuple(PARTS))
    found = [fate for fate in fates(old, new, entries()) if not given.tests or fate.kind == "test"]
    write_tests(RESULTS / f"test_ids_{BEFORE}.csv", (fate for fate in found if fate.kind == "test"))
    if not given.tests:
        (RESULTS / f"features_{BEFORE}.md").write_text("\n".join(page(found, new)) + "\n")
    print(", ".join(f"{what}: {count}" for what, count in Counter(map(became, found)).items()))
    for fate in (unexplained := [fate for fate in found if not fate.is_explained]):
        print(f"UNEXPLAINED: {fate.kind}: {fate.name}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
