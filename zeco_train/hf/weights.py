"""Loads the weights of a checkpoint or a Hugging Face folder into a model on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from models.spec import spec_of
from zeco_train.checkpoint.files import CHECKSUMS_FILE, is_hf_folder, read_record
from zeco_train.checkpoint.weights import damage_of, read_state
from zeco_train.distributed.agreement import check_same
from zeco_train.distributed.mesh import ProcessMesh, agree
from zeco_train.errors import CheckpointError
from zeco_train.hf.folder import ORIGIN_FILE, checked_fla_model


def load_weights(path: Path, model: nn.Module, mesh: ProcessMesh, group: dist.ProcessGroup) -> None:
    """Load weights only, in place, converted to the model's dtype. Collective.

    Args:
        path: a checkpoint's folder, or a Hugging Face folder.
        model: plain, or parallelised.
        mesh: the ranks.
        group: CPU process group of all ranks.

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
        fla = agree(mesh, lambda: checked_fla_model(path))
        tensors = {fla.name_of(name): model_state[name] for name in spec_of(fla.model).parameter_shapes}
        read_state(tensors, path, group, HuggingFaceStorageReader(str(path)))
    else:
        read_state({"model": model_state}, path, group)
    set_model_state_dict(model, model_state)


def _which(path: Path, is_hf: bool) -> dict[str, Any]:
    """Identity of a folder, to be compared over ranks.

    Each rank looks for the newest checkpoint by itself, the run may still be writing checkpoints, and nodes may hold
    different exports under the same path.
    """
    if not is_hf:
        return {"checkpoint": path.name}
    # Other programs' folders have no ORIGIN_FILE.
    return {"export of step": read_record(path / ORIGIN_FILE).get("step")} if (path / ORIGIN_FILE).is_file() else {}
