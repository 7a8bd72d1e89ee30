"""Whole sequences of any operator in fp64, and their results by the second oracle, each sequence by itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tests.support.recurrence import recurrence
from zeco_train.ops.operator_registry import OPERATORS

SIZES = {"H": 4, "G": 2, "K": 6, "V": 5, "D": 6, "C": 7, "W": 4, "1": 1}
# Not of tokens, and with a row for each sequence.
_STATES = ("carry_in", "carry_out", "dcarry_out")


def tensors(name: str, tokens: int, batch: int) -> dict[str, Tensor]:
    """The operands, do, carry_in and dcarry_out."""
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    operator, sizes = OPERATORS[name], SIZES | {"B": batch, "T": tokens}
    values = {key: random(*(sizes[dim] for dim in dims)) for key, dims in operator.dims_of.items()}
    changes = {
        "k": partial(torch.nn.functional.normalize, dim=-1),
        "g": lambda x: -x.abs() / 3,
        "log_decay": lambda x: -x.abs() / 3,
        "beta": lambda x: 2 * x.sigmoid(),
    }
    values = {key: changes.get(key, lambda x: x)(x) for key, x in values.items()}
    operands = [*values.values()]
    values["do"] = random(*operands[operator.output].shape)
    return values | {key: random(*operator.state_shape(operands)) for key in ("carry_in", "dcarry_out")}


def dims_of(name: str, key: str) -> str:
    """Dimensions of an operand, or of a gradient or result under the names of `tensors` and `recurrence`."""
    operator = OPERATORS[name]
    if key in ("o", "do"):
        return operator.dims[operator.output]
    return "BHKV" if key in _STATES or key == "dcarry_in" else operator.dims_of[key.removeprefix("d")]


def own_tokens(name: str, values: dict[str, Tensor], tokens: slice) -> dict[str, Tensor]:
    """Of some tokens, what has tokens."""
    return {key: x[:, tokens] if "T" in dims_of(name, key) else x for key, x in values.items()}


def expected(
    name: str, values: dict[str, Tensor], starts: Sequence[Sequence[int]], *, carry_in: bool, carry_out: bool
) -> dict[str, Tensor]:
    """o, carry_out, and the gradients of the operands and of carry_in; gradients that sequences share are summed.

    `starts`: of each sequence, where documents begin; those outside of it do not count. `carry_in`, `carry_out`:
    whether there is the one, and a gradient of the other.
    """
    rows = []
    for row, own in enumerate(starts):
        of_row = {key: x[row : row + 1] if "B" in dims_of(name, key) else x for key, x in values.items()}
        do, *states = (of_row.pop(key) for key in ("do", "carry_in", "dcarry_out"))
        before, dafter = (x if given else None for x, given in zip(states, (carry_in, carry_out), strict=True))
        inside = [start for start in own if start < do.shape[1]]
        rows.append(recurrence(name, of_row, do, inside, before, dafter))
    return {
        key: torch.cat([row[key] for row in rows]) if "B" in dims_of(name, key) else sum(row[key] for row in rows)
        for key in rows[0]
    }
