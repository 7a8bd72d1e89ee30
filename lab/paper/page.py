"""Question: what of the four papers has this project measured, what is computed, what cannot be here?
Command: python -m lab.paper.page > docs/papers.md
Date: 2026-11-27, from stored results; no GPU
Answer: docs/papers.md. `tests/lab/test_paper.py` writes it again and compares.

The rows are in `tables.toml`. A value is taken from a stored result, or computed by a function of `COMPUTED`; there are
no other numbers of ours in it, and those of the papers are theirs. A row with `measured` and `missing` says what is
missing until a stored result has its value.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lab.paper import formulas
from lab.paper.store import RESULTS
from models.mixer_registry import MIXERS
from zeco_train.bench.figures import reference
from zeco_train.system.command import Parser, docstring
from zeco_train.system.terminal import markdown_table

ROWS = Path(__file__).with_name("tables.toml")
HEAD = """# The papers, table by table

What each of the four papers shows, and what this project has of it: ratios beside the paper's, since the machines
differ, of times or of speeds as the paper's are. *Measured* names the machine and the commit, and links the stored
result; *computed* names the formula; a row without a value says which machine, or which command, it still needs.
Written by `python -m lab.paper.page` from `lab/paper/tables.toml` and the stored results; a test writes it again and
compares.
"""
# Of the rows that a column tells apart.
UNITS = {"ranks": "ranks", "size": "MiB", "size_mb": "MiB", "module": "", "tokens": "tokens a GPU"}
HEADINGS = ["what", "the paper", "here", "how"]


def page() -> str:
    """The whole page, as Markdown."""
    data = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    used: dict[str, None] = {}
    parts = [HEAD]
    for paper in data["paper"]:
        parts.append(f"## {paper['name']}\n\n{paper['about'].strip()}\n")
        for item in paper["item"]:
            lines = [_line(row, item, data["commit"], used) for row in item.get("row", [])]
            parts.append(f"### {item['name']}: {item['title']}\n")
            parts += [f"{item['note'].strip()}\n"] if "note" in item else []
            parts += [markdown_table(HEADINGS, lines)] if lines else []
    commands = [[f"`{name}`", f"`{command_of(load(name))}`"] for name in used]
    parts.append("## Commands of the results\n\n" + markdown_table(["result", "command"], commands))
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _line(
    row: Mapping[str, Any], item: Mapping[str, Any], commits: Mapping[str, str], used: dict[str, None]
) -> list[str]:
    what, theirs = row["what"], _theirs(row.get("theirs", ""))
    kinds = [kind for kind in ("measured", "computed", "missing", "mixer") if kind in row]
    if kinds == ["measured", "missing"]:
        kinds = [kinds[not _is_stored(row["measured"])]]
    if len(kinds) != 1:
        raise ValueError(f"{item['name']}, {what}: needs one of measured, computed, missing and mixer, has {kinds}")
    value = row[kinds[0]]
    if kinds == ["missing"]:
        return [what, theirs, "–", value]
    if kinds == ["mixer"]:
        if any(name not in MIXERS for name in value.split(", ")):
            return [what, theirs, "–", f"not in this version: `model.mixer={value}`"]
        return [what, theirs, ", ".join(f"`{name}`" for name in value.split(", ")), row["how"]]
    if kinds == ["computed"]:
        return [what, theirs, COMPUTED[value](), f"computed: `lab/paper/formulas.py:{value}`"]
    name = value["result"]
    used[name] = None
    result = load(name)
    where = f"{machine_of(result)}, {commits.get(name) or commit_of(result)}"
    how = f"{row.get('kind', 'measured')}: {where}, [{name}](../lab/results/{name}.json)"
    return [what, theirs, _ours(result["rows"], value), how]


def _is_stored(value: Mapping[str, Any]) -> bool:
    if not (RESULTS / f"{value['result']}.json").exists():
        return False
    wheres = [value["where"], *({**value["where"], **value[other]} for other in ("over", "less") if other in value)]
    rows = [row for row in load(value["result"])["rows"] if value["column"] in row]
    return all(any(where.items() <= row.items() for row in rows) for where in wheres)


def _theirs(value: str | Mapping[str, Any]) -> str:
    # Text, or a value of the tables in bench/reference, or a ratio of two of its columns.
    if isinstance(value, str):
        return value
    row = _only(reference(value["table"]), value["where"])
    found = f"{row[value['column']] / row[value['over']]:.3f}" if "over" in value else number(row[value["column"]])
    return f"{found} ({int(row['gpus'])} GPUs)"


def _ours(rows: Sequence[Mapping[str, Any]], value: Mapping[str, Any]) -> str:
    column, where, unit = value["column"], value["where"], value.get("unit", "")
    if "mean_over" in value:
        several = [row[column] for row in _those(rows, where)]
        middle = sum(several) / len(several)
        if len(several) == 1:
            return f"{middle:.3f} (one of the {value['mean_over']})"
        return f"{middle:.3f} ({min(several):.3f} to {max(several):.3f}, {len(several)} {value['mean_over']})"
    if "across" in value:
        return _series(rows, value)
    row = _only(rows, where)
    found = row[column]
    own = f"{number(found)} {unit}".strip()
    if "planned" in value:
        # A search that was stopped says so.
        note = f"; {row['note']}" if "note" in row else ""
        return f"{found / row[value['planned']]:.3f} of the plan's ({own} / {number(row[value['planned']])}){note}"
    if "over" not in value:
        return own
    other = _only(rows, {**where, **value["over"]})[column]
    if value.get("pair"):
        return f"{found:.5f} / {other:.5f}"
    if value.get("speed"):
        # Of times, beside a paper's ratio of speeds.
        return f"{other / found:.3f} times the speed ({own}; {number(other)})"
    return f"{found / other:.3f} ({own} / {number(other)})"


def _series(rows: Sequence[Mapping[str, Any]], value: Mapping[str, Any]) -> str:
    # Values of several rows, which `across` tells apart, less those of other rows, in a unit of their own.
    across, column, where = value["across"], value["column"], value["where"]
    found = {row[across]: row[column] for row in _those(rows, where) if column in row}
    if "less" in value:
        others = {row[across]: row[column] for row in _those(rows, {**where, **value["less"]})}
        found = {key: one - others[key] for key, one in found.items()}
    if "over" in value:
        others = {row[across]: row[column] for row in _those(rows, {**where, **value["over"]})}
        found = {key: one / others[key] for key, one in found.items()}
    texts = (number(one / value.get("per", 1)) for one in found.values())
    places = ", ".join(str(place) if isinstance(place, str) else f"{place:g}" for place in found)
    return f"{', '.join(texts)} {value['unit']}".strip() + f" ({places} {UNITS[across]}".rstrip() + ")"


def _those(rows: Sequence[Mapping[str, Any]], where: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = [row for row in rows if where.items() <= row.items()]
    if not found:
        raise ValueError(f"no row has {dict(where)}")
    return found


def _only(rows: Sequence[Mapping[str, Any]], where: Mapping[str, Any]) -> Mapping[str, Any]:
    found = _those(rows, where)
    if len(found) > 1:
        raise ValueError(f"{len(found)} rows have {dict(where)}")
    return found[0]


def number(value: float) -> str:
    """Three digits, or all of a large one."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


