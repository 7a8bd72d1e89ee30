"""Whole sequences of any operator in fp64, and their exact results: of every exact case."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from zeco_train.ops.operator import Kind
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.oracle import ExactTokens, exact_softmax
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange
from zeco_train.verify.sequences import SOFTMAX

Results = dict[str, Tensor]
# Heads of values are those of keys.
_OF_SOFTMAX = {"q": "BTHK", "k": "BTGK", "v": "BTGV"}


def _dims_of(operator: str) -> Mapping[str, str]:
    return _OF_SOFTMAX if operator == SOFTMAX else OPERATORS[operator].dims_of


def _output_dims(operator: str) -> str:
    return "BTHV" if operator == SOFTMAX else OPERATORS[operator].dims[OPERATORS[operator].output]


# Starts of documents among `pieces` shards of t tokens each, in order: several inside of the first shard, and one over
# all that follow but the last; at shards' first and last tokens; many in every shard, some of one token; one.
DOCUMENTS: Mapping[str, Callable[[int, int], set[int]]] = {
    "spanning": lambda t, pieces: {t // 3, t // 2, (pieces - 1) * t + t // 2},
    "at edges": lambda t, pieces: {p * t for p in range(1, pieces, 2)} | {pieces * t - 1},
    "many": lambda t, pieces: {p * t + place for p in range(pieces) for place in {1, 2, t // 2, t - 1}},
    "one border": lambda t, pieces: {max(1, pieces // 2 * t)},
}


@dataclass(frozen=True)
class Whole:
    """A sequence, identical on every rank, as shards in order: of a first segment those of all ranks, then of a second.

    Attributes:
        name: seeds the values.
        tokens: of a shard.
        ranks, segments: P, M.
        batch, heads, groups, key_dim, value_dim: B, H, heads of keys, K, V; of a convolution V is its channels.
        width: of a convolution.
        documents: a key of `DOCUMENTS`; None: one document. The batch is 1 with them.
        carry: it has an initial state, and a gradient of the final one. The first document is then a continuation.
        strided: operands are not contiguous, as they are views of larger tensors.
        scale: of the outputs; None: K^-1/2.
        window: keys that a query of softmax attention reads at most; None: no limit.
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

    @property
    def num_pieces(self) -> int:
        """Number of shards."""
        return self.ranks * self.segments

    @property
    def seq_len(self) -> int:
        """Tokens of all shards."""
        return self.tokens * self.num_pieces

    @property
    def has_tokens(self) -> dict[str, bool]:
        """Operands by name, and whether they have a token dimension."""
        return {name: "T" in dims for name, dims in _dims_of(self.operator).items()}

    @property
    def borders(self) -> list[int]:
        """Document borders, from 0 to `seq_len`."""
        starts = set() if self.documents is None else DOCUMENTS[self.documents](self.tokens, self.num_pieces)
        return [0, *sorted(start for start in starts if 0 < start < self.seq_len), self.seq_len]

    @cached_property
    def tensors(self) -> Results:
        """The operands, do, carry_in and dcarry_out, of all tokens."""
        values = {name: self._operand(name, dims) for name, dims in _dims_of(self.operator).items()}
        values["do"] = self._random("do", *self._shape(_output_dims(self.operator)))
        state = self.state_shape
        return values | {name: self._random(name, *state) for name in ("carry_in", "dcarry_out")}

    @property
    def state_shape(self) -> tuple[int, ...]:
        """(B, H, K, V)."""
        if self.operator == SOFTMAX:
            return self.batch, self.heads, self.key_dim, self.value_dim
        operator = OPERATORS[self.operator]
        return operator.state_shape([torch.empty(self._shape(dims), device="meta") for dims in operator.dims])

    def position(self, exchange: Exchange, piece: int) -> SequencePosition:
        # With a carry a token precedes the sequence, so that the first document continues.
        (segment, rank), before = divmod(piece, self.ranks), int(self.carry)
        shards = range(segment * self.ranks, (segment + 1) * self.ranks + 1)
        documents = None if self.documents is None else [[0, *(border + before for border in self.borders[1:])]]
        return SequencePosition(
            [before + shard * self.tokens for shard in shards],
            rank,
            seq_len=before + self.seq_len,
            documents=documents,
            segment=segment,
            num_segments=self.segments,
            exchange=exchange,
        )

    def operands(self, piece: int) -> Results:
        """The operands of a shard, as leaves."""
        found = {}
        for name, has_tokens in self.has_tokens.items():
            x = self.tensors[name]
            x = x[:, piece * self.tokens : (piece + 1) * self.tokens] if has_tokens else x
            if self.strided and has_tokens:
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            # Decays that are constants ask for no gradient.
            found[name] = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(name != "log_decay")
        return found

    def do(self, piece: int) -> Tensor:
        """The gradient of a shard's outputs."""
        return self.tensors["do"][:, piece * self.tokens : (piece + 1) * self.tokens]

    def split(self, results: Results) -> list[Results]:
        """Results of all tokens by shard."""
        parts = {name: x.split(self.tokens, 1) for name, x in results.items()}
        return [{name: part[piece] for name, part in parts.items()} for piece in range(self.num_pieces)]

    def _shape(self, dims: str) -> list[int]:
        sizes = {"B": self.batch, "T": self.seq_len, "G": self.groups, "H": self.heads, "1": 1}
        sizes |= {"K": self.key_dim, "V": self.value_dim, "C": self.value_dim, "W": self.width}
        return [sizes[dim] for dim in dims]

    def _operand(self, name: str, dims: str) -> Tensor:
        shape = self._shape(dims)
        if name == "g":
            rates = self._rates() if len(shape) == 4 else self._rates()[:, 0]
            return -rates * (0.5 + self._random(name, *shape).sigmoid())
        if name == "log_decay":
            return -self._rates()[:, 0]
        if name == "beta":
            return self._strengths() * (0.5 + 0.5 * self._random(name, *shape).sigmoid())
        x = self._random(name, *shape)
        # Longer keys would make the transitions of a delta rule expansions.
        has_matrices = self.operator != SOFTMAX and OPERATORS[self.operator].kind is Kind.matrix
        return F.normalize(x, dim=-1) if name == "k" and has_matrices else x

    def _rates(self) -> Tensor:
        """Decays per token, [H, K]: by head weak, so that a state outlives several shards; none; all kinds; medium."""
        weak, channels = 0.7 / self.tokens, torch.arange(self.key_dim, dtype=torch.float64)
        kinds = [
            weak * (1 + channels) / (1 + channels.mean()),
            torch.zeros(self.key_dim, dtype=torch.float64),
            torch.tensor([0.0, weak, 0.2, 20.0] * self.key_dim)[: self.key_dim].double(),
            torch.full((self.key_dim,), 3 * weak, dtype=torch.float64),
        ]
        return torch.stack([kinds[head % 4] for head in range(self.heads)])

    def _strengths(self) -> Tensor:
        """Largest β, [H]: by head so weak that a state outlives several shards; 2, close to a reflection; and 1."""
        weak = min(1.0, 0.7 * self.key_dim / self.tokens)
        return torch.tensor([(weak, 2.0, weak, 1.0)[head % 4] for head in range(self.heads)], dtype=torch.float64)

    def _random(self, what: str, *shape: int) -> Tensor:
        # Not `hash`, which differs between processes.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self} {what}".encode()))
        return torch.randn(shape, generator=generator, dtype=torch.float64)


