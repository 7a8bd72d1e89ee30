"""The token mixers by name. To add one, write its file in `models/mixers` and add a line here."""

from __future__ import annotations

import inspect

from models.config import LanguageModelConfig
from models.mixers.base import Mixer
from models.mixers.gla import GatedLinearAttention

MIXERS: dict[str, type[Mixer]] = {"gla": GatedLinearAttention}

# Of the default mixer, which is also that of files and stored configurations that name none.
DEFAULT_CONFIG: type[LanguageModelConfig] = MIXERS["gla"].config_class


def unmasked_mixers() -> list[str]:
    """Names of the mixers that can read in both directions, see `LanguageModelConfig.causal`."""
    return [name for name, mixer in MIXERS.items() if mixer.can_be_unmasked]


def mixer_of(config: LanguageModelConfig) -> type[Mixer]:
    """The mixer class of a model; of a hybrid, the mixer after which the model is named."""
    return MIXERS[config.mixer]


def describe_mixers() -> str:
    """For `--help`: the mixers, one per line."""
    return "\n".join(f"  model.mixer={name:<16}{_title(mixer)}" for name, mixer in MIXERS.items())


def _title(mixer: type[Mixer]) -> str:
    """The title of fla's format, or else the first line of the docstring."""
    return mixer.fla.title if mixer.fla is not None else inspect.cleandoc(mixer.__doc__ or "").partition("\n")[0]
