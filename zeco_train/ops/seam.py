"""The seam between models and communication (docs/architecture.md).

A sequence-parallel backend is one exclusive scan over the ranks that share a sequence. Each rank contributes the pair
`(state, transition)` of its own tokens, from a zero start, and receives the state that precedes them:

    R_0 = carry_in,    R_{p+1} = A_p R_p + state_p

In reverse the scan runs from the last rank to the first, over gradients with respect to the states. `launch` and `wait`
are apart, so that communication overlaps whatever a caller does between them. Backends hold no autograd.
They are `zeco_train.sp`; models name the types of this file and know nothing of them.

A custom op takes tensors and plain values but no objects, so it is given a scan by name. A name stands for one scan as
long as that lives. It is a constant of a compiled graph: a graph is compiled anew for another scan, and holds none
alive.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from zeco_train.ops.documents import find_pieces


@dataclass(frozen=True, eq=False)
class ScanRequest:
    """One rank's part in a scan.

    Attributes:
        state: [B, H, K, V], fp32 (fp64 for fp64 inputs), this rank's contribution from a zero start.
        transition: same dtype, how this rank's tokens change an incoming state (`zeco_train.ops.transition`):
            log-decays [B, H, K], ≤ 0, −inf where a document restarts, or matrices [B, H, K, K], zero there. All ranks'
            are of one kind. A reverse scan takes the `adjoint` of what the forward one took.
        reverse: scan from the last rank to the first.
        carry_in: [B, H, K, V], a replicated value that only the first rank in scan direction reads; None is zero.
        want_carry: `carry_out` will be asked for. All ranks must agree.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """

    state: Tensor
    transition: Tensor
    reverse: bool = False
    carry_in: Tensor | None = None
    want_carry: bool = False

    def __post_init__(self) -> None:
        state, transition, carry_in = self.state, self.transition, self.carry_in
        if state.ndim != 4 or state.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"state must be [B, H, K, V] in float32 or float64, not {_describe(state)}")
        wanted = (state.dtype, state.device)
        shapes = state.shape[:3], (*state.shape[:3], state.shape[2])
        if transition.shape not in shapes or (transition.dtype, transition.device) != wanted:
            problem = f"like the state, {_describe(state)}, not {_describe(transition)}"
            raise ValueError(f"transition must be [B, H, K] or [B, H, K, K] {problem}")
        if carry_in is not None and (carry_in.shape != state.shape or (carry_in.dtype, carry_in.device) != wanted):
            raise ValueError(f"carry_in must be like the state, {_describe(state)}, not {_describe(carry_in)}")

    def first_incoming(self) -> Tensor:
        """The incoming state of the first rank in scan direction, R_0: `carry_in` itself, or zeros."""
        return torch.zeros_like(self.state) if self.carry_in is None else self.carry_in


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


class LaunchedScan(Protocol):
    """A scan under way. The order of use is `wait`, `finish`, `carry_out`."""

    def wait(self) -> Tensor:
        """Return the incoming state R_p (in reverse: D_in = D_{p+1}), [B, H, K, V], in the dtype of the state."""
        ...

    def finish(self) -> None:
        """To be called once the outputs that use the incoming state are computed: LASP-1 folds and sends here."""
        ...

    def carry_out(self) -> Tensor:
        """The state after the last rank in scan direction, [B, H, K, V], the same on every rank.

        Raises:
            RuntimeError: the scan was launched without `want_carry=True`.
        """
        ...


class StateScan(Protocol):
    """An exclusive scan of `(state, transition)` over the ranks of one sequence-parallel group."""

    def launch(self, request: ScanRequest) -> LaunchedScan:
        """Start the scan."""
        ...


_SCANS: WeakValueDictionary[str, StateScan] = WeakValueDictionary()
_HANDLES: WeakKeyDictionary[StateScan, str] = WeakKeyDictionary()
_numbers = itertools.count()


def handle_of(scan: StateScan) -> str:
    """The scan's name, always the same."""
    if scan not in _HANDLES:
        _HANDLES[scan] = handle = f"scan-{next(_numbers)}"
        _SCANS[handle] = scan
    return _HANDLES[scan]


def scan_of(handle: str) -> StateScan:
    """The scan of that name.

    Raises:
        RuntimeError: it is gone; whoever runs a backward pass has to keep the scan of the forward pass.
    """
    scan = _SCANS.get(handle)
    if scan is None:
        raise RuntimeError(f"the scan {handle!r} is gone: keep it until the backward pass is over")
    return scan


class Place(NamedTuple):
    """A `SequenceShard` as the operator sees it.

    Attributes:
        scan: name of the scan.
        pieces: [T], see `zeco_train.ops.documents`, on the device of the tokens; None without documents.
    """

    scan: str
    pieces: Tensor | None = None


class Boundary(NamedTuple):
    """The states at the borders of one layer's tokens; see `zeco_train.ops.mix.mix`."""

    incoming_state: Tensor | None = None
    carry_in: Tensor | None = None
    want_carry: bool = False


class Crossing(NamedTuple):
    """What one layer's tokens got from other ranks and left to others.

    Attributes:
        received: [B, H, K, V], R, for a later replay; [0] in a replay.
        carry_out: [B, H, K, V], the state after the whole sequence; [0] unless it was wanted.
    """

    received: Tensor
    carry_out: Tensor


@dataclass(frozen=True)
class SequenceShard:
    """All that a layer knows of where its tokens lie in the sequence.

    Attributes:
        scan: how states cross to and from the other shards of the sequence.
        offset: position of this shard's first token in the whole sequence.
        seq_len: length of the whole sequence in tokens.
        cu_seqlens: [documents + 1] int64, the borders of the documents' pieces on this shard, from 0 to its number of
            tokens; None where the sequence is one document.
        before: tokens of the first piece's document on earlier shards; 0 where it begins here. Without documents the
            sequence is the one document, and this is `offset`, which need not be given.
    """

    scan: StateScan
    offset: int
    seq_len: int
    cu_seqlens: Tensor | None = None
    before: int = 0

    def __post_init__(self) -> None:
        if self.cu_seqlens is None:
            object.__setattr__(self, "before", self.offset)

    def place(self, num_tokens: int, device: torch.device) -> Place:
        """What the operator is given, in values that a compiler can trace; arguments and errors of `pieces`."""
        return Place(handle_of(self.scan), self.pieces(num_tokens, device))

    def pieces(self, num_tokens: int, device: torch.device) -> Tensor | None:
        """Where the state restarts among this shard's `num_tokens` tokens, on their device; None without documents.

        Found once, however many layers ask: it takes the borders to the host, for which CUDA has to be waited for.

        Returns:
            [T] int32, see `zeco_train.ops.documents`.

        Raises:
            ValueError: `cu_seqlens` does not rise from 0 to `num_tokens`.
        """
        key = num_tokens, device
        if key not in self._pieces:
            self._pieces[key] = find_pieces(self.cu_seqlens, self.before, num_tokens, device)
        return self._pieces[key]

    @cached_property
    def _pieces(self) -> dict[tuple[int, torch.device], Tensor | None]:
        return {}
