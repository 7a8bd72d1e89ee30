"""The token mixers by name. To add one, write its file in `models/mixers` and add a line here."""

from __future__ import annotations

import inspect

from models.config import LanguageModelConfig
from models.mixers.base import Mixer
from models.mixers.gla import GatedLinearAttention
from models.mixers.hgrn2 import HGRN2
from models.mixers.lightning import LightningAttention
from models.mixers.retnet import MultiScaleRetention

MIXERS: dict[str, type[Mixer]] = {
    "gla": GatedLinearAttention,
    "retnet": MultiScaleRetention,
    "lightning": LightningAttention,
    "hgrn2": HGRN2,
}

# Of the default mixer, which is also that of files and stored configurations that name none.
DEFAULT_CONFIG: type[LanguageModelConfig] = MIXERS["gla"].config_class


def mixer_of(config: LanguageModelConfig) -> type[Mixer]:
    """The mixer class of a model; of a hybrid, the mixer after which the model is named."""
    return MIXERS[config.mixer]


def describe_mixers() -> str:
    """For `--help`: the mixers, one per line."""
    return "\n".join(f"  model.mixer={name:<16}{_title(mixer)}" for name, mixer in MIXERS.items())


def _title(mixer: type[Mixer]) -> str:
    """The title of fla's format, or else the first line of the docstring."""
    return mixer.fla.title if mixer.fla is not None else inspect.cleandoc(mixer.__doc__ or "").partition("\n")[0]
