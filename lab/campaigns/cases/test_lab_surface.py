"""The list of what users can name: options in help texts, and the comparison of two lists."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lab.campaigns.fates import page, write_tests
from lab.campaigns.surface import compare, entries, fates, options

pytestmark = pytest.mark.campaign

HELP = """usage: command [-h]
  --samples N, -n N     texts for each prompt
  --no-stream           show texts once they are complete
Case loader:
  workers: one line about it.

  workers=[0,2]
needle.KEY=VALUE:
  depths=5
#   RUN_DIR      the runs' folder
"""


def test_options_of_a_help_text() -> None:
    found = dict(options(HELP.replace("#", " ").replace("    RUN", "  RUN")))
    expected = {"--samples": "N, -n N", "--no-stream": "", "loader workers": "[0,2]", "needle depths": "5"}
    assert found == {**expected, "needle RUN_DIR": ""}


def test_comparison_names_what_is_gone_changed_and_new() -> None:
    old = {("key", name): "1" for name in ("same", "value", "away", "kept", "lost", "old")}
    new = {("key", name): "1" for name in ("same", "other", "renamed")} | {("key", "value"): "2"}
    changes = [
        {"kind": "key", "was": "away", "because": "deleted"},
        {"kind": "key", "was": "old", "now": "renamed", "because": "a better name"},
        {"kind": "key", "was": "lost", "now": "nowhere", "because": "an entry that is wrong"},
        {"kind": "test", "was": "kept", "because": "of another kind"},
    ]
    assert sorted(compare(old, new, changes)) == [
        ("key", "changed", "value: '1' became '2'", True),
        ("key", "gone", "away", True),
        ("key", "gone", "kept", False),
        ("key", "gone", "lost", False),
        ("key", "new", "other", True),
    ]


def test_one_entry_moves_all_tests_of_a_file() -> None:
    old = {("test", f"tests/a.py::test_{name}"): "" for name in ("one", "two")}
    new = {("test", "tests/b/c.py::test_one"): ""}
    changes = [{"kind": "test", "was": "tests/a.py::*", "now": "tests/b/c.py::*", "because": "moved"}]
    assert list(compare(old, new, changes)) == [("test", "gone", "tests/a.py::test_two", False)]


def test_tables_say_what_became_of_each_name(tmp_path: Path) -> None:
    old = {("test", name): "" for name in ("same", "away", "lost")} | {("key", "a.b"): "", ("command", "one.sh"): ""}
    new = {("test", "same"): "", ("test", "tests/lab/a.py::b"): "", ("key", "a.c"): "", ("command", "lab/one.sh"): ""}
    changes = [
        {"kind": "test", "was": "away", "now": "tests/lab/a.py::b", "because": "an experiment"},
        {"kind": "key", "was": "a.b", "because": "of no use"},
        {"kind": "command", "was": "*", "now": "lab/*", "because": "an experiment"},
    ]
    found = list(fates(old, new, changes))
    write_tests(tmp_path / "ids.csv", (fate for fate in found if fate.kind == "test"))
    assert list(csv.reader((tmp_path / "ids.csv").open()))[1:] == [
        ["same", "kept", "same", ""],
        ["away", "moved to", "tests/lab/a.py::b", "an experiment"],
        ["lost", "UNEXPLAINED", "", ""],
    ]
    lines = list(page(found, new))
    assert "| command | 1 | 0 | 0 | 1 | 0 | 0 | 0 |" in lines
    assert "| key | 1 | 0 | 0 | 0 | 1 | 0 | 1 |" in lines
    assert {"| `a.b` | deleted |  | of no use |", "- New, `a`: `a.c`"} <= {*lines}


def test_every_entry_has_a_reason() -> None:
    for change in entries():
        assert {"kind", "was", "because"} <= change.keys() <= {"kind", "was", "now", "because"}
