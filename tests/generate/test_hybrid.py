"""Generation with softmax layers: caches of keys and values beside the states, by pieces, steps and ranks."""

from __future__ import annotations

import dataclasses
import itertools
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data.tokenizer import ByteTokenizer
from models.attn import AttnConfig
from models.language_model import LanguageModel
from models.mixer_registry import MIXERS
from models.spec import ModelSpec
from tests.support.distributed import run_distributed
from zeco_train.distributed.mesh import ProcessMesh, init_mesh
from zeco_train.errors import ConfigError
from zeco_train.generate import generator as generator_module
from zeco_train.generate.decode import Decoder
from zeco_train.generate.generator import Generator, Limits
from zeco_train.generate.prefill import Prefill, whole_logits
from zeco_train.generate.sampling import Sampling
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.layer_states import LayerStates
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.softmax.attention import extend
from zeco_train.sp.attention.method_registry import METHODS, AttentionChoice
from zeco_train.sp.backend_registry import Backend, SPConfig
from zeco_train.sp.exchange import connect_model, local_exchange

pytestmark = pytest.mark.numeric

# Mixer, and softmax layers: all forms of them; windows within a piece, over several, and beyond the prompts.
HYBRIDS: dict[str, tuple[str, AttnConfig]] = {
    "gla, last of 2": ("gla", AttnConfig(every=2)),
    "gla, GQA, window in a piece": ("gla", AttnConfig(every=2, num_kv_heads=1, window=5)),
    "mamba2, first, GQA, norm": (
        "mamba2",
        AttnConfig(layers=[0], num_heads=4, num_kv_heads=2, head_dim=6, qk_norm=True),
    ),
    "mamba2, window over pieces": ("mamba2", AttnConfig(layers=[1], num_heads=2, head_dim=8, window=90)),
    "retnet, gate, no positions": ("retnet", AttnConfig(every=2, gate=True, rope_theta=None)),
    "retnet, only softmax, wide window": (
        "retnet",
        AttnConfig(every=1, num_kv_heads=2, window=1000, qk_norm=True, gate=True),
    ),
    "retnet, norms after and over all heads, a part rotated": (
        "retnet",
        AttnConfig(every=2, num_kv_heads=2, qk_norm=True, qk_norm_all_heads=True, rotary_dim=4, norm_after=True),
    ),
}
LENGTHS = (150, 1, 221, 150, 70)
STEPS = 12
# fp64; measured at most 2e-14.
TOLERANCE = 1e-12


def build(name: str) -> LanguageModel:
    """A model in fp64 whose matrices are large enough that every path matters."""
    mixer, attn = HYBRIDS[name]
    own = {"head_dim": 8, "state_size": 8} if mixer == "mamba2" else {"intermediate_size": 24}
    config = MIXERS[mixer].config_class(hidden_size=32, num_layers=2, attn=attn, **own)
    model = ModelSpec(config).build().double()
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 5 if parameter.ndim > 1 else 1
    return model.eval().requires_grad_(False)


def texts() -> list[Tensor]:
    """Token ids of prompts with the `STEPS` tokens after them."""
    random = torch.Generator().manual_seed(1)
    return [torch.randint(256, (length + STEPS,), generator=random) for length in LENGTHS]


def mesh_of(rank: int, world_size: int, sp_size: int) -> ProcessMesh:
    return init_mesh(Launch(rank, world_size, rank), sp_size, torch.device("cpu"), timedelta(seconds=30))


@pytest.fixture
def mesh() -> Any:
    try:
        yield mesh_of(0, 1, 1)
    finally:
        dist.destroy_process_group()


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def logits_of(model: LanguageModel, prefill: Prefill) -> Tensor:
    """Logits after each prompt and each of the tokens after it, [prompts, STEPS + 1, vocab]: by pieces, then steps."""
    ids = texts()
    found = prefill.run([text[:-STEPS] for text in ids], capacity=max(LENGTHS) + STEPS)
    assert found is not None
    logits, states = [found[0]], found[1]
    decoder = Decoder(model, states, torch.tensor(LENGTHS))
    for step in range(STEPS):
        logits.append(decoder.step(torch.stack([text[step - STEPS] for text in ids])))
    return torch.stack(logits, 1)


