"""Cases of the delta rules' kernels, and all results of a rank's two passes, of kernels or in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tests.support.kernel_cases import RankCase
from zeco_train.ops.passes import Passes


@dataclass(frozen=True)
class DeltaCase(RankCase):
    """One rank's tokens.

    Attributes:
        shape: B, T, G, H, K, V.
        rule: of `zeco_train.ops.delta`.
        joining: see `DeltaTuning`; a small number makes many segments, a large one makes one, None takes the kept one.
    """

    rule: str = "kda"
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
