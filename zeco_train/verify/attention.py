"""Methods of softmax attention over ranks, against float64 on the CPU and against one device.

No code of the methods, of their routes or of the kernels' calls takes part in the exact results.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeco_train.distributed.mesh import ProcessMesh, attention_group
from zeco_train.ops import accumulation_dtype, seam
from zeco_train.ops.attend import attend_at
from zeco_train.ops.oracle import exact_softmax
from zeco_train.ops.position import SequencePosition, even_bounds
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.sp.attention.all_gather import ALL_GATHER
from zeco_train.sp.attention.method import LocalAttention
from zeco_train.sp.attention.registry import build_attention
from zeco_train.sp.exchange import local_exchange
from zeco_train.verify.comparisons import Comparisons, Results, Run
from zeco_train.verify.config import DTYPES, LIMITS, METHODS, SOFTMAX, VerifyConfig
from zeco_train.verify.reference import SequenceRank, processors
from zeco_train.verify.report import VerifyRow
from zeco_train.verify.runs import gather_tokens
from zeco_train.verify.sequences import RankedSequence, pieces

# Runs on one device, by the queries of a piece.
_IN_SHARDS, _IN_HALVES = "one device, in shards", "one device, in halves"


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
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.key_dim**-0.5)

    def part(self, rank: int) -> Results:
        """q, k, v and do of one rank's tokens, on the CPU: the same on every rank that asks."""
        heads = {"q": self.heads, "k": self.key_heads, "v": self.key_heads, "do": self.heads}
        dims = {"q": self.key_dim, "k": self.key_dim, "v": self.value_dim, "do": self.value_dim}
        return {
            name: self.random(f"{name} {rank}", self.batch, self.tokens, heads[name], dims[name]).to(self.dtype)
            for name in heads
        }

    def span(self, start: int, stop: int) -> Span:
        """The queries [start, stop)."""
        return Span(start, stop, torch.tensor(self.borders) if self.documents else None, self.window)


def exact(sequence: AttentionSequence, place: SequenceRank) -> Results:
    """o, dq, dk and dv of this rank's tokens, in fp64 on the CPU. Collective over the ranks of the sequence.

    Each rank has all keys and computes its own queries; gradients of keys and values are summed over ranks.
    """
    parts = [sequence.part(rank) for rank in range(sequence.num_ranks)]
    k, v = (torch.cat([part[name] for part in parts], 1) for name in ("k", "v"))
    q, do = (parts[place.rank][name] for name in ("q", "do"))
    own, borders = place.rank * sequence.tokens, sequence.span(0, sequence.seq_len).borders
    with processors(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        results = exact_softmax(q, k, v, do, offset=own, borders=borders, window=sequence.window)
    for name in ("dk", "dv"):
        if place.group is not None:
            dist.all_reduce(results[name], group=place.group)
        results[name] = results[name][:, own : own + sequence.tokens]
    return results


def run_method(
    sequence: AttentionSequence, tokens: Mapping[str, Tensor], method: seam.AttentionMethod, start: int
) -> Results:
    """Forward and backward by a method, of the tokens from position `start` on. Collective over the method's ranks."""
    q, k, v = (tokens[name].detach().requires_grad_() for name in ("q", "k", "v"))
    exchange = local_exchange().replaced(attention=method)
    parts = sequence.seq_len // q.shape[1]
    documents = [sequence.borders] if sequence.documents else None
    position = SequencePosition(
        even_bounds(sequence.seq_len, parts), start // q.shape[1], documents=documents, exchange=exchange
    )
    o, _ = attend_at(q, k, v, sequence.scale, position, [seam.StateInput()] * 2, sequence.window)
    grads = torch.autograd.grad(o, (q, k, v), tokens["do"])
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=True))


def run_one_device(sequence: AttentionSequence, part: Mapping[str, Tensor], place: SequenceRank) -> dict[str, Results]:
    """The whole sequence on this rank's device, at once, and with more than one rank also shard by shard, or in halves.

    Collective: the ranks' tokens are all-gathered. Results as of `exact`, by the name of the run.
    """
    whole = {name: gather_tokens(x, place) for name, x in part.items()}
    runs = {"one device": run_method(sequence, whole, LocalAttention(), 0)}
    if place.size > 1:
        runs[_IN_SHARDS] = _in_pieces(sequence, whole, 1)
        if sequence.window is None:
            runs[_IN_HALVES] = _in_pieces(sequence, whole, 2)
    own = slice(place.rank * sequence.tokens, (place.rank + 1) * sequence.tokens)
    return {name: {of: x[:, own].clone() for of, x in run.items()} for name, run in runs.items()}


