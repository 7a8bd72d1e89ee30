"""Shared by the tests of kernels: cases, compiling without a GPU, and a rank's two passes against those in fp64."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import normalize

from zeco_train.ops.documents import find_doc_ids
from zeco_train.ops.gla.chunked import CHUNKED
from zeco_train.ops.passes import Passes

# Limit of shared memory per program in bytes, by architecture.
SHARED_MEMORY = {90: 227 << 10, 80: 163 << 10}


@dataclass(frozen=True)
class RankCase:
    """One rank's tokens; the shape is of the operands, see the subclasses."""

    shape: tuple[int, ...]
    rate: float = 0.2  # log-decays are uniform from −rate to 0
    documents: tuple[int, ...] | None = None  # cu_seqlens
    before: int = 1
    reset: float | None = None  # the log-decay of every 40th token, as users write a reset

    def random(
        self,
        of_keys: tuple[int, int, int, int],
        of_values: tuple[int, int, int, int],
        of_decays: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Random inputs of those shapes; not contiguous, as a projection's output cut into heads may be."""
        (*tokens, K), (B, _, H, V) = of_keys, of_values
        generator = torch.Generator().manual_seed(sum(self.shape))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        keys, values = normal(*tokens, 2 * K).to(dtype), normal(*of_values[:3], 2 * V).to(dtype)
        tensors = {
            **dict(zip("qk", keys.chunk(2, -1), strict=True)),
            **dict(zip(("v", "do"), values.chunk(2, -1), strict=True)),
            "g": -self.rate * torch.rand(of_decays, generator=generator),
            **{name: normal(B, H, K, V) for name in ("R", "D_in")},
        }
        if self.reset is not None:
            tensors["g"][:, 7::40] = self.reset
        return {name: x.to(device) for name, x in tensors.items()}

    def doc_ids(self, device: torch.device) -> Tensor | None:
        """The documents in the operator's format."""
        if self.documents is None:
            return None
        return find_doc_ids(torch.tensor(self.documents), self.before, self.shape[1], device)


@dataclass(frozen=True)
class KernelCase(RankCase):
    """Of gated linear attention: shape B, T, H, K, V."""

    programs: int = 264  # of the walks over chunks; few make long segments
    fused: bool = True  # dv may be computed in the loop that computes dk

    def tensors(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Random inputs."""
        B, T, H, K, V = self.shape
        return self.random((B, T, H, K), (B, T, H, V), (B, T, H, K), dtype, device)


@dataclass(frozen=True)
class DeltaCase(RankCase):
    """Of a delta rule: shape B, T, G, H, K, V."""

    rule: str = "kda"
    # See `DeltaTuning`: a small number makes many segments, a large one makes one, None takes the kept one.
    joining: float | None = 0.1

    @property
    def names(self) -> tuple[str, ...]:
        """The operands, in their order."""
        return ("q", "k", "v", "beta") if self.rule == "delta" else ("q", "k", "v", "g", "beta")

    def tensors(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Random inputs, keys of norm 1."""
        B, T, G, H, K, V = self.shape
        of_decays = (B, T, H, K) if self.rule == "kda" else (B, T, H)
        found = self.random((B, T, G, K), (B, T, H, V), of_decays, dtype, device)
        found["k"] = normalize(found["k"].float(), dim=-1).to(dtype)
        generator = torch.Generator().manual_seed(1)
        found["beta"] = 2 * torch.randn(B, H, T, generator=generator).sigmoid().mT.to(device)
        return found


@contextlib.contextmanager
def compiling(capability: int) -> Iterator[dict[str, int]]:
    """Compile the kernels launched inside for such GPUs, which this machine need not have, instead of running them.

    Yields the shared memory of each kernel, in bytes per program; wrong descriptors in machine code are an
    AssertionError.
    """
    from triton.backends.compiler import GPUTarget  # late: the mode is fixed at import
    from triton.runtime import JITFunction, driver

    from tests.support.descriptors import wrong_descriptors

    shared: dict[str, int] = {}

    def compiled(kernel: Any, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            made = kernel.warmup(*arguments, grid=grid, **constants)
            wrong = wrong_descriptors(made.asm["cubin"]) if capability == 90 else []
            assert not wrong, f"{kernel.fn.__name__}: {wrong}"
            shared[kernel.fn.__name__] = max(shared.get(kernel.fn.__name__, 0), made.metadata.shared)

        return launch

    target = GPUTarget("cuda", capability, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    with mock.patch.object(JITFunction, "__getitem__", compiled):
        yield shared


def both_results(
    passes: Passes, names: tuple[str, ...], tensors: dict[str, Tensor], scale: float, doc_ids: Tensor | None
) -> dict[str, Tensor]:
    """All results of the two passes."""
    operands = [tensors[name] for name in names]
    promised = [(x.shape, x.stride(), x.dtype) for x in passes.saved_like(operands)]
    forward = passes.forward(operands, scale, doc_ids)
    found = {"S": forward.state.clone(), "M": forward.transition.clone()}
    forward.overlap()
    found["o"] = forward.outputs(tensors["R"])
    _check_kept(found["S"], forward.state)
    saved = [*forward.saved]
    assert promised == [(x.shape, x.stride(), x.dtype) for x in saved]
    kept = operands.copy()
    for position in passes.replaced:
        assert (saved[0].shape, saved[0].dtype) == (operands[position].shape, operands[position].dtype)
        kept[position] = saved.pop(0)
    incoming = tensors["R"] if passes.needs_incoming else None
    backward = passes.backward(kept, tensors["do"], saved, incoming, scale, doc_ids)
    found["D"] = backward.state_grad.clone()
    backward.overlap()
    grads = backward.operand_grads(tensors["D_in"])
    _check_kept(found["D"], backward.state_grad)
    for name, grad in zip(names, grads, strict=True):
        assert (grad.shape, grad.dtype) == (tensors[name].shape, tensors[name].dtype), name
        found[f"d{name}"] = grad
    return found


def _check_kept(sent: Tensor, state: Tensor) -> None:
    """A scan may still read the state. Not where a test forbids to synchronise, as a comparison does."""
    if not torch.cuda.is_available() or torch.cuda.get_sync_debug_mode() == 0:
        torch.testing.assert_close(sent, state, rtol=0, atol=0, equal_nan=True)


def both_passes(passes: Passes, tensors: dict[str, Tensor], doc_ids: Tensor | None, scale: float) -> dict[str, Tensor]:
    """`both_results` of gated linear attention."""
    found = both_results(passes, ("q", "k", "v", "g"), tensors, scale, doc_ids)
    # exp underflows to 0 in fp32 from −104 on, so compare all decays below that as equal
    return {**found, "M": found["M"].clamp(min=-104.0)}


def kernel_errors(case: KernelCase, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Error of each result of the kernels, norm over norm, from the PyTorch passes in fp64."""
    from zeco_train.ops.gla import cuda  # late: imports Triton, whose mode is fixed at import

    tensors = case.tensors(dtype, device)
    doc_ids = case.doc_ids(device)
    scale = case.shape[3] ** -0.5
    plain, changes = cuda.options_for, {"programs": case.programs, "fused": case.fused}
    with mock.patch.object(cuda, "options_for", lambda *x: dataclasses.replace(plain(*x), **changes)):
        found = both_passes(cuda.CUDA, tensors, doc_ids, scale)
    expected = both_passes(CHUNKED, {name: x.double() for name, x in tensors.items()}, doc_ids, scale)
    return {name: relative_error(found[name], expected[name]) for name in expected}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm; infinite where anything found is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    norm, difference = expected.norm().item(), (found.double() - expected).norm().item()
    return difference / norm if norm > 0 else difference
