"""The methods of softmax attention by name. To add one, add its file and a line here."""

from __future__ import annotations

from datetime import timedelta
from enum import Enum

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeco_train.collectives.wire import Wire
from zeco_train.errors import ConfigError
from zeco_train.sp.attention.all_gather import ALL_GATHER
from zeco_train.sp.attention.method import AttentionLoad, LocalAttention, MethodSpec, ShardedAttention
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


def choose_method(choice: AttentionChoice, load: AttentionLoad) -> MethodSpec:
    """The configured method; `auto` selects the balanced method that sends the fewest bytes from the busiest rank.

    It depends on the load only, so all ranks of a sequence, and plans, choose alike. Raises as `check_heads`.
    """
    check_heads(choice, load.heads, load.key_heads, load.ranks)
    if choice.value != AUTO:
        return METHODS[choice.value]
    possible = [spec for spec in _possible(load.heads, load.key_heads, load.ranks) if spec.balanced]
    return min(possible, key=lambda spec: spec.costs(load).sent)


def check_heads(choice: AttentionChoice, heads: int, key_heads: int, ranks: int) -> None:
    """Raise ConfigError if the method of a setting cannot spread heads of queries and of keys over ranks."""
    if choice.value == AUTO:
        return
    if (problem := METHODS[choice.value].heads_problem(heads, key_heads, ranks)) is not None:
        others = ", ".join(spec.name for spec in _possible(heads, key_heads, ranks))
        raise ConfigError("sp.attention", choice.value, f"{problem}; here: auto, {others}")


def _possible(heads: int, key_heads: int, ranks: int) -> list[MethodSpec]:
    return [spec for spec in METHODS.values() if spec.heads_problem(heads, key_heads, ranks) is None]


def build_attention(
    spec: MethodSpec,
    group: ProcessGroup,
    timeout: timedelta,
    device: torch.device | None = None,
    nodes: int = 1,
    *,
    deterministic: bool = False,
) -> ShardedAttention | LocalAttention:
    """The method over an SP group that carries nothing else, warmed up for `device` if that is given. Collective."""
    if dist.get_world_size(group) == 1:
        return LocalAttention(deterministic=deterministic)
    method = spec.build(Wire(group, f"softmax attention ({spec.name})", False, timeout))
    method.num_nodes, method.deterministic = nodes, deterministic
    if device is not None:
        method.prepare(device)
    return method


def describe_methods() -> str:
    """For `--help`: the methods, one per line."""
    lines = ["  sp.attention=auto        the method that sends the fewest bytes, of those with equal work on all ranks"]
    return "\n".join([*lines, *(f"  sp.attention={name:<12}{spec.description}" for name, spec in METHODS.items())])
