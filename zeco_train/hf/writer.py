"""Writes a checkpoint's weights as safetensors files of bounded size, in one process, one file in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from models.config import LanguageModelConfig
from models.spec import spec_of
from zeco_train.checkpoint.metadata import read_metadata
from zeco_train.checkpoint.weights import read_state
from zeco_train.errors import CheckpointError, system_errors
from zeco_train.hf.folder import INDEX_FILE, WEIGHTS_FILE
from zeco_train.hf.names import FileTensors, StoredModel
from zeco_train.ops import accumulation_dtype
from zeco_train.system.files import make_readable, sync_file, write_durably

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
    names = _file_names(len(parts))
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


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [WEIGHTS_FILE]
    stem = WEIGHTS_FILE.removesuffix(".safetensors")
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _check_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    sync_file(path)
    # Readable by others: weights are not secret.
    make_readable(path)
    with safe_open(path, framework="pt") as stored:
        for name, tensor in tensors.items():
            # As bytes: NaN is not equal to itself, and 0 is equal to −0.
            if not torch.equal(stored.get_tensor(name).view(torch.uint8), tensor.view(torch.uint8)):
                raise OSError(f"{path.name} does not hold what was written to it: {name} differs")
