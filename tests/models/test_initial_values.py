"""Initial values drawn by several threads are those of one generator, to the last bit."""

from __future__ import annotations

import pytest
import torch

from models import initial_values
from models.initial_values import jump
from models.parameters import parameter_rules
from models.spec import spec_of
from zeco_train.config.schema import load_config


@pytest.mark.parametrize(("before", "draws"), [(0, 1), (0, 624), (1, 623), (16, 608), (623, 2), (1000, 100_000)])
def test_jump_advances_generator_as_drawing_does(before: int, draws: int) -> None:
    jumped, drawn = (torch.Generator().manual_seed(3) for _ in range(2))
    for generator in (jumped, drawn)[: 2 * bool(before)]:
        torch.empty(before).uniform_(generator=generator)
    jump(jumped, draws)
    torch.empty(draws).uniform_(generator=drawn)
    ours, plain = (torch.empty(2000).normal_(generator=generator) for generator in (jumped, drawn))
    assert torch.equal(ours, plain)


# With convolutions, time steps and rates, and with sizes that take more numbers than values.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings",
    [["model=kda_tiny"], ["model=mamba2_tiny"], ["model=gla_tiny", "model.vocab_size=259", "model.hidden_size=72"]],
)
def test_threads_draw_what_one_generator_does(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(load_config([*settings, "model.num_layers=2"]).model)
    threaded, plain = spec.build(), spec.build()
    jumps = []
    monkeypatch.setattr(initial_values, "_SHARE", spec.num_parameters // 6)
    monkeypatch.setattr(initial_values, "jump", lambda generator, draws: jumps.append(draws) or jump(generator, draws))
    threaded.init_weights(5)
    assert len(jumps) > 2
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter, rule in parameter_rules(plain):
            rule.init(parameter, spec.config.initializer_range, generator)
    for (name, ours), other in zip(threaded.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, other), name
