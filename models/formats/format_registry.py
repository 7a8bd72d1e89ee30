"""The classes of language models that can be read and written. To add one, write its file here and add a line."""

from __future__ import annotations

from models.config import LanguageModelConfig
from models.formats.delta_net import DELTA_NET
from models.formats.format import ModelFormat
from models.formats.gated_deltanet import GATED_DELTANET
from models.formats.gla import GLA
from models.formats.hgrn import HGRN
from models.formats.hgrn2 import HGRN2
from models.formats.kda import KDA
from models.formats.linear_attn import LINEAR_ATTN
from models.formats.mamba2 import MAMBA2
from models.formats.olmo_hybrid import OLMO_HYBRID
from models.formats.qwen3_5 import QWEN3_5
from models.formats.retnet import RETNET

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
)


def formats_of(config: LanguageModelConfig) -> list[ModelFormat]:
    """The formats for models with a configuration's mixer; empty: they cannot be exported."""
    return [one for one in FORMATS if one.mixer.config_class.mixer == config.mixer]
