"""Settings of how a training step is executed, with the same loss but for rounding, and of what ends a run."""

from __future__ import annotations

import re
from enum import Enum

from zeco_train.errors import ConfigError


class Compile(Enum):
    """Whether to fuse the operations between matrix products with `torch.compile`. `auto`: on CUDA devices."""

    auto = "auto"
    always = "always"
    never = "never"


class CudaGraphs(Enum):
    """Whether to replay steps as CUDA graphs. `auto`: on CUDA devices, where a step can be captured."""

    auto = "auto"
    off = "off"


def skip_limit(policy: str) -> int:
    """How many steps in a row `train.nonfinite` allows to skip: 0 for `stop`, n for `skip:n`.

    Raises:
        ConfigError: it is neither.
    """
    if policy == "stop":
        return 0
    match = re.fullmatch(r"skip:([1-9]\d{0,8})", policy)
    if match is None:
        raise ConfigError("train.nonfinite", policy, "must be stop, or skip:N to leave out up to N ≥ 1 steps in a row")
    return int(match[1])
