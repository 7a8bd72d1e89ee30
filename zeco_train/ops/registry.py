"""The operators by name. To add one, add its folder and a line here."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeco_train.ops.delta import DELTA, GATED_DELTA, KDA
from zeco_train.ops.gla import GLA
from zeco_train.ops.passes import Operator
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
}

# What `verify` and `bench` take unless another is named.
DEFAULT = "gla"


def operator_of(name: str, operands: Sequence[Tensor]) -> Operator:
    """Look up an operator by name.

    Raises:
        ValueError: unknown name, or wrong number of operands.
    """
    if name not in OPERATORS:
        raise ValueError(f"operator: must be one of {', '.join(OPERATORS)}; got {name!r}")
    operator = OPERATORS[name]
    if len(operands) != len(operator.operands):
        raise ValueError(f"operands: {name} takes {', '.join(operator.operands)}; got {len(operands)} tensors")
    return operator
