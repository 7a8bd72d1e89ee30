"""The order of sequences: a permutation that needs no memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from data.randomness import Permutation


@pytest.mark.parametrize("n", [*range(1, 70), 255, 256, 257, 1000, 1024, 4097])
def test_permutation_is_a_bijection(n: int) -> None:
    for epoch, of in [(0, "sequences"), (1, "sequences"), (1, "documents")]:
        permutation = Permutation(n, seed=3, epoch=epoch, of=of)
        order = list(map(permutation, range(n)))
        assert sorted(order) == list(range(n))
        assert permutation.map(np.arange(n)).tolist() == order


def test_permutation_depends_on_seed_and_epoch_and_is_random() -> None:
    n = 10_000
    orders = {key: [Permutation(n, *key)(i) for i in range(n)] for key in [(0, 0), (0, 1), (1, 0), (-1, 0)]}
    assert orders[0, 0] == [Permutation(n, 0, 0)(i) for i in range(n)]
    for first, second in itertools.combinations(orders.values(), 2):
        # Two random orders agree in 1 place on average (Poisson); 10 or more has probability 1e-7.
        assert sum(a == b for a, b in zip(first, second, strict=True)) < 10
    for order in orders.values():
        # Correlation of a random order with its index is 0 ± 1/√n, also between neighbours; 5 deviations.
        for a, b in [(range(n), order), (order[:-1], order[1:])]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / n**0.5
    assert 0 <= Permutation(10**15, 0, 0)(10**15 - 1) < 10**15  # constant memory and time for any n


@pytest.mark.parametrize("n", [2, 3, 4])
def test_all_orders_of_few_elements_occur(n: int) -> None:
    orders = {tuple(map(Permutation(n, 0, epoch), range(n))) for epoch in range(400)}
    assert len(orders) == {2: 2, 3: 6, 4: 24}[n]
