"""Refusal of generation: a token of an unmasked model reads tokens that are yet to be generated."""

from __future__ import annotations

from typing import NoReturn

from zeco_train.errors import ConfigError


def refuse_step(*operands: object) -> NoReturn:
    """The operator's `step`, which cannot exist.

    Raises:
        ConfigError: always.
    """
    raise ConfigError("model.causal", "false", "each token reads the whole text; generation needs model.causal=true")
