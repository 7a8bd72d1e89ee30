"""The operator's Triton kernels against the PyTorch passes in fp64: under Triton's interpreter, and on a GPU.

The interpreter computes in fp32 what a GPU computes in three tf32 parts, so it tests everything but the hardware.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support import interpreter
from tests.support.distributed import run_distributed
from tests.support.few import one_of
from tests.support.kernel_cases import (
    SHARED_MEMORY,
    KernelCase,
    both_passes,
    compiling,
    kernel_errors,
    relative_error,
)
from tests.support.waiting import ENOUGH
from zeco_train.ops.documents import find_doc_ids
from zeco_train.ops.gla import GLA
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.mix import mix_at
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import recomputed
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

# Odd lengths and dims, long and short segments, decays down to e^-50 a token, restarts on and off the chunks' borders.
SMALL = {
    "one token": KernelCase((1, 1, 1, 16, 16)),
    "segments and documents": KernelCase((1, 130, 2, 5, 7), rate=3.3, documents=(0, 70, 130), programs=4),
    "odd sizes": KernelCase((2, 150, 2, 5, 7), rate=1.0, programs=4),
    "tiles of K and V": KernelCase((1, 200, 1, 40, 48), programs=4),
    "strong decays": KernelCase((1, 130, 1, 16, 16), rate=50.0),
    "mild chunks and others": KernelCase((1, 500, 2, 5, 7), rate=3.3),
    "resets": KernelCase((1, 150, 1, 16, 16), reset=-1e9),
    "the strongest reset": KernelCase((1, 150, 1, 16, 16), reset=-3e38),
    "documents": KernelCase((1, 300, 1, 16, 16), documents=(0, 70, 128, 129, 200, 300), programs=2),
    "a document starts the rank": KernelCase((1, 200, 1, 16, 16), documents=(0, 64, 200), before=0),
    "one document, that continues": KernelCase((1, 100, 1, 16, 16), documents=(0, 100)),
    # a tile has at least 64 keys in bf16, 32 in fp32: padded keys must not contribute
    "16 keys": KernelCase((1, 200, 2, 16, 64), documents=(0, 70, 128, 200)),
    "32 keys": KernelCase((2, 130, 2, 32, 64), rate=1.0),
    "dv apart": KernelCase((1, 150, 2, 32, 48), documents=(0, 70, 150), fused=False),
    "48 keys": KernelCase((1, 130, 2, 48, 64), rate=1.0, documents=(0, 100, 130)),
}
# Three chunks, the last of two tokens, the first two a segment; both kinds of chunks; a border inside of one.
QUICK = ["segments and documents"]
SLOW = ["odd sizes", "the strongest reset", "a document starts the rank"]
LARGE = {
    **SMALL,
    "the paper's heads": KernelCase((2, 1000, 4, 64, 128)),
    "wide keys": KernelCase((1, 4096, 2, 128, 128), rate=5.0),
    "the widest heads": KernelCase((1, 1500, 2, 256, 512)),
    "the narrowest heads": KernelCase((1, 777, 3, 32, 32), rate=0.5),
    "no power of two": KernelCase((1, 2000, 2, 96, 160), documents=(0, 70, 128, 700, 1400, 2000)),
    "no decay": KernelCase((1, 2000, 2, 64, 128), rate=0.0),
    "strong decays everywhere": KernelCase((1, 4096, 1, 64, 128), rate=50.0),
    "long with resets": KernelCase((1, 4096, 2, 64, 128), reset=-1e9),
    "long": KernelCase((1, 65536, 1, 64, 128)),
}
# fp32: cumulative decays round relative to their sum within the chunk, hence less exact for strong decays.
# bf16: 8 bits in each operand, an rms error of 2^-9/√3 each; a few in a row.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-3}


def test_some_chunks_of_a_case_are_mild_and_some_are_not() -> None:
    """A program of the second launch then skips some of its chunks and computes others."""
    case = SMALL["segments and documents"]
    _, T, H, K, _ = case.shape
    sums = case.tensors(torch.float32, torch.device("cpu"))["g"][:, : T // 64 * 64].view(-1, 64, H, K).cumsum(1)
    farthest = torch.maximum(sums[:, 0] - sums[:, 31], sums[:, 31] - sums[:, 63]).amax(-1)
    assert bool((farthest <= 60).any(0).all())
    assert bool((farthest > 60).any(0).all())


def _interpreted(rank: int, world_size: int, names: list[str]) -> dict[str, dict[str, float]]:
    interpreter.skip_overflow_checks()
    return {name: kernel_errors(SMALL[name], torch.float32, torch.device("cpu")) for name in names}


@pytest.mark.parametrize(
    "names",
    [
        QUICK,
        pytest.param(SLOW, marks=pytest.mark.slow),
        pytest.param([name for name in SMALL if name not in QUICK + SLOW], marks=pytest.mark.campaign),
    ],
    ids=["quick", "slow", "others"],
)
def test_kernels_match_fp64_under_interpreter(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter is chosen when Triton is imported, so the kernels run in a separate process.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, errors in run_distributed(_interpreted, 1, names, fresh=True)[0].items():
        assert all(error <= LIMITS[torch.float32] for error in errors.values()), f"{name}: {errors}"
        assert len(errors) == 8


COMPILED = {
    "sm_90, the paper's heads": (90, torch.bfloat16, KernelCase((1, 192, 2, 64, 128))),
    "sm_90, wide keys": (90, torch.bfloat16, KernelCase((1, 192, 2, 128, 128))),
    "sm_90, the widest heads": (90, torch.bfloat16, KernelCase((1, 192, 2, 256, 512), documents=(0, 70, 192))),
    "sm_90, fp32": (90, torch.float32, KernelCase((1, 192, 2, 64, 128), documents=(0, 70, 192))),
    "sm_90, few values": (90, torch.bfloat16, KernelCase((1, 63, 2, 64, 8))),
    "sm_90, few values, documents": (90, torch.bfloat16, KernelCase((1, 192, 2, 40, 24), documents=(0, 70, 192))),
    "sm_80": (80, torch.bfloat16, KernelCase((1, 192, 2, 64, 128), documents=(0, 70, 192))),
}


def _compiled(rank: int, world_size: int, name: str) -> dict[str, int]:
    """Shared memory of each kernel, compiled for a GPU that this machine need not have."""
    from zeco_train.ops.gla import cuda
    from zeco_train.ops.gla.kernels import launch

    capability, dtype, case = COMPILED[name]
    cpu, architecture = torch.device("cpu"), divmod(capability, 10)
    with (
        compiling(capability) as found,
        mock.patch.object(cuda, "options_for", lambda k: launch.find(architecture, k.dtype, k.shape[3])),
    ):
        both_passes(cuda.CUDA, case.tensors(dtype, cpu), case.doc_ids(cpu), 1.0)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(COMPILED, "sm_90, the widest heads"))
def test_kernels_compile_within_shared_memory(name: str) -> None:
    """The GPU compiler runs without a GPU and refuses code that the interpreter accepts."""
    found = run_distributed(_compiled, 1, name, fresh=True)[0]
    assert len(found) == 7
    assert max(found.values()) <= SHARED_MEMORY[COMPILED[name][0]], found


HEADS, KEY_DIM, VALUE_DIM = 2, 40, 24


def _block(
    x: Tensor,
    place: SequencePosition,
    state_inputs: Sequence[StateInput],
    shared: Tensor | None = None,
    output_needed: bool = True,
) -> tuple[Tensor, ...]:
    """The operator alone; its operands are parts of x [B, T, H·(3K + V)]."""
    q, k, g, v = x.unflatten(-1, (HEADS, -1)).split([KEY_DIM, KEY_DIM, KEY_DIM, VALUE_DIM], -1)
    operands = q, k, v, torch.nn.functional.logsigmoid(g)
    o, state_output = mix_at("gla", operands, KEY_DIM**-0.5, place, *state_inputs)
    return o.flatten(2), state_output.received, state_output.carry_out


def _gradient(x: Tensor, dy: Tensor, place: SequencePosition, recompute: bool) -> tuple[Tensor, list[tuple[int, ...]]]:
    """dx, and the shapes of the tensors that autograd saved."""
    kept: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        state_inputs = (StateInput(),)
        y, *_ = recomputed(_block, x, place, state_inputs, None) if recompute else _block(x, place, state_inputs)
    (dx,) = torch.autograd.grad(y, x, dy)
    return dx, kept


def _kept_and_made_again(rank: int, world_size: int) -> list[str]:
    """Failures of the kernels under autograd: saved scores and gradients, with and without recompute."""
    from zeco_train.ops.gla.cuda import CUDA

    interpreter.skip_overflow_checks()
    scan, wrong = local_exchange(), []
    for tokens, cu_seqlens in ((70, (0, 66, 70)),):
        generator = torch.Generator().manual_seed(tokens)
        sizes = 3 * KEY_DIM + VALUE_DIM, VALUE_DIM
        x, dy = (torch.randn(1, tokens, HEADS * size, generator=generator) for size in sizes)
        documents = None if cu_seqlens is None else [cu_seqlens]
        place = SequencePosition((0, tokens), documents=documents, exchange=scan).on(x)
        exact, _ = _gradient(x.double(), dy.double(), place, recompute=False)
        with mock.patch.dict(OPERATORS, gla=replace(GLA, portable=CUDA, cuda=None)):
            whole, of_whole = _gradient(x, dy, place, recompute=False)
            again, of_again = _gradient(x, dy, place, recompute=True)
        scores, error = (-(-tokens // 64), 1, HEADS, 64, 64), relative_error(whole, exact)
        if scores not in of_whole or scores in of_again:
            wrong.append(f"{tokens} tokens: kept {of_whole}, with full recompute {of_again}")
        if error > LIMITS[torch.float32] or not torch.equal(whole, again):
            wrong.append(f"{tokens} tokens: dx is off by {error}, recomputed by {relative_error(again, exact)}")
    return wrong


@pytest.mark.campaign
def test_scores_are_saved_or_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_kept_and_made_again, 1, fresh=True) == [[]]


class Recorder:
    """Stands in for a kernel and records the constants of its launches."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *arguments: object, **constants: object) -> None:
        self.launches.append(constants)


