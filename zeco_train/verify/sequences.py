"""The sequences of all comparisons: random, with decays from none to strong, some with packed documents."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.operator import Kind
from zeco_train.ops.operator_registry import DEFAULT, OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange
from zeco_train.ops.softmax.span import Span

WEAKEST, STRONGEST = 1e-6, 20.0
# Operands that are the same for all tokens, and have no gradient.
CONSTANTS = ("log_decay",)
# Softmax attention, as an `operator`: it has no state, and methods of its own in place of the backends.
SOFTMAX = "softmax"
# Operators with states along a causal sequence.
VERIFIED = [name for name, operator in OPERATORS.items() if not (operator.state_is_halo or operator.reads_whole)]


@dataclass(frozen=True)
class RankedSequence:
    """One sequence over `num_ranks` ranks of `tokens` tokens each.

    Attributes:
        name: seeds the values; sequences of different names are different.
        documents: packed documents, some of which straddle ranks and some of which start at a rank's first token.
    """

    name: str
    tokens: int
    num_ranks: int
    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    documents: bool

    @property
    def seq_len(self) -> int:
        return self.tokens * self.num_ranks

    @property
    def borders(self) -> list[int]:
        """Document borders, from 0 to `seq_len`."""
        # One straddles up to three ranks, and from the fourth rank on documents also start at rank boundaries.
        length, later = self.tokens, range(3, self.num_ranks)
        starts = {0, 3, length // 3, length // 2, min(2, self.num_ranks - 1) * length + length // 4}
        starts |= {rank * length + extra for rank in later for extra in (0, length // 2)}
        return [*sorted(starts), self.seq_len]

    def random(self, what: str, *shape: int) -> Tensor:
        """Normal values, the same on every rank; in the accumulation dtype."""
        # Not `hash`, which differs between processes.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {what}".encode()))
        return torch.randn(shape, generator=generator, dtype=accumulation_dtype(self.dtype))


@dataclass(frozen=True)
class Sequence(RankedSequence):
    """A sequence for an operator with states.

    Attributes:
        carry: there is an initial state, and a gradient of the final state.
        operator: name of the operator.
    """

    carry: bool
    operator: str = DEFAULT

    @property
    def layout(self) -> str:
        """What the table says of it."""
        return ("documents" if self.documents else "one document") + (", carry" if self.carry else "")

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands that have tokens."""
        return tuple(name for name in OPERATORS[self.operator].operands if name not in CONSTANTS)

    @property
    def restarts(self) -> list[int]:
        """The tokens before which the state restarts. With a carry the first document is a continuation."""
        return self.borders[self.carry : -1] if self.documents else []

    def position(self, exchange: Exchange, bounds: Iterable[int], rank: int = 0) -> SequencePosition:
        """Of a rank's tokens, see `SequencePosition`."""
        # With a carry a token precedes the sequence, so that the first document is a continuation.
        before = int(self.carry)
        documents = [[0, *(border + before for border in self.borders[1:])]] if self.documents else None
        return SequencePosition(
            [before + bound for bound in bounds],
            rank,
            seq_len=before + self.seq_len,
            documents=documents,
            exchange=exchange,
        )

    def part(self, rank: int) -> dict[str, Tensor]:
        """The operands that have tokens, and do, of one rank's tokens, on the CPU."""
        operator = OPERATORS[self.operator]
        dims = {name: operator.dims_of[name] for name in self.operands}
        values = {}
        for name, own in (dims | {"do": operator.dims[operator.output]}).items():
            x = self.random(f"{name} {rank}", *self._shape(own))
            if name == "g":
                rates = decay_rates(self.heads, self.key_dim) if "K" in own else decay_rates(self.heads, 1)[:, 0]
                values[name] = F.logsigmoid(x).mul_(rates)
            elif name == "beta":
                values[name] = 2 * x.sigmoid()
            else:
                values[name] = x.to(self.dtype)
        if operator.kind is Kind.matrix:
            # Longer keys would make the transitions expansions. β lies between 0 and 2.
            values["k"] = F.normalize(values["k"].to(accumulation_dtype(self.dtype)), dim=-1).to(self.dtype)
        return values

    def _shape(self, dims: str) -> list[int]:
        sizes = {"B": self.batch, "T": self.tokens, "G": self.heads, "H": self.heads}
        return [(sizes | {"K": self.key_dim, "V": self.value_dim})[dim] for dim in dims]

    def complete(self, tokens: Mapping[str, Tensor]) -> list[Tensor]:
        """The operator's operands, in its order; constants in the accumulation dtype."""
        operands = [tokens[name] for name in self.operands]
        if "log_decay" in OPERATORS[self.operator].operands:
            wide = accumulation_dtype(operands[0].dtype)
            # Rounded to that of the sequence, also for a reference in fp64.
            constant = -decay_rates(self.heads, 1)[:, 0].to(accumulation_dtype(self.dtype))
            operands.append(constant.to(device=operands[0].device, dtype=wide))
        return operands

    def carries(self) -> dict[str, Tensor]:
        """carry_in and dcarry_out, [B, H, K, V] on the CPU; empty without a carry."""
        operator = OPERATORS[self.operator]
        shape = operator.state_shape([torch.empty(self._shape(dims), device="meta") for dims in operator.dims])
        return {name: self.random(name, *shape) for name in ("carry_in", "dcarry_out")} if self.carry else {}


@dataclass(frozen=True)
class AttentionSequence(RankedSequence):
    """A sequence of queries, keys and values.

    Attributes:
        key_heads: G.
        window: keys that a query reads at most, itself among them; None: no limit.
    """

    key_heads: int
    window: int | None

    @property
    def layout(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        return f"{SOFTMAX}, {'documents' if self.documents else 'one document'}{window}"

    @property
    def scale(self) -> float:
        return float(self.key_dim**-0.5)

    def part(self, rank: int) -> dict[str, Tensor]:
        """q, k, v and do of one rank's tokens, on the CPU."""
        heads = {"q": self.heads, "k": self.key_heads, "v": self.key_heads, "do": self.heads}
        dims = {"q": self.key_dim, "k": self.key_dim, "v": self.value_dim, "do": self.value_dim}
        return {
            name: self.random(f"{name} {rank}", self.batch, self.tokens, heads[name], dims[name]).to(self.dtype)
            for name in heads
        }

    def span(self, start: int, stop: int) -> Span:
        """The queries [start, stop)."""
        return Span(start, stop, torch.tensor(self.borders) if self.documents else None, self.window)


def decay_rates(heads: int, key_dim: int) -> Tensor:
    """Factors of log-sigmoids, [H, K]: none for the first 16th of all channels, then from 1e-6 to 20 per token."""
    # Each head has its own range, so that large states of one do not hide an error in the decays of another.
    count = heads * key_dim
    still = -(-count // 16)
    rates = torch.zeros(count)
    rates[still:] = torch.logspace(math.log10(WEAKEST), math.log10(STRONGEST), count - still)
    return rates.view(heads, key_dim)


def pieces(length: int, size: int) -> list[tuple[int, int]]:
    """Split [0, length) into pieces of `size`, the last one shorter."""
    return list(itertools.pairwise([*range(0, length, size), length]))
