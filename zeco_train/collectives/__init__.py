"""Exclusive scans of `(state, transition)` over the ranks of a process group, one file per algorithm.

    R_0 = carry_in,    R_{p+1} = A_p R_p + state_p        (in reverse: from the last rank down; docs/mathematics.md)

All but `symmetric.py`, a kernel over memory shared by the GPUs of one NVLink domain, use only the public API of
`torch.distributed`, over gloo or NCCL. The group of a `ScanWorker` must carry scans of one direction and nothing else,
every rank must launch the same scans in the same order, and the group needs the worker's timeout: on CUDA, where `wait`
does not block the host, NCCL's watchdog enforces it; on CPUs it bounds the lifetime of gloo's threads after a failure.

A scan can be captured into a CUDA graph only after one like it (in all but its data) has run, and the capture must
include `finish`. Replays and the worker's other scans must not overlap: the memory of a direction is used by one
kernel at a time.
"""

from zeco_train.collectives.worker import PendingScan, ScanWorker, scan_alone

__all__ = ["PendingScan", "ScanWorker", "scan_alone"]
