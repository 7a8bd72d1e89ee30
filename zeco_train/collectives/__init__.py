"""Exclusive scans of `(state, transition)` over the ranks of a process group, one file for each way over the wire;
`registry.py` has them by name, with what each sends and takes.

All take a pair of this rank's tokens, from a zero start, and give the state that precedes them (docs/mathematics.md):

    R_0 = carry_in,    R_{p+1} = A_p R_p + state_p        (in reverse: from the last rank down)

A collective takes a `ScanRequest`, which holds this rank's tensors, and the `Courier` of a process group. All but
`symmetric.py` use the public API of `torch.distributed` alone, over gloo or NCCL; that one runs a kernel over memory
that GPUs of one NVLink domain share. A courier's group must carry scans of one direction and nothing else, and every
rank must launch the same scans in the same order. Give it a timeout of its own (`new_group(timeout=…)`) equal to the
courier's: on CUDA, where `wait` orders streams and does not block the host, NCCL's watchdog enforces that one (and the
kernel the courier's); on CPUs it bounds what a failed collective leaves behind in gloo's threads.

A scan that is captured into a CUDA graph has to have run once before, alike in all but its data, and ends with
`finish`. Its replays and a courier's other scans must follow each other: one kernel at a time uses the memory of a
direction.
"""

from zeco_train.collectives.courier import Courier
from zeco_train.collectives.scan import PendingScan, scan_alone

__all__ = ["Courier", "PendingScan", "scan_alone"]
