"""Weights: of a checkpoint or a Hugging Face folder into a model, and of a checkpoint into files of such a folder.

They are loaded on any number of ranks, and written in one process, one file in memory at a time.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from models.config import LanguageModelConfig
from models.spec import spec_of
from zeco_train.checkpoint.files import CHECKSUMS_FILE, is_hf_folder, read_record
from zeco_train.checkpoint.metadata import read_metadata
from zeco_train.checkpoint.weights import damage_of, read_state
from zeco_train.distributed.mesh import ProcessMesh, agree
from zeco_train.distributed.owned_matrices import local
from zeco_train.errors import CheckpointError, system_errors
from zeco_train.hf.config_json import FileTensors, StoredModel
from zeco_train.hf.folder import INDEX_FILE, ORIGIN_FILE, WEIGHTS_FILE, StoredTensors, checked_tensors
from zeco_train.lifecycle.join import check_same
from zeco_train.ops import accumulation_dtype
from zeco_train.system.files import make_readable, sync_file, write_durably


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


# Key of the weights in a checkpoint (`Checkpointer`).
_MODEL = "model"
_EMBEDDING = "model.embeddings.weight"


def stored_dtype(checkpoint: Path, model: LanguageModelConfig) -> torch.dtype:
    """The common dtype of a checkpoint's weights, after checking that names and shapes match the model.

    Builds a model of no more layers than the checkpoint has weights: the configuration may be a stranger's.

    Raises:
        CheckpointError: a mismatch, several dtypes, or an unreadable checkpoint.
    """
    with system_errors(lambda reason: CheckpointError(f"{checkpoint}: .metadata cannot be read: {reason}")):
        metadata = read_metadata(checkpoint).state_dict_metadata
    count = sum(name.startswith(f"{_MODEL}.") for name in metadata)
    if model.num_layers > count:
        raise CheckpointError(f"{checkpoint}: {count} weights are no model of model.num_layers={model.num_layers}")
    try:
        # First the one shape that needs no model: it bounds what building takes.
        _dtypes(checkpoint, metadata, {_EMBEDDING: torch.Size((model.vocab_size, model.hidden_size))})
        dtypes = _dtypes(checkpoint, metadata, spec_of(model).parameter_shapes)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{checkpoint}: the run's configuration has impossible sizes: {reason}") from error
    if len(dtypes) > 1:
        raise CheckpointError(f"{checkpoint}: its weights have several dtypes: {sorted(map(str, dtypes))}")
    return dtypes.pop()


def _dtypes(checkpoint: Path, metadata: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> set[torch.dtype]:
    dtypes = set()
    for name, shape in shapes.items():
        stored = metadata.get(f"{_MODEL}.{name}")
        if not isinstance(stored, TensorStorageMetadata) or stored.size != shape:
            found = list(stored.size) if isinstance(stored, TensorStorageMetadata) else "not there"
            raise CheckpointError(f"{checkpoint}: {name} is {found}, the run's configuration makes it {list(shape)}")
        dtypes.add(stored.properties.dtype)
    return dtypes


def write_weights(
    checkpoint: Path, written: StoredModel, folder: Path, dtype: torch.dtype, file_bytes: int
) -> tuple[list[str], int]:
    """Write the weights, converted to `dtype`, under the names of the format; verify each file by reading it back.

    Wide parameters (`ParameterRule`) are written in fp32 if `dtype` is narrower. Files have at most `file_bytes` of
    tensors; a single larger tensor gets its own file. Returns the files' names, and the bytes of all tensors.

    Raises:
        CheckpointError: a weight cannot be read.
        OSError: a file cannot be written, or differs when read back.
    """
    spec, wide = spec_of(written.model), accumulation_dtype(dtype)
    parts = list(_parts(written.written(), spec.parameter_shapes, dtype.itemsize, file_bytes))
    names = [WEIGHTS_FILE]
    if (count := len(parts)) > 1:
        stem = WEIGHTS_FILE.removesuffix(".safetensors")
        names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    table: dict[str, str] = {}
    total = 0
    for file, part in zip(names, parts, strict=True):
        own = {
            name: torch.empty(spec.parameter_shapes[name], dtype=wide if name in spec.wide else dtype)
            for one in part
            for name in one.ours
        }
        read_state({_MODEL: own}, checkpoint, None)
        # What is one parameter is written as it lies in memory.
        tensors = {
            one.theirs[0]: own[one.ours[0]] if one.is_one else one.join([own[name] for name in one.ours])
            for one in part
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        _check_file(folder / file, tensors)
        table |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
        # Free them before allocating the next file's tensors.
        del own, tensors
    if len(names) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(table.items()))}
        write_durably(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    return names, total


def _parts(
    tensors: Iterable[FileTensors], shapes: Mapping[str, torch.Size], itemsize: int, file_bytes: int
) -> Iterator[list[FileTensors]]:
    part: list[FileTensors] = []
    filled = 0
    for one in tensors:
        size = sum(shapes[name].numel() for name in one.ours) * itemsize
        if part and filled + size > file_bytes:
            yield part
            part, filled = [], 0
        part.append(one)
        filled += size
    yield part


def _check_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    sync_file(path)
    # Readable by others: weights are not secret.
    make_readable(path)
    with safe_open(path, framework="pt") as stored:
        for name, tensor in tensors.items():
            # As bytes: NaN is not equal to itself, and 0 is equal to −0.
            if not torch.equal(stored.get_tensor(name).view(torch.uint8), tensor.view(torch.uint8)):
                raise OSError(f"{path.name} does not hold what was written to it: {name} differs")
