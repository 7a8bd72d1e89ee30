"""More than 2³¹ elements in the values and in the chunk states, where 32-bit offsets overflow, on one device.

Heads are independent, so only a few of them are compared with float64 over all tokens: the first, the middle and the
last one, whose last tokens have the largest offsets.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zeco_train.ops import CHUNK
from zeco_train.sp.exchange import local_exchange
from zeco_train.verify.config import VerifyConfig
from zeco_train.verify.reference import SequenceRank, exact
from zeco_train.verify.report import Deviation, deviations
from zeco_train.verify.runs import run_backend
from zeco_train.verify.sequences import Sequence, decay_rates, pieces

_TOKENS = 1 << 16
_ELEMENTS = 1 << 31


def huge_sequence(config: VerifyConfig, dtype: torch.dtype, name: str, elements: int = _ELEMENTS) -> Sequence:
    """A sequence on one rank whose values, and states at chunk boundaries, have more than `elements` elements."""
    # The chunk states have K / CHUNK times as many elements as the values: with K ≥ CHUNK both are large enough.
    key_dim, value_dim = max(config.key_dim, CHUNK), config.value_dim
    heads = elements // (_TOKENS * value_dim) + 1
    return Sequence(name, _TOKENS, 1, 1, heads, key_dim, value_dim, dtype, documents=False, carry=True)


def huge_deviations(sequence: Sequence, device: torch.device) -> dict[str, Deviation]:
    """Forward and backward of all heads; deviations of some of them."""
    part = _part(sequence, device)
    results = run_backend(sequence, part, local_exchange(), SequenceRank(0, 1))
    heads = sorted({0, sequence.heads // 2, sequence.heads - 1})
    chosen = {name: x[:, :, heads].cpu() for name, x in part.items()}
    expected = exact(sequence, chosen, SequenceRank(0, 1), heads)
    actual = {name: x[:, heads] if name in _STATES else x[:, :, heads] for name, x in results.items()}
    return deviations({name: x.cpu() for name, x in actual.items()}, expected)


_STATES = ("R", "D_in", "carry_out", "dcarry_in")


def _part(sequence: Sequence, device: torch.device) -> dict[str, Tensor]:
    """q, k, v, g, do as of `Sequence.part`, but created on the device, a few tokens at a time."""
    generator = torch.Generator(device).manual_seed(sum(sequence.name.encode()))
    shape = (1, sequence.tokens, sequence.heads)
    dims = {"q": sequence.key_dim, "k": sequence.key_dim, "v": sequence.value_dim, "do": sequence.value_dim}
    part = {name: torch.empty(*shape, dim, dtype=sequence.dtype, device=device) for name, dim in dims.items()}
    part["g"] = torch.empty(*shape, sequence.key_dim, device=device)
    rates = decay_rates(sequence.heads, sequence.key_dim).to(device)
    for start, stop in pieces(sequence.tokens, 4096):
        for name, x in part.items():
            piece = x[:, start:stop]
            random = torch.randn(piece.shape, generator=generator, device=device)
            piece.copy_(F.logsigmoid(random) * rates if name == "g" else random)
    return {name: part[name] for name in ("q", "k", "v", "g", "do")}
