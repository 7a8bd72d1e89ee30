"""The methods of softmax attention by name. To add one, add its file and a line here."""

from __future__ import annotations

from datetime import timedelta
from enum import Enum

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeco_train.collectives.wire import Wire
from zeco_train.errors import ConfigError
from zeco_train.ops.seam import AttentionMethod
from zeco_train.sp.attention.all_gather import ALL_GATHER
from zeco_train.sp.attention.local import LocalAttention
from zeco_train.sp.attention.method import MethodSpec
from zeco_train.sp.attention.ring import RING
from zeco_train.sp.attention.ulysses import ULYSSES

# In table order.
METHODS: dict[str, MethodSpec] = {
    spec.name: spec
    for spec in (
        ALL_GATHER,
        ULYSSES,
        RING,
    )
}
AUTO = "auto"


class AttentionChoice(Enum):
    """`auto` and the names of `METHODS`, as a settings type."""

    # Otherwise the loop variable would become a member.
    _ignore_ = "name"
    for name in (AUTO, *METHODS):
        vars()[name] = name


def choose(choice: AttentionChoice, heads: int, key_heads: int, head_dim: int, ranks: int) -> MethodSpec:
    """The method that a setting names; `auto`: of the balanced methods the one that sends the fewest bytes.

    Raises:
        ConfigError: it cannot spread these heads over these ranks.
    """
    shape = heads, key_heads
    if choice.value != AUTO:
        found = METHODS[choice.value]
        if (problem := found.heads_problem(*shape, ranks)) is not None:
            others = ", ".join(spec.name for spec in METHODS.values() if spec.heads_problem(*shape, ranks) is None)
            raise ConfigError("sp.attention", choice.value, f"{problem}; here: auto, {others}")
        return found
    balanced = [spec for spec in METHODS.values() if spec.automatic]
    possible = [spec for spec in balanced if spec.heads_problem(*shape, ranks) is None]
    return min(possible, key=lambda spec: spec.elements_sent(*shape, head_dim, 1, ranks))


def build_attention(spec: MethodSpec, group: ProcessGroup, timeout: timedelta) -> AttentionMethod:
    """The method over an SP group that carries nothing else; each wait for a peer is bounded by `timeout`."""
    if dist.get_world_size(group) == 1:
        return LocalAttention()
    return spec.build(Wire(group, f"softmax attention ({spec.name})", False, timeout))


def describe_methods() -> str:
    """For `--help`: the methods, one per line."""
    lines = ["  sp.attention=auto        the method that sends the fewest bytes, of those with equal work on all ranks"]
    return "\n".join([*lines, *(f"  sp.attention={name:<12}{spec.description}" for name, spec in METHODS.items())])
