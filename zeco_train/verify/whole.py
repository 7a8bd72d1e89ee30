"""The sequences of all comparisons: random, with decays from none to strong, some with packed documents."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.operator import Kind
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange
from zeco_train.ops.softmax.span import Span

Results = dict[str, Tensor]
# Operands that are the same for all tokens, and have no gradient.
CONSTANTS = ("log_decay",)
# Results without tokens: the state before and the gradient after a shard; those after and before the whole sequence.
STATES = ("R", "D_in", "carry_out", "dcarry_in")
# Softmax attention, as an `operator`: it has no state, and methods of its own in place of the backends.
SOFTMAX = "softmax"
# Operators with states along a causal sequence, whose operands have tokens, or are constants.
VERIFIED = [
    name
    for name, operator in OPERATORS.items()
    if not (operator.state_is_halo or operator.reads_whole)
    and all("T" in dims or operand in CONSTANTS for operand, dims in operator.dims_of.items())
]

# Starts of documents among `pieces` shards of t tokens each, in order: several inside of the first shard, and one over
# all that follow but the last; at shards' first and last tokens; many in every shard, some of one token; one.
DOCUMENTS: dict[str, Callable[[int, int], set[int]]] = {
    "spanning": lambda t, pieces: {t // 3, t // 2, (pieces - 1) * t + t // 2},
    "at edges": lambda t, pieces: {p * t for p in range(1, pieces, 2)} | {pieces * t - 1},
    "many": lambda t, pieces: {p * t + place for p in range(pieces) for place in {1, 2, t // 2, t - 1}},
    "one border": lambda t, pieces: {max(1, pieces // 2 * t)},
}
# Of launched ranks: one straddles up to three ranks, and from the fourth rank on documents also start at its first
# token.
LAUNCHED_DOCUMENTS = "over ranks"
_STARTS = DOCUMENTS | {
    LAUNCHED_DOCUMENTS: lambda t, pieces: (
        {3, t // 3, t // 2, min(2, pieces - 1) * t + t // 4}
        | {p * t + extra for p in range(3, pieces) for extra in (0, t // 2)}
    )
}
WEAKEST, STRONGEST = 1e-6, 20.0


@dataclass(frozen=True)
class Whole:
    """A sequence, identical on every rank, as shards in order: all ranks' of a first segment, then of a second.

    Attributes:
        name: seeds the values.
        tokens: of a shard.
        ranks, segments: P, M.
        batch, heads, groups, key_dim, value_dim: B, H, heads of keys, K, V; of a convolution V is its channels.
        width: of a convolution.
        documents: a key of `DOCUMENTS`, or `LAUNCHED_DOCUMENTS`; None: one document. The batch is 1 with them.
        carry: it has an initial state, and a gradient of the final one. The first document is then a continuation.
        strided: operands are not contiguous, as they are views of larger tensors.
        scale: of the outputs; None: K^-1/2.
        window: keys that a query of softmax attention reads at most; None: no limit.
        dtype: of the operands; decays and strengths have its accumulation dtype.
        is_launched: on launched ranks, where a sequence may be too long for one: each shard has values of its own, and
            decays rise over all channels, for the many heads of which GPUs have kernels.
    """

    name: str
    operator: str
    tokens: int
    ranks: int
    segments: int = 1
    batch: int = 1
    heads: int = 1
    groups: int = 1
    key_dim: int = 4
    value_dim: int = 4
    width: int = 4
    documents: str | None = None
    carry: bool = False
    strided: bool = False
    scale: float | None = None
    # The representation seeds the values.
    window: int | None = field(default=None, repr=False)
    dtype: torch.dtype = field(default=torch.float64, repr=False)
    is_launched: bool = field(default=False, repr=False)

    @property
    def num_pieces(self) -> int:
        return self.ranks * self.segments

    @property
    def seq_len(self) -> int:
        return self.tokens * self.num_pieces

    @property
    def dims(self) -> dict[str, str]:
        """The dimensions, a letter each (`Operator.dims`), of the operands in their order, and of the outputs, `do`."""
        if self.operator == SOFTMAX:
            # As many heads of values as of keys.
            return {"q": "BTHK", "k": "BTGK", "v": "BTGV", "do": "BTHV"}
        operator = OPERATORS[self.operator]
        return operator.dims_of | {"do": operator.dims[operator.output]}

    @property
    def borders(self) -> list[int]:
        """Document borders, from 0 to `seq_len`."""
        starts = set() if self.documents is None else _STARTS[self.documents](self.tokens, self.num_pieces)
        return [0, *sorted(start for start in starts if 0 < start < self.seq_len), self.seq_len]

    @property
    def restarts(self) -> list[int]:
        """The tokens before which the state restarts. With a carry the first document is a continuation."""
        # Without a carry the first document has the state that a trainer starts from.
        return self.borders[self.carry : -1] if self.documents else []

    @property
    def state_shape(self) -> tuple[int, ...]:
        """(B, H, K, V)."""
        if self.operator == SOFTMAX:
            return self.batch, self.heads, self.key_dim, self.value_dim
        operator = OPERATORS[self.operator]
        return operator.state_shape([torch.empty(self._shape(dims, 1), device="meta") for dims in operator.dims])

    @property
    def layout(self) -> str:
        """The operator and its sequence, for the table."""
        if self.operator == SOFTMAX:
            widths = f"H{self.heads}/{self.groups}"
        elif OPERATORS[self.operator].state_is_halo:
            widths = f"w{self.width} C{self.value_dim}"
        else:
            _, heads, key_dim, value_dim = self.state_shape
            widths = f"H{heads}{f'/{self.groups}' if self.groups < heads else ''} K{key_dim} V{value_dim}"
        words = [f"{self.operator} B{self.batch} {widths}"]
        words += [f"documents {self.documents}"] if self.documents else []
        words += [f"window {self.window}"] if self.window else []
        words += ["carry"] * self.carry + [f"{self.segments} segments"] * (self.segments > 1)
        return ", ".join(words)

    @cached_property
    def tensors(self) -> Results:
        """The operands and do of all tokens; of the launched ranks each has its own `part` only."""
        return {name: self._values(name, name, self.seq_len) for name in self.dims}

    def part(self, piece: int) -> Results:
        """The operands of a shard, in their order, and do, the gradient of its outputs; on the CPU."""
        if self.is_launched:
            return {name: self._values(name, f"{name} {piece}", self.tokens) for name in self.dims}
        found = {}
        for name, x in self.tensors.items():
            if has_tokens := "T" in self.dims[name]:
                x = x[:, piece * self.tokens : (piece + 1) * self.tokens]
            if self.strided and has_tokens and name != "do":
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            found[name] = x if name == "do" else x.clone(memory_format=torch.preserve_format)
        return found

    @property
    def ends(self) -> list[Tensor]:
        """The state before the sequence, and the gradient of the one after it, [B, H, K, V]; 0 without a carry."""
        return [self._random(name, *self.state_shape) * self.carry for name in ("carry_in", "dcarry_out")]

    def position(self, exchange: Exchange, piece: int) -> SequencePosition:
        segment, rank = divmod(piece, self.ranks)
        shards = range(segment * self.ranks, (segment + 1) * self.ranks + 1)
        return self.position_in(exchange, [shard * self.tokens for shard in shards], rank, segment)

    def position_in(self, exchange: Exchange, bounds: Many[int], rank: int = 0, segment: int = 0) -> SequencePosition:
        """Of tokens of a rank, of a segment that is cut at these bounds; see `SequencePosition`."""
        # With a carry a token precedes the sequence, so that the first document continues.
        before = int(self.carry)
        documents = None if self.documents is None else [[0, *(border + before for border in self.borders[1:])]]
        return SequencePosition(
            [before + bound for bound in bounds],
            rank,
            seq_len=before + self.seq_len,
            documents=documents,
            segment=segment,
            num_segments=self.segments,
            exchange=exchange,
        )

    def span(self, start: int, stop: int) -> Span:
        """The queries [start, stop) of softmax attention."""
        return Span(start, stop, torch.tensor(self.borders) if self.documents else None, self.window)

    def split(self, results: Mapping[str, Tensor], pieces: int) -> list[Results]:
        """Results of consecutive tokens by shard."""
        parts = {name: x.split(self.tokens, 1) for name, x in results.items()}
        return [{name: part[piece] for name, part in parts.items()} for piece in range(pieces)]

    def _shape(self, dims: str, tokens: int) -> list[int]:
        sizes = {"B": self.batch, "T": tokens, "G": self.groups, "H": self.heads, "1": 1}
        sizes |= {"K": self.key_dim, "V": self.value_dim, "C": self.value_dim, "W": self.width}
        return [sizes[dim] for dim in dims]

    def _values(self, name: str, seed: str, tokens: int) -> Tensor:
        dims = self.dims[name]
        if name in CONSTANTS:
            return -self._rates(by_channel=False).to(accumulation_dtype(self.dtype))
        x = self._random(seed, *self._shape(dims, tokens))
        if name == "g":
            rates = self._rates(by_channel="K" in dims)
            return F.logsigmoid(x).mul_(rates) if self.is_launched else -rates * (0.5 + x.sigmoid())
        if name == "beta":
            return 2 * x.sigmoid() if self.is_launched else self._strengths() * (0.5 + 0.5 * x.sigmoid())
        x = x.to(self.dtype)
        if name == "k" and self.operator != SOFTMAX and OPERATORS[self.operator].kind is Kind.matrix:
            # Longer keys would make the transitions of a delta rule expansions: β lies between 0 and 2.
            x = F.normalize(x.to(accumulation_dtype(self.dtype)), dim=-1).to(self.dtype)
        return x

    def _rates(self, *, by_channel: bool) -> Tensor:
        # Decays per token, [H, K] or [H].
        if self.is_launched:
            rates = decay_rates(self.heads, self.key_dim if by_channel else 1)
        else:
            # By head weak, so that a state outlives several shards; none; all kinds; medium.
            weak, channels = 0.7 / self.tokens, torch.arange(self.key_dim, dtype=torch.float64)
            kinds = [
                weak * (1 + channels) / (1 + channels.mean()),
                torch.zeros(self.key_dim, dtype=torch.float64),
                torch.tensor([0.0, weak, 0.2, 20.0] * self.key_dim)[: self.key_dim].double(),
                torch.full((self.key_dim,), 3 * weak, dtype=torch.float64),
            ]
            rates = torch.stack([kinds[head % 4] for head in range(self.heads)])
        return rates if by_channel else rates[:, 0]

    def _strengths(self) -> Tensor:
        # Largest β, [H]: by head so weak that a state outlives several shards; 2, close to a reflection; and 1.
        weak = min(1.0, 0.7 * self.key_dim / self.tokens)
        return torch.tensor([(weak, 2.0, weak, 1.0)[head % 4] for head in range(self.heads)], dtype=torch.float64)

    def _random(self, what: str, *shape: int) -> Tensor:
        # Normal values, the same on every rank; not by `hash`, which differs between processes.
        seed = zlib.crc32(f"{self.name if self.is_launched else self} {what}".encode())
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=accumulation_dtype(self.dtype))


def decay_rates(heads: int, key_dim: int) -> Tensor:
    """Factors of log-sigmoids, [H, K]: none for the first 16th of all channels, then from 1e-6 to 20 per token."""
    # Each head has its own range, so that large states of one do not hide an error in the decays of another.
    count = heads * key_dim
    still = -(-count // 16)
    rates = torch.zeros(count)
    rates[still:] = torch.logspace(math.log10(WEAKEST), math.log10(STRONGEST), count - still)
    return rates.view(heads, key_dim)
