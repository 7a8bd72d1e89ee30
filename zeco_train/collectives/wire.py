"""Messages over a process group: every wait is bounded, and errors name rank, peer and operation.

Peers are addressed by *position* in scan order: 0 is where the scan starts, the first rank of the group forward and the
last one in reverse. On CPUs a wait blocks the calling thread for at most `timeout`. On CUDA it makes the current stream
wait and returns at once, like NCCL's own `wait`; there the timeout of the process group is the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from zeco_train.errors import CommunicationError

_T = TypeVar("_T")


def has_streams(device: torch.device) -> bool:
    """Whether work is queued on a device's streams, and NCCL carries its messages; else calls block, and gloo does."""
    return device.type == "cuda"


def is_capturing(device: torch.device) -> bool:
    """Whether work on a device is being captured into a CUDA graph."""
    return has_streams(device) and torch.cuda.is_current_stream_capturing()


class Message(NamedTuple):
    """A message of `Wire.send_and_receive`."""

    tensor: Tensor  # contiguous; to send, or to receive into
    position: int  # of the other rank
    what: str  # its contents, for errors


class Transfer:
    """A message in flight. Holds its tensors, which must be neither changed nor freed before `wait` returns."""

    def __init__(self, wire: Wire, work: Work, what: str, peer: int | None, *tensors: Tensor) -> None:
        self._wire, self._work, self._what, self._peer = wire, work, what, peer
        self._tensors, self._device = tensors, tensors[0].device
        # With a timeout NCCL's wait would block the host until the message is complete.
        self._bound = () if has_streams(self._device) else (wire.timeout,)

    def wait(self) -> None:
        """Wait for completion; on CUDA the current stream waits, not the caller.

        Raises CommunicationError if that takes longer than the wire's timeout, or the peer is gone.
        """
        wire = self._wire
        wire.guard(lambda: wire.run_wait(lambda: self._work.wait(*self._bound), self._device), self._what, self._peer)
        self._tensors = ()


