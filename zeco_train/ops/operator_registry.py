"""The operators by name. To add one, add its folder and a line here."""

from __future__ import annotations

from zeco_train.ops.delta import DELTA, GATED_DELTA, KDA
from zeco_train.ops.gla import GLA
from zeco_train.ops.gsa import GSA
from zeco_train.ops.hgrn import HGRN
from zeco_train.ops.mamba1 import MAMBA1
from zeco_train.ops.scalar_decay import FIXED_DECAY, SCALAR_DECAY
from zeco_train.ops.short_conv import SHORT_CONV
from zeco_train.ops.unmasked import UNMASKED

OPERATORS = {
    "gla": GLA,
    "scalar_decay": SCALAR_DECAY,
    "fixed_decay": FIXED_DECAY,
    "short_conv": SHORT_CONV,
    "unmasked": UNMASKED,
    "delta": DELTA,
    "gated_delta": GATED_DELTA,
    "kda": KDA,
    "hgrn": HGRN,
    "gsa": GSA,
    "mamba1": MAMBA1,
}

# What `verify` and `bench` take unless another is named.
DEFAULT = "gla"