@pytest.mark.parametrize("K", [5, 16, 32, 48, 64, 96, 128, 256])
def test_miscompiled_tile_sizes_are_never_requested(K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 the gradient kernels never use tiles of fewer than 64 keys or values, whatever the stored tuning."""
    from zeco_train.ops.gla.kernels import launch

    kernels = Recorder(), Recorder()
    for name, kernel in zip(("intra_grads_kernel", "input_grads_kernel"), kernels, strict=True):
        monkeypatch.setattr(launch, name, kernel)
    q = torch.empty(1, 64, 1, K, dtype=torch.bfloat16)
    v, b, narrow = torch.empty(1, 64, 1, 16, dtype=torch.bfloat16), q.float(), launch.TileOptions(16, 16, 4, 1)
    local: Any = SimpleNamespace(states=v, log_decays=b, segments=SimpleNamespace(starts=b))
    narrowed = launch.GlaTuning(intra_grads=narrow, mild_grads=narrow, input_grads=narrow)
    for options in (launch.options_for(q), narrowed):
        launcher = launch.GlaKernels(q, v, None, 1.0, options)
        launcher.intra_grads(q, q, v, b, v, v)
        launcher.input_grads(q, v, b, v, v, v, local, b, q)
        for kernel, flag in zip(kernels, ("ONE_TILE", "FUSED"), strict=True):
            for constants in kernel.launches:
                assert min(constants["BK"], constants["BV"]) >= 64
                assert constants[flag] == (constants["BK"] >= K)
    assert [len(kernel.launches) for kernel in kernels] == [4, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LARGE)
def test_kernels_match_fp64_on_gpu(name: str, dtype: torch.dtype) -> None:
    errors = kernel_errors(LARGE[name], dtype, torch.device("cuda"))
    print(name, dtype, {tensor: f"{error:.1e}" for tensor, error in errors.items()})
    assert all(error <= LIMITS[dtype] for error in errors.values()), errors


@pytest.mark.gpu
def test_kernels_do_not_synchronise_and_are_deterministic() -> None:
    """Neither pass synchronises the host, also with documents; repetitions are bit-identical."""
    case = KernelCase((1, 1000, 2, 64, 128), documents=(0, 300, 1000))
    from zeco_train.ops.gla.cuda import CUDA

    tensors = case.tensors(torch.bfloat16, torch.device("cuda"))
    doc_ids = find_doc_ids(torch.tensor([0, 300, 1000]), 1, 1000, torch.device("cuda"))
    first = both_passes(CUDA, tensors, doc_ids, 0.125)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = both_passes(CUDA, tensors, doc_ids, 0.125)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


# A user's first step: a new process with an empty Triton cache.
FIRST_PASSES = """
import time
import torch
from tests.support.kernel_cases import KernelCase, both_passes
from zeco_train.ops.gla.cuda import CUDA

for dims in ((16, 64, 128), (16, 128, 128), (4, 256, 512)):
    tensors = KernelCase((1, 4096, *dims)).tensors(torch.bfloat16, torch.device("cuda"))
    torch.cuda.synchronize()
    started = time.perf_counter()
    both_passes(CUDA, tensors, None, 0.125)
    torch.cuda.synchronize()
    print(f"H{dims[0]} K{dims[1]} V{dims[2]} {time.perf_counter() - started:.1f}", flush=True)
"""


@pytest.mark.processes
@pytest.mark.gpu
def test_first_passes_take_at_most_30_seconds(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command, options = [sys.executable, "-c", FIRST_PASSES], {"capture_output": True, "text": True, "check": False}
    result = subprocess.run(command, env=environment, timeout=ENOUGH, **options)
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    seconds = [float(line.split()[-1]) for line in result.stdout.splitlines()]
    assert len(seconds) == 3
    assert max(seconds) <= 30.0, result.stdout
