"""The token mixers by name. To add one, write its file in `models/mixers` and add a line here."""

from __future__ import annotations

import re
import sys
from collections import ChainMap
from collections.abc import Mapping
from types import ModuleType

from models.config import SOFTMAX, LanguageModelConfig
from models.mixers.base import Mixer
from models.mixers.based import Based
from models.mixers.cosformer import Cosformer
from models.mixers.delta_net import DeltaNet
from models.mixers.gated_deltanet import GatedDeltaNet
from models.mixers.gla import GatedLinearAttention
from models.mixers.gsa import GatedSlotAttention
from models.mixers.hgrn import HGRN
from models.mixers.hgrn2 import HGRN2
from models.mixers.kda import KimiDeltaAttention
from models.mixers.lightning import LightningAttention
from models.mixers.linear import LinearAttention
from models.mixers.mamba1 import Mamba1
from models.mixers.mamba2 import Mamba2
from models.mixers.rebased import Rebased
from models.mixers.retnet import MultiScaleRetention
from models.mixers.softmax import SoftmaxAttention
from zeco_train.errors import ConfigError
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.system.command import docstring

MIXERS: dict[str, type[Mixer]] = {
    "gla": GatedLinearAttention,
    "linear": LinearAttention,
    "retnet": MultiScaleRetention,
    "lightning": LightningAttention,
    "hgrn2": HGRN2,
    "based": Based,
    "rebased": Rebased,
    "cosformer": Cosformer,
    "mamba2": Mamba2,
    "gated_deltanet": GatedDeltaNet,
    "delta_net": DeltaNet,
    "kda": KimiDeltaAttention,
    "hgrn": HGRN,
    "gsa": GatedSlotAttention,
    "mamba1": Mamba1,
}

# Of a layer, by its name in `LanguageModelConfig.mixer_of`: softmax layers are part of models with another mixer.
# A view, not a copy, so that a mixer added to `MIXERS` is here as well.
LAYERS: Mapping[str, type[Mixer]] = ChainMap({SOFTMAX: SoftmaxAttention}, MIXERS)

# Of the default mixer, which is also that of files and stored configurations that name none.
DEFAULT_CONFIG: type[LanguageModelConfig] = MIXERS["gla"].config_class


def unmasked_mixers() -> list[str]:
    """Names of the mixers that can read in both directions, see `LanguageModelConfig.causal`."""
    return [name for name, mixer in MIXERS.items() if mixer.can_be_unmasked]


def describe_mixers() -> str:
    """For `--help`: the mixers, one per line."""
    return "\n".join(f"  model.mixer={name:<16}{_title(mixer)}" for name, mixer in MIXERS.items())


def _title(mixer: type[Mixer]) -> str:
    return mixer.title or docstring(mixer).partition("\n")[0]


def describe_mixer(name: str) -> str:
    """For `--help`: what a mixer is, its paper, the formulas of its layer, and the recurrence of its operator."""
    mixer = MIXERS[name]
    layer: list[str] = []
    for base in reversed(mixer.__mro__):
        # A base class has lines that several mixers share, unless a class has its own of the same name.
        texts = docstring(base) if issubclass(base, Mixer) else ""
        own = [line for block in texts.split("\n\n") if _FORMULA.match(block) for line in block.split("\n")]
        names = {line.partition(" = ")[0] for line in own}
        layer = [line for line in layer if line.partition(" = ")[0] not in names] + own
    operators = dict.fromkeys(OPERATORS[own].one_token.__module__ for own in (*mixer.operators, mixer.operator) if own)
    recurrences = [block for module in (mixer.__module__, *operators) for block in _indented(sys.modules[module])]
    layer = [f"    {line}" for line in layer]
    parts = ["\n".join(["The layer, x [B, T, D] → y [B, T, D]:", *layer]), "Over a whole sequence:", *recurrences]
    return "\n\n".join([f"Mixer {name}: {_title(mixer)}", *parts])


# A paragraph of lines `name   = …`.
_FORMULA = re.compile(r"\S.{0,9} = ")


def _indented(module: ModuleType) -> list[str]:
    # The first formula of a module's docstring.
    return [block for block in docstring(module).split("\n\n") if block.startswith("    ") and " = " in block][:1]


def longest_document(config: LanguageModelConfig) -> int | None:
    """Tokens of the longest document that all mixers of a model are defined for; None: any."""
    limits = (LAYERS[name].longest_document(config) for name in config.mixer_counts())
    return min((limit for limit in limits if limit is not None), default=None)


def check_document(config: LanguageModelConfig, field: str, tokens: int) -> None:
    """Raise `ConfigError` if the model is not defined for documents, or sequences without, of so many tokens.

    `field` is where the length comes from, such as `data.seq_len`; that of a part includes the tokens before it.
    """
    longest = longest_document(config)
    if longest is not None and tokens > longest:
        allowed = f"the model is defined for documents of at most {longest} tokens (model.max_document)"
        raise ConfigError(field, tokens, allowed)