def expected_logits(model: LanguageModel) -> Tensor:
    """The same from whole sequences."""
    return torch.stack([whole_logits(model, text[None])[0, -STEPS - 1 :] for text in texts()])


@pytest.mark.few(3, quick=2)
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("tokens", [40, 100_000])
def test_pieces_and_steps_equal_the_whole_sequence(mesh: ProcessMesh, name: str, tokens: int) -> None:
    """Prompts of different lengths together, in pieces of 8 tokens and more, or up to the end of the next prompt."""
    model = build(name)
    assert (
        relative_error(logits_of(model, Prefill(model, mesh, local_exchange(), tokens)), expected_logits(model))
        <= TOLERANCE
    )


@pytest.mark.slow
@pytest.mark.few(1)
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


def _over_ranks(rank: int, world_size: int, names: list[str]) -> dict[tuple[str, str], Tensor]:
    mesh = mesh_of(rank, world_size, world_size)
    found = {}
    for name in names:
        model = build(name)
        for method in METHODS if name.startswith("gla") and world_size == 2 else ["auto"]:
            if (spec := METHODS.get(method)) is not None:
                shape = next(layer.attn for layer in model.model.blocks() if layer.attn.state_shapes == ()).shape
                if spec.heads_problem(shape.heads, shape.key_heads, world_size) is not None:
                    continue
            settings = SPConfig(Backend.zeco, attention=AttentionChoice[method])
            scan = connect_model(settings, model.config, mesh)
            found[name, method] = logits_of(model, Prefill(model, mesh, scan, 175))
            scan.drain()
    return found


NAMES = ("gla, GQA, window in a piece", "mamba2, first, GQA, norm")


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, [*NAMES]),
        pytest.param(2, [*HYBRIDS], marks=pytest.mark.campaign),
        pytest.param(3, [*HYBRIDS], marks=pytest.mark.campaign),
    ],
)
def test_prompts_over_ranks_give_the_logits_of_one_rank(world_size: int, names: list[str]) -> None:
    """Every rank decodes from whole caches. Shards are uneven; some pieces are too short to be shared."""
    expected = {name: expected_logits(build(name)) for name in names}
    for rank, by_case in enumerate(run_distributed(_over_ranks, world_size, names)):
        assert {name for name, _ in by_case} == set(names)
        for (name, method), found in by_case.items():
            assert relative_error(found, expected[name]) <= TOLERANCE, (rank, name, method)


@pytest.mark.slow
def test_a_prompt_goes_on_from_given_states_with_a_larger_capacity(mesh: ProcessMesh) -> None:
    """As in bench decode: contexts that continue each other. The given states stay as they are."""
    for name in NAMES:
        model, ids = build(name), texts()[0]
        prefill = Prefill(model, mesh, local_exchange(), 64)
        first = prefill.run([ids[:80]])
        assert first is not None
        kept = [state.clone() for state in first[1]]
        second = prefill.run([ids[80:]], states=first[1], position=80)
        assert second is not None
        assert relative_error(second[0], whole_logits(model, ids[None])[:, -1]) <= TOLERANCE
        assert all(torch.equal(*pair) for pair in zip(first[1], kept, strict=True))


