"""The seam between models and communication (DESIGN, section 4).

A sequence-parallel backend is one exclusive scan over the ranks that share a sequence. Each rank contributes the pair
`(state, transition)` of its own tokens, from a zero start, and receives the state that precedes them:

    R_0 = carry_in,    R_{p+1} = A_p R_p + state_p

In reverse the scan runs from the last rank to the first, over gradients with respect to the states. `launch` and `wait`
are apart, so that communication overlaps whatever a caller does between them. Backends hold no autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zeco_train.ops import Documents
from zeco_train.sp.handles import handle_of


class PendingScan(Protocol):
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

    def launch(
        self,
        state: Tensor,
        transition: Tensor,
        *,
        reverse: bool = False,
        carry_in: Tensor | None = None,
        want_carry: bool = False,
    ) -> PendingScan:
        """Start the scan.

        Args:
            state: [B, H, K, V], fp32 (fp64 for fp64 inputs): this rank's contribution from a zero start.
            transition: same dtype, how this rank's tokens change an incoming state (`collectives.transition`):
                log-decays [B, H, K], −inf where a document restarts, or matrices [B, H, K, K], zero there. In reverse
                its `adjoint`.
            reverse: scan from the last rank to the first.
            carry_in: [B, H, K, V], a replicated value that only the first rank in scan direction reads; None is zero.
            want_carry: `carry_out` will be asked for. All ranks must agree.
        """
        ...


class Place(NamedTuple):
    """A `SequenceShard` as the operator sees it.

    Attributes:
        scan: name of the scan (`zeco_train.sp.handles`).
        restarts, pieces: [T], see `ops.Documents`, on the device of the tokens; None without documents.
    """

    scan: str
    restarts: Tensor | None = None
    pieces: Tensor | None = None


class Boundary(NamedTuple):
    """The states at the borders of one layer's tokens; see `zeco_train.sp.autograd.gla`."""

    incoming_state: Tensor | None = None
    carry_in: Tensor | None = None
    want_carry: bool = False


@dataclass(frozen=True)
class SequenceShard:
    """All that a layer knows of where its tokens lie in the sequence.

    Attributes:
        scan: how states cross to and from the other shards of the sequence.
        offset: position of this shard's first token in the whole sequence.
        seq_len: length of the whole sequence in tokens.
        cu_seqlens: [documents + 1] int64, the borders of the documents' pieces on this shard, from 0 to its number of
            tokens; None where the sequence is one document.
        continues: the first piece continues a document that began on an earlier shard.
    """

    scan: StateScan
    offset: int
    seq_len: int
    cu_seqlens: Tensor | None = None
    continues: bool = False

    def place(self, num_tokens: int, device: torch.device) -> Place:
        """What the operator is told, in values that a compiler can trace; arguments and errors of `documents`."""
        documents = self.documents(num_tokens, device)
        if documents is None:
            return Place(handle_of(self.scan))
        return Place(handle_of(self.scan), documents.restarts, documents.pieces)

    def documents(self, num_tokens: int, device: torch.device) -> Documents | None:
        """The restarts of the state among this shard's `num_tokens` tokens, on their device; None without documents.

        Found once, however many layers ask: it takes the borders to the host, for which CUDA has to be waited for.

        Raises:
            ValueError: `cu_seqlens` does not rise from 0 to `num_tokens`.
        """
        key = num_tokens, device
        if key not in self._documents:
            self._documents[key] = Documents.from_cu_seqlens(self.cu_seqlens, self.continues, num_tokens, device)
        return self._documents[key]

    @cached_property
    def _documents(self) -> dict[tuple[int, torch.device], Documents | None]:
        return {}
