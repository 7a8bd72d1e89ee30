"""The layers of a model that mix tokens, found by the names that their code uses."""

from __future__ import annotations

import dis
import functools
import inspect
from collections import ChainMap
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from zeco_train.attach.forward import AttachError, Layer, class_of
from zeco_train.attach.inline import inline_of
from zeco_train.attach.linear import REPLACEMENTS

REGISTRY = "ALL_ATTENTION_FUNCTIONS"
# Of one token after a cache, which an attached model has none of.
_STEPS = {
    "causal_conv1d_update",
    "mamba2_selective_state_update",
    "recurrent_kimi_delta_attention",
    "torch_recurrent_gated_delta_rule",
}
_PRODUCTS = {"@", "baddbmm", "bmm", "einsum", "matmul"}
_FLASH = {"_flash_attention_forward", "flash_attn_func", "flash_attn_varlen_func"}
_ATTENTIONS = {"flex_attention", "scaled_dot_product_attention", *_FLASH}
# These are refused in a user's own classes; transformers counts tokens and positions by sums.
_MIXING = {"conv1d", "cumsum"}
# Functions by which transformers' other models mix tokens in their own code.
_RECURRENCES = {"_rnn_scan", "mlstm_backend", "rnn_scan", "rwkv_linear_attention"}
# Of fla's operators, those that work token by token.
_BY_TOKEN = ("fla.ops.attnres", "fla.ops.utils")
# Packages whose modules work token by token, but for `MIXING_MODULES`.
_TRUSTED = ("torch.", "peft.")
# Modules that mix tokens when they are called; a layer may own one for its weights only.
MIXING_MODULES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention, nn.modules.batchnorm._NormBase)


def spaces_of(module: nn.Module) -> list[dict[str, Any]]:
    """The globals of the forward functions of a module's class, and of those that they may call in its bases."""
    return [getattr(inspect.unwrap(kind.forward), "__globals__", {}) for kind in _kinds(class_of(module))]


def _kinds(kind: Any) -> Iterator[Any]:
    for base in kind.__mro__:
        if "forward" in vars(base):
            yield base
            if not _names(base) & {"super", "forward"}:
                return


def names_of(module: nn.Module) -> frozenset[str]:
    """The names in the code of a module's forward function and of what it calls.

    That is methods of its own, functions of its file, and forward functions of its base classes.
    """
    owner: Any = class_of(module)
    return _names(owner).union(*map(_names, _kinds(owner)))


@functools.cache
def _names(owner: Any) -> frozenset[str]:
    function = inspect.unwrap(owner.forward)
    if not isinstance(function, FunctionType):
        return frozenset()
    found: set[str] = set()
    pending, seen = [function], set()
    while pending:
        one = pending.pop()
        if one.__code__ in seen:
            continue
        seen.add(one.__code__)
        for name in _code_names(one.__code__):
            found.add(name)
            for other in (inspect.getattr_static(owner, name, None), one.__globals__.get(name)):
                other = inspect.unwrap(other) if isinstance(other, FunctionType) else other
                if not isinstance(other, FunctionType) or name in REPLACEMENTS:
                    continue
                if other.__module__ == function.__module__:
                    pending.append(other)
    return frozenset(found)


def _code_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from ["@"] if any(each.argrepr == "@" for each in dis.get_instructions(code)) else []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_names(constant)


def find_layers(model: nn.Module) -> list[Layer]:
    """The layers to attach. Raises AttachError for one that mixes tokens in unknown ways, or if none does."""
    found = []
    for name, module in model.named_modules():
        if class_of(module).__module__.startswith(_TRUSTED):
            continue
        names = names_of(module)
        layer = Layer(name, module, "softmax" if REGISTRY in names else "linear")
        if REGISTRY in names and getattr(module, "is_causal", True) is False:
            raise layer.error("is not causal")
        if inline_of(layer) is not None:
            found.append(layer)
        elif problem := _unknown_call(module, names) or _own_mixing(class_of(module)):
            raise layer.error(problem)
        elif names & {REGISTRY, *REPLACEMENTS}:
            found.append(layer)
    if not found:
        raise AttachError(f"{type(model).__name__}: has no layer that is known to mix tokens")
    return found


def _unknown_call(module: nn.Module, names: frozenset[str]) -> str | None:
    if class_of(module).__name__.endswith("Indexer"):
        return "selects the keys that queries read, from one rank's"
    space = ChainMap(*spaces_of(module))
    for name in sorted(names - REPLACEMENTS.keys() - _STEPS):
        place = str(getattr(space.get(name), "__module__", ""))
        is_operator = place.startswith("fla.ops.") and not place.startswith(_BY_TOKEN) and callable(space[name])
        if name in _RECURRENCES or is_operator or has_kernel(space.get(name)):
            return f"mixes tokens by {name}, which is not known over ranks"
    return None


def _own_mixing(owner: Any) -> str | None:
    # Each class by itself: what a user's adds to its base is checked, a known layer is not.
    is_more = any(isinstance(x, FunctionType) for x in vars(owner).values())
    for kind in dict.fromkeys([*[owner] * is_more, *_kinds(owner)]):
        names, is_of_library = _names(kind), kind.__module__.startswith(("transformers.", "fla."))
        if names & {REGISTRY, *REPLACEMENTS}:
            continue
        products = _PRODUCTS - {"@" if is_of_library else ""}
        if names & _ATTENTIONS or (names & {"Softmax", "softmax"} and names & products):
            return "computes attention in its own code, not by the registry of attention functions"
        if names & _MIXING and not is_of_library:
            return f"may mix tokens by {min(names & _MIXING)} in its own code"
    return None


def has_kernel(thing: Any) -> bool:
    """Whether transformers looks for a package with a kernel for a function, as it does for whatever mixes tokens."""
    code = getattr(thing, "__code__", None)
    return code is not None and code.co_filename.endswith("hub_kernels.py") and code.co_name == "wrapped"
