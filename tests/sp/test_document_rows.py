"""Models over batches in which each sequence has documents of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.attn import AttnConfig
from models.language_model import LanguageModel
from models.mixer_registry import MIXERS
from models.spec import ModelSpec
from tests.sp.test_operators import STARTS
from tests.support.distributed import on_ranks
from tests.support.sp_reference import TIMEOUT
from zeco_train.collectives.wire import Wire
from zeco_train.ops.layer_states import LayerStates
from zeco_train.ops.position import SequencePosition, even_bounds
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.seam import Exchange
from zeco_train.sp.attention.method_registry import METHODS
from zeco_train.sp.backend_registry import SPConfig
from zeco_train.sp.exchange import connect, local_exchange

pytestmark = pytest.mark.numeric

# Of a sequence.
TOKENS = 13


def documents_of(rows: slice = slice(None)) -> list[Tensor]:
    """The borders of each row's documents."""
    return [torch.tensor([0, *(start for start in starts if start > 0), TOKENS]) for starts in STARTS[rows]]


def build(recompute: Recompute = Recompute.none) -> LanguageModel:
    """A convolution, a scan and softmax attention, in fp64, with matrices large enough that every path matters."""
    attn = AttnConfig(layers=[1], num_heads=2, head_dim=8, window=5)
    config = MIXERS["mamba2"].config_class(hidden_size=32, num_layers=2, attn=attn, head_dim=8, state_size=8)
    model = ModelSpec(config).build().double()
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 5 if parameter.ndim > 1 else 1
    model.set_recompute(recompute)
    return model


def tokens_and_labels() -> Tensor:
    return torch.randint(256, (2, len(STARTS), TOKENS), generator=torch.Generator().manual_seed(1))


def part_of(exchange: Exchange, bounds: Sequence[int], rank: int = 0, rows: slice = slice(None)) -> SequencePosition:
    return SequencePosition(bounds, rank, seq_len=TOKENS, documents=documents_of(rows), exchange=exchange)


def gradients(model: LanguageModel, shard: SequencePosition, rows: slice, tokens: slice) -> list[Tensor]:
    ids, labels = tokens_and_labels()[:, rows, tokens]
    loss = model(ids, shard, labels)
    loss.backward()
    return [loss.detach(), *(x.grad for x in model.parameters())]


@pytest.mark.slow
@on_ranks(2)
def test_a_recomputed_model_over_ranks_has_the_gradients_of_its_rows(rank: int, world_size: int) -> None:
    alone, total = build(), torch.zeros((), dtype=torch.float64)
    for row in range(len(STARTS)):
        rows = slice(row, row + 1)
        total += gradients(alone, part_of(local_exchange(), (0, TOKENS), 0, rows), rows, slice(None))[0]
    wanted = [total, *(x.grad for x in alone.parameters())]
    bounds = even_bounds(TOKENS, world_size)
    start, stop = bounds[rank : rank + 2]
    groups = [dist.new_group() for _ in range(5)]
    exchange = connect(SPConfig(), (groups[0], groups[1]), TIMEOUT, halo=(groups[2], groups[3]))
    exchange = exchange.replaced(attention=METHODS["ring"].build(Wire(groups[4], "ring", False, TIMEOUT)))
    model = build(Recompute.full)
    found = gradients(model, part_of(exchange, bounds, rank), slice(None), slice(start, stop))
    names = ["loss", *(name for name, _ in model.named_parameters())]
    for name, x, expected in zip(names, found, wanted, strict=True):
        dist.all_reduce(x)
        error = (x - expected).abs().max().item() / expected.abs().max().item()
        assert error <= 1e-11, f"{name} is off by {error:.1e}"
    exchange.drain()


@torch.no_grad()
def test_segments_of_rows_equal_whole_sequences() -> None:
    """Keys of earlier segments are in caches."""
    model, exchange, ids = build(), local_exchange(), tokens_and_labels()[0]
    states, found = model.zero_states(len(ids), ids.device, TOKENS), []
    for start, stop in itertools.pairwise((0, 1, 4, 11, TOKENS)):
        carried = LayerStates(carry_in=states, want_carry=True)
        shard = part_of(exchange, (start, stop))
        found.append(model(ids[:, start:stop], shard, states=carried))
        states = carried.carry_out
    whole = model(ids, part_of(exchange, (0, TOKENS)))
    assert (torch.cat(found, 1) - whole).abs().max() <= 1e-12 * whole.abs().max()
    alone = model(ids, SequencePosition((0, TOKENS), exchange=exchange))
    assert (whole - alone)[0].abs().max() <= 1e-12 * whole.abs().max()
    assert ((whole - alone)[1:].abs().amax((1, 2)) > 1e-3).all()
