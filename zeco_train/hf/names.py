"""Names and layouts of a model's parameters in the files of its format (`models.formats`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.attn import AttnShape
from models.config import LanguageModelConfig
from models.formats.format import ModelFormat
from models.spec import spec_of

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
