"""The classes of language models that can be read and written. To add one, write it here and add a line."""

from __future__ import annotations

from models.config import LanguageModelConfig
from models.formats.fla import DELTA_NET, GATED_DELTANET, GLA, GSA, HGRN, HGRN2, KDA, LINEAR_ATTN, RETNET
from models.formats.format import ModelFormat
from models.formats.hybrids import OLMO_HYBRID, QWEN3_5
from models.formats.mamba import MAMBA1, MAMBA2

# An export takes the first that can express a model.
FORMATS: tuple[ModelFormat, ...] = (
    GLA,
    LINEAR_ATTN,
    RETNET,
    HGRN2,
    MAMBA2,
    GATED_DELTANET,
    OLMO_HYBRID,
    QWEN3_5,
    DELTA_NET,
    KDA,
    HGRN,
    GSA,
    MAMBA1,
)


def formats_of(config: LanguageModelConfig) -> list[ModelFormat]:
    """The formats for models with a configuration's mixer; empty: they cannot be exported."""
    return [one for one in FORMATS if one.mixer.config_class.mixer == config.mixer]
