"""Batches in which each sequence has documents of its own, over uneven ranks, against the recurrences of its rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import opcheck

from models.attn import AttnConfig
from models.language_model import LanguageModel
from models.mixer_registry import MIXERS
from models.spec import ModelSpec
from tests.support.distributed import run_distributed
from tests.support.recurrence import recurrence
from tests.support.sp_reference import TIMEOUT, RecordedExchange
from zeco_train.collectives.wire import Wire
from zeco_train.ops.attend import attend_at
from zeco_train.ops.documents import stack_borders
from zeco_train.ops.gla import GLA
from zeco_train.ops.gla.chunked import _GlaForward
from zeco_train.ops.layer_states import LayerStates, StateInput
from zeco_train.ops.mix import mix
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.oracle import exact_softmax
from zeco_train.ops.passes import Passes
from zeco_train.ops.position import SequencePosition, even_bounds
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.rows import by_rows
from zeco_train.ops.seam import Exchange
from zeco_train.sp.attention.method import LocalAttention
from zeco_train.sp.attention.method_registry import METHODS
from zeco_train.sp.backend_registry import SPConfig
from zeco_train.sp.exchange import connect, local_exchange

pytestmark = pytest.mark.numeric

SIZES = {"B": 3, "H": 4, "G": 2, "K": 6, "V": 5, "C": 7, "W": 4, "1": 1}
NAMES = [name for name, operator in OPERATORS.items() if not operator.reads_whole]
# Tokens of each rank; a sequence ends with the last one.
LENGTHS = {1: (9,), 2: (1, 6), 3: (5, 1, 3), 5: (1, 1, 1, 5, 2)}
# Where documents begin, by row: one that continues from the carry, several over ranks after it, one a token.
STARTS = ((), (2, 3, 6), tuple(range(10)))
# Sums of tens of terms near 1, each rounded by 2^-53.
TOLERANCE = 1e-13
PROMISES = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]


def tensors(name: str, tokens: int) -> dict[str, Tensor]:
    """Operands, do, carry_in and dcarry_out in fp64."""
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    operator, sizes = OPERATORS[name], SIZES | {"T": tokens}
    values = {key: random(*(sizes[dim] for dim in dims)) for key, dims in operator.dims_of.items()}
    changes = {
        "k": partial(torch.nn.functional.normalize, dim=-1),
        "g": lambda x: -x.abs() / 3,
        "log_decay": lambda x: -x.abs() / 3,
        "beta": lambda x: 2 * x.sigmoid(),
    }
    values = {key: changes.get(key, lambda x: x)(x) for key, x in values.items()}
    operands = [*values.values()]
    values["do"] = random(*operands[operator.output].shape)
    return values | {key: random(*operator.state_shape(operands)) for key in ("carry_in", "dcarry_out")}


def has_rows(name: str, key: str) -> bool:
    return "B" in OPERATORS[name].dims_of.get(key, "B")


def expected(name: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the whole sequences, each by itself."""
    rows = []
    for row, starts in enumerate(STARTS):
        own = {key: x[row : row + 1] if has_rows(name, key) else x for key, x in values.items()}
        do, carry_in, dcarry_out = (own.pop(key) for key in ("do", "carry_in", "dcarry_out"))
        inside = [start for start in starts if start < do.shape[1]]
        rows.append(recurrence(name, own, do, inside, carry_in, dcarry_out))
    return {
        key: torch.cat([row[key] for row in rows]) if has_rows(name, key[1:]) else sum(row[key] for row in rows)
        for key in rows[0]
    }


def shard_of(exchange: Exchange, borders: Sequence[int], rank: int) -> SequencePosition:
    """This rank's tokens, with the documents of `STARTS`."""
    start, stop = borders[rank : rank + 2]
    doc_ids = torch.stack([doc_ids_of(starts, start, stop) for starts in STARTS])
    return SequencePosition(borders, rank, exchange=exchange).with_tensors(doc_ids, torch.arange(start, stop))