@pytest.mark.few(3, quick=2)
@pytest.mark.parametrize("name", HYBRIDS)
def test_segments_with_documents_equal_the_whole_sequence(name: str) -> None:
    """Of any sizes; documents begin in segments, and go on in later ones."""
    model, ids, scan = build(name), texts()[0][None], local_exchange()
    borders, total = [0, 20, 90, 130, 162], 162
    whole_shard = SequencePosition((0, total), documents=[borders], exchange=scan)
    found, states = [], model.zero_states(1, ids.device, total)
    for start, stop in itertools.pairwise([0, 1, 64, 120, 121, total]):
        shard = SequencePosition((start, stop), seq_len=total, documents=[borders], exchange=scan)
        carried = LayerStates(carry_in=states, want_carry=True)
        found.append(model(ids[:, start:stop], shard, states=carried))
        states = carried.carry_out
    assert relative_error(torch.cat(found, 1), model(ids, whole_shard)) <= TOLERANCE
    assert relative_error(torch.cat(found, 1), whole_logits(model, ids)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_steps_repeated_at_a_position_leave_no_trace_in_caches(mesh: ProcessMesh, name: str) -> None:
    """A CUDA graph's warm-up steps write caches, and only the other states are restored."""
    model = build(name)
    found = Prefill(model, mesh, local_exchange(), 100).run(
        [text[:-STEPS] for text in texts()], capacity=max(LENGTHS) + 1
    )
    assert found is not None
    decoders = [Decoder(model, [state.clone() for state in found[1]], torch.tensor(LENGTHS)) for _ in range(2)]
    kept = [state.clone() for state in found[1]]
    for _ in range(2):
        model.step(torch.zeros(len(LENGTHS), dtype=torch.int64), decoders[0]._states, torch.tensor(LENGTHS))
    for state, before, kind in zip(decoders[0]._states, kept, model.states, strict=True):
        if not kind.is_cache:
            state.copy_(before)
    first, second = (decoder.step(torch.arange(len(LENGTHS))) for decoder in decoders)
    assert torch.equal(first, second)


def test_window_keeps_only_the_tokens_that_are_read() -> None:
    """Keys are their positions: pieces of all lengths, over many turns of the ring."""
    for window in (1, 4, 7):
        cache, start = torch.full((1, 1, min(window, 60), 1), -1.0), 0
        for tokens in (1, 2, 3, 1, 9, 4, 7, 8, 1, 15, 1, 1):
            stop = start + tokens
            keys, first = extend(cache, torch.arange(start, stop).view(1, -1, 1, 1).float(), start, window)
            assert first == max(0, start - window + 1)
            assert keys.flatten().tolist() == list(range(first, stop))
            kept = range(max(0, stop - window), stop)
            assert {int(cache[0, 0, p % window, 0]) for p in kept} == set(kept)
            start = stop


def test_tokens_beyond_the_capacity_are_refused(mesh: ProcessMesh) -> None:
    model, ids = build("gla, last of 2"), texts()[0][None]
    with pytest.raises(ValueError, match="a cache of 30 tokens cannot keep 40"):
        Prefill(model, mesh, local_exchange(), 100).run([ids[0, :40]], capacity=30)
    states = model.zero_states(1, ids.device, capacity=1)
    model.step(ids[:, 0], states, torch.tensor([0]))
    with pytest.raises(IndexError):
        model.step(ids[:, 1], states, torch.tensor([1]))
    with pytest.raises(ValueError, match="give the capacity"):
        model.zero_states(1, ids.device)


def test_caches_are_neither_made_up_nor_differentiated() -> None:
    model, ids = build("gla, last of 2"), texts()[0][None]
    shard = SequencePosition((0, ids.shape[1]), exchange=local_exchange())
    with pytest.raises(ValueError, match="only if they are carried in"):
        model(ids, shard, states=LayerStates(want_carry=True))
    model.requires_grad_(True)
    carried = LayerStates(carry_in=model.zero_states(1, ids.device, ids.shape[1]), want_carry=True)
    with pytest.raises(NotImplementedError, match=r"train\.segments must be 1"):
        model(ids, shard, states=carried)


def test_caches_larger_than_memory_are_refused_before_they_are_made(
    mesh: ProcessMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("gla, GQA, window in a piece")
    generator = Generator(model, ByteTokenizer(), mesh, local_exchange())
    # k and v of one layer, with one head of 8 and the window's 5 tokens, in fp64.
    states = model.zero_states(1, torch.device("cpu"), 50)
    caches = [state for state, kind in zip(states, model.states, strict=True) if kind.is_cache]
    assert model.cache_bytes(50) == sum(cache.nbytes for cache in caches) == 2 * 8 * 5 * 8
    prompts = [generator.encode("abc")]
    # Of the prompt, and of its two texts.
    assert generator.cache_bytes(prompts, Limits(10), samples=2) == 3 * 640
    monkeypatch.setattr(generator_module, "total_memory", lambda device: (639, "this toy"))
    with pytest.raises(ConfigError, match=r"batch=32.*take 6\.4e-07 GB, this toy has 6\.39e-07 GB"):
        generator.generate(prompts, Sampling(), Limits(10), samples=2)
    plain = ModelSpec(dataclasses.replace(model.config, attn=AttnConfig())).build()
    assert plain.cache_bytes(50) == 0
