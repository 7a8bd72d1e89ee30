"""Serial point-to-point: one rank after another receives, computes, folds and sends (LASP, Algorithms 2 and 3).

Receiving and sending are two calls, with the caller's outputs between them, so the ranks' compute lies in the chain:

    rank p:  receive R_p from p−1  →  (outputs that use R_p)  →  R_{p+1} = exp(G_p) ⊙_K R_p + S_p  →  send to p+1

On the wire: S bytes from each rank but the last, in one message; `carry_out` adds a broadcast of S from the last rank.
Rounds: P. Time = P(α + βS + compute between receive and send). It needs no courier: each step runs in its caller.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeco_train.collectives.transition import fold
from zeco_train.collectives.wire import Wire, check_scan

_OPERATION = "serial_scan"
# Each message is waited for on both sides before the next one, so all can bear the same tag.
_TAG = 0


def recv_incoming(
    state: Tensor,
    group: ProcessGroup,
    *,
    timeout: timedelta,
    reverse: bool = False,
    carry_in: Tensor | None = None,
) -> Tensor:
    """Receive the incoming state from the rank before this one; the first rank takes `carry_in`, or zeros.

    Args:
        state: [B, H, K, V], gives shape, dtype and device only.
        group, timeout, reverse, carry_in: as in `launch_chain`.

    Returns:
        [B, H, K, V]; on the first rank it may be `carry_in` itself.

    Raises:
        CommunicationError: nothing came within `timeout`, or the peer is gone.
    """
    wire = Wire(group, _OPERATION, reverse, timeout)
    if wire.is_first:
        return torch.zeros_like(state) if carry_in is None else carry_in
    incoming = torch.empty_like(state, memory_format=torch.contiguous_format)
    wire.receive(incoming, wire.position - 1, _TAG, "the state").wait()
    return incoming


def send_folded(
    state: Tensor,
    log_decay: Tensor,
    incoming: Tensor,
    group: ProcessGroup,
    *,
    timeout: timedelta,
    reverse: bool = False,
    want_carry: bool = False,
) -> Tensor | None:
    """Fold this rank's pair into its incoming state and send the result on; return once it has been received.

    Args:
        state, log_decay: [B, H, K, V] and [B, H, K], this rank's pair.
        incoming: [B, H, K, V], from `recv_incoming`.
        group, timeout, reverse, want_carry: as in `launch_chain`.

    Returns:
        The state after the last rank, [B, H, K, V], the same on every rank, if `want_carry`; else None.

    Raises:
        CommunicationError: a peer did not answer within `timeout`, or is gone.
    """
    wire = Wire(group, _OPERATION, reverse, timeout)
    if wire.is_last and not want_carry:
        return None
    folded = fold(state, log_decay, incoming).contiguous()
    if not wire.is_last:
        wire.send(folded, wire.position + 1, _TAG, "the state").wait()
    if not want_carry:
        return None
    if wire.size > 1:
        wire.broadcast(folded, wire.size - 1, "carry_out").wait()
    return folded


def launch_serial(
    state: Tensor,
    log_decay: Tensor,
    group: ProcessGroup,
    *,
    timeout: timedelta,
    reverse: bool = False,
    carry_in: Tensor | None = None,
    want_carry: bool = False,
) -> PendingSerialScan:
    """The scan as a handle. Nothing is sent or received here. Arguments as in `launch_chain`.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a group without this process.
    """
    check_scan(state, log_decay, carry_in)
    Wire(group, _OPERATION, reverse, timeout)
    return PendingSerialScan(state, log_decay, group, timeout, reverse, carry_in, want_carry)


class PendingSerialScan:
    """A serial scan (`zeco_train.sp.base.PendingScan`): `wait` receives, `finish` folds and sends. Two of one group
    may not overlap: `finish` the first before the `wait` of the second."""

    def __init__(
        self,
        state: Tensor,
        log_decay: Tensor,
        group: ProcessGroup,
        timeout: timedelta,
        reverse: bool,
        carry_in: Tensor | None,
        want_carry: bool,
    ) -> None:
        self._pair: tuple[Tensor, Tensor] | None = (state, log_decay)
        self._group, self._timeout, self._reverse = group, timeout, reverse
        self._carry_in, self._want_carry = carry_in, want_carry
        self._incoming: Tensor | None = None
        self._carry: Tensor | None = None

    def wait(self) -> Tensor:
        """Receive the incoming state, see `recv_incoming`."""
        if self._incoming is None:
            assert self._pair is not None
            self._incoming = recv_incoming(
                self._pair[0], self._group, timeout=self._timeout, reverse=self._reverse, carry_in=self._carry_in
            )
        return self._incoming

    def finish(self) -> None:
        """Fold and send on, see `send_folded`. Once only.

        Raises:
            RuntimeError: called before `wait`, or twice.
        """
        if self._incoming is None or self._pair is None:
            raise RuntimeError("finish of a serial scan comes once, after wait")
        pair, self._pair = self._pair, None
        self._carry = send_folded(
            *pair,
            self._incoming,
            self._group,
            timeout=self._timeout,
            reverse=self._reverse,
            want_carry=self._want_carry,
        )

    def carry_out(self) -> Tensor:
        """The state after the last rank in scan direction, [B, H, K, V], the same on every rank.

        Raises:
            RuntimeError: the scan was launched without `want_carry=True`, or `finish` was not called yet.
        """
        if not self._want_carry:
            raise RuntimeError("carry_out needs a scan launched with want_carry=True")
        if self._carry is None:
            raise RuntimeError("carry_out of a serial scan comes after finish")
        return self._carry
