"""Retention (Sun et al., 2023, arXiv 2307.08621): the layer, its configuration, FLOPs and activations.

Each head has one decay that is no parameter, so its memory has one length: that of head h is about 2^(5 + h) tokens.
Queries and keys have rotary position embeddings.

Names and shapes of its parameters equal those of `fla.models.RetNetForCausalLM` 0.6.0 (with fused norms, no short
convolution, as many heads of keys and values as of queries), so a checkpoint maps one to one. fla rotates with
frequencies of base 10000 only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.activations import Activations, TokenTensor, Traffic
from models.fla import FlaFormat
from models.heads import ExpandedHeadsConfig
from models.mixers.base import Mixer, OperatorFLOPs
from models.modules import GatedRMSNorm
from models.projections import parallel_linear
from models.rotary import check_rotary, rotate
from zeco_train.ops import CHUNK, accumulation_dtype
from zeco_train.ops.mix import mix_at
from zeco_train.ops.registry import OPERATORS
from zeco_train.ops.seam import Boundary, Crossing, Place


@dataclass
class RetNetConfig(ExpandedHeadsConfig):
    """Shape of a RetNet. The defaults are those of `retnet_tiny`.

    Attributes:
        rope_theta: base of the frequencies of the rotary position embeddings; None: no position embeddings.
    """

    mixer: str = "retnet"
    name: str = "retnet_tiny"
    expand_v: float = 2.0
    rope_theta: float | None = 10000.0

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        super().validate()
        check_rotary(self.rope_theta, self.head_k_dim)

    def describe(self) -> Mapping[str, str]:
        """See `LanguageModelConfig`."""
        variants = ["no position embeddings"] if self.rope_theta is None else []
        variants += ["tied embeddings"] if self.tie_word_embeddings else []
        heads = f"{self.num_heads} of K {self.head_k_dim} and V {self.head_v_dim}"
        return {"heads": heads, "variants": "; ".join(variants) or "none"}


def log_decays(num_heads: int) -> Tensor:
    """Log-decays of the heads, log(1 − 2^(−5−h)): [H] in fp64, on the CPU."""
    return torch.log1p(-torch.exp2(-5 - torch.arange(num_heads, dtype=torch.float64, device="cpu")))


class MultiScaleRetention(Mixer):
    """One RetNet layer: x [B, T, D] → [B, T, D].

    q, k      = x Wq, x Wk, cut into heads and rotated by the tokens' positions
    v         = x Wv
    o         = retention(q, k, v) with the decay 1 − 2^(−5−h) of head h, over the whole sequence, all shards
    y         = (RMSNorm over a head of o ⊙ swish(x Wg)) Wo
    """

    config_class = RetNetConfig
    fla = FlaFormat(
        model_type="retnet",
        architecture="RetNetForCausalLM",
        title="retention (Sun et al., 2023, arXiv 2307.08621)",
        numbers={"num_heads": 8, "expand_k": 1.0, "expand_v": 2.0},
        optional_defaults={"hidden_ratio": 2},
        fixed={"rope_theta": 10000.0},
        refused={
            "feature_map": (None, "a feature map of queries and keys"),
            "num_kv_heads": (None, "heads of keys and values that serve several heads of queries"),
            "use_output_gate": (True, "no output gate"),
            "use_short_conv": (False, "short convolutions before the operator"),
        },
        equals={"num_kv_heads": "num_heads"},
        most={"head_k_dim": 256},
        written={
            "attn_mode": "chunk",
            "feature_map": None,
            "num_kv_heads": None,
            "use_output_gate": True,
            "use_short_conv": False,
        },
        plain_norm={"g_norm_swish_gate": "g_norm"},
    )

    log_decay: Tensor

    def __init__(self, config: RetNetConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.config, self.rope_theta = config, config.rope_theta
        self.reads_positions = config.rope_theta is not None
        self.head_k_dim, self.head_v_dim = config.head_k_dim, config.head_v_dim
        width, keys, values = config.hidden_size, config.key_dim, config.value_dim
        # `init_weights` draws in this order: reordering the modules changes the initial values.
        self.q_proj = nn.Linear(width, keys, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, values, bias=False)
        self.g_proj = nn.Linear(width, values, bias=False)
        self.o_proj = nn.Linear(values, width, bias=False)
        self.g_norm_swish_gate = GatedRMSNorm(self.head_v_dim, config.norm_eps)

    @classmethod
    def constants(cls, config: RetNetConfig, layer: int) -> Mapping[str, Tensor]:
        """The heads' log-decays."""
        return {"log_decay": log_decays(config.num_heads)}

    def forward(
        self, x: Tensor, place: Place, boundaries: Sequence[Boundary], shared: Tensor | None
    ) -> tuple[Tensor, tuple[Crossing, ...]]:
        """See `Mixer.forward`."""
        *operands, gate = self._operands(x, place.positions)
        o, crossing = mix_at("fixed_decay", operands, self.head_k_dim**-0.5, place, boundaries[0])
        return self._output(o, gate), (crossing,)

    def step(self, x: Tensor, states: Sequence[Tensor], positions: Tensor, shared: Tensor | None) -> Tensor:
        """See `Mixer.step`."""
        *operands, gate = self._operands(x, positions[:, None])
        return self._output(OPERATORS["fixed_decay"].step(*operands, states[0], self.head_k_dim**-0.5), gate)

    def _operands(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, ...]:
        """q, k [B, T, H, K], v [B, T, H, V], the log-decays [H], and the gate [B, T, H, V]."""
        projections = self.q_proj, self.k_proj, self.v_proj, self.g_proj
        q, k, v, gate = parallel_linear(x, *(projection.weight for projection in projections))
        q, k = (tensor.unflatten(-1, (-1, self.head_k_dim)) for tensor in (q, k))
        v, gate = (tensor.unflatten(-1, (-1, self.head_v_dim)) for tensor in (v, gate))
        if self.rope_theta is not None:
            assert positions is not None, "the model asks for positions"
            q, k = rotate(q, k, positions, self.rope_theta)
        return q, k, v, self.log_decay.to(accumulation_dtype(x.dtype)), gate

    def _output(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(self.g_norm_swish_gate(o, gate).flatten(-2))

    @property
    def state_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """One state."""
        return ((self.config.num_heads, self.head_k_dim, self.head_v_dim),)

    def operator_flops(self, seq_len: int) -> OperatorFLOPs:
        """FLOPs of the operator; independent of the sequence length."""
        operator, (shape,) = OPERATORS["fixed_decay"], self.state_shapes
        return OperatorFLOPs(operator.forward_flops(*shape), operator.recomputed_flops(*shape))

    def activations(self) -> Activations:
        """Activations that autograd and the compiler's partitioner save.

        On GPUs the operator keeps the scores, in PyTorch it recomputes them. The positions, 8 bytes per token for
        all layers together, are not counted.
        """
        config, heads = self.config, self.config.num_heads
        keys, values = config.key_dim, config.value_dim
        scores, states = heads * CHUNK, heads * self.head_k_dim * self.head_v_dim // CHUNK
        rotated = config.rope_theta is not None
        kept = (
            TokenTensor("cosines and sines", self.head_k_dim * rotated, wide=True, compiled=False),
            TokenTensor("q", keys),
            TokenTensor("k", keys),
            TokenTensor("v", values),
            TokenTensor("output gate", values),
            TokenTensor("o", values),
            TokenTensor("1 / rms of o", heads, wide=True),
            TokenTensor("o normed and gated", values),
            TokenTensor("scores", scores, cpu=False),
        )
        gradients = (
            TokenTensor("gradient of o", values),
            TokenTensor("gradient of the output gate", values),
            TokenTensor("gradient of q", keys),
            TokenTensor("gradient of k", keys),
            TokenTensor("gradient of v", values),
            TokenTensor("states", states),
            TokenTensor("gradients of states", states),
            # The PyTorch operator makes fp32 copies of all its tensors.
            TokenTensor("chunks of q, k, v, do", keys, wide=True, gpu=False),
            TokenTensor("scores", scores, gpu=False),
            TokenTensor("scores and their gradients", scores, wide=True, gpu=False),
        )
        traffic = (
            Traffic("rotation of q and k", keys * rotated, 4, 4),
            Traffic("gated norm of o", values, 3, 6),
        )
        return Activations(kept, gradients, traffic)