def doc_ids_of(starts: Sequence[int], start: int, stop: int) -> Tensor:
    restarts = torch.zeros(stop - start, dtype=torch.int32)
    restarts[[border - start for border in starts if start <= border < stop]] = 1
    return restarts.cumsum(0, dtype=torch.int32)


def own_tokens(name: str, values: dict[str, Tensor], tokens: slice) -> dict[str, Tensor]:
    dims = OPERATORS[name].dims_of | {"do": "BT", "carry_in": "", "dcarry_out": ""}
    return {key: x[:, tokens] if "T" in dims[key] else x for key, x in values.items()}


def found_by(
    name: str, values: dict[str, Tensor], shard: SequencePosition, replayed: Tensor | None
) -> dict[str, Tensor]:
    """o, carry_out and every gradient of this rank's tokens."""
    keys = [key for key in OPERATORS[name].operands if key != "log_decay"]
    leaves = {key: values[key].clone().requires_grad_() for key in (*keys, "carry_in")}
    o, carry_out = mix(
        name,
        [leaves.get(key, values[key]) for key in OPERATORS[name].operands],
        shard,
        scale=1.0 if name == "short_conv" else None,
        incoming_state=replayed,
        carry_in=leaves["carry_in"],
        want_carry=True,
    )
    assert carry_out is not None
    found = torch.autograd.grad([o, carry_out], [*leaves.values()], [values["do"], values["dcarry_out"]])
    results = {"o": o.detach()} | {f"d{key}": grad for key, grad in zip(leaves, found, strict=True)}
    return results if replayed is not None else results | {"carry_out": carry_out.detach()}


def suite(rank: int, world_size: int) -> None:
    groups = [dist.new_group() for _ in range(4)]
    exchange = RecordedExchange(connect(SPConfig(), (groups[0], groups[1]), TIMEOUT, halo=(groups[2], groups[3])))
    borders = [*itertools.accumulate(LENGTHS[world_size], initial=0)]
    tokens = slice(*borders[rank : rank + 2])
    for name in NAMES:
        values = tensors(name, borders[-1])
        wanted = expected(name, values)
        # A halo is not recorded.
        of_states = exchange.replaced(halo=exchange.states)
        shard, own = shard_of(of_states, borders, rank), own_tokens(name, values, tokens)
        exchange.events.clear()
        found = found_by(name, own, shard, None)
        assert exchange.events.count("launch forward") == exchange.events.count("launch reverse") == 1, name
        again = found_by(name, own, shard, exchange.received["R"])
        assert all(torch.equal(x, found[key]) for key, x in again.items()), f"{name}: a replay"
        passes = [found]
        if OPERATORS[name].state_is_halo:
            passes.append(found_by(name, own, shard.over(exchange), None))
        for key in found:
            if "T" not in OPERATORS[name].dims_of.get(key[1:], "T"):
                for results in passes:
                    dist.all_reduce(results[key])
            of_tokens = key == "o" or "T" in OPERATORS[name].dims_of.get(key[1:], "")
            mine = wanted[key][:, tokens] if of_tokens else wanted[key]
            for results in passes:
                error = (results[key] - mine).abs().max().item() / max(1.0, wanted[key].abs().max().item())
                assert error <= TOLERANCE, f"{name}: {key} is off by {error:.1e}"
    exchange.drain()
    dist.barrier()  # keep ranks alive until their peers have received everything


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.campaign) for n in (1, 3, 5))])
def test_rows_with_documents_of_their_own_equal_their_recurrences(world_size: int) -> None:
    run_distributed(suite, world_size)


