"""Question: how do models of masked tokens with softmax attention over ranks learn? (LASP-2, Table 3, first row)
Command: python -m lab.paper.losses unmasked
Date: 2026-11-27; 2 CPU ranks
Answer: lab/results/paper_unmasked_2cpu.json, docs/papers.md.

The product's softmax layers are causal. Here every query reads all keys, of every rank: the blocks of keys and values
go all the way round, and a block is placed before the queries, so that the product's own kernels mask nothing of it.
Exact (`tests/lab/test_paper.py`); outside of this folder nothing uses it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from models.mixer_registry import unmasked_mixers
from zeco_train.collectives.wire import Message
from zeco_train.config import schema
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.sp.attention.method import ShardedAttention
from zeco_train.sp.attention.method_registry import METHODS
from zeco_train.sp.attention.routes import Bounds


def _reads_all(queries: Tensor, keys: Tensor) -> Span:
    # Queries that come after all of the keys.
    return Span(keys.shape[1], keys.shape[1] + queries.shape[1])


class UnmaskedRing(ShardedAttention):
    """Ring Attention in which every query reads every key; no windows, no documents, shards of equal length."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, span: Span, bounds: Bounds, scale: float) -> Attended:
        self.connect(q)
        block, found = torch.stack([k, v]), None
        for step in range(self.wire.size):
            part = attend(q, block[0], block[1], _reads_all(q, k), 0, scale)
            found = part if found is None else Attended.merged(found, part)
            block = self._next(block) if step + 1 < self.wire.size else block
        assert found is not None
        return Attended(found.o.to(q.dtype), found.lse)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, span: Span, bounds: Bounds, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The blocks travel once more, with their gradients, which are back at their owner after P steps."""
        wide = accumulation_dtype(q.dtype)
        block, dq = torch.stack([k, v]), torch.zeros(q.shape, dtype=wide, device=q.device)
        grads = torch.zeros(block.shape, dtype=wide, device=q.device)
        for step in range(self.wire.size):
            dqp, *of_keys = attend_backward(do, q, block[0], block[1], attended, _reads_all(q, k), 0, scale)
            dq += dqp
            grads += torch.stack(of_keys)
            grads, block = self._next(grads), self._next(block) if step + 1 < self.wire.size else block
        dk, dv = (grad.clone() for grad in grads)
        return dq, dk, dv

    def _next(self, block: Tensor) -> Tensor:
        wire = self.wire
        into = torch.empty_like(block)
        sent = [Message(block.contiguous(), (wire.position + 1) % wire.size, "a block of keys")]
        for transfer in wire.send_and_receive(
            sent, [Message(into, (wire.position - 1) % wire.size, "a block of keys")]
        ):
            transfer.wait()
        return into


@contextmanager
def unmasked_softmax() -> Iterator[None]:
    """Train models of softmax layers with `model.causal=false`, on two ranks or more."""

    checked = schema.check_attention

    def check(model: schema.LanguageModelConfig, sp: schema.SPConfig, segments: int) -> None:
        checked(dataclasses.replace(model, causal=True), sp, segments)

    ring = dataclasses.replace(METHODS["ring"], build=UnmaskedRing)
    able = mock.patch.object(schema, "unmasked_mixers", return_value=[*unmasked_mixers(), "softmax"])
    with able, mock.patch.object(schema, "check_attention", check), mock.patch.dict(METHODS, ring=ring):
        yield