def exact_results(whole: Whole) -> list[Results]:
    """The exact results of each shard.

    Returns:
        o, and the gradients of operands: of a convolution's weight and bias the shard's part. R: the state before the
        shard, or of the whole sequence for an operator that reads it. carry_out, dcarry_in: the state after the shard's
        segment and the gradient of the one before it.
    """
    operands, do = {name: whole.tensors[name] for name in whole.has_tokens}, whole.tensors["do"]
    if whole.operator == SOFTMAX:
        q, k, v = operands.values()
        return whole.split(exact_softmax(q, k, v, do, borders=torch.tensor(whole.borders), window=whole.window))
    operator = OPERATORS[whole.operator]
    if operator.reads_whole:
        tokens = ExactTokens(operator, operands, do, scale=whole.scale)
        state = tokens.forward(tokens.zero_state())
        tokens.backward(torch.zeros_like(state))
        return [{"R": state, **piece} for piece in whole.split(tokens.results)]
    # Without a carry the first document has the state that a trainer starts from.
    restarts = whole.borders[whole.carry : -1] if whole.documents else []
    shards = []
    for piece in range(whole.num_pieces):
        start, stop = piece * whole.tokens, (piece + 1) * whole.tokens
        starts = [restart - start for restart in restarts if start <= restart < stop]
        shards.append(ExactTokens(operator, whole.operands(piece), whole.do(piece), starts, whole.scale))
    states = [whole.tensors["carry_in"] * whole.carry]
    for shard in shards:
        states.append(shard.forward(states[-1]))
    grads = [whole.tensors["dcarry_out"] * whole.carry]
    for shard in reversed(shards):
        grads.append(shard.backward(grads[-1]))
    results = []
    for number, shard in enumerate(shards):
        first = number // whole.ranks * whole.ranks
        ends = {"R": states[number], "carry_out": states[first + whole.ranks], "dcarry_in": grads[-1 - first]}
        results.append(shard.results | ends)
    return results


class Expected:
    """The exact results of all shards of a sequence, to compare with.

    Args:
        pieces: as of `exact_results`, by shard.
        beside: tensors that are small differences of large numbers, so that rounding is relative to a hundredth of the
            largest norm of another tensor, or of their own in any head and shard.
    """

    def __init__(self, pieces: list[Results], beside: Mapping[str, str]) -> None:
        self._pieces, self._beside = pieces, beside
        self._norms = {
            name: torch.stack([_by_head(name, piece[name]).norm(dim=1) for piece in pieces]) for name in pieces[0]
        }

    @classmethod
    def of(cls, whole: Whole, pieces: list[Results]) -> Expected:
        # A query that reads one key has no gradient.
        return cls(pieces, {"dq": "dv", "dk": "dv"} if whole.operator == SOFTMAX else {"dg": "dg"})

    def errors(self, results: Results, piece: int) -> dict[str, tuple[float, int]]:
        """The relative error of each tensor's worst head in a shard, and that head.

        A head's norm counts as at least a thousandth of that in the shard where it is largest.
        """
        errors = {}
        for name, actual in results.items():
            wanted, norms = self._pieces[piece][name], self._norms[name]
            if actual.shape != wanted.shape:
                errors[name] = (math.nan, 0)
                continue
            least = self._norms[self._beside[name]].max() / 1e2 if name in self._beside else norms.amax(0) / 1e3
            off = _by_head(name, actual - wanted).norm(dim=1)
            # An expected 0 must be matched exactly.
            error = torch.where(off == 0, 0.0, off / torch.maximum(norms[piece], least))
            head = int(error.nan_to_num(math.inf).argmax())
            errors[name] = (float(error[head]), head)
        return errors


def _by_head(name: str, x: Tensor) -> Tensor:
    dim = {"dweight": 0, "dbias": 0, "R": 1, "carry_out": 1, "dcarry_in": 1}.get(name, 2)
    return x.movedim(dim, 0).flatten(1) if x.ndim > 1 else x[:, None]
