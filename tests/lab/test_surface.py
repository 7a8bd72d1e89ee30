"""The list of what users can name: options in help texts, and the comparison of two lists."""

from __future__ import annotations

import tomllib

from lab.campaigns.surface import CHANGES, compare, options

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


def test_every_entry_has_a_reason() -> None:
    for change in tomllib.loads(CHANGES.read_text()).get("change", []):
        assert {"kind", "was", "because"} <= change.keys() <= {"kind", "was", "now", "because"}
