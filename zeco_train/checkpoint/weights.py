"""Loads a checkpoint's tensors on any number of ranks, and checks the checkpoint for damage."""

from __future__ import annotations

import io
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, StorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from zeco_train.checkpoint.files import (
    FILES_AT_ONCE,
    METADATA_FILE,
    PROGRESS_FILE,
    find_damage,
    is_hf_folder,
    read_checksums,
)
from zeco_train.checkpoint.metadata import find_contradiction, read_metadata
from zeco_train.checkpoint.writer import retried
from zeco_train.distributed.mesh import ProcessMesh, agree
from zeco_train.errors import CheckpointError, system_errors
from zeco_train.lifecycle.join import gather


def read_state(
    state: dict[str, Any], path: Path, group: dist.ProcessGroup | None, reader: StorageReader | None = None
) -> None:
    """Load the tensors of `state` from a checkpoint by name, each rank its shards. Collective over `group`, if given.

    Non-tensor values of `state` must be in the checkpoint, too, and are left unchanged. `reader`: for a checkpoint in
    another format than DCP. Raises CheckpointError if an entry is missing or has another shape, or it cannot be read.
    """
    reader = reader or _Reader(path)
    try:
        with warnings.catch_warnings():
            # Loading in one process without the others is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=reader, planner=_Planner(), process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointError(f"{path}: loading failed: {cause_of(error)}") from error


class _Reader(FileSystemReader):
    # Reads a DCP checkpoint without unpickling its metadata; tensors by torch's `weights_only` loader.
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            parts = [replace(plan, items=items) for items in files.values()]
            read = [pool.submit(super(_Reader, self).read_data, part, planner) for part in parts]
        for each in read:
            each.result()
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Planner(DefaultLoadPlanner):
    # Torch's own planner unpickles entries that are no tensors, and so executes code from them.
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # A non-tensor entry must be a plain value, and `state` must not expect a tensor.
        name = read_item.dest_index.fqn
        if isinstance(self.state_dict[name], torch.Tensor):
            raise ValueError(f"{name} is not stored as a tensor; nothing of it was run")
        try:
            # Checked and dropped: settings such as the learning rate come from the configuration.
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"{name} is no plain value; nothing of it was run") from error


def problem_of(path: Path) -> str | None:
    """Describe a checkpoint's damage; None if it is intact. This process alone reads all files.

    Raises CheckpointError for a storage failure.
    """
    with system_errors(lambda reason: CheckpointError(f"{path}: cannot be read: {reason}")):
        return _problem(path, 0, 1)


def damage_of(path: Path, mesh: ProcessMesh) -> str | None:
    """`problem_of` with the files divided among the ranks; the same result on all of them. Collective."""

    def check() -> str | None:
        with system_errors(lambda reason: CheckpointError(f"{path}: cannot be read: {reason}")):
            return retried(f"{path}: cannot be read", lambda: _problem(path, mesh.rank, mesh.world_size))

    return next((problem for problem in gather(agree(mesh, check), mesh.world_size) if problem is not None), None)


def _problem(path: Path, rank: int, world_size: int) -> str | None:
    # Rank 0 checks the small files, each rank its share of the others.
    try:
        table = read_checksums(path)
    except ValueError as error:
        return str(error)
    small = {name: entry for name, entry in table.items() if name in (METADATA_FILE, PROGRESS_FILE)}
    if rank == 0:
        problem = find_damage(path, small)
        # Hugging Face exports have neither file.
        if problem is None and not is_hf_folder(path):
            problem = find_contradiction(path, table)
        if problem is not None:
            return problem
    others = [name for name in table if name not in small]
    return find_damage(path, {name: table[name] for name in others[rank::world_size]})


def cause_of(error: CheckpointException) -> str:
    """The first rank's failure in one line."""
    for rank, (failure, _) in error.failures.items():
        return f"rank {rank}: {type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
    return str(error)
