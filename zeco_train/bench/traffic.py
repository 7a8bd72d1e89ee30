"""Bytes that a rank sends, counted while operations run.

Of this project's scans by the descriptors of their algorithms, since a scan in one kernel sends no messages;
tests/collectives compares the descriptors with messages. Of flash-linear-attention's context parallelism by the
all-gathers that it calls, its only collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zeco_train.bench.runner import Subject
from zeco_train.bench.session import Session
from zeco_train.ops.seam import LaunchedScan, ScanRequest
from zeco_train.sp.backend import ScanBackend


@contextmanager
def counted() -> Iterator[list[float]]:
    """Within it, all scans and all-gathers of this process: the bytes that the busiest rank sends for each."""
    sent: list[float] = []
    launch, gather = ScanBackend.launch, dist.all_gather_into_tensor

    def counted_launch(scan: ScanBackend, request: ScanRequest) -> LaunchedScan:
        launched = launch(scan, request)
        sent.append(scan.bytes_sent(request))
        return launched

    def counted_gather(into: Tensor, part: Tensor, group: dist.ProcessGroup | None = None, **rest: Any) -> Any:
        sent.append(float(part.nbytes * (dist.get_world_size(group) - 1)))
        return gather(into, part, group=group, **rest)

    # The backward pass runs in another thread, so it is the functions themselves that are replaced.
    _replace(counted_launch, counted_gather)
    try:
        yield sent
    finally:
        _replace(launch, gather)


def _replace(launch: Any, gather: Any) -> None:
    ScanBackend.launch = launch  # type: ignore[method-assign]
    dist.all_gather_into_tensor = gather


def sent_mb(subject: Subject, session: Session) -> float | None:
    """MB that the busiest rank sends for a run of a subject; None if that is nothing. Collective."""
    with counted() as sent:
        subject.prepare()
        subject.run()
    subject.prepare()
    session.settle()
    return max(session.gather(sum(sent) / 1e6)) or None