class Wire:
    """One scan's view of a process group.

    `operation` names the collective in errors, `timeout` bounds each wait. ValueError: this process is not in the
    group.
    """

    def __init__(self, group: ProcessGroup, operation: str, reverse: bool, timeout: timedelta) -> None:
        self.timeout = timeout
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)  # as `all_to_all` and `all_gather` order their parts
        if self.rank < 0:
            raise ValueError("this process is not a member of the given process group")
        self._group, self.reverse = group, reverse
        self.operation = f"{operation} {'reverse' if reverse else 'forward'}"
        self.position = self.group_rank(self.rank)  # in scan order
        # Runs a call that waits for messages of tensors on a device, and may measure it.
        self.run_wait: Callable[[Callable[[], bool], torch.device], bool] = lambda call, device: call()

    @property
    def is_first(self) -> bool:
        return self.position == 0

    @property
    def is_last(self) -> bool:
        return self.position == self.size - 1

    def group_rank(self, position: int) -> int:
        """The rank within the group at a position in scan order (and the reverse: the map is its own inverse)."""
        return self.size - 1 - position if self.reverse else position

    def send(self, tensor: Tensor, position: int, tag: int, what: str) -> Transfer:
        """Start to send a contiguous tensor to the rank at `position`."""
        peer = self.group_rank(position)
        return self._start(
            lambda: dist.isend(tensor, group=self._group, group_dst=peer, tag=tag), f"send of {what}", peer, tensor
        )

    def receive(self, into: Tensor, position: int, tag: int, what: str) -> Transfer:
        """Start to receive into a contiguous tensor from the rank at `position`."""
        peer = self.group_rank(position)
        return self._start(
            lambda: dist.irecv(into, group=self._group, group_src=peer, tag=tag), f"receive of {what}", peer, into
        )

    def send_and_receive(self, sent: Sequence[Message], received: Sequence[Message]) -> list[Transfer]:
        """Start to send and receive messages in one group, so that NCCL waits for no order among them.

        At most one message goes each way between two ranks. Before the first, all ranks must have called a collective.
        """
        messages = [*((dist.isend, message) for message in sent), *((dist.irecv, message) for message in received)]
        if not messages:
            return []
        peers = [self.group_rank(message.position) for _, message in messages]
        names = [f"{'send' if post is dist.isend else 'receive'} of {message.what}" for post, message in messages]
        operations = [
            dist.P2POp(post, message.tensor, group=self._group, group_peer=peer)
            for (post, message), peer in zip(messages, peers, strict=True)
        ]
        peer = peers[0] if len(peers) == 1 else None
        works = self.guard(lambda: dist.batch_isend_irecv(operations), ", ".join(names), peer)
        if len(works) == len(messages):
            return [
                Transfer(self, work, name, peer, message.tensor)
                for work, name, peer, (_, message) in zip(works, names, peers, messages, strict=True)
            ]
        # NCCL completes the group as a whole.
        tensors = [message.tensor for _, message in messages]
        return [Transfer(self, work, ", ".join(names), None, *tensors) for work in works]

    def post_receives(self, received: Sequence[Message], tag: int) -> PostedReceives:
        """Messages both ways between ranks, whose receives are posted at once where that is possible.

        The requirements of `send_and_receive` hold, and no other messages between these ranks have `tag`.
        """
        return PostedReceives(self, received, tag)

    def broadcast(self, tensor: Tensor, position: int, what: str) -> Transfer:
        """Start to copy `tensor` of the rank at `position` into that of every other rank."""
        source = self.group_rank(position)
        return self._start(
            lambda: dist.broadcast(tensor, group=self._group, group_src=source, async_op=True),
            f"broadcast of {what}",
            None if source == self.rank else source,
            tensor,
        )

    def all_to_all(
        self, into: Tensor, parts: Tensor, what: str, received: list[int] | None = None, sent: list[int] | None = None
    ) -> Transfer:
        """Start an all-to-all of `parts[r]` to each group rank r; `into[r]` is received from r. Both [P, …].

        Or of unequal parts: `received` and `sent` have the lengths of each rank's, which lie one after another.
        """
        return self._start(
            lambda: dist.all_to_all_single(into, parts, received, sent, group=self._group, async_op=True),
            f"all-to-all of {what}",
            None,
            into,
            parts,
        )

    def all_gather(self, into: Tensor, part: Tensor, what: str) -> Transfer:
        """Start an all-gather of every rank's `part` into `into` [P, …], by group rank. Both contiguous."""
        return self._start(
            # Flat, because gloo and NCCL accept different shapes.
            lambda: all_gather_single(into.view(-1), part.view(-1), group=self._group, async_op=True),
            f"all-gather of {what}",
            None,
            into,
            part,
        )

    def guard(self, action: Callable[[], _T], what: str, peer: int | None) -> _T:
        """Run one call into `torch.distributed`, converting its failures to `CommunicationError`."""
        try:
            return action()
        except RuntimeError as error:
            raise CommunicationError(
                dist.get_rank(),
                f"{self.operation}: {what}",
                self._problem(str(error)),
                None if peer is None else dist.get_global_rank(self._group, peer),
            ) from error

    def _start(self, post: Callable[[], Work | None], what: str, peer: int | None, *tensors: Tensor) -> Transfer:
        work = self.guard(post, what, peer)
        # torch returns None to a process outside of the group, which `__init__` refuses.
        assert isinstance(work, Work)
        return Transfer(self, work, what, peer, *tensors)

    def _problem(self, message: str) -> str:
        # Meaning of a backend's error message. gloo raises RuntimeError for everything, so its text has to be parsed.
        text = message.lower()
        if "pair closure" in text:
            return "connection already given up after an earlier timeout"
        if "timed out" in text or "timeout" in text:
            return f"no answer within {self.timeout.total_seconds():g} s"
        if any(sign in text for sign in ("connection closed", "connection reset", "broken pipe", "socket closed")):
            return "connection lost"
        return message.strip().splitlines()[0] if message.strip() else "failed without a message"


class PostedReceives:
    """Messages between ranks that send to each other; see `Wire.post_receives`.

    gloo finds a message's receive by its tag, so receives can wait from the start. NCCL matches the messages of two
    ranks by their order: two ranks that post their receives first would wait for each other.
    """

    def __init__(self, wire: Wire, received: Sequence[Message], tag: int) -> None:
        self._wire, self._tag, self._received = wire, tag, received
        self._posted: list[Transfer] | None = None
        if not any(has_streams(message.tensor.device) for message in received):
            self._posted = [wire.receive(*message[:2], tag, message.what) for message in received]

    def start(self, sent: Sequence[Message]) -> tuple[list[Transfer], list[Transfer]]:
        """Start to send, once; returns what to wait for before received tensors are read, and what later."""
        if self._posted is None:
            return self._wire.send_and_receive(sent, self._received), []
        return self._posted, [self._wire.send(*message[:2], self._tag, message.what) for message in sent]


# torch 2.13 renames this function and deprecates the old name, the only one in torch 2.11.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
