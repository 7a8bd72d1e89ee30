"""The token mixers by name. To add one, write its file in `models/mixers` and add a line here."""

from __future__ import annotations

from models.config import LanguageModelConfig
from models.mixers.base import Mixer
from models.mixers.gla import GatedLinearAttention

MIXERS: dict[str, type[Mixer]] = {"gla": GatedLinearAttention}

# Default mixer.
DEFAULT_CONFIG: type[LanguageModelConfig] = MIXERS["gla"].config_class


def unmasked_mixers() -> list[str]:
    """Names of the mixers that can read in both directions, see `LanguageModelConfig.causal`."""
    return [name for name, mixer in MIXERS.items() if mixer.can_be_unmasked]


def mixer_of(config: LanguageModelConfig) -> type[Mixer]:
    """The mixer class of a model; of a hybrid, the mixer after which the model is named."""
    return MIXERS[config.mixer]