def _in_pieces(sequence: AttentionSequence, tokens: Mapping[str, Tensor], parts_of_shard: int) -> Results:
    """The queries of each part of a shard with the keys of one shard after the other, its own first.

    Not at odd places: outputs and gradients of a part are rounded before they are summed, which is most of the noise,
    and with documents the number of a query's parts depends on where the cuts are.
    """
    q, k, v, do = (tokens[name] for name in ("q", "k", "v", "do"))
    wide = accumulation_dtype(q.dtype)
    results = {name: torch.zeros_like(x, dtype=wide) for name, x in (("o", do), ("dq", q), ("dk", k), ("dv", v))}
    shards = pieces(sequence.seq_len, sequence.tokens)
    size = -(-sequence.tokens // parts_of_shard)
    for a, b in ((start + a, start + b) for start, _ in shards for a, b in pieces(sequence.tokens, size)):
        span, earlier = sequence.span(a, b), [(c, min(b, d)) for c, d in reversed(shards) if c < b]
        parts = [attend(q[:, a:b], k[:, c:d], v[:, c:d], span, c, sequence.scale) for c, d in earlier]
        lse = torch.stack([part.lse for part in parts]).logsumexp(0)
        for part in parts:
            results["o"][:, a:b] += part.o.to(wide) * (part.lse - lse).exp().mT.unsqueeze(-1)
        merged = Attended(results["o"][:, a:b].to(q.dtype), lse)
        for c, d in earlier:
            grads = attend_backward(do[:, a:b], q[:, a:b], k[:, c:d], v[:, c:d], merged, span, c, sequence.scale)
            for name, (first, last), grad in zip(("dq", "dk", "dv"), ((a, b), (c, d), (c, d)), grads, strict=True):
                results[name][:, first:last] += grad
    return {name: x.to(q.dtype) for name, x in results.items()}


class AttentionCases:
    """The cases of softmax attention, row by row. Collective throughout.

    Args:
        config: resolved.
        meshes: by the number of ranks that share a sequence.
        compare: makes the rows.
    """

    def __init__(self, config: VerifyConfig, meshes: Mapping[int, ProcessMesh], compare: Comparisons) -> None:
        self._config, self._meshes, self._compare = config, meshes, compare
        self._groups: dict[int, ProcessGroup] = {}
        self._methods: dict[tuple[int, str], seam.AttentionMethod] = {}
        self._skipped: set[tuple[int, str]] = set()

    def rows(self) -> Iterator[VerifyRow]:
        """Compute the rows one by one; the same on every rank."""
        config = self._config
        for mesh, tokens, documents, dtype in itertools.product(
            self._meshes.values(), config.attention_tokens, config.documents_or_not, config.dtypes
        ):
            for window in config.windows(tokens):
                yield from self._sequence(mesh, self._make(mesh, tokens, dtype, documents, window), dtype)
                self._compare.free()

    def _make(
        self, mesh: ProcessMesh, tokens: int, dtype: str, documents: bool, window: int | None
    ) -> AttentionSequence:
        config = self._config
        return AttentionSequence(
            name=f"{config.seed} {mesh.dp_rank} {dtype} {tokens} {documents} {window}",
            tokens=tokens,
            num_ranks=mesh.sp_size,
            batch=1 if documents else config.batch,
            heads=config.heads,
            key_dim=config.key_dim,
            # FlashAttention has one width of heads.
            value_dim=config.key_dim,
            dtype=DTYPES[dtype],
            documents=documents,
            key_heads=config.num_key_heads,
            window=window,
        )

    def _sequence(self, mesh: ProcessMesh, sequence: AttentionSequence, dtype: str) -> Iterator[VerifyRow]:
        place, compare = SequenceRank.of(mesh), self._compare
        layout = f"{SOFTMAX}, {'documents' if sequence.documents else 'one document'}"
        layout += "" if sequence.window is None else f", window {sequence.window}"
        row = VerifyRow(dtype, sequence.tokens, sequence.num_ranks, layout, "", limit=LIMITS[dtype])
        compare.enter(row, "float64 on the CPU")
        expected = {name: x.to(compare.device) for name, x in exact(sequence, place).items()}
        compare.enter(row, "one device")
        part = {name: x.to(compare.device) for name, x in sequence.part(place.rank).items()}
        runs = self._runs(mesh, sequence, part, place)
        # Without a window paired queries are halves of shards.
        beside = {ALL_GATHER.name: _IN_HALVES} if sequence.window is None else {}
        yield from compare.rows(row, expected, run_one_device(sequence, part, place), runs, beside)

    def _runs(
        self, mesh: ProcessMesh, sequence: AttentionSequence, part: Results, place: SequenceRank
    ) -> Iterator[Run]:
        # On one rank every method is that of one device.
        for name in self._config.methods if mesh.sp_size > 1 else ():
            if (mesh.sp_size, name) not in self._skipped:
                yield name, partial(self._run, name, mesh, sequence, part, place)

    def _run(
        self, name: str, mesh: ProcessMesh, sequence: AttentionSequence, part: Results, place: SequenceRank
    ) -> tuple[Results, str]:
        key = mesh.sp_size, name
        if (problem := METHODS[name].heads_problem(sequence.heads, sequence.key_heads, mesh.sp_size)) is not None:
            self._skipped.add(key)
            return {}, problem
        if key not in self._methods:
            if mesh.sp_size not in self._groups:
                self._groups[mesh.sp_size] = attention_group(mesh)
            timeout = timedelta(seconds=self._config.timeout)
            self._methods[key] = build_attention(METHODS[name], self._groups[mesh.sp_size], timeout)
        return run_method(sequence, part, self._methods[key], place.rank * sequence.tokens), ""
