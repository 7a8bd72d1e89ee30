"""The token mixers, by name. To add one is to write its file in `models/mixers` and a line here."""

from __future__ import annotations

from models.config import LanguageModelConfig
from models.mixers.base import Mixer
from models.mixers.gla import GatedLinearAttention

MIXERS: dict[str, type[Mixer]] = {"gla": GatedLinearAttention}

# Of a run that names no other.
DEFAULT_CONFIG: type[LanguageModelConfig] = MIXERS["gla"].config_class


def mixer_of(config: LanguageModelConfig) -> type[Mixer]:
    """The mixer of a model; of a hybrid that by which it is called."""
    return MIXERS[config.mixer]
