"""Based (Arora et al., 2024, arXiv 2402.18668): linear attention whose feature map is a Taylor polynomial of exp.

    φ(q)ᵀφ(k) = 1 + s + s²/2,    s = qᵀk / √d

Queries and keys are short, d = 16, and the state is large: K = 1 + d + d² = 273 in the paper, 153 with each
product of two channels once. The weights are at least 1/2.

Names and shapes of the parameters equal those of fla's layer `BasedLinearAttention` 0.6.0; fla has no language model of
it. fla adds 1e-6 to the normaliser (1e-10 in its chunked form), this layer adds nothing. The paper's models also have
layers of sliding-window attention and of short convolutions; this is its linear attention alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from models.mixers.quadratic import Polynomial, QuadraticAttention, QuadraticConfig, keep_inputs
from zeco_train.ops import accumulation_dtype


@dataclass
class BasedConfig(QuadraticConfig):
    """Shape of a Based model, see `QuadraticConfig`. The defaults are those of `based_tiny`.

    For d = 16 a head has K = 153, or 273 unless `symmetric`; with features of zeros 160 or 288.
    """

    mixer: str = "based"
    name: str = "based_tiny"

    @property
    def polynomial(self) -> Polynomial:
        """The feature map."""
        return Polynomial(1.0, self.feature_dim**-0.25, (2 * self.feature_dim) ** -0.5, self.symmetric)


class Based(QuadraticAttention):
    """Based (Arora et al., 2024, arXiv 2402.18668).

    One layer: `QuadraticAttention` with the Taylor polynomial.
    """

    config_class = BasedConfig

    def __init__(self, config: BasedConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.polynomial = config.polynomial

    def map_features(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `FeatureMapAttention`."""
        del positions
        return keep_inputs(self._features, q), keep_inputs(self._features, k)

    def _features(self, x: Tensor) -> Tensor:
        return self.polynomial(x.to(accumulation_dtype(x.dtype))).to(x.dtype)
