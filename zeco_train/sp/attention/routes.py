"""Exchange of tokens between ranks: each holds some ranges of positions, and wants others.

All ranks know all ranges, so each message has exactly the tokens that its receiver wants. One all-to-all moves keys and
values to their readers, queries to the rank that computes them, and back. Tokens that a rank itself wants are copied to
their place, and are in no message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zeco_train.collectives.wire import Transfer, Wire

# Positions [start, stop) of tokens.
Range = tuple[int, int]
# [P + 1]: rank r has the tokens [bounds[r], bounds[r + 1]).
Bounds = Sequence[int]


class _Piece(NamedTuple):
    # Tokens for one rank: where the sender has them and where the receiver puts them, from its first token on.
    start: int
    place: int
    length: int


class Parcel(NamedTuple):
    """What a rank sends."""

    message: Tensor  # packed
    per_token: int  # elements of the message
    # makes the tensors [B, wanted tokens, ...], with the tokens that the rank has itself
    wanted: Callable[[], list[Tensor]]


class Routes:
    """Who sends which tokens to whom, by each rank's ranges in the order in which its tensors have them."""

    def __init__(self, wire: Wire, held: Sequence[Sequence[Range]], wanted: Sequence[Sequence[Range]]) -> None:
        own = wire.rank
        self._wire = wire
        # Of this rank's own tokens both ends are here; the lists have nothing in their place.
        self._kept = _overlaps(held[own], wanted[own])
        self._sent = [[] if rank == own else _overlaps(held[own], ranges) for rank, ranges in enumerate(wanted)]
        self._received = [[] if rank == own else _overlaps(ranges, wanted[own]) for rank, ranges in enumerate(held)]
        self._num_wanted = sum(stop - start for start, stop in wanted[own])
        arriving = sorted((piece.place, piece.length) for pieces in (self._kept, *self._received) for piece in pieces)
        ends = [0, *(place + length for place, length in arriving)]
        # Then nothing need be 0 before, and nothing is added.
        self._is_partition = [place for place, _ in arriving] == ends[:-1] and ends[-1] == self._num_wanted

    def start(self, tensors: Sequence[Tensor], what: str) -> Arrival:
        """Start to send tensors [B, held tokens, ...] of one dtype. Errors as of `send`."""
        # The caller has them until the arrival; a copy would be held beside them.
        return self.send(self._parcel(tensors, lambda: [self._with_kept(x, x.dtype) for x in tensors]), what)

    def pack(self, tensors: Sequence[Tensor], sums: torch.dtype) -> Parcel:
        """Copy what is wanted of tensors [B, held tokens, ...] of one dtype, so that they can be freed before `send`.

        `sums` is the dtype of the tensors of wanted tokens; they travel in their own.
        """
        wanted = [self._with_kept(x, sums) for x in tensors]
        return self._parcel(tensors, lambda: wanted)

    def send(self, parcel: Parcel, what: str) -> Arrival:
        """Start to send what is packed. Raises CommunicationError if a peer is gone."""
        sent, received = (
            [parcel.per_token * sum(piece.length for piece in pieces) for pieces in way]
            for way in (self._sent, self._received)
        )
        into = parcel.message.new_empty(sum(received))
        transfer = self._wire.all_to_all(into, parcel.message, what, received, sent)
        return Arrival((transfer, into, parcel.wanted), self._received, self._is_partition)

    def _parcel(self, tensors: Sequence[Tensor], wanted: Callable[[], list[Tensor]]) -> Parcel:
        parts = [
            tensor[:, piece.start : piece.start + piece.length].reshape(-1)
            for pieces in self._sent
            for piece in pieces
            for tensor in tensors
        ]
        message = torch.cat(parts) if parts else tensors[0].new_empty(0)
        return Parcel(message, sum(math.prod((x.shape[0], *x.shape[2:])) for x in tensors), wanted)

    def _with_kept(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        # [B, held tokens, ...] → [B, wanted tokens, ...]: this rank's; elsewhere 0, or anything that is replaced.
        shape = tensor.shape[0], self._num_wanted, *tensor.shape[2:]
        is_whole = sum(piece.length for piece in self._kept) == self._num_wanted
        make = tensor.new_empty if is_whole or self._is_partition else tensor.new_zeros
        found = make(shape, dtype=dtype)
        for piece in self._kept:
            part = tensor[:, piece.start : piece.start + piece.length]
            found[:, piece.place : piece.place + piece.length] = part
        return found


@dataclass
class Arrival:
    """Tokens under way."""

    # The message, and what makes the tensors to put its tokens into.
    under_way: tuple[Transfer, Tensor, Callable[[], list[Tensor]]]
    pieces: list[list[_Piece]]  # of each rank's tokens in the message
    is_partition: bool

    def wait(self, *, add: bool = False) -> list[Tensor]:
        """The tensors [B, wanted tokens, ...]; 0 where no rank holds a wanted token. Once: the message is freed.

        With `add`, several ranks may hold a token: sum this rank's and what the others sent, always in the order of
        ranks. Raises CommunicationError if a peer is gone, or did not answer within the timeout.
        """
        transfer, message, wanted = self.under_way
        transfer.wait()
        # NCCL's work has the message, too.
        del self.under_way, transfer
        found = wanted()
        first = 0
        for piece in (piece for pieces in self.pieces for piece in pieces):
            for tensor in found:
                into = tensor[:, piece.place : piece.place + piece.length]
                part = message[first : first + into.numel()].view(into.shape)
                into.add_(part) if add and not self.is_partition else into.copy_(part)
                first += into.numel()
        return found


class Here(NamedTuple):
    """In place of an `Arrival`: tensors that stay where they are."""

    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        return self.tensors


def _overlaps(held: Sequence[Range], wanted: Sequence[Range]) -> list[_Piece]:
    # Tokens of `held` that are wanted, in the order of `held`.
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
