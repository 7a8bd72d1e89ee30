"""fla's model on a CPU: its Triton kernels replaced by fla's plain reference implementations."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F


def use_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the modules of `fla.models.GLAForCausalLM` compute without Triton, the operator in fp32, for up to 64 tokens
    at once."""
    import fla.layers.gla as fla_layer
    import fla.modules.mlp as fla_mlp
    import fla.modules.norm.fused_norm_gate as fla_gate
    import fla.modules.norm.layernorm as fla_norm
    from fla.ops.gla.naive import naive_recurrent_gla

    def norm(x: Tensor, residual: Tensor | None = None, prenorm: bool = False, **kwargs: Any) -> Any:
        kwargs = {key: kwargs[key] for key in ("weight", "bias", "eps")}
        return fla_norm.rms_norm_ref(x=x, residual=residual, prenorm=prenorm, **kwargs)

    def gated_norm(x: Tensor, g: Tensor, weight: Tensor, bias: None, eps: float, activation: str, **_: Any) -> Tensor:
        assert activation == "swish"
        return fla_norm.rms_norm_ref(x, weight, bias, eps=eps) * F.silu(g)

    def recurrent(q: Tensor, k: Tensor, v: Tensor, gk: Tensor, **options: Any) -> Any:
        kept = {name: options[name] for name in ("initial_state", "output_final_state")}
        return naive_recurrent_gla(q, k, v, gk, **kept)

    monkeypatch.setattr(fla_norm, "rms_norm", norm)
    monkeypatch.setattr(fla_gate, "rms_norm_gated", gated_norm)
    monkeypatch.setattr(fla_layer, "fused_recurrent_gla", recurrent)
    monkeypatch.setitem(fla_layer.ACT2FN, "swish", F.silu)
    # The kernel computes x σ(x) y in this order: `swiglu_fwd_kernel` in fla/modules/activations/ops.py.
    monkeypatch.setattr(fla_mlp, "swiglu_linear", lambda x, y, w, b: F.linear(F.silu(x) * y, w, b))