def by_rows_and_alone(name: str, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The results of a batch over one rank, and of each of its sequences alone."""
    borders, exchange = [0, values["do"].shape[1]], local_exchange()
    shard = shard_of(exchange, borders, 0)
    shard = shard.with_tensors(shard.doc_ids.to(values["do"].device), shard.positions)
    alone = []
    for row, doc_ids in enumerate(shard.doc_ids):
        own = {key: x[row : row + 1] if has_rows(name, key) else x for key, x in values.items()}
        alone.append(found_by(name, own, shard.with_tensors(doc_ids, shard.positions), None))
    return found_by(name, values, shard, None), alone


def check_same_bits(name: str, values: dict[str, Tensor]) -> None:
    found, alone = by_rows_and_alone(name, values)
    for key, x in found.items():
        of_rows = [row[key] for row in alone]
        if has_rows(name, key[1:]):
            assert torch.equal(x, torch.cat(of_rows)), f"{name}: {key}"
        else:
            wide = [grad.float() if grad.dtype == torch.bfloat16 else grad for grad in of_rows]
            assert torch.equal(x, sum(wide[1:], wide[0]).to(x.dtype)), f"{name}: {key}"


def in_bf16(name: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tokens in bf16; decays, strengths and states in fp32."""
    wide = ("g", "log_decay", "beta", "carry_in", "dcarry_out")
    return {key: x.float() if key in wide else x.bfloat16() for key, x in values.items()}


@pytest.mark.few(quick=3)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_bits_that_it_has_alone(name: str) -> None:
    check_same_bits(name, in_bf16(name, tensors(name, 9)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_kernels_give_a_row_the_bits_that_it_has_alone(name: str) -> None:
    """Rows of odd lengths do not start at 16 bytes. Nothing synchronises the host."""
    values = {key: x.cuda() for key, x in in_bf16(name, tensors(name, 203)).items()}
    check_same_bits(name, values)
    shard = shard_of(local_exchange(), [0, 203], 0)
    shard = shard.with_tensors(shard.doc_ids.cuda(), shard.positions)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found_by(name, values, shard, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Keeping(_GlaForward):
    """GLA's forward pass, which saves 2g in place of g, and its states, as kernels do."""

    def outputs(self, incoming_state: Tensor) -> Tensor:
        self.saved = 2 * self._g, incoming_state.clone(), self.state.mT.contiguous()
        return super().outputs(incoming_state)


def keeping_backward(
    operands: Sequence[Tensor],
    do: Tensor,
    saved: Sequence[Tensor],
    incoming: Tensor | None,
    scale: float,
    doc_ids: Tensor | None,
) -> object:
    q, k, v, doubled = operands
    incoming_state, turned = saved
    assert incoming is None
    assert turned.mT.shape == incoming_state.shape
    return GLA.select(operands).backward([q, k, v, doubled / 2], do, (), incoming_state, scale, doc_ids)


def keeping_saved(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    g = operands[3]
    B, H, K, V = GLA.state_shape(operands)
    return g.new_empty(g.shape), g.new_empty(B, H, K, V), g.new_empty(B, H, V, K)


KEEPING = Passes(Keeping, keeping_backward, keeping_saved, replaced=(3,), needs_incoming=False)


@pytest.mark.slow
def test_saved_tensors_return_to_their_rows() -> None:
    """Those in place of operands too; a compiler is promised the same ones."""
    values = tensors("gla", 9)
    wanted, _ = by_rows_and_alone("gla", values)
    with mock.patch.dict(OPERATORS, {"gla": replace(GLA, portable=KEEPING, cuda=None)}):
        found, _ = by_rows_and_alone("gla", values)
        check_promises("gla", values)
    assert all(torch.equal(x, found[key]) for key, x in wanted.items())


@pytest.mark.slow  # tests/ops has opcheck without rows
@pytest.mark.parametrize("name", ["short_conv", "fixed_decay"])
def test_operator_passes_opcheck_by_rows(name: str) -> None:
    check_promises(name, tensors(name, 9))


def check_promises(name: str, values: dict[str, Tensor]) -> None:
    """Shapes, dtypes and strides that a compiler is promised, and no aliases."""
    shard = shard_of(local_exchange(), [0, 9], 0)
    operands = [values[key].clone().requires_grad_(key != "log_decay") for key in OPERATORS[name].operands]
    where = 1.0, shard.handle, shard.doc_ids
    arguments = (operands, name, *where, None, values["carry_in"].clone().requires_grad_(), True)
    opcheck(torch.ops.zeco.mix.default, arguments, test_utils=PROMISES)


def test_wrong_pieces_are_refused() -> None:
    operands = [torch.zeros(2, 4, 3, 6) for _ in range(4)]
    doc_ids = torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^doc_ids: of 3 sequences, for a batch of 2$"):
        by_rows(GLA, operands, doc_ids)
    with pytest.raises(ValueError, match=r"^documents: expected ids of shape \[2, 4\], got \[2, 3\]$"):
        GLA.check(operands, doc_ids[:2, :3])


# --- softmax attention ---

# Heads of queries and of keys, which three ranks can share; tokens of a sequence.
HEADS, KEY_HEADS, HEAD_DIM, TOKENS = 6, 3, 4, 13


def documents_of(rows: slice = slice(None)) -> list[Tensor]:
    """The borders of each row's documents."""
    return [torch.tensor([0, *(start for start in starts if start > 0), TOKENS]) for starts in STARTS[rows]]


def softmax(rank: int, world_size: int) -> None:
    """Every method, with and without a window: o and the gradients, and a replay's; then opcheck on one rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": HEADS, "k": KEY_HEADS, "v": KEY_HEADS, "do": HEADS}
    inputs = {
        name: torch.randn(len(STARTS), TOKENS, heads, HEAD_DIM, generator=generator, dtype=torch.float64)
        for name, heads in shapes.items()
    }
    borders = documents_of()
    bounds = even_bounds(TOKENS, world_size)
    start, stop = bounds[rank : rank + 2]
    methods = {"local": LocalAttention()}
    if world_size > 1:
        methods = {name: spec.build(Wire(dist.new_group(), name, False, TIMEOUT)) for name, spec in METHODS.items()}
    for window, (name, method) in itertools.product((None, 3), methods.items()):
        rows = [
            exact_softmax(*(inputs[key][row : row + 1] for key in shapes), borders=of_row, window=window)
            for row, of_row in enumerate(borders)
        ]
        exchange = local_exchange().replaced(attention=method)
        place = SequencePosition(bounds, rank, documents=borders, exchange=exchange)
        state_inputs = StateInput(), StateInput()
        for _ in ("first", "replay"):
            leaves = [inputs[key][:, start:stop].clone().requires_grad_() for key in ("q", "k", "v")]
            o, state_outputs = attend_at(*leaves, HEAD_DIM**-0.5, place, state_inputs, window)
            grads = torch.autograd.grad(o, leaves, inputs["do"][:, start:stop])
            for key, x in zip(rows[0], (o.detach(), *grads), strict=True):
                wanted = torch.cat([row[key] for row in rows])
                error = (x - wanted[:, start:stop]).abs().max().item() / wanted.abs().max().item()
                assert error <= TOLERANCE, f"{name}, {window=}: {key} is off by {error:.1e}"
            state_inputs = tuple(StateInput(state_output.received) for state_output in state_outputs)
    if world_size == 1:
        arguments = *leaves, None, None, 0.5, place.handle, list(place.bounds), 0
        opcheck(torch.ops.zeco.attend.default, (*arguments, stack_borders(borders), 3), test_utils=PROMISES)
        with pytest.raises(ValueError, match=r"^borders: documents of 2 sequences, for a batch of 3$"):
            torch.ops.zeco.attend(*arguments, stack_borders(borders[:2]), None)
    dist.barrier()


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_softmax_of_rows_with_documents_of_their_own_equals_the_formula(world_size: int) -> None:
    run_distributed(softmax, world_size)


# --- models ---


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


def of_model(rank: int, world_size: int) -> None:
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
    dist.barrier()


@pytest.mark.slow
def test_a_recomputed_model_over_ranks_has_the_gradients_of_its_rows() -> None:
    run_distributed(of_model, 2)


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