@cache
def load(name: str) -> dict[str, Any]:
    """A stored result: of a benchmark, or of a script of this folder."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def machine_of(result: Mapping[str, Any]) -> str:
    """As "4 × H200"."""
    if "machine" in result:
        return str(result["machine"])
    return f"{result['world_size']} × {result['environment']['device_name'].removeprefix('NVIDIA ')}"


def commit_of(result: Mapping[str, Any]) -> str:
    """Short, each of several; with a plus if the tree had changes."""
    commits = str(result.get("commit") or result.get("config", {}).get("commit") or result["environment"]["commit"])
    return " and ".join(each[:8] + "+" * each.endswith("+") for each in commits.split(", "))


def command_of(result: Mapping[str, Any]) -> str:
    """Without the arguments that say where results go, and which commit it is."""
    if isinstance(result["command"], str):
        return str(result["command"])
    given = [text for text in result["command"] if not text.startswith(("out=", "commit=", "budget_seconds="))]
    quoted = " ".join(f"'{text}'" if "[" in text else text for text in given)
    return f"torchrun --nproc-per-node {result['world_size']} -m zeco_train.bench {quoted}"


COMPUTED: dict[str, Callable[[], str]] = {
    name: function
    for name, function in vars(formulas).items()
    if getattr(function, "__module__", "") == formulas.__name__
}


if __name__ == "__main__":
    Parser(prog="python -m lab.paper.page", description=docstring(sys.modules[__name__])).parse_args()
    sys.stdout.write(page())
