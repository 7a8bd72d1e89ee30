"""The order of sequences: a permutation that needs no memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from data.randomness import Permutation


@pytest.mark.parametrize(("epoch", "of"), [(0, "sequences"), (1, "documents")])
def test_permutation_is_a_bijection(epoch: int, of: str) -> None:
    for n in [*range(1, 70), 255, 256, 257, 1025]:
        permutation = Permutation(n, seed=3, epoch=epoch, of=of)
        order = list(map(permutation, range(n)))
        assert sorted(order) == list(range(n))
        assert permutation.map(np.arange(n)).tolist() == order, n


def test_permutation_depends_on_seed_and_epoch_and_is_random() -> None:
    n = 10_000
    orders = {key: Permutation(n, *key).map(np.arange(n)).tolist() for key in [(0, 0), (0, 1), (1, 0), (-1, 0)]}
    for first, second in itertools.combinations(orders.values(), 2):
        # Two random orders agree in 1 place on average (Poisson); 10 or more has probability 1e-7.
        assert sum(a == b for a, b in zip(first, second, strict=True)) < 10
    for order in orders.values():
        # Correlation of a random order with its index is 0 ± 1/√n, also between neighbours; 5 deviations.
        for a, b in [(range(n), order), (order[:-1], order[1:])]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / n**0.5
    assert 0 <= Permutation(10**15, 0, 0)(10**15 - 1) < 10**15  # constant memory and time for any n


def test_all_orders_of_few_elements_occur() -> None:
    assert len({tuple(map(Permutation(4, 0, epoch), range(4))) for epoch in range(400)}) == 24
