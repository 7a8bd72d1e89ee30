"""Only the matrix products of one training step of the model: the upper bound of case `model`.

It takes turns with the backends, on the same GPU at the same temperature: at its power limit a GPU lowers its clocks.
For the same reason the bound is not strict, since products alone draw more power than a step that also moves memory.

For each linear layer of the model and for the head it runs the three products of a step, one by one, in the compute
dtype and with the layouts of `models.projections`: y = x Wᵀ in the forward pass, dx = dy W and dW = dyᵀ x in the
backward pass; those of the head chunk by chunk in the forward pass, as in `zeco_train.ops.loss`. There is no norm, no
operator, no optimizer, no sum of the gradients dx of one input, and no communication; no `recompute` or `segments`.

Values are drawn from normal distributions, since products of zeros draw less power: x and dy with variance 1, W as the
model's initial weights. Results are written, but never read (the head's logits are, as their own gradient). All blocks
of a mixer share one block's weights, and all layers three buffers, for x, dy and the results: too large to stay in the
L2 cache (0.1 and 0.2 GB for `gla_1b` with 16k tokens). Together they take 1.4 GB then, and 2.0 GB at 32k.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from models.config import LanguageModelConfig
from models.spec import TokenFLOPs, spec_of
from zeco_train.bench.timing import Contender
from zeco_train.bench.variants import PRODUCTS, Variant

# As in `zeco_train.ops.loss` on CUDA.
CHUNK_TOKENS = 8192

# (a [m, k], b [k, n], output of a b [m, n]).
_Product = tuple[Tensor, Tensor, Tensor]


def product_flops(config: LanguageModelConfig) -> TokenFLOPs:
    """FLOPs of the products per token: the model's, less the operator's."""
    return replace(spec_of(config).flops_per_token(seq_len=1), operator=0.0)


class Products:
    """The products of a step for this many tokens of this rank; all buffers together have `held_bytes`."""

    def __init__(
        self, config: LanguageModelConfig, tokens: int, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device, generator=generator)

        blocks, head = spec_of(config).blocks, (config.hidden_size, config.vocab_size)
        self._layers = [config.mixer_of(layer) for layer in range(config.num_layers)]
        shapes = [shape for block in blocks.values() for group in block.products for shape in group]
        widest, chunk = max(max(shape) for shape in shapes), min(tokens, CHUNK_TOKENS)
        self._tokens, self._inputs, self._grads = tokens, normal(tokens * widest), normal(tokens * widest)
        self._results = torch.empty_like(self._inputs)
        # As in the model, a chunk's gradient overwrites its logits.
        self._logits = torch.empty(chunk * config.vocab_size, dtype=dtype, device=device)
        self._dweight = self._logits.new_empty(max(math.prod(shape) for shape in (*shapes, head)))
        weights = {
            name: [[normal(n, k).mul_(config.initializer_range) for k, n in group] for group in block.products]
            for name, block in blocks.items()
        }
        head_weight = normal(*reversed(head)).mul_(config.initializer_range)
        buffers = [self._inputs, self._grads, self._results, self._logits, self._dweight, head_weight]
        own = [weight for groups in weights.values() for group in groups for weight in group]
        self.held_bytes = sum(tensor.nbytes for tensor in [*buffers, *own])
        self._forward = {
            name: [product for group in groups for product in self._outputs(group)] for name, groups in weights.items()
        }
        self._head = self._head_products(head_weight, chunk)
        self._backward = {
            name: [product for group in reversed(groups) for product in self._gradients(group)]
            for name, groups in weights.items()
        }

    def contender(self, times: int) -> Contender:
        """These products, so many `times` a step, which returns one result, not a loss."""

        def step(number: int) -> Tensor:
            return [self.step() for _ in range(times)][-1]

        return Contender(Variant(PRODUCTS, PRODUCTS), step, held_gb=self.held_bytes / 1e9)

    def step(self) -> Tensor:
        """All products of a step. Returns an element of the last result."""
        forward = (self._forward[name] for name in self._layers)
        backward = (self._backward[name] for name in reversed(self._layers))
        for a, b, result in itertools.chain(*forward, self._head, *backward):
            torch.mm(a, b, out=result)
        return self._dweight[0]

    def _outputs(self, weights: Sequence[Tensor]) -> list[_Product]:
        return [
            (self._view(self._inputs, weight.shape[1]), weight.T, self._view(self._results, weight.shape[0]))
            for weight in weights
        ]

    def _gradients(self, weights: Sequence[Tensor]) -> list[_Product]:
        dxs, dweights = [], []
        for weight in weights:
            n, k = weight.shape
            dy = self._view(self._grads, n)
            dxs.append((dy, weight, self._view(self._results, k)))
            dweights.append((dy.T, self._view(self._inputs, k), self._dweight[: n * k].view(n, k)))
        return [*dxs, *dweights]

    def _head_products(self, weight: Tensor, chunk: int) -> list[_Product]:
        # Logits, dh and dW of each chunk of tokens; the logits stand in for their gradient.
        products: list[_Product] = []
        vocab, width = weight.shape
        hidden, dhidden = (self._view(tensor, width) for tensor in (self._inputs, self._results))
        dweight = self._dweight[: vocab * width].view(vocab, width)
        for start in range(0, self._tokens, chunk):
            rows, drows = hidden[start : start + chunk], dhidden[start : start + chunk]
            logits = self._logits[: rows.shape[0] * vocab].view(-1, vocab)
            products += [(rows, weight.T, logits), (logits, weight, drows), (logits.T, rows, dweight)]
        return products

    def _view(self, buffer: Tensor, width: int) -> Tensor:
        return buffer[: self._tokens * width].view(self._tokens, width)
