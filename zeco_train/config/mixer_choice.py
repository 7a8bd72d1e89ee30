"""The token mixer of a run's model, which decides the class of section `model` before any of its keys is checked.

The composed files name it (`mixer: NAME` in `configs/model/{mixer}_{size}.yaml`; gla where there is no such line), and
`model.mixer=NAME` takes the file of that mixer with the size of the chosen one, so that widths and the mixer's own keys
are that mixer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from models.config import LanguageModelConfig
from models.registry import DEFAULT_CONFIG, MIXERS
from zeco_train.config.overrides import find_value, of_groups
from zeco_train.errors import ConfigError

GROUP = "model"
KEY = f"{GROUP}.mixer"
# Of files and stored configurations that name no mixer.
_UNNAMED = DEFAULT_CONFIG.mixer


class Composed(NamedTuple):
    """What composed files say of the model: `model.mixer` (None: nothing), and the chosen file of `configs/model`."""

    mixer: Any
    option: str


class MixerChoice(NamedTuple):
    """The class of section `model`, and overrides that choose a file of its mixer."""

    model: type[LanguageModelConfig]
    overrides: list[str]


# Composes a file of `configs/` with overrides that choose groups' files, without a schema.
Compose = Callable[[str, Sequence[str]], Composed]


def config_class(mixer: Any) -> type[LanguageModelConfig]:
    """The configuration class of the models with a mixer.

    Raises:
        ConfigError: there is no such mixer.
    """
    # Not `in MIXERS`, which raises for lists and mappings.
    if mixer not in list(MIXERS):
        raise ConfigError(KEY, mixer, f"must be one of {', '.join(MIXERS)}")
    return MIXERS[mixer].config_class


def stored_class(plain: Mapping[str, Any]) -> type[LanguageModelConfig]:
    """The class of section `model` of a stored configuration.

    Raises:
        ConfigError: there is no such mixer.
    """
    section = plain.get(GROUP)
    return config_class(section.get("mixer") if isinstance(section, dict) else None)


def choose_mixer(overrides: Sequence[str], groups: Mapping[str, Sequence[str]], compose: Compose) -> MixerChoice:
    """Find the mixer that overrides and files choose, and its file.

    Args:
        overrides: in Hydra's syntax, with valid choices of groups' files.
        groups: the options of each configuration group.
        compose: reads the files.

    Raises:
        ConfigError: an unknown mixer, a file that cannot be composed, or no file of the mixer with the size.
    """
    files = of_groups(overrides, groups)
    composed = compose("train", files)
    asked = find_value(overrides, KEY)
    mixer = _name(composed) if asked is None else asked
    model = config_class(mixer)
    of_file = _mixer_of_file(composed.option, compose)
    if mixer == of_file:
        return MixerChoice(model, list(overrides))
    option = _same_size(composed.option.removeprefix(f"{of_file}_"), mixer, groups[GROUP], compose)
    replaced = of_groups(overrides, [GROUP])
    return MixerChoice(model, [*(text for text in overrides if text not in replaced), f"{GROUP}={option}"])


def _same_size(size: str, mixer: str, options: Sequence[str], compose: Compose) -> str:
    """The file of `mixer` with a size."""
    wanted = f"{mixer}_{size}"
    if wanted not in options:
        # The name of another mixer may begin with that of this one.
        own = [name for name in options if name.startswith(f"{mixer}_") and _mixer_of_file(name, compose) == mixer]
        sizes = ", ".join(name.removeprefix(f"{mixer}_") for name in own) or "none"
        raise ConfigError(KEY, mixer, f"no configs/{GROUP}/{wanted}.yaml; sizes of {mixer}: {sizes}")
    if (found := _mixer_of_file(wanted, compose)) != mixer:
        raise ConfigError(KEY, mixer, f"configs/{GROUP}/{wanted}.yaml is of {found}; it needs a line mixer: {mixer}")
    return wanted


def _mixer_of_file(option: str, compose: Compose) -> Any:
    return _name(compose(f"{GROUP}/{option}", []))


def _name(composed: Composed) -> Any:
    return _UNNAMED if composed.mixer is None else composed.mixer
