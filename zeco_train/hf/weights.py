"""Loads the weights of a checkpoint or a Hugging Face folder into a model on any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from zeco_train.checkpoint.files import CHECKSUMS_FILE, is_hf_folder, read_record
from zeco_train.checkpoint.weights import damage_of, read_state
from zeco_train.distributed.mesh import ProcessMesh, agree
from zeco_train.distributed.owned_matrices import local
from zeco_train.errors import CheckpointError
from zeco_train.hf.folder import ORIGIN_FILE, StoredTensors, checked_tensors
from zeco_train.lifecycle.join import check_same


def load_weights(path: Path, model: nn.Module, mesh: ProcessMesh, group: dist.ProcessGroup | None) -> None:
    """Load the weights of a checkpoint or a Hugging Face folder in place, converted to the model's dtype. Collective.

    The model may be parallelised; `group` is a CPU process group of all ranks; None: one rank.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
        ConfigError: the ranks found different ones.
    """
    is_hf = is_hf_folder(path)
    remedy = "name one step_… folder, or one export, for all ranks"
    check_same(agree(mesh, lambda: _which(path, is_hf)), mesh.world_size, remedy)
    # Folders written by other programs have no checksums.
    problem = damage_of(path, mesh) if not is_hf or (path / CHECKSUMS_FILE).is_file() else None
    if problem is not None:
        raise CheckpointError(f"{path}: damaged: {problem}; name another checkpoint")
    model_state = get_model_state_dict(model)
    if is_hf:
        _read_folder(path, model_state, agree(mesh, lambda: checked_tensors(path)[1]), group)
    else:
        read_state({"model": model_state}, path, group)
    set_model_state_dict(model, model_state)


# Each rank reads its shards. Tensors that are no parameter as they stand are read whole, a layer's at a time.
def _read_folder(
    path: Path, model_state: Mapping[str, Any], stored: Sequence[StoredTensors], group: dist.ProcessGroup | None
) -> None:
    single = {one.names[0]: model_state[one.tensors.ours[0]] for one in stored if one.tensors.is_one}
    read_state(single, path, group, HuggingFaceStorageReader(str(path)))
    others = [one for one in stored if not one.tensors.is_one]
    for _, of_layer in itertools.groupby(others, lambda one: one.tensors.ours[0].partition(".attn.")[0]):
        _read_joined(path, model_state, list(of_layer), group)


def _read_joined(
    path: Path, model_state: Mapping[str, Any], stored: Sequence[StoredTensors], group: dist.ProcessGroup | None
) -> None:
    whole = {
        name: torch.empty(shape, dtype=model_state[one.tensors.ours[0]].dtype)
        for one in stored
        for name, shape in zip(one.names, one.shapes, strict=True)
    }
    read_state(dict(whole), path, group, HuggingFaceStorageReader(str(path)))
    for one in stored:
        parameters: list[Tensor] = [model_state[name] for name in one.tensors.ours]
        rows = torch.cat([whole[name] for name in one.names])
        parts = one.tensors.split(rows, [parameter.shape[0] for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            part = part.to(parameter.device)
            if isinstance(parameter, DTensor):
                # Every rank has all rows: nothing is sent.
                mesh, placements = parameter.device_mesh, parameter.placements
                part = distribute_tensor(part, mesh, placements, src_data_rank=None).to_local()
            local(parameter).copy_(part)


# Identity of a folder, to be compared over ranks: each looks for the newest checkpoint by itself, the run may still be
# writing checkpoints, and nodes may hold different exports under the same path.
def _which(path: Path, is_hf: bool) -> dict[str, Any]:
    if not is_hf:
        return {"checkpoint": path.name}
    # Other programs' folders have no ORIGIN_FILE.
    return {"export of step": read_record(path / ORIGIN_FILE).get("step")} if (path / ORIGIN_FILE).is_file() else {}
