"""Steps of hybrids alone, from the first token on."""

from __future__ import annotations

import pytest
import torch

from tests.generate.test_hybrid import HYBRIDS, TOLERANCE, build, relative_error, texts
from zeco_train.generate.prefill import whole_logits

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize("name", HYBRIDS)
def test_steps_from_the_first_token_equal_the_whole_sequence(name: str) -> None:
    model = build(name)
    ids = torch.stack([text[:80] for text in texts()[:1] * 2])
    ids[1] = ids[1].flip(0)
    states = model.zero_states(2, ids.device, capacity=80)
    before = [state.data_ptr() for state in states]
    steps = [model.step(column, states, torch.full_like(column, t)) for t, column in enumerate(ids.T)]
    assert relative_error(torch.stack(steps, 1), whole_logits(model, ids)) <= TOLERANCE
    assert [state.data_ptr() for state in states] == before
