"""The token mixers by name. To add one, write its file in `models/mixers` and add a line here."""

from __future__ import annotations

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

# Default mixer.
DEFAULT_CONFIG: type[LanguageModelConfig] = MIXERS["gla"].config_class


def mixer_of(config: LanguageModelConfig) -> type[Mixer]:
    """The mixer class of a model; of a hybrid, the mixer after which the model is named."""
    return MIXERS[config.mixer]
