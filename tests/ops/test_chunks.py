"""Length of the chunks of tokens."""

from __future__ import annotations

import pytest

from tests.ops.test_ops import make_case
from zeco_train.ops.gla.chunked import intra_scores


@pytest.mark.parametrize(("num_tokens", "chunk"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 64)])
def test_chunk_is_smallest_size_that_fits_up_to_64(num_tokens: int, chunk: int) -> None:
    case = make_case(num_tokens)
    assert intra_scores(case.q, case.k, case.g, None, 1.0).shape[-2:] == (chunk, chunk)
