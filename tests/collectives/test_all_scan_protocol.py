"""A model of the All-Scan protocol over symmetric memory: correct in any step order, incorrect without its rules."""

from __future__ import annotations

import random

import pytest

from tests.support.all_scan_model import Call, Model, ProtocolError


def run(seed: int, algorithms: tuple[str, ...], *mutations: str) -> None:
    """Six scans of random shapes, CTAs and algorithms by 2 to 4 ranks."""
    numbers = random.Random(seed)
    ranks = numbers.choice((2, 3, 4))
    calls = [
        Call(
            numbers.choice(algorithms),
            tiles=numbers.choice((1, 2, 5, 8)),
            tile=numbers.choice((1, 2, 3)),
            ctas=numbers.choice((1, 2, 3)),
            carry=numbers.random() < 0.3,
        )
        for _ in range(6)
    ]
    Model(ranks, calls, mutations, seed).run()


@pytest.mark.parametrize("algorithms", [("chain",), ("two_shot",), ("chain", "two_shot")], ids=str)
def test_protocol_is_correct_in_random_step_orders(algorithms: tuple[str, ...]) -> None:
    for seed in range(25):
        run(seed, algorithms)


@pytest.mark.parametrize(
    ("algorithm", "mutations"),
    [
        ("chain", ("no credit",)),
        ("chain", ("one buffer",)),
        ("chain", ("wait for equality",)),
        ("chain", ("layout from the shape",)),
        ("chain", ("the first CTA advances the epoch",)),
        ("two_shot", ("wait for needed inputs only",)),
        ("two_shot", ("the first CTA advances the epoch",)),
        # With two buffers, chosen by parity, neither of these alone is an error.
        ("two_shot", ("one buffer", "results before the loads")),
        ("two_shot", ("one buffer", "the first rank waits for nobody")),
    ],
    ids=str,
)
def test_protocol_without_a_rule_fails(algorithm: str, mutations: tuple[str, ...]) -> None:
    def runs() -> None:
        for seed in range(300):
            run(seed, (algorithm,), *mutations)

    with pytest.raises(ProtocolError):
        runs()
