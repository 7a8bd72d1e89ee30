"""A model's forward pass over this rank's shards of sequences, whole or in segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from data.loader.batches import Batch
from models.language_model import LanguageModel
from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.ops.layer_states import LayerStates
from zeco_train.ops.loss import TokenScores
from zeco_train.ops.seam import Exchange


class SequenceForward:
    """Forward passes for training and evaluation. All methods are collective.

    `called`, where not the model itself, is called instead: torch's DDP of it.
    """

    def __init__(
        self, model: LanguageModel, exchange: Exchange, mesh: ProcessMesh, called: nn.Module | None = None
    ) -> None:
        self.model, self.exchange, self.mesh = model, exchange, mesh
        self.called = model if called is None else called

    def loss(self, batch: Batch, states: LayerStates) -> Tensor:
        """The sum of the token losses of a segment."""
        input_ids, labels = self._tokens(batch)
        loss: Tensor = self.called(input_ids, batch.position.over(self.exchange), labels, states)
        return loss

    def fill_states(self, batch: Batch, states: LayerStates) -> None:
        """Run a segment only to compute its states."""
        input_ids, _ = self._tokens(batch)
        self.called(input_ids, batch.position.over(self.exchange), None, states, states_only=True)

    @torch.no_grad()
    def total_loss(self, segments: Sequence[Batch]) -> Tensor:
        """The sum of the token losses of this rank's part of a micro-batch, without gradients; fp64, on the device."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for batch, states in self._in_order(segments):
            total += self.loss(batch, states)
        return total

    @torch.no_grad()
    def scores(self, segments: Sequence[Batch]) -> Iterator[TokenScores]:
        """Loss and prediction of this rank's tokens, segment by segment, on the device; every rank must consume all.

        The head is applied only to tokens whose label is not −100.
        """
        for batch, states in self._in_order(segments):
            input_ids, labels = self._tokens(batch)
            yield self.model(input_ids, batch.position.over(self.exchange), labels, states, scores=True)

    def zero_carries(self, segments: Sequence[Batch]) -> list[Tensor] | None:
        """The initial states of a sequence; None if it is not segmented and needs none."""
        if len(segments) == 1:
            return None
        batch, capacity = len(segments[0].input_ids), segments[0].position.seq_len
        return self.model.zero_states(batch, self.mesh.device, capacity)

    def _in_order(self, segments: Sequence[Batch]) -> Iterator[tuple[Batch, LayerStates]]:
        # Yields each segment with the states of the previous one; the caller runs it before taking the next.
        carries = self.zero_carries(segments)
        for batch in segments:
            states = LayerStates(carry_in=carries, want_carry=len(segments) > 1)
            yield batch, states
            carries = states.carry_out

    def _tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        device = self.mesh.device
        return to_device(batch.input_ids, device), to_device(batch.labels, device)


def to_device(tokens: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; pinned, since a copy from pageable memory would wait for the device's queued work."""
    if device.type == "cuda" and tokens.device.type == "cpu":
        tokens = tokens.pin_memory()
    return tokens.to(device, non_blocking=True)
