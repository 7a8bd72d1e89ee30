"""Terms of a model's loss that are no sums over tokens: balancing losses of routers, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeco_train.attach.forward import AttachError, Frame, current
from zeco_train.ops import accumulation_dtype

# What a model's own code calls for its loss, and what that has to take.
_OF_TRANSFORMERS, _OF_FLA = "loss_function", "_compute_logits_and_loss"
_SHIFTED = ("shift_labels", "num_items_in_batch")
# Settings whose terms are means over a rank's tokens.
_MEANS = ("z_loss_coefficient", "router_z_loss_coef", "use_l2warp")


def check_losses(model: nn.Module, names: Set[str], config: Any) -> None:
    """Refuse a model, given the names in its code, whose loss has terms that the ranks' parts do not add up to."""
    for setting in _MEANS:
        if getattr(config, setting, None):
            raise AttachError(
                f"{type(model).__name__}: {setting}={getattr(config, setting)} is a mean over one rank's tokens"
            )
    if unknown := sorted(name for name in names if name.endswith("loss_func") and name not in LOSSES):
        raise AttachError(f"{type(model).__name__}: {unknown[0]} is a loss that is not known over ranks")


def check_labels(model: nn.Module, names: Set[str], arguments: Mapping[str, Any]) -> None:
    """Refuse labels that the model would shift within a slice, or divide by the number of one rank's labels."""
    if arguments.get("labels") is None:
        return
    for name in _SHIFTED:
        if arguments.get(name) is None:
            raise AttachError(f"{name}: missing beside labels; `shard` gives it")
    if not names & {_OF_TRANSFORMERS, _OF_FLA}:
        problem = "computes its loss in its own code, from labels that it would shift within a slice"
        raise AttachError(f"{type(model).__name__}: {problem}; leave labels out, and take shift_labels")


def redirect_loss(model: Any, names: Set[str]) -> list[Callable[[], None]]:
    """Give the model's loss shifted labels and the number of all ranks' where its own code does not pass them on.

    The result undoes it; empty: there is no such loss.
    """
    if not names & {_OF_TRANSFORMERS, _OF_FLA}:
        return []
    name = _OF_FLA if _OF_FLA in names else _OF_TRANSFORMERS
    # With fla, of its class: a deep copy has a head of its own.
    original = getattr(type(model) if name == _OF_FLA else model, name)
    known = {*inspect.signature(original).parameters}

    @wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Any:
        frame = current()
        if frame is None:
            return original(*args, **kwargs)
        given = {label: x for label, x in frame.of.labels.items() if x is not None}
        if given and (missing := sorted({*_SHIFTED} - known)):
            raise AttachError(f"{type(model).__name__}: its loss, {original.__name__}, takes no {missing[0]}")
        return original(*args, **{**kwargs, **given})

    if name == _OF_FLA:
        vars(model)[name] = MethodType(loss, model)
        return [lambda: vars(model).pop(name, None)]
    own = vars(model).get("_loss_function")
    model.loss_function = loss
    return [lambda: vars(model).pop("_loss_function", None) if own is None else vars(model).update(_loss_function=own)]


def load_balancing(
    frame: Frame,
    gate_logits: tuple[Tensor, ...] | None,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor | int:
    """Transformers' balancing loss of experts, logits [B T, experts] of each layer: this rank's part of all ranks'.

    With f_e the share of all ranks' tokens that chose expert e, and p_e the mean of its probabilities, it is
    experts · Σ_e f_e p_e: f has no gradient, so each rank adds its own part of the p_e.
    """
    if not isinstance(gate_logits, tuple) or num_experts is None:
        return 0
    dtype, is_token = accumulation_dtype(gate_logits[0].dtype), frame.of.tokens
    numbers = torch.zeros(num_experts + 1, dtype=dtype, device=gate_logits[0].device)
    sums: Tensor | float = 0.0
    for logits in gate_logits:
        probabilities = logits.softmax(-1)
        if is_token is not None:
            probabilities = probabilities[is_token.flatten()]
        chosen = probabilities.topk(top_k, dim=-1).indices.flatten()
        numbers[:-1].index_add_(0, chosen, torch.ones_like(chosen, dtype=dtype))
        numbers[-1] += len(probabilities)
        sums = sums + probabilities.to(dtype).sum(0)
    dist.all_reduce(numbers, group=frame.of.over.group)
    return num_experts * (numbers[:-1] / numbers[-1] * sums / numbers[-1]).sum()


LOSSES = {"load_balancing_loss_func": load_balancing}
