"""fla's models on a CPU: their Triton kernels replaced by fla's plain reference implementations."""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

import pytest
import torch
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
        gate = {"swish": F.silu, "sigmoid": torch.sigmoid}[activation]
        return fla_norm.rms_norm_ref(x, weight, bias, eps=eps) * gate(g)

    def recurrent(q: Tensor, k: Tensor, v: Tensor, gk: Tensor, **options: Any) -> Any:
        kept = {name: options[name] for name in ("initial_state", "output_final_state")}
        return naive_recurrent_gla(q, k, v, gk, **kept)

    monkeypatch.setattr(fla_norm, "rms_norm", norm)
    monkeypatch.setattr(fla_gate, "rms_norm_gated", gated_norm)
    monkeypatch.setattr(fla_layer, "fused_recurrent_gla", recurrent)
    monkeypatch.setitem(fla_layer.ACT2FN, "swish", F.silu)
    # The kernel computes x σ(x) y in this order: `swiglu_fwd_kernel` in fla/modules/activations/ops.py.
    monkeypatch.setattr(fla_mlp, "swiglu_linear", lambda x, y, w, b: F.linear(F.silu(x) * y, w, b))
    monkeypatch.setattr(fla_mlp, "swiglu", lambda x, y: F.silu(x) * y)


def use_decay_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fla's RetNet, HGRN, HGRN2 and GSA compute without Triton, in fp32, for up to 64 tokens at once."""
    use_references(monkeypatch)
    hgrn, hgrn2, gsa, retention, rotary, norm, naive, gla, of_hgrn, of_gsa = (
        importlib.import_module(f"fla.{name}")
        for name in (
            "layers.hgrn",
            "layers.hgrn2",
            "layers.gsa",
            "layers.multiscale_retention",
            "modules.rotary.ops",
            "modules.norm.layernorm",
            "ops.retention.naive",
            "ops.gla.naive",
            "ops.hgrn.naive",
            "ops.gsa.naive",
        )
    )

    def recurrent_hgrn(x: Tensor, g: Tensor, **_: Any) -> tuple[Tensor, None]:
        return of_hgrn.naive_recurrent_hgrn(x, g)[0], None

    def recurrent_gsa(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, scale: float, **_: Any) -> Any:
        return of_gsa.naive_recurrent_gsa(q, k, v, s, g, scale)

    def recurrent_retention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, None]:
        return naive.naive_retention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), None

    def recurrent_gla(q: Tensor, k: Tensor, v: Tensor, gk: Tensor, **_: Any) -> tuple[Tensor, None]:
        return gla.naive_recurrent_gla(q, k, v, gk)[0], None

    def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, **_: Any) -> Tensor:
        return rotary.rotary_embedding_ref(x, cos[: x.shape[1]], sin[: x.shape[1]], interleaved)

    eps = inspect.signature(hgrn2.rms_norm_linear).parameters["eps"].default

    def norm_linear(x: Tensor, norm_weight: Tensor, norm_bias: None, weight: Tensor, bias: None) -> Tensor:
        return F.linear(norm.rms_norm_ref(x, norm_weight, norm_bias, eps=eps), weight, bias)

    monkeypatch.setattr(retention, "fused_recurrent_retention", recurrent_retention)
    monkeypatch.setattr(rotary, "rotary_embedding", rotary_embedding)
    monkeypatch.setattr(hgrn, "fused_recurrent_hgrn", recurrent_hgrn)
    monkeypatch.setattr(hgrn, "swiglu", lambda x, y: F.silu(x) * y)
    monkeypatch.setattr(hgrn2, "fused_recurrent_gla", recurrent_gla)
    monkeypatch.setattr(hgrn2, "rms_norm_linear", norm_linear)
    monkeypatch.setattr(gsa, "rms_norm_linear", norm_linear)
    monkeypatch.setattr(gsa, "fused_recurrent_gsa", recurrent_gsa)
    monkeypatch.setattr(importlib.import_module("fla.modules.feature_map"), "swish", F.silu)
    monkeypatch.setattr(hgrn2, "swish", F.silu)


def use_delta_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fla's DeltaNet, Gated DeltaNet and KDA compute without Triton, in fp32, for up to 64 tokens at once."""
    use_references(monkeypatch)
    delta, gated, kda, of_delta, of_gated, of_kda, gates = (
        importlib.import_module(f"fla.{name}")
        for name in (
            "layers.delta_net",
            "layers.gated_deltanet",
            "layers.kda",
            "ops.delta_rule.naive",
            "ops.gated_delta_rule.naive",
            "ops.kda.naive",
            "ops.kda.gate",
        )
    )

    def norm(x: Tensor) -> Tensor:
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    def strengths(beta: Tensor, allow_neg_eigval: bool) -> Tensor:
        return beta.sigmoid() * (2 if allow_neg_eigval else 1)

    def of_heads(x: Tensor, v: Tensor) -> Tensor:
        return x.repeat_interleave(v.shape[2] // x.shape[2], dim=2)

    def recurrent_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
        q, k, v, beta = (x.transpose(1, 2) for x in (norm(q), norm(k), v, beta))
        return of_delta.delta_rule_recurrence(q, k, v, beta)[0].transpose(1, 2), None

    def recurrent_gated(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        g = -A_log.exp() * F.softplus(g + dt_bias)
        q, k = (of_heads(norm(x), v) for x in (q, k))
        beta = strengths(beta, options["allow_neg_eigval"])
        return of_gated.naive_recurrent_gated_delta_rule(q, k, v, beta, g)[0], None

    def recurrent_kda(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        q, k = (of_heads(norm(x), v) for x in (q, k))
        beta = strengths(beta, options["allow_neg_eigval"])
        return of_kda.naive_recurrent_kda(q, k, v, gates.naive_kda_gate(g, A_log, dt_bias), beta)[0], None

    def convolve(x: Tensor, weight: Tensor, bias: None, activation: str, **_: Any) -> tuple[Tensor, None]:
        assert activation == "silu"
        width = weight.shape[-1]
        y = F.conv1d(x.mT, weight.view(-1, 1, width), bias, padding=width - 1, groups=x.shape[-1])
        return F.silu(y[..., : x.shape[1]]).mT, None

    def forward(self: Any, x: Tensor, **_: Any) -> tuple[Tensor, None]:
        return convolve(x, self.weight, self.bias, self.activation)

    monkeypatch.setattr(delta, "fused_recurrent_delta_rule", recurrent_delta)
    monkeypatch.setattr(gated, "fused_recurrent_gated_delta_rule", recurrent_gated)
    monkeypatch.setattr(gated, "causal_conv1d", convolve)
    monkeypatch.setattr(kda, "fused_recurrent_kda", recurrent_kda)
    monkeypatch.setattr(importlib.import_module("fla.modules").ShortConvolution, "forward", forward)


def use_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fla's RetNet, HGRN, HGRN2 and GSA, with their references, compute in fp64 what is fp32 in any model.

    That is the operators, the angles and the lower bounds. For a short time: `Tensor.float` is replaced.
    """
    wide = types.ModuleType("torch")
    vars(wide).update({**vars(torch), "float": torch.float64, "float32": torch.float64})
    models = "models.hgrn.modeling_hgrn", "models.hgrn2.modeling_hgrn2"
    operators = (f"ops.{operator}.naive" for operator in ("retention", "gla", "hgrn", "gsa"))
    for name in (*models, "modules.rotary.ops", *operators):
        monkeypatch.setattr(importlib.import_module(f"fla.{name}"), "torch", wide)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
