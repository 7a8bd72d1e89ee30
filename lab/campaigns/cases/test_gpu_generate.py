"""Generation on CUDA: the step kernel, the step as one CUDA graph, and constant memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data.tokenizer import ByteTokenizer
from models.attn import AttnConfig
from models.language_model import LanguageModel
from models.mixers.gla import GLAConfig
from models.spec import ModelSpec
from tests.generate.test_step import steps
from tests.support.recurrence import naive_gla
from zeco_train.distributed.mesh import ProcessMesh, init_mesh
from zeco_train.generate.decode import Decoder
from zeco_train.generate.generator import Generator, Limits
from zeco_train.generate.prefill import Prefill, whole_logits
from zeco_train.generate.sampling import Sampling
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.gla import recurrent_step
from zeco_train.ops.operator import Target, assume
from zeco_train.sp.exchange import local_exchange
from zeco_train.system.numbers import relative_error

pytestmark = [pytest.mark.campaign, pytest.mark.gpu]

CONFIG = GLAConfig(hidden_size=512, num_layers=4, num_heads=4, intermediate_size=1024)
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def mesh() -> Iterator[ProcessMesh]:
    torch.cuda.set_device(DEVICE)
    try:
        yield init_mesh(Launch(0, 1, 0), 1, DEVICE, timedelta(seconds=60))
    finally:
        dist.destroy_process_group()


def model(dtype: torch.dtype) -> LanguageModel:
    network = ModelSpec(CONFIG).build().to(DEVICE, dtype)
    network.init_weights(0)
    return network.eval().requires_grad_(False)


def ids(count: int) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("heads", [(64, 128), (128, 128), (256, 512), (24, 40)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("kernel", [True, False])
def test_steps_equal_the_recurrence(heads: tuple[int, int], dtype: torch.dtype, tolerance: float, kernel: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = {"q": heads[0], "k": heads[0], "v": heads[1], "g": heads[0]}
    wide = {name: torch.randn(2, 40, 3, size, generator=generator).double() for name, size in shape.items()}
    q, k, v = (wide[name].to(DEVICE, dtype) for name in "qkv")
    g = torch.nn.functional.logsigmoid(wide["g"]).to(DEVICE, torch.float32)
    state = torch.randn(2, 3, *heads, generator=generator).to(DEVICE)
    expected, final_state = naive_gla(*(x.double() for x in (q, k, v, g)), initial_state=state.double())
    with assume(Target("cuda" if kernel else "cpu")):
        o = steps(q, k, v, g, state)
    assert o.dtype == dtype
    assert (o - expected).norm() <= tolerance * expected.norm()
    assert (state - final_state).norm() <= 1e-5 * final_state.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_as_accurate_as_chunked_operator(mesh: ProcessMesh, dtype: torch.dtype) -> None:
    """Against fp64, since bf16 rounds both: by 0.023 in these four layers, computed either way."""
    network, tokens = model(dtype), ids(300)
    started = Prefill(network, mesh, local_exchange(), 128).run([tokens[:200]])
    assert started is not None
    decoder = Decoder(network, started[1], torch.tensor([200], device=DEVICE), cuda_graph=False)
    steps = torch.cat([decoder.step(token[None].to(DEVICE)) for token in tokens[200:]])
    chunks = whole_logits(network, tokens[None].to(DEVICE))[0, 200:]
    exact = whole_logits(network.double(), tokens[None].to(DEVICE))[0, 200:]
    error, allowed = relative_error(steps, exact), relative_error(chunks, exact)
    assert error <= max(1e-5, 1.25 * allowed), (error, allowed)
    assert allowed <= {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]


def check_graphed_steps(network: LanguageModel, prompts: list[Tensor], logits: Tensor, states: list[Tensor]) -> None:
    """Twenty steps by a CUDA graph and without, from the same states; all but two rows are dropped half way."""
    positions = torch.tensor([len(prompt) for prompt in prompts], device=DEVICE)
    decoders = [
        Decoder(network, [state.clone() for state in states], positions, cuda_graph=graph) for graph in (True, False)
    ]
    tokens = logits.argmax(-1)
    for step in range(20):
        if step == 10:
            tokens = tokens[[2, 0]]
            for decoder in decoders:
                decoder.keep([2, 0])
        graphed, eager = (decoder.step(tokens) for decoder in decoders)
        assert torch.equal(graphed, eager), step
        tokens = eager.argmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graph_equals_eager_steps(mesh: ProcessMesh, dtype: torch.dtype) -> None:
    """Bit for bit, also after rows have been dropped; capturing does not change the states."""
    network = model(dtype)
    prompts = [ids(n) for n in (5, 70, 30)]
    found = Prefill(network, mesh, local_exchange(), 128).run(prompts)
    assert found is not None
    check_graphed_steps(network, prompts, *found)


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graph_of_a_hybrid_equals_eager_steps(mesh: ProcessMesh, dtype: torch.dtype, window: int | None) -> None:
    """Bit for bit, with caches of keys and values, whose slots the warm-up of a capture writes."""
    config = dataclasses.replace(CONFIG, attn=AttnConfig(every=2, num_kv_heads=2, window=window))
    network = ModelSpec(config).build().to(DEVICE, dtype)
    network.init_weights(0)
    prompts = [ids(n) for n in (5, 16, 9)]
    found = Prefill(network, mesh, local_exchange(), 128).run(prompts, capacity=36)
    assert found is not None
    check_graphed_steps(network, prompts, *found)


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_texts_equal_with_graph_and_memory_is_constant(mesh: ProcessMesh, cuda_graph: bool) -> None:
    """The same texts with and without a CUDA graph; 1000 tokens take the memory of 100."""
    network, tokenizer = model(torch.bfloat16), ByteTokenizer()
    generator = Generator(network, tokenizer, mesh, local_exchange(), cuda_graph=cuda_graph)
    prompts = [generator.encode(text) for text in ("def main(", "x" * 500, "")]
    # Warm-up allocates what stays: cuBLAS's workspace of the stream on which graphs are captured.
    generator.generate(prompts, Sampling(seed=1), Limits(2, at_eos=False), samples=2)
    peaks, texts = [], []
    for count in (100, 1000):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        found = generator.generate(prompts, Sampling(seed=1), Limits(count, at_eos=False), samples=2)
        peaks.append(torch.cuda.max_memory_allocated())
        texts.append([completion.tokens[:100] for completion in found])
    assert texts[0] == texts[1]
    assert peaks[1] <= 1.02 * peaks[0]
    plain = Generator(network, tokenizer, mesh, local_exchange(), cuda_graph=not cuda_graph)
    other = plain.generate(prompts, Sampling(seed=1), Limits(100, at_eos=False), samples=2)
    assert [completion.tokens for completion in other] == texts[0]


def test_step_runs_on_the_device_of_its_tensors() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 1, 2, 64, generator=generator) for _ in range(4))
    g = torch.nn.functional.logsigmoid(g)
    results = []
    for device in (torch.device("cuda", 0), torch.device("cuda", 1)):
        state = torch.ones(1, 2, 64, 64, device=device)
        with torch.cuda.device(0):
            results.append(recurrent_step(*(x.to(device) for x in (q, k, v, g)), state).cpu())
    assert torch.equal(*results)
