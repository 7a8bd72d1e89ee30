"""What every registered mixer has to fulfil, in a small model with its configuration's defaults."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.language_model import LanguageModel
from models.mixer_registry import MIXERS
from models.parameters import cast
from models.spec import ModelSpec
from tests.support.distributed import run_distributed
from tests.support.positions import position_of
from tests.support.sp_reference import build_scans
from zeco_train.ops.layer_states import LayerStates
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

TOKENS = 70
# Of documents.
BORDERS = (0, 10, 25, 50)
# By scan, whether there are documents, and where the second rank begins: each rank has two chunks once, of which one
# reaches into the other rank's few tokens. A document straddles the ranks.
SPLITS = (("lasp2", False, 4), ("chain/3", True, 66))
# fp64: sums of 70 tokens and 2 layers in another order; measured at most 4e-15.
TOLERANCE = 1e-12
# One of each family of states' decays: by key channel; slow: of the delta rule, fixed by head, by token and head.
MARKS = {"gla": (), **dict.fromkeys(("kda", "retnet", "mamba2"), pytest.mark.slow)}
ONE_OF_A_FAMILY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.campaign)) for name in MIXERS]
)


def _build(name: str) -> tuple[LanguageModel, Tensor]:
    """A model in fp64 whose matrices are large enough that every path matters, and tokens for it."""
    config = MIXERS[name].config_class(num_layers=2)
    assert config.mixer == name
    model = ModelSpec(config).build().double()
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 5 if parameter.ndim > 1 else 1
    return model, torch.randint(config.vocab_size, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))


def _loss_and_gradients(
    model: LanguageModel, ids: Tensor, scan: Exchange, start: int, stop: int, documents: bool
) -> list[Tensor]:
    """Of the tokens [start, stop), summed over them."""
    model.zero_grad()
    shard = position_of(scan, start, stop, (*BORDERS, TOKENS) if documents else None)
    loss = model(ids[:, start:stop], shard, ids[:, start + 1 : stop + 1])
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


def _ranks_against_one(rank: int, world_size: int, name: str) -> float:
    scans = build_scans(tuple(range(world_size)))
    model, ids = _build(name)
    for scan, documents, split in SPLITS:
        start, stop = (0, split) if rank == 0 else (split, TOKENS)
        rows = ids[:1] if documents else ids
        whole = _loss_and_gradients(model, rows, local_exchange(), 0, TOKENS, documents)
        for ours, expected in zip(
            _loss_and_gradients(model, rows, scans[scan], start, stop, documents), whole, strict=True
        ):
            dist.all_reduce(ours)
            assert (ours - expected).norm() <= TOLERANCE * expected.norm(), f"{scan}, {list(expected.shape)}"
        scans[scan].drain()
    dist.barrier()  # nobody leaves while a peer still waits for what it sent
    packed, plain = (
        _loss_and_gradients(model, rows, local_exchange(), 0, TOKENS, kind)[0].item() for kind in (True, False)
    )
    return abs(packed - plain) / plain


@pytest.mark.slow
@ONE_OF_A_FAMILY
def test_two_ranks_compute_what_one_does(name: str) -> None:
    """Also with documents, of which one straddles the ranks."""
    effects = run_distributed(_ranks_against_one, 2, name)
    assert all(effect > 1e-5 for effect in effects), effects


@pytest.mark.slow
@ONE_OF_A_FAMILY
def test_steps_equal_the_whole_sequence(name: str) -> None:
    """Logits after each token: all at once, and a prompt at once with a step a token from there."""
    model, ids = _build(name)
    prompt, scan = 66, local_exchange()
    with torch.no_grad():
        expected = model(ids, SequencePosition((0, TOKENS + 1), exchange=scan))
        states = LayerStates(carry_in=model.zero_states(2, ids.device), want_carry=True)
        logits = [model(ids[:, :prompt], SequencePosition((0, prompt), exchange=scan), states=states)]
        for position, column in enumerate(ids[:, prompt:].T, prompt):
            logits.append(model.step(column, states.carry_out, torch.full_like(column, position))[:, None])
    assert (torch.cat(logits, dim=1) - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("name", MIXERS)
def test_sums_of_gradients_are_not_rounded_to_bf16(name: str) -> None:
    """A batch of one sequence many times has that many times its gradients, for every parameter.

    Sums in bf16 stop growing after 2^8 equal terms: 0.5 off. Sums in fp32 are rounded once, by at most 2^-9.
    """
    narrow = {"head_dim": 16} if name == "mamba2" else {}
    config = MIXERS[name].config_class(num_layers=1, hidden_size=64, intermediate_size=32, **narrow)
    copies = 512
    model = ModelSpec(config).build()
    model.init_weights(0)
    cast(model, torch.bfloat16)
    row = torch.randint(4, (1, 9), generator=torch.Generator().manual_seed(1))
    one, many = (
        _loss_and_gradients(model, row.expand(count, -1), local_exchange(), 0, 8, False)[1:] for count in (1, copies)
    )
    for (parameter, _), of_one, of_many in zip(model.named_parameters(), one, many, strict=True):
        assert (of_many.double() / copies - of_one.double()).norm() <= 4e-3 * of_one.double().norm(), parameter
