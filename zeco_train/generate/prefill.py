"""Prefill: prompts through the chunked operator, to the states after them.

Prompts of a batch may differ in length: all are processed together up to the end of the shortest, the rest up to the
end of the next, and so on. In between, tokens are processed in pieces of bounded size, like segments in training, each
sharded over the ranks of the sequence. Nothing is padded, so only the rounding of a prompt's result depends on the rest
of the batch.

Softmax layers write the keys and values of each piece to caches of fixed capacity, whole on every rank, and read those
of all earlier pieces there.

Prompts of a few tokens go through the recurrent step instead: the operator's kernels take seconds to compile on a
machine's first call, and the step is needed for decoding anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from models.language_model import LanguageModel
from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.ops import CHUNK
from zeco_train.ops.layer_states import LayerStates
from zeco_train.ops.position import SequencePosition, even_bounds
from zeco_train.ops.seam import Exchange
from zeco_train.sp.exchange import local_exchange

# Prompts up to this many tokens go through the recurrent step.
_STEPS = 16


class Prefill:
    """Runs prompts through a replicated model. Collective over the ranks that share a sequence; all get the results.

    `tokens`: maximum tokens of a piece per rank, summed over its prompts.
    """

    def __init__(self, model: LanguageModel, mesh: ProcessMesh, exchange: Exchange, tokens: int) -> None:
        self._model, self._mesh, self._exchange, self._tokens = model, mesh, exchange, tokens
        self._alone = local_exchange()

    @torch.no_grad()
    def run(
        self,
        prompts: Sequence[Tensor],
        proceed: Callable[[], bool] = lambda: True,
        states: Sequence[Tensor] | None = None,
        position: int = 0,
        capacity: int | None = None,
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Logits [B, vocab] after each prompt's last token, and the states there (`LanguageModel.zero_states`).

        Args:
            prompts: [T_i] int64 each, T_i ≥ 1, the same on all ranks of a sequence.
            proceed: called before each piece; must return the same value on all these ranks.
            states: initial states, the same on all these ranks; None for zeros.
            position: of the prompts' first tokens, the tokens that `states` have seen.
            capacity: of the caches of softmax layers, in tokens of a sequence; None: up to the end of the longest.

        Returns:
            None if `proceed` returned false.
        """
        device, lengths = self._mesh.device, [len(prompt) for prompt in prompts]
        capacity = position + max(lengths) if capacity is None else capacity
        if states is None:
            states = self._model.zero_states(len(prompts), device, capacity)
        else:
            # Copies: they are written in place below.
            states = self._model.grown(states, capacity)
        width, dtype = self._model.config.hidden_size, self._model.model.norm.weight.dtype
        last = torch.zeros(len(prompts), width, dtype=dtype, device=device)
        process = self._steps if max(lengths) <= _STEPS else self._piece
        for start, stop in self._pieces(lengths):
            if not proceed():
                return None
            rows = [row for row, length in enumerate(lengths) if length >= stop]
            index = torch.tensor(rows, device=device)
            tokens = torch.stack([prompts[row][start:stop] for row in rows])
            # Indexing with a tensor copies, which caches are too large for if all prompts go on.
            carries = [state[index] for state in states] if len(rows) < len(prompts) else states
            carries, hidden = process(tokens, position + start, carries)
            for state, carry in zip(states, carries, strict=True):
                if carry is not state:
                    state[index] = carry
            # Overwritten by later pieces, so the value of each prompt's last piece remains.
            last[index] = hidden
        return self._model.lm_head(last), states

    def _pieces(self, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
        # Ranges [start, stop), cut at the ends of prompts, and at the maximum size.
        start = 0
        for end in sorted(set(lengths)):
            rows = sum(length >= end for length in lengths)
            size = max(1, self._tokens // rows) * self._mesh.sp_size
            while start < end:
                stop = min(start + size, end)
                yield start, stop
                start = stop

    def _steps(self, tokens: Tensor, start: int, carries: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        # As `_piece`, token by token on this rank alone; updates the carries in place.
        hidden = torch.empty(0)
        for position, column in enumerate(tokens.to(self._mesh.device).unbind(1), start):
            positions = torch.full_like(column, position)
            hidden = self._model.step(column, carries, positions, states_only=True)
        return carries, hidden

    def _piece(self, tokens: Tensor, start: int, carries: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        # Of [B, T] on all ranks: the states after it and the last token's hidden [B, D]; caches are updated in place.
        total, ranks = tokens.shape[1], self._mesh.sp_size
        # Shard only if each rank gets a chunk: every rank needs a token, and smaller shards do not pay off.
        is_shared = ranks > 1 and total >= ranks * CHUNK
        bounds = [start + border for border in even_bounds(total, ranks if is_shared else 1)]
        rank, exchange = (self._mesh.sp_rank, self._exchange) if is_shared else (0, self._alone)
        position = SequencePosition(bounds, rank, exchange=exchange)
        states = LayerStates(carry_in=carries, want_carry=True)
        own = tokens[:, position.start - start : position.stop - start].to(self._mesh.device)
        hidden = self._model(own, position, states=states, states_only=True)[:, -1].contiguous()
        if is_shared:
            group = self._mesh.devices.get_group("sp")
            dist.broadcast(hidden, src=dist.get_global_rank(group, ranks - 1), group=group)
        return states.carry_out, hidden


@torch.no_grad()
def whole_logits(model: LanguageModel, input_ids: Tensor) -> Tensor:
    """All logits in one pass of the chunked operator, on this rank alone: input_ids [B, T] → [B, T, vocab]."""
    return model(input_ids, SequencePosition((0, input_ids.shape[1]), exchange=local_exchange()))
