"""Emulated symmetric memory for CPU processes running the kernels in Triton's interpreter: a file mapped by all."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_numbers = itertools.count()


def allocate_shared(size: int, group: ProcessGroup, device: torch.device) -> tuple[object, list[int]]:
    """An `Allocate` of `zeco_train.collectives.arena`: every rank maps the parts of all ranks, zeroed."""
    del device
    ranks = dist.get_world_size(group)
    name = [f"{tempfile.mkdtemp(prefix='zeco-arena-')}/{next(_numbers)}"] if dist.get_rank(group) == 0 else [""]
    dist.broadcast_object_list(name, group=group, group_src=0)
    stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    if dist.get_rank(group) == 0:
        with Path(name[0]).open("wb") as file:
            file.truncate(stride * ranks)
    dist.barrier(group)
    with Path(name[0]).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), stride * ranks)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    dist.barrier(group)
    if dist.get_rank(group) == 0:
        Path(name[0]).unlink()
        Path(name[0]).parent.rmdir()
    return memory, [first + stride * rank for rank in range(ranks)]
