"""A model's forward pass over this rank's shards of sequences, in segments if need be; the loss over held-out ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from data.loader.batches import Batch, DataSplit, Reader, SequenceSource
from data.loader.loader import validation_batches
from models.language_model import LanguageModel
from zeco_train.config.schema import Config
from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.ops.layer_states import LayerStates
from zeco_train.ops.loss import TokenScores
from zeco_train.ops.seam import Exchange
from zeco_train.tracking.positions import PositionLosses, PositionSums, ValidationLoss, weighted


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


def split_of(config: Config, mesh: ProcessMesh, seq_len: int | None = None) -> DataSplit:
    """This rank's part of each batch of sequences, by default as long as `data.seq_len`."""
    data = config.data
    return mesh.split(
        data.seq_len if seq_len is None else seq_len,
        data.micro_batch,
        documents=data.reset_state_at_document,
        segments=config.train.segments,
        labels_across_documents=data.has_labels_across,
    )


class Validation:
    """Evaluates the loss on held-out sequences, in stored order: of each store at most the first `max_sequences`.

    Attributes:
        unlabelled: descriptions of the stores without a label, which are left out.
    """

    def __init__(self, sources: Sequence[SequenceSource], split: DataSplit, max_sequences: int) -> None:
        self._max_sequences, self._split = max_sequences, split
        self._sources, self._readers, self.unlabelled = list[SequenceSource](), list[Reader](), list[str]()
        for source in sources:
            reader = source.reader(split)
            if any(reader.num_labels(0, number) for number in range(self._taken(reader))):
                self._sources.append(source)
                self._readers.append(reader)
            else:
                self.unlabelled.append(reader.description)

    @property
    def is_empty(self) -> bool:
        return not self._readers

    def coverage(self, key: str = "train.eval_sequences") -> list[str]:
        """One line per store: the sequences used and those left out; `key` is the setting that limits them."""
        lines = []
        for reader in self._readers:
            taken, left = self._taken(reader), []
            if reader.is_endless:
                lines.append(f"{reader.description}: {taken:,} held-out sequences of {self._split.seq_len:,} tokens")
                continue
            if taken < reader.num_sequences:
                left.append(f"{reader.num_sequences - taken:,} sequences by {key}={self._max_sequences}")
            if reader.tokens_behind:
                left.append(f"{reader.tokens_behind:,} tokens behind the last whole one")
            what = f"{taken:,} of {reader.num_sequences:,} held-out sequences of {self._split.seq_len:,} tokens"
            lines.append(f"{reader.description}: {what}; left out: {', '.join(left) or 'nothing'}")
        return lines

    @torch.no_grad()
    def loss(self, forward: SequenceForward, proceed: Callable[[], bool] = lambda: True) -> ValidationLoss | None:
        """Compute the losses with the model's current weights; None if nothing is held out. Collective.

        `proceed` is called before each micro-batch and must return the same on all ranks; where it returns False, the
        result is None.
        """
        sums = []
        for reader in self._readers:
            of_store = self._sums(reader, forward, proceed)
            if of_store is None:
                return None
            sums.append(of_store)
        if not sums:
            return None
        weights = [source.weight for source in self._sources]
        wholes = [of_store.whole() for of_store in sums]
        names = [source.name for source in self._sources if source.name]
        mean, error = weighted(wholes, weights)
        return ValidationLoss(
            mean.item(),
            PositionLosses.of_sums(sums, weights),
            {name: loss.item() for name, (loss, _) in zip(names, wholes, strict=True)} if names else {},
            None if error.isnan() else error.item(),
            sum(self._taken(reader) for reader in self._readers),
            sum(of_store.labels for of_store in sums),
        )

    def _taken(self, reader: Reader) -> int:
        return min(reader.num_sequences, self._max_sequences)

    def _sums(self, reader: Reader, forward: SequenceForward, proceed: Callable[[], bool]) -> PositionSums | None:
        # Over all ranks; None if `proceed` returned False.
        sums = PositionSums(self._taken(reader), self._split.seq_len, forward.mesh.device)
        batches = validation_batches(reader, max_sequences=self._max_sequences)
        while segments := list(islice(batches, self._split.segments)):
            if not proceed():
                return None
            for batch, scores in zip(segments, forward.scores(segments), strict=True):
                # Padding is computed like the rest, for matching collectives.
                if not batch.is_padding:
                    sums.add(batch.sequence_ids, batch.position.start, scores)
        sums.reduce()
        return sums
