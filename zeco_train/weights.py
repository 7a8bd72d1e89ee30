"""Reads the weights of a checkpoint, or of a Hugging Face folder, into a model that lies over any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, StorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from zeco_train.agreement import check_same
from zeco_train.checkpoint_files import CHECKSUMS_FILE, find_damage, read_checksums
from zeco_train.checkpoint_writer import retried
from zeco_train.errors import CheckpointError
from zeco_train.hf.folder import ORIGIN_FILE, checked_fla_model, is_hf_folder, parameter_shapes, read_json
from zeco_train.mesh import ProcessMesh, agree


def load_weights(path: Path, model: nn.Module, mesh: ProcessMesh, group: dist.ProcessGroup) -> None:
    """Restore weights only, in place, in the dtype that they have in the model. Collective.

    Args:
        path: a checkpoint's folder, or one in Hugging Face's form.
        group: of all ranks, between hosts.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
        ConfigError: the ranks have found different ones.
    """
    is_hf = is_hf_folder(path)
    remedy = "name one step_… folder, or one export, for all ranks"
    check_same(agree(mesh, lambda: _which(path, is_hf)), mesh.world_size, remedy)
    # Folders that others wrote say nothing of what was in them.
    problem = damage_of(path, mesh) if not is_hf or (path / CHECKSUMS_FILE).is_file() else None
    if problem is not None:
        raise CheckpointError(f"{path}: damaged: {problem}; name another checkpoint")
    model_state = get_model_state_dict(model)
    if is_hf:
        fla = agree(mesh, lambda: checked_fla_model(path))
        tensors = {fla.name_of(name): model_state[name] for name in parameter_shapes(fla.model)}
        read_state(tensors, path, group, HuggingFaceStorageReader(str(path)))
    else:
        read_state({"model": model_state}, path, group)
    set_model_state_dict(model, model_state)


def read_state(
    state: dict[str, Any], path: Path, group: dist.ProcessGroup, reader: StorageReader | None = None
) -> None:
    """Fill the tensors of `state` with what a checkpoint has under their names, each rank its parts. Collective.

    Args:
        reader: of another form of checkpoint than torch's own.

    Raises:
        CheckpointError: it lacks one of them, has it in another shape, or cannot be read.
    """
    try:
        dcp.load(state, checkpoint_id=str(path), storage_reader=reader, process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"{path}: loading failed: {cause_of(error)}") from error


def damage_of(path: Path, mesh: ProcessMesh) -> str | None:
    """What is wrong with a checkpoint, each rank having read its share of the files; the same on all ranks.

    Raises:
        CheckpointError: the storage does not answer.
    """

    def check() -> str | None:
        try:
            files = retried(f"{path}: cannot be read", lambda: read_checksums(path))
            own = dict(list(files.items())[mesh.rank :: mesh.world_size])
            return retried(f"{path}: cannot be read", lambda: find_damage(path, own))
        except ValueError as error:
            return str(error)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error

    own = agree(mesh, check)
    everyone: list[str | None] = [None] * mesh.world_size
    dist.all_gather_object(everyone, own)
    return next((problem for problem in everyone if problem is not None), None)


def _which(path: Path, is_hf: bool) -> dict[str, Any]:
    """What tells a folder from those that other ranks may have found: each looks for the newest checkpoint by itself,
    the run that it is of may go on meanwhile, and nodes may hold different exports under the same path.
    """
    if not is_hf:
        return {"checkpoint": path.name}
    # Others' folders say nothing of where they are from.
    return {"export of step": read_json(path / ORIGIN_FILE).get("step")} if (path / ORIGIN_FILE).is_file() else {}


def cause_of(error: CheckpointException) -> str:
    """The first rank's failure in one line."""
    for rank, (failure, _) in error.failures.items():
        return f"rank {rank}: {type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
    return str(error)
