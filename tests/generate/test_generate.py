"""The generator: the same texts for any batch, prefill size and number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data.tokenizer import ByteTokenizer
from models.language_model import LanguageModel
from models.mixers.gla import GLAConfig
from tests.models.test_model import build, whole
from tests.support.distributed import run_distributed
from zeco_train.distributed.mesh import ProcessMesh, init_mesh
from zeco_train.errors import ConfigError, NonFiniteError
from zeco_train.generate import generator as generator_module
from zeco_train.generate.generator import Completion, Generator, Limits
from zeco_train.generate.prefill import Prefill
from zeco_train.generate.sampling import Sampling
from zeco_train.lifecycle.join import Launch
from zeco_train.sp.backend_registry import Backend, SPConfig
from zeco_train.sp.exchange import connect, local_exchange

pytestmark = pytest.mark.numeric

CONFIG = GLAConfig(hidden_size=24, num_layers=2, num_heads=3, intermediate_size=20, gate_low_rank_dim=5)
PROMPTS = ["def main(", "import numpy as np\n" * 5, "é", ""]


def model() -> LanguageModel:
    return build(CONFIG, spread=15.0)


def mesh_of(rank: int, world_size: int, sp_size: int) -> ProcessMesh:
    return init_mesh(Launch(rank, world_size, rank), sp_size, torch.device("cpu"), timedelta(seconds=30))


@pytest.fixture
def mesh() -> Iterator[ProcessMesh]:
    try:
        yield mesh_of(0, 1, 1)
    finally:
        dist.destroy_process_group()


def generator(mesh: ProcessMesh, backend: Backend = Backend.dp, **settings: Any) -> Generator:
    scan = connect(SPConfig(backend), mesh.scan_groups, mesh.timeout)
    return Generator(model(), ByteTokenizer(), mesh, scan, **settings)


def generate(generator: Generator, prompts: Sequence[str] = PROMPTS, **settings: Any) -> list[Completion]:
    limits = settings.pop("limits", Limits(max_tokens=20))
    sampling = settings.pop("sampling", Sampling(seed=3))
    return generator.generate([generator.encode(text) for text in prompts], sampling, limits, **settings)


def sampled_one_by_one(prompt: str, seed: int, max_tokens: int) -> list[int]:
    """Reference: the model runs on the whole sequence for each token, drawn as in transformers."""
    tokenizer, network = ByteTokenizer(), model()
    ids = tokenizer.encode([prompt])[0].tolist() or [tokenizer.eos_id]
    stream, found = torch.Generator().manual_seed(seed), []
    while len(found) < max_tokens and found[-1:] != [tokenizer.eos_id]:
        with torch.no_grad():
            logits = network(torch.tensor([ids + found]), whole(len(ids) + len(found)))[0, -1]
        found.append(int(torch.multinomial(logits.float().softmax(-1), 1, generator=stream)))
    return found


@pytest.mark.slow
def test_prefill_time_ends_when_the_device_is_done(mesh: ProcessMesh) -> None:
    """CUDA runs the last piece after its call has returned; that time counted as decoding."""
    clock = mock.Mock(perf_counter=mock.Mock(return_value=0.0))

    def wait(device: torch.device) -> None:
        clock.perf_counter.return_value += 5.0

    found = generator(mesh)
    found._mesh = dataclasses.replace(mesh, device=torch.device("cuda", 0))
    with mock.patch.object(generator_module, "time", clock), mock.patch("torch.cuda.synchronize", wait):
        generate(found)
    assert (found.speed.prefill_seconds, found.speed.decode_seconds) == (5.0, 0.0)


@pytest.mark.slow
def test_texts_equal_whole_sequence_reference(mesh: ProcessMesh) -> None:
    found = generate(generator(mesh, prefill_tokens=70), samples=2, limits=Limits(10))
    assert [(c.prompt, c.sample) for c in found] == [(p, s) for p in range(len(PROMPTS)) for s in range(2)]
    tokenizer = ByteTokenizer()
    # The reference takes long, so the first or the second text of a prompt in turns.
    for completion in (c for c in found if c.sample == c.prompt % 2):
        expected = sampled_one_by_one(PROMPTS[completion.prompt], 3 + completion.sample, 10)
        assert completion.tokens == expected
        assert completion.ended_by == ("eos" if expected[-1] == tokenizer.eos_id else "length")
        assert completion.text == tokenizer.decode(torch.tensor(expected).numpy())
    assert len({tuple(c.tokens) for c in found}) == len(found)


@pytest.mark.slow
def test_streamed_pieces_join_to_the_texts(mesh: ProcessMesh) -> None:
    told: dict[tuple[int, int], list[str]] = {}
    ended = []

    def tell(prompt: int, sample: int, piece: str, is_last: bool) -> None:
        assert (prompt, sample) not in ended
        told.setdefault((prompt, sample), []).append(piece)
        if is_last:
            ended.append((prompt, sample))

    found = generate(generator(mesh), samples=2, on_text=tell)
    assert {key: "".join(pieces) for key, pieces in told.items()} == {(c.prompt, c.sample): c.text for c in found}
    assert sorted(ended) == [(c.prompt, c.sample) for c in found]


@pytest.mark.slow
def test_generation_stops_at_stop_text_or_eos(mesh: ProcessMesh) -> None:
    plain = generate(generator(mesh), limits=Limits(max_tokens=20, at_eos=False))
    assert {c.ended_by for c in plain} == {"length"}
    assert {len(c.tokens) for c in plain} == {20}
    stop = plain[0].text[5:8]
    found = generate(generator(mesh), limits=Limits(20, (stop,), at_eos=False))
    for completion, before in zip(found, plain, strict=True):
        place = before.text.find(stop)
        assert completion.text == (before.text if place < 0 else before.text[:place])
        assert completion.ended_by == ("length" if place < 0 else "stop")
        assert completion.tokens == before.tokens[: len(completion.tokens)]
    assert "stop" in {c.ended_by for c in found}
    eos = ByteTokenizer.eos_id
    limited = generate(generator(mesh), limits=Limits(20))
    for completion, before in zip(limited, plain, strict=True):
        expected = before.tokens[: before.tokens.index(eos) + 1] if eos in before.tokens else before.tokens
        assert completion.tokens == expected


def test_stop_signal_ends_generation(mesh: ProcessMesh) -> None:
    asked = iter(range(1000))
    stopping = generator(mesh, stop=lambda: 2 if next(asked) >= 10 else 0)
    found = generate(stopping, PROMPTS[:1], limits=Limits(1000, at_eos=False))
    assert [c.ended_by for c in found] == ["signal"]
    assert 0 < len(found[0].tokens) < 12
    assert stopping.stopped_by == 2
    # Stopped before the first token: no texts.
    assert generate(generator(mesh, stop=lambda: 2)) == []


def test_nonfinite_logits_raise(mesh: ProcessMesh) -> None:
    broken = generator(mesh)
    with torch.no_grad():
        broken._model.lm_head.weight[5, 3] = float("nan")
    with pytest.raises(NonFiniteError, match="prompt 1, token 1 after it"):
        generate(broken)


@pytest.mark.parametrize("wrong", [{"prefill_tokens": 0}, {"batch": 0}])
def test_settings_out_of_range(mesh: ProcessMesh, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        generator(mesh, **wrong)
    with pytest.raises(ConfigError, match="max_tokens"):
        generate(generator(mesh), limits=Limits(0))


def states_of(rank: int, world_size: int) -> dict[Backend, list[Tensor]]:
    mesh = mesh_of(rank, world_size, world_size)
    network, found = model(), {}
    for backend in (Backend.zeco, Backend.lasp1, Backend.lasp2):
        scan = connect(SPConfig(backend), mesh.scan_groups, mesh.timeout)
        found[backend] = prefilled(Prefill(network, mesh, scan, 150))
        scan.drain()
    return found


def prefilled(prefill: Prefill) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(259, (length,), generator=random) for length in (400, 1, 701, 400, 130)]
    found = prefill.run(prompts)
    assert found is not None
    return [found[0], *found[1]]


@pytest.mark.slow
def test_prefill_over_ranks_equals_one_rank(mesh: ProcessMesh) -> None:
    """Uneven shards, pieces, and prompts that end within them: every rank has the logits and states of one rank."""
    expected = prefilled(Prefill(model(), mesh, local_exchange(), 100_000))
    for rank, by_backend in enumerate(run_distributed(states_of, 3)):
        for backend, found in by_backend.items():
            for ours, theirs in zip(found, expected, strict=True):
                assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max(), (rank, backend)


def texts_of(rank: int, world_size: int) -> dict[int, tuple[list[Completion], int]]:
    found = {}
    for sp_size in (1, 2, 4):
        mesh = mesh_of(rank, world_size, sp_size)
        told: list[int] = []
        many = generator(mesh, Backend.dp if sp_size == 1 else Backend.zeco, batch=2, prefill_tokens=40)
        texts = generate(many, samples=2, on_text=lambda prompt, *_, told=told: told.append(prompt))
        found[sp_size] = texts, len(set(told))
    return found


@pytest.mark.slow
def test_texts_over_ranks_equal_one_rank(mesh: ProcessMesh) -> None:
    """Prompts are divided over sequence groups, texts over the ranks of a group; every rank returns all texts."""
    expected = generate(generator(mesh), samples=2)
    for by_size in run_distributed(texts_of, 4):
        for sp_size, (found, told) in by_size.items():
            assert found == expected, sp_size
            assert told, f"{sp_size}: a rank without work"
