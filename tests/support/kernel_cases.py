"""Shared by the tests of kernels: cases, compiling without a GPU, and a rank's two passes against those in fp64."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import normalize

from zeco_train.ops.operator import Kind
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.passes import Passes
from zeco_train.ops.position import find_doc_ids, find_restarts

# Limit of shared memory per program in bytes, by architecture.
SHARED_MEMORY = {90: 227 << 10, 80: 163 << 10}


# Tuples, so that a case can be a dictionary's key: of sizes, and of changed options.
Pairs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class KernelCase:
    """One rank's tokens for an operator's kernels."""

    operator: str
    tokens: int
    sizes: tuple[int, ...] = (1, 1, 1, 16, 16)  # B, G, H, K, V; of a convolution B, W, C
    rate: float = 0.2  # log-decays are uniform from −rate to 0
    documents: tuple[int, ...] | None = None  # cu_seqlens, without the last border
    before: int = 1
    reset: float | None = None  # the log-decay of every 40th token, as users write a reset
    vanishing: int | None = None  # of every so many channels from the first on log-decays are 50 less
    changes: Pairs = ()  # of the kept options: few programs make long segments

    def tensors(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Random inputs; not contiguous, as parts of a projection's output. Keys of delta rules have norm 1."""
        operator, names = OPERATORS[self.operator], "BWC" if self.operator == "short_conv" else "BGHKV"
        sizes = dict(zip(names, self.sizes, strict=True)) | {"T": self.tokens, "1": 1}
        generator = torch.Generator().manual_seed(sum(self.sizes) + self.tokens)
        found = {}
        for name, dims in {**operator.dims_of, "do": operator.dims[operator.output]}.items():
            shape = [sizes[dim] for dim in dims]
            if name in ("g", "log_decay"):
                x = -self.rate * torch.rand(shape, generator=generator)
                if self.vanishing is not None:
                    x[..., :: self.vanishing] -= 50.0
                if self.reset is not None:
                    x[:, 7::40] = self.reset
            elif name == "beta":
                x = 2 * torch.randn([shape[0], shape[2], shape[1]], generator=generator).sigmoid().mT
            else:
                x = torch.randn(shape, generator=generator)
                x = normalize(x, dim=-1) if name == "k" and operator.kind is Kind.matrix else x
                x = torch.cat([x, torch.full_like(x, torch.nan)], -1).to(dtype)[..., : shape[-1]]
            found[name] = x
        state = operator.state_shape([*found.values()][:-1])
        found |= {name: torch.randn(state, generator=generator) for name in ("R", "D_in")}
        return {name: x.to(device) for name, x in found.items()}

    def doc_ids(self, device: torch.device) -> Tensor | None:
        """The documents in the operator's format."""
        if self.documents is None:
            return None
        return find_doc_ids(torch.tensor([*self.documents, self.tokens]), self.before, self.tokens, device)

    def found(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Results of the kernels, with the case's options."""
        operator = OPERATORS[self.operator]
        assert operator.cuda is not None
        passes, module = resolve_name(operator.cuda), sys.modules[operator.cuda.partition(":")[0]]
        with contextlib.ExitStack() as stack:
            if self.changes and hasattr(module, "options_for"):
                plain = module.options_for
                changed = lambda *x: dataclasses.replace(plain(*x), **dict(self.changes))  # noqa: E731
                stack.enter_context(mock.patch.object(module, "options_for", changed))
            return both_results(passes, operator.operands, tensors, 0.7, self.doc_ids(tensors["do"].device))

    def errors(self, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
        """Error of each result, norm over norm, from the PyTorch passes in fp64.

        Random keys of delta rules leave little of a state after some hundred tokens, and rounding errors are of the
        size of what they left before: that of a matrix is over the norm of the identity.
        """
        tensors, doc_ids, operator = self.tensors(dtype, device), self.doc_ids(device), OPERATORS[self.operator]
        found = self.found(tensors)
        wide = {name: x.double() for name, x in tensors.items()}
        exact = both_results(operator.portable, operator.operands, wide, 0.7, doc_ids)
        assert found.keys() == exact.keys()
        errors = {name: relative_error(found[name], exact[name]) for name in exact if name != "M"}
        if operator.kind is Kind.matrix:
            errors["M"] = (found["M"] - exact["M"]).norm().item() / found["M"].shape[:3].numel() ** 0.5
        else:
            # exp underflows to 0 in fp32 from −104 on, so compare all decays below that as equal.
            errors["M"] = relative_error(*(of["M"].clamp(min=-104.0) for of in (found, exact)))
        if "dg" in found and doc_ids is not None and self.operator != "hgrn":
            is_zero = (found["dg"][:, find_restarts(doc_ids)] == 0).all()
            errors["dg at restarts"] = 0.0 if is_zero else float("inf")
        return errors


@contextlib.contextmanager
def compiling(capability: int, seen: Callable[[str, Any], object] | None = None) -> Iterator[dict[str, int]]:
    """Compile the kernels launched inside for such GPUs, which this machine need not have, instead of running them.

    Yields the shared memory of each kernel, in bytes per program. `seen` gets each one's name and what the compiler
    made. Wrong descriptors or addresses in machine code, and buffers overwritten too early, are an AssertionError.
    """
    from triton.backends.compiler import GPUTarget  # late: the mode is fixed at import
    from triton.runtime import JITFunction, driver

    from lab.campaigns.addresses import wrong_addresses
    from lab.campaigns.buffers import overwritten_buffers
    from lab.campaigns.descriptors import wrong_descriptors

    shared: dict[str, int] = {}

    def compiled(kernel: Any, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            made = kernel.warmup(*arguments, grid=grid, **constants)
            wrong = overwritten_buffers(made.asm["ttgir"])
            if capability == 90:
                wrong += wrong_descriptors(made.asm["cubin"]) + wrong_addresses(made.asm["ptx"], made.asm["cubin"])
            if seen is not None:
                seen(kernel.fn.__name__, made)
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


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm; infinite where anything found is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    norm, difference = expected.norm().item(), (found.double() - expected).norm().item()
    return difference / norm if norm > 0 else difference
