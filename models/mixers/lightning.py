"""Lightning Attention (Qin et al., 2023, arXiv 2307.14995; 2024, 2405.17381): the layer, its configuration and FLOPs.

Each head has one decay that is no parameter: a slope of ALiBi (Press et al., 2021, arXiv 2108.12409), smaller in later
layers, nearly none in the last. The layer is that of MiniMax-01 (2025, arXiv 2501.08313): swish of q, k and v, no
scale, one norm over all heads, and a sigmoid gate. Some models rotate queries and keys besides; `rope_theta` sets it.

flash-linear-attention has no such model, and MiniMax's has experts and other residuals, so there is no export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.activations import Activations, TokenTensor, Traffic
from models.heads import ExpandedHeadsConfig
from models.mixers.base import Mixer, OperatorFLOPs
from models.modules import GatedRMSNorm, GateFunction
from models.projections import parallel_linear
from models.rotary import check_rotary, rotate
from zeco_train.ops import CHUNK, accumulation_dtype
from zeco_train.ops.mix import mix_at
from zeco_train.ops.registry import OPERATORS
from zeco_train.ops.seam import Boundary, Crossing, Place


@dataclass
class LightningConfig(ExpandedHeadsConfig):
    """Shape of a model with Lightning Attention. The defaults are those of `lightning_tiny`.

    Attributes:
        rope_theta: base of the frequencies of rotary position embeddings; None: no position embeddings.
    """

    mixer: str = "lightning"
    name: str = "lightning_tiny"
    rope_theta: float | None = None

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        super().validate()
        check_rotary(self.rope_theta, self.head_k_dim)

    def describe(self) -> Mapping[str, str]:
        """See `LanguageModelConfig`."""
        variants = [] if self.rope_theta is None else [f"rotary position embeddings of base {self.rope_theta:g}"]
        variants += ["tied embeddings"] if self.tie_word_embeddings else []
        heads = f"{self.num_heads} of K {self.head_k_dim} and V {self.head_v_dim}"
        return {"heads": heads, "variants": "; ".join(variants) or "none"}


def slopes(num_heads: int) -> list[float]:
    """ALiBi's slopes: a geometric sequence, 2^(−8/n) to 2^(−8), for n heads, n a power of two.

    For other numbers, those of the next lower power of two, then every second one of the next higher power of two.
    """
    lower = 1 << (num_heads.bit_length() - 1)
    geometric = [2 ** (-8 * (head + 1) / lower) for head in range(lower)]
    between = [2 ** (-8 * (2 * head + 1) / (2 * lower)) for head in range(num_heads - lower)]
    return geometric + between


def log_decays(num_heads: int, layer: int, num_layers: int) -> Tensor:
    """Log-decays of a layer's heads, −slope · (1 − layer / (num_layers − 1) + 1e-5): [H] in fp64, on the CPU."""
    factor = 1 - layer / max(num_layers - 1, 1) + 1e-5
    return torch.tensor(slopes(num_heads), dtype=torch.float64, device="cpu") * -factor


class LightningAttention(Mixer):
    """One layer of Lightning Attention: x [B, T, D] → [B, T, D].

    q, k, v   = swish(x Wq), swish(x Wk), swish(x Wv), cut into heads; q and k rotated if there is a `rope_theta`
    o         = linear attention with the heads' decays, over the whole sequence, all shards
    y         = (RMSNorm over all heads of o ⊙ σ(x Wg)) Wo
    """

    config_class = LightningConfig

    log_decay: Tensor

    def __init__(self, config: LightningConfig, layer: int) -> None:
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
        self.g_norm = GatedRMSNorm(values, config.norm_eps, GateFunction.sigmoid)

    @classmethod
    def constants(cls, config: LightningConfig, layer: int) -> Mapping[str, Tensor]:
        """The heads' log-decays."""
        return {"log_decay": log_decays(config.num_heads, layer, config.num_layers)}

    def forward(
        self, x: Tensor, place: Place, boundaries: Sequence[Boundary], shared: Tensor | None
    ) -> tuple[Tensor, tuple[Crossing, ...]]:
        """See `Mixer.forward`."""
        *operands, gate = self._operands(x, place.positions)
        o, crossing = mix_at("fixed_decay", operands, 1.0, place, boundaries[0])
        return self._output(o, gate), (crossing,)

    def step(self, x: Tensor, states: Sequence[Tensor], positions: Tensor, shared: Tensor | None) -> Tensor:
        """See `Mixer.step`."""
        *operands, gate = self._operands(x, positions[:, None])
        return self._output(OPERATORS["fixed_decay"].step(*operands, states[0], 1.0), gate)

    def _operands(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, ...]:
        """q, k [B, T, H, K], v [B, T, H, V], the log-decays [H], and the gate [B, T, H·V]."""
        projections = self.q_proj, self.k_proj, self.v_proj, self.g_proj
        *projected, gate = parallel_linear(x, *(projection.weight for projection in projections))
        sizes = self.head_k_dim, self.head_k_dim, self.head_v_dim
        q, k, v = (F.silu(tensor).unflatten(-1, (-1, size)) for tensor, size in zip(projected, sizes, strict=True))
        if self.rope_theta is not None:
            assert positions is not None, "the model asks for positions"
            q, k = rotate(q, k, positions, self.rope_theta)
        return q, k, v, self.log_decay.to(accumulation_dtype(x.dtype)), gate

    def _output(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(self.g_norm(o.flatten(-2), gate))

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
            TokenTensor("projections of q, k, v", 2 * keys + values),
            TokenTensor("cosines and sines", self.head_k_dim * rotated, wide=True, compiled=False),
            TokenTensor("q", keys),
            TokenTensor("k", keys),
            TokenTensor("v", values),
            TokenTensor("output gate", values),
            TokenTensor("o", values),
            TokenTensor("1 / rms of o", 1, wide=True),
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
            Traffic("swish of q, k, v, and rotation", 2 * keys + values, 2, 3),
            Traffic("gated norm of o", values, 3, 6),
        )
        return Activations(kept, gradients, traffic)
