"""Conversion between config.json and this package's configuration of a model, by the formats of `models.formats`.

Settings that the other side does not support are rejected by name. Below: names and layouts of parameters in files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from models.attn import AttnShape
from models.config import LanguageModelConfig
from models.formats.format import Keys, ModelFormat, not_exported, shown
from models.formats.format_registry import FORMATS, formats_of
from models.spec import spec_of
from zeco_train.checkpoint.files import HF_CONFIG_FILE as CONFIG_FILE
from zeco_train.errors import ConfigError


def from_config_json(record: Mapping[str, Any], path: Path) -> StoredModel:
    """Convert a config.json in the folder `path` to a model configuration, with the folder's name.

    Raises:
        ConfigError: an unknown model, or an unsupported setting; names the key.
    """
    keys = Keys(path / CONFIG_FILE, record)
    known = {one.model_type: one for one in FORMATS}
    # Not `in known`, which raises for lists and objects.
    if (model_type := record.get("model_type")) not in list(known):
        raise keys.refusal("model_type", model_type, f"only {', '.join(map(repr, known))} can be read")
    form = known[model_type]
    names = record.get("architectures") or [form.architecture]
    if not (isinstance(names, list | str) and form.architecture in names):
        raise keys.refusal("architectures", names, f"only {form.architecture} can be read")
    keys.only({"quantization_config": (None, "quantised weights")})
    fields = form.read(keys)
    try:
        model = form.mixer.config_class(name=str(path.resolve().name), **fields)
    except ConfigError as error:
        raise ConfigError("config", keys.file, f"is of no model that can be built: {error}") from error
    return StoredModel(model.canonical(), form)


def to_config_json(
    model: LanguageModelConfig,
    tokenizer: Tokenizer,
    pad_id: int | None,
    seq_len: int,
    dtype: str,
    model_type: str | None = None,
) -> dict[str, Any]:
    """The contents of config.json.

    Args:
        tokenizer: provides the end-of-sequence id; there is no beginning-of-sequence token.
        seq_len: sequence length in training; no limit of the model, but tools require one.
        dtype: of the weights, by its torch name.
        model_type: of the format; None: the first that can express the model.

    Raises:
        ConfigError: no format can express the model.
    """
    form = format_of(model, model_type)
    record = {
        **form.write(model, seq_len),
        "architectures": [form.architecture],
        "bos_token_id": None,
        "dtype": dtype,
        "eos_token_id": tokenizer.eos_id,
        "model_type": form.model_type,
        "num_hidden_layers": model.num_layers,
        "pad_token_id": pad_id,
        "use_cache": True,
    }
    return dict(sorted(record.items()))


def format_of(model: LanguageModelConfig, model_type: str | None = None) -> ModelFormat:
    """The format of a model's export: the one that is asked for, or the first that can express it, or `ConfigError`."""
    formats = {one.model_type: one for one in formats_of(model)}
    if not formats:
        raise ConfigError("model", model.name, f"fla has no model with {model.mixer}, so this one cannot be exported")
    if model_type is not None:
        if model_type not in formats:
            raise ConfigError("model_type", model_type, f"a model with {model.mixer} can be: {', '.join(formats)}")
        formats = {model_type: formats[model_type]}
    refusals = []
    for form in formats.values():
        try:
            check_expressible(model, form)
        except ConfigError as error:
            refusals.append(error)
        else:
            return form
    if len(refusals) == 1:
        raise refusals[0]
    reasons = "; ".join(f"as {name}: {error}" for name, error in zip(formats, refusals, strict=True))
    raise ConfigError("model", model.name, f"cannot be exported as any class; {reasons}")


def check_expressible(model: LanguageModelConfig, form: ModelFormat) -> None:
    """Raise `ConfigError` for the first field that the format's config.json would not give back."""
    record = {**form.write(model, 1), "num_hidden_layers": model.num_layers}
    found = form.mixer.config_class(**form.read(Keys(Path(CONFIG_FILE), record))).canonical()
    theirs = model_fields(found)
    for key, value in model_fields(model.canonical()).items():
        if value != theirs[key]:
            raise not_exported(key, value, f"{form.label} has {shown(theirs[key])} only")


def model_fields(model: LanguageModelConfig) -> dict[str, Any]:
    """The values of a configuration by key, `attn.layers` and its like among them, without the name."""
    values = {entry.name: getattr(model, entry.name) for entry in dataclasses.fields(model)}
    del values["name"], values["attn"]
    return values | {f"attn.{entry.name}": getattr(model.attn, entry.name) for entry in dataclasses.fields(model.attn)}


_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class FileTensors:
    """Tensors of a file and the parameters whose rows they hold."""

    ours: tuple[str, ...]  # names, in the order of the rows, as are the next
    theirs: tuple[str, ...]
    blocks: int = 1  # equal parts of the rows, in each of which lie, one after the other, equal parts of all parameters

    @property
    def is_one(self) -> bool:
        return len(self.ours) == len(self.theirs) == 1

    def join(self, parameters: Sequence[Tensor]) -> Tensor:
        """Our parameters, [N_i, …] each → all rows in the order of the file, [Σ N_i, …]."""
        return torch.cat([x.unflatten(0, (self.blocks, -1)) for x in parameters], dim=1).flatten(0, 1)

    def split(self, rows: Tensor, heights: Sequence[int]) -> tuple[Tensor, ...]:
        """The inverse of `join`, given N_i."""
        parts = rows.unflatten(0, (self.blocks, -1)).split([height // self.blocks for height in heights], dim=1)
        return tuple(part.flatten(0, 1) for part in parts)


@dataclass(frozen=True)
class StoredModel:
    """The contents of a config.json: the shape, and the format."""

    model: LanguageModelConfig
    format: ModelFormat

    def tensors(self) -> list[FileTensors]:
        """All tensors, in the order of our parameters; together those whose rows a file may cut elsewhere."""
        softmax = set(self.model.attn.chosen(self.model.num_layers))
        found, seen = [], set[str]()
        for parameter in spec_of(self.model).parameter_shapes:
            if parameter not in seen:
                found.append(self._tensors_at(parameter, softmax))
                seen |= set(found[-1].ours)
        return found

    def written(self) -> Iterator[FileTensors]:
        """As `tensors`, but one for each parameter wherever the format has as many."""
        for tensors in self.tensors():
            if len(tensors.ours) == len(tensors.theirs):
                pairs = zip(tensors.ours, tensors.theirs, strict=True)
                yield from (FileTensors((own,), (theirs,)) for own, theirs in pairs)
            else:
                yield tensors

    def _tensors_at(self, parameter: str, softmax: set[int]) -> FileTensors:
        layer, names = _LAYER.match(parameter), self.format.names
        if layer is not None and int(layer[1]) in softmax:
            names = self.format.softmax_names or names
        prefix = "" if layer is None else layer[0]
        model = self.model
        for group in names.rows:
            if parameter.removeprefix(prefix) == group.ours[0]:
                ours, theirs = (tuple(prefix + name for name in names) for names in (group.ours, group.theirs))
                heads = AttnShape.of(model.attn, model.num_heads, model.hidden_size).heads
                return FileTensors(ours, theirs, blocks=heads if group.by_heads else 1)
        return FileTensors((parameter,), (renamed(parameter, names.parts),))


def renamed(parameter: str, parts: Mapping[str, str]) -> str:
    """A parameter's name with parts of it replaced, one after the other."""
    for own, theirs in parts.items():
        parameter = parameter.replace(own, theirs)
    return parameter
