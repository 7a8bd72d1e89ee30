"""Variant `fla_cp` of case `operator`: flash-linear-attention's (fla) own context parallelism, a peer.

Each rank has consecutive tokens of one sequence, as with the backends. fla 0.6.0 summarises them as [S | M], fp32
[H, K, V + K], all-gathers that of every rank, and folds those of the ranks before; the backward pass does the same with
those after. What a rank sends is (P − 1) · H · K · (V + K) · 4 bytes a pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_train.bench.operands import DELTA_RULES, Attention, Shape
from zeco_train.bench.session import Session
from zeco_train.bench.variants import FLA_CP
from zeco_train.distributed.mesh import attention_group
from zeco_train.errors import ConfigError

# Of fla 0.6.0's functions for this benchmark's operators, those that take a `cp_context`.
_OPERATORS = ("gated_delta", "kda")


def context_parallel(shape: Shape, session: Session) -> Attention:
    """The function of fla for the same operator, over all ranks' tokens. Collective.

    Raises:
        ConfigError: fla, or a GPU, is missing; or fla has none for this operator or shape.
    """
    if shape.operator not in _OPERATORS:
        allowed = f"fla has context parallelism for {' and '.join(_OPERATORS)}, not {shape.operator}"
        raise ConfigError("variants", FLA_CP, allowed)
    if shape.num_groups != shape.heads:
        raise ConfigError("variants", FLA_CP, f"is measured with as many heads of q and k as of v; not {shape.groups}")
    module, name = DELTA_RULES[shape.operator]
    function = getattr(session.import_fla(module, FLA_CP), name)
    build_context = session.import_fla("fla.ops.cp", FLA_CP).build_cp_context
    # Of the whole sequence: fla cuts it at the ranks' borders.
    borders = torch.tensor([0, session.world_size * shape.tokens])
    # On the host too, so that nothing is read from the device in each call.
    context = build_context(
        cu_seqlens=borders.to(session.device), group=attention_group(session.mesh), cu_seqlens_cpu=borders
    )

    def attention(*operands: Tensor) -> Tensor:
        o: Tensor = function(*operands, cp_context=context)[0]
        return o

    return attention
