"""Exchange of tokens between ranks: each holds some ranges of positions, and wants others.

All ranks know all ranges, so each message has exactly the tokens that its receiver wants. One all-to-all moves keys and
values to their readers, queries to the rank that computes them, and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zeco_train.collectives.wire import Transfer, Wire

# Positions [start, stop) of tokens.
Range = tuple[int, int]


class _Piece(NamedTuple):
    """Tokens of one message: where the sender has them and where the receiver puts them, from its first token on."""

    start: int
    place: int
    length: int


class Parcel(NamedTuple):
    """Tokens that are packed: what a rank sends, and the shapes [B, wanted tokens, ...] of what it receives."""

    message: Tensor
    shapes: list[tuple[int, ...]]


class Routes:
    """Who sends which tokens to whom.

    Args:
        wire: of the ranks.
        held, wanted: each rank's ranges, in the order in which its tensors have them.
    """

    def __init__(self, wire: Wire, held: Sequence[Sequence[Range]], wanted: Sequence[Sequence[Range]]) -> None:
        own = wire.rank
        self._wire = wire
        self._sent = [_overlaps(held[own], ranges) for ranges in wanted]
        self._received = [_overlaps(ranges, wanted[own]) for ranges in held]
        self._num_wanted = sum(stop - start for start, stop in wanted[own])

    def start(self, tensors: Sequence[Tensor], what: str) -> Arrival:
        """Start to send tensors [B, held tokens, ...] of one dtype. Errors as of `send`."""
        return self.send(self.pack(tensors), what)

    def pack(self, tensors: Sequence[Tensor]) -> Parcel:
        """Copy what is sent of tensors [B, held tokens, ...] of one dtype, so that they can be freed before `send`."""
        parts = [
            tensor[:, piece.start : piece.start + piece.length].reshape(-1)
            for pieces in self._sent
            for piece in pieces
            for tensor in tensors
        ]
        message = torch.cat(parts) if parts else tensors[0].new_empty(0)
        return Parcel(message, [(tensor.shape[0], self._num_wanted, *tensor.shape[2:]) for tensor in tensors])

    def send(self, parcel: Parcel, what: str) -> Arrival:
        """Start to send what is packed.

        Raises:
            CommunicationError: a peer is gone.
        """
        size = sum(math.prod((batch, *rest)) for batch, _, *rest in parcel.shapes)
        sent, received = (
            [size * sum(piece.length for piece in pieces) for pieces in way] for way in (self._sent, self._received)
        )
        into = parcel.message.new_empty(sum(received))
        transfer = self._wire.all_to_all(into, parcel.message, what, received, sent)
        return Arrival(transfer, into, self._received, parcel.shapes)


class Arrival:
    """Tokens under way."""

    def __init__(
        self, transfer: Transfer, message: Tensor, pieces: list[list[_Piece]], shapes: list[tuple[int, ...]]
    ) -> None:
        self._under_way, self._pieces, self._shapes = (transfer, message), pieces, shapes

    def wait(self, *, add: bool = False) -> list[Tensor]:
        """The tensors [B, wanted tokens, ...]; 0 where no rank holds a wanted token. Once: the message is freed.

        Args:
            add: several ranks may hold a token: sum what they sent, in the order of ranks, so always alike.

        Raises:
            CommunicationError: a peer is gone, or did not answer within the timeout.
        """
        transfer, message = self._under_way
        transfer.wait()
        # NCCL's work has the message, too.
        del self._under_way, transfer
        found = [message.new_zeros(shape) for shape in self._shapes]
        first = 0
        for piece in (piece for pieces in self._pieces for piece in pieces):
            for tensor in found:
                into = tensor[:, piece.place : piece.place + piece.length]
                part = message[first : first + into.numel()].view(into.shape)
                into.add_(part) if add else into.copy_(part)
                first += into.numel()
        return found


class Here(NamedTuple):
    """In place of an `Arrival`: tensors that stay where they are."""

    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        """The tensors."""
        return self.tensors


def _overlaps(held: Sequence[Range], wanted: Sequence[Range]) -> list[_Piece]:
    """Tokens of `held` that are wanted, in the order of `held`."""
    pieces, start = [], 0
    for held_start, held_stop in held:
        place = 0
        for wanted_start, wanted_stop in wanted:
            first, stop = max(held_start, wanted_start), min(held_stop, wanted_stop)
            if first < stop:
                pieces.append(_Piece(start + first - held_start, place + first - wanted_start, stop - first))
            place += wanted_stop - wanted_start
        start += held_stop - held_start
    return pieces
