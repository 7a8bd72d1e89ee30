"""Which cases of a parametrized test the gate has: `@pytest.mark.few` marks the others `campaign`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def is_among_few(
    axes: Sequence[tuple[Sequence[str], Sequence[Any]]], values: Mapping[str, Any], number: int, quick: int = 0
) -> bool:
    """Whether a case is one of the few.

    These are the cases in which the k-th values of all axes meet, for k up to the length of the longest axis; shorter
    axes begin again. So each value of each axis is in one of them. Values marked `slow` or `campaign` are left
    out.

    Args:
        axes: names and values of each `parametrize` of the test.
        values: of the case, by name.
        number: if it is not 0, only as many of the few, evenly spaced, the first among them.
        quick: the same, of those.
    """
    plain = [[_values(row, names) for row in rows if not _is_slow(row)] for names, rows in axes]
    found = [[values[name] for name in names] for names, _ in axes]
    longest = max(map(len, plain))
    chosen: Sequence[int] = range(longest)
    for count in filter(None, (number, quick)):
        chosen = [chosen[step * len(chosen) // count] for step in range(count)]
    return any(all(_same(rows[k % len(rows)], own) for rows, own in zip(plain, found, strict=True)) for k in chosen)


def one_of(cases: Iterable[str], *kept: str) -> list[Any]:
    """Cases of which only `kept` are tests of every gate; `lab.campaigns.matrices` runs the others."""
    cases = [*cases]
    assert {*kept} <= {*cases}
    return [case if case in kept else pytest.param(case, marks=pytest.mark.campaign) for case in cases]


def mark_others(item: pytest.Item) -> None:
    """Apply `@pytest.mark.few(number=0, quick=0)`: mark a case that is not among the few `campaign`.

    Of the few those that are not among the quick ones become `slow`, and so do all of campaigns.

    Raises:
        pytest.UsageError: the test is not parametrized.
    """
    if (mark := item.get_closest_marker("few")) is not None:
        parametrized = [(_names(each.args[0]), [*each.args[1]]) for each in item.iter_markers("parametrize")]
        if not parametrized:
            raise pytest.UsageError(f"{item.nodeid}: few needs parametrize")
        values, number = item.callspec.params, mark.args[0] if mark.args else 0  # type: ignore[attr-defined]
        if not is_among_few(parametrized, values, number):
            item.add_marker(pytest.mark.campaign)
        elif not is_among_few(parametrized, values, number, **mark.kwargs):
            item.add_marker(pytest.mark.slow)
    if item.get_closest_marker("campaign"):
        item.add_marker(pytest.mark.slow)


def _names(names: str | Sequence[str]) -> list[str]:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]


def _is_slow(row: Any) -> bool:
    return isinstance(row, ParameterSet) and any(
        getattr(mark, "name", "") in ("slow", "campaign") for mark in row.marks
    )


def _values(row: Any, names: Sequence[str]) -> Sequence[Any]:
    if isinstance(row, ParameterSet):
        return row.values
    return [row] if len(names) == 1 else row


def _same(row: Sequence[Any], own: Sequence[Any]) -> bool:
    # By identity: values may have no equality, such as tensors.
    return all(value is other for value, other in zip(row, own, strict=True))
