"""The mark `few`: what the gate has of a parametrized test."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.few import is_among_few, mark_others

LETTERS, NUMBERS = ["a", "b", "c"], [1.5, 2.5]
SLOW = pytest.param(3.5, marks=pytest.mark.slow)


def chosen(number: int, letters: list[Any], numbers: list[Any]) -> list[tuple[Any, Any]]:
    axes = [(["letter"], letters), (["number"], numbers)]
    plain = [row if isinstance(row, (str, float)) else row.values[0] for row in numbers]
    cells = itertools.product(letters, plain)
    return [cell for cell in cells if is_among_few(axes, dict(zip(("letter", "number"), cell, strict=True)), number)]


def test_each_value_is_in_a_case() -> None:
    assert chosen(0, LETTERS, NUMBERS) == [("a", 1.5), ("b", 2.5), ("c", 1.5)]


def test_a_number_takes_as_many_from_the_first_on() -> None:
    assert chosen(1, LETTERS, NUMBERS) == [("a", 1.5)]
    assert chosen(2, LETTERS, NUMBERS) == [("a", 1.5), ("b", 2.5)]


def test_slow_values_are_in_no_case_and_hide_no_other() -> None:
    assert chosen(0, LETTERS, [SLOW, *NUMBERS]) == [("a", 1.5), ("b", 2.5), ("c", 1.5)]


@pytest.mark.few(2)
@pytest.mark.parametrize(("first", "second"), [("a", object()), ("b", object()), ("c", object()), ("d", object())])
@pytest.mark.parametrize("third", [[1]])
def test_others_are_of_a_campaign(request: pytest.FixtureRequest, first: str, second: object, third: list[int]) -> None:
    for mark in ("campaign", "slow"):
        assert (request.node.get_closest_marker(mark) is not None) == (first not in "ac")


@pytest.mark.few(3, quick=2)
@pytest.mark.parametrize("value", [*range(6)])
def test_few_that_are_not_quick_are_slow(request: pytest.FixtureRequest, value: int) -> None:
    """The few are 0, 2 and 4."""
    assert (request.node.get_closest_marker("campaign") is not None) == (value % 2 == 1)
    assert (request.node.get_closest_marker("slow") is not None) == (value not in (0, 2))


def test_without_parameters_it_is_refused(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.few)
    with pytest.raises(pytest.UsageError, match="few needs parametrize"):
        mark_others(request.node)
