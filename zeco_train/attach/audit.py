"""Which modules mix tokens beside the attached layers: each is called again with other tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeco_train.attach.forward import AttachError

# Relative to the largest output: rounding of sums in another order, as experts have them.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_LONGEST = 61


def audit_modules(model: nn.Module, batch: Mapping[str, Any], attached: Sequence[nn.Module]) -> list[str]:
    """Call the model on the first row of a batch, without gradients; the modules that mix tokens, by name and class.

    Each is called again with the tokens of the first half, each twice, which changes a mean over tokens, as another
    order would not. What works token by token gives the outputs of these, each twice; a result without a dimension of
    the tokens, as a loss of a router, is not compared. What a module of `attached` does in its own code is not seen,
    nor what the modules around it do, only what they call. Raises AttachError for a batch of fewer than 3 tokens.
    """
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if tokens is None:
        raise AttachError("input_ids: missing, and inputs_embeds, too")
    if (length := _length(model, tokens.shape[1])) < 3:
        raise AttachError(f"input_ids: {tokens.shape[1]} tokens; an audit takes a sequence of more, at least 3")
    name = "input_ids" if "input_ids" in batch else "inputs_embeds"
    around = {module for module in model.modules() if {*module.modules()} & {*attached}}
    found: dict[nn.Module, str] = {}
    again = [False]

    def check(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if again[0]:
                return
            again[0] = True
            try:
                other = module(*_moved(args, length), **_moved(kwargs, length))
            finally:
                again[0] = False
            pairs = zip(_tensors(_moved(output, length)), _tensors(other), strict=False)
            # Not also the modules around one that mixes.
            if not all(_equal(x, y) for x, y in pairs if length in x.shape) and not found.keys() & {*module.modules()}:
                found[module] = f"{name} ({type(module).__name__})"

        return hook

    hooks = [
        module.register_forward_hook(check(name), with_kwargs=True)
        for name, module in model.named_modules()
        if name and module not in around
    ]
    training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()(**{name: tokens[:1, :length]})
    finally:
        for module, flag in training.items():
            module.training = flag
        for one in hooks:
            one.remove()
    return [*found.values()]


# A number of tokens that is the size of nothing else, so that a tensor's dimension of this size is that of its tokens.
def _length(model: nn.Module, tokens: int) -> int:
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    return next(length for length in range(min(tokens, _LONGEST), 0, -1) if length not in sizes or length == 1)


def _moved(x: Any, length: int) -> Any:
    if isinstance(x, Tensor):
        dims = [dim for dim, size in enumerate(x.shape) if size == length]
        return x.index_select(dims[0], torch.arange(length, device=x.device) // 2) if dims else x
    if isinstance(x, tuple | list):
        return type(x)(_moved(part, length) for part in x)
    return {key: _moved(part, length) for key, part in x.items()} if isinstance(x, dict) else x


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield from [x] if x.is_floating_point() else []
    elif isinstance(x, dict | tuple | list):
        for part in x.values() if isinstance(x, dict) else x:
            yield from _tensors(part)


def _equal(x: Tensor, y: Tensor) -> bool:
    tolerance = _TOLERANCES.get(x.dtype, 3e-2)
    return x.shape == y.shape and bool((x - y).abs().max() <= tolerance * x.abs().max())
