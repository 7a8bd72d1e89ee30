"""Every operator as a plain differentiable function, on one rank or over the ranks of a process group.

Signatures and docstrings are made from the registry's facts; `zeco_train.functional` offers the functions by name, and
its stub, which `lab/functional_stub.py` writes, shows them to editors and type checkers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeco_train.errors import ConfigError
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.attend import attend_at
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.mix import mix
from zeco_train.ops.operator import WIDE, Operator
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import Exchange
from zeco_train.sp.backend_registry import SHARING, Backend, SPConfig
from zeco_train.sp.exchange import GroupExchange, local_exchange


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a sequence, made by `connect`: what functions take as `ranks`.

    Attributes:
        rank: this process's place among them, and so its part of each sequence.
        size: their number.
        backend: how their states are exchanged.
    """

    rank: int
    size: int
    backend: str
    _exchange: Exchange = field(repr=False)
    _over: GroupExchange | None = field(default=None, repr=False)

    def position(
        self, like: Tensor, bounds: Sequence[int] | None, documents: Any, *, continues: bool
    ) -> SequencePosition:
        """Where this rank's tokens of `like` [B, T, …] lie; a ValueError names what does not fit them.

        `continues`: the first document has tokens before the sequence, of which there is a state.
        """
        batch, num_tokens = like.shape[:2]
        if documents is not None and len(documents) != batch:
            raise ValueError(f"documents: expected the borders of {batch} sequences, got those of {len(documents)}")
        # The record has such a document's earlier tokens as one.
        before = int(continues and documents is not None)
        found = [num_tokens * rank for rank in range(self.size + 1)] if bounds is None else [int(x) for x in bounds]
        if len(found) != self.size + 1 or found[0] != 0:
            raise ValueError(f"bounds: expected {self.size + 1} positions that rise from 0, got {found}")
        if (own := found[self.rank + 1] - found[self.rank]) != num_tokens:
            raise ValueError(f"bounds: {found} give rank {self.rank} {own} tokens, it has {num_tokens}")
        borders = documents
        if before:
            borders = [[0, *(int(border) + 1 for border in row[1:])] for row in documents]
        try:
            return SequencePosition([x + before for x in found], self.rank, documents=borders, exchange=self._exchange)
        except ValueError as error:
            if bounds is not None or self.size == 1 or documents is None:
                raise
            raise ValueError(f"{error}; without bounds all ranks have {num_tokens} tokens, as this one") from error

    def for_softmax(self, q: Tensor, k: Tensor, window: int | None, bounds: Sequence[int]) -> Exchange:
        """The exchange with a method for these heads; collective at the first call that needs another method."""
        if self._over is None:
            return self._exchange
        return self._over.for_softmax(q, k, window, max(bounds[-1] // self.size, 1))


def connect(
    group: ProcessGroup | None = None, *, backend: str = "zeco", timeout: timedelta = timedelta(minutes=5)
) -> Ranks:
    """Connect the ranks of a process group, which then share sequences: rank r has the r-th part of each.

    Collective over the group: call it once, and give the result to all layers.

    Args:
        group: of torch.distributed; None is the default group.
        backend: "zeco", "lasp1" or "lasp2"; all compute the same.
        timeout: the longest wait for another rank.

    Raises:
        ConfigError: an unknown backend; torch.distributed is not initialised, or this process is not in the group.
    """
    if backend not in SHARING:
        raise ConfigError("backend", backend, f"must be one of {', '.join(SHARING)}")
    over = GroupExchange(SPConfig(Backend(backend)), group, timeout)
    return Ranks(over.rank, over.size, backend, over.exchange, over)


@cache
def _alone() -> Ranks:
    return Ranks(0, 1, "none", local_exchange())


_DTYPES = torch.bfloat16, torch.float32, torch.float64
_RESULT = "tuple[Tensor, Tensor | None]"
_OPTIONS: Mapping[str, tuple[str, Any, str]] = {
    "scale": ("float | None", None, "factor of the outputs; None is q.shape[-1] ** -0.5."),
    "window": ("int | None", None, "keys that a query reads at most, itself among them; None: no limit."),
    "initial_state": (
        "Tensor | None",
        None,
        "[B, H, K, V], the state before the sequence, in fp32 (fp64 for fp64 operands); None is zero. The\n"
        "first document continues from it. The same on all ranks, as is its gradient: do not sum it over ranks.",
    ),
    "output_final_state": ("bool", False, "also return the state after the sequence, the same on all ranks."),
    "documents": (
        "Sequence[Sequence[int] | Tensor] | None",
        None,
        "for each of the B sequences the borders of its documents, from 0 to the length of the whole\n"
        "sequence; nothing is read across them. None: each sequence is one document.",
    ),
    "bounds": (
        "Sequence[int] | None",
        None,
        "rank r has the tokens [bounds[r], bounds[r + 1]) of each sequence; None: all ranks have as many.",
    ),
    "ranks": (
        "Ranks | None",
        None,
        "the ranks that share the sequences, see `connect`; None: this one has them whole.",
    ),
}
_MEANINGS = {
    "g": "log-decays, finite and at most 0; fp32 (fp64 for fp64)",
    "log_decay": "log-decays as g, of all tokens; constants without gradient",
    "beta": "writing strengths, from 0 to 2; fp32 (fp64 for fp64)",
}


def _function(name: str, operator: Operator) -> Callable[..., tuple[Tensor, Tensor | None]]:
    # The operator as a function of its operands, with the options that its facts allow.
    options = [option for option in _OPTIONS if option != "window" and _takes(operator, option)]
    signature = _signature(operator.operands, options, _RESULT)

    def function(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        try:
            values = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        operands = [values[operand] for operand in operator.operands]
        _check_tensors(operands, operator.operands, operator.dims)
        operator.check(operands, None)
        _check_wide(operands, operator)
        state = values.get("initial_state")
        _check_state(state, operator, operands)
        _check_scale(values.get("scale"))
        ranks = _ranks_of(values.get("ranks"))
        bounds, documents = values.get("bounds"), values.get("documents")
        position = ranks.position(operands[operator.output], bounds, documents, continues=state is not None)
        want_state = values.get("output_final_state", False)
        return mix(name, operands, position, scale=values.get("scale"), carry_in=state, want_carry=want_state)

    shapes = [
        f"{operand}: [{', '.join(dims)}]{_meaning(operand, dims)}."
        for operand, dims in zip(operator.operands, operator.dims, strict=True)
    ]
    like = operator.operands[operator.output]
    returns = f"o, shaped as {like} and in its dtype, and the state after the sequence or None."
    return _named(function, name, signature, operator.about, [*shapes, *_described(options)], returns)


def _meaning(operand: str, dims: str) -> str:
    if operand in _MEANINGS:
        return f", {_MEANINGS[operand]}"
    return "" if "T" in dims else ", the same on all ranks; its gradient is of this rank's tokens: sum it over ranks"


def _takes(operator: Operator, option: str) -> bool:
    if option == "scale":
        return operator.has_scale
    # Each token reads the whole sequence: there is no state before it, and no document in it.
    return not operator.reads_whole or option == "ranks"


def _described(options: Sequence[str]) -> list[str]:
    return [f"{option}: {_OPTIONS[option][2]}" for option in options]


def _signature(operands: Sequence[str], options: Sequence[str], returns: str) -> Signature:
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation="Tensor") for name in operands]
    for option in options:
        kind, default, _ = _OPTIONS[option]
        parameters.append(Parameter(option, Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    return Signature(parameters, return_annotation=returns)


def _named(
    function: Callable[..., Any], name: str, signature: Signature, about: str, arguments: list[str], returns: str
) -> Callable[..., Any]:
    lines = "\n".join(textwrap.indent(textwrap.indent(text, "    ").lstrip(), "    ") for text in arguments)
    function.__name__ = function.__qualname__ = name
    function.__module__ = "zeco_train.functional"
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = {x.name: x.annotation for x in signature.parameters.values()}
    raises = "ValueError: a shape, dtype, device or border that does not fit, by name."
    function.__doc__ = f"{about}\n\nArgs:\n{lines}\n\nReturns:\n    {returns}\n\nRaises:\n    {raises}\n"
    return function


def _ranks_of(ranks: object) -> Ranks:
    if ranks is None:
        return _alone()
    if not isinstance(ranks, Ranks):
        raise ValueError(f"ranks: expected the result of connect(group), got {type(ranks).__name__}")
    return ranks


def _check_tensors(tensors: Sequence[Any], names: Sequence[str], dims: Sequence[str]) -> None:
    for name, x, letters in zip(names, tensors, dims, strict=True):
        shape = f"[{', '.join(letters)}]"
        if not isinstance(x, Tensor) or x.dim() != len(letters):
            found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}: expected a tensor of shape {shape}, got {found}")
        if x.device != tensors[0].device:
            raise ValueError(f"{name}: is on {x.device}, {names[0]} on {tensors[0].device}; all must be on one device")
    if (dtype := tensors[0].dtype) not in _DTYPES:
        raise ValueError(f"{names[0]}: expected {', '.join(map(str, _DTYPES))}; got {dtype}")


def _check_wide(operands: Sequence[Tensor], operator: Operator) -> None:
    # Of `_MEANINGS`: a wider decay would be rounded to the dtype of the states without a word.
    tokens = operands[operator.output].dtype
    for name, x in zip(operator.operands, operands, strict=True):
        if name in WIDE and x.dtype != (wanted := accumulation_dtype(tokens)):
            raise ValueError(f"{name}: expected {wanted} beside operands in {tokens}, got {x.dtype}")


def _check_state(state: object, operator: Operator, operands: Sequence[Tensor]) -> None:
    if state is None:
        return
    like = operands[operator.output]
    wanted = list(operator.state_shape(operands)), accumulation_dtype(like.dtype), like.device
    found = (list(state.shape), state.dtype, state.device) if isinstance(state, Tensor) else type(state).__name__
    if found != wanted:
        shape, dtype, device = wanted
        raise ValueError(f"initial_state: expected shape {shape} in {dtype} on {device}, got {found}")


def _check_scale(scale: object) -> None:
    if scale is not None and not isinstance(scale, int | float):
        raise ValueError(f"scale: expected a number, or None; got {scale!r:.100}")


_SOFTMAX_OPTIONS = ("scale", "window", "documents", "bounds", "ranks")


def _softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    documents: Sequence[Sequence[int] | Tensor] | None = None,
    bounds: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> Tensor:
    tensors, names, of = (q, k, v), ("q", "k", "v"), _ranks_of(ranks)
    _check_tensors(tensors, names, ("BTHD", "BTGD", "BTGV"))
    for name, x in zip(names, tensors, strict=True):
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: expected {q.dtype}, the dtype of q; got {x.dtype}")
    heads, groups = q.shape[2], k.shape[2]
    if k.shape[3] != q.shape[3] or k.shape[:2] != q.shape[:2] or v.shape[:3] != k.shape[:3] or heads % groups:
        found = ", ".join(str(list(x.shape)) for x in tensors)
        raise ValueError(f"q, k, v: expected shapes [B, T, H, D], [B, T, G, D], [B, T, G, V], G divides H; got {found}")
    _check_scale(scale)
    if window is not None and not (isinstance(window, int) and window >= 1):
        raise ValueError(f"window: expected a number of keys from 1 on, or None; got {window!r}")
    if of.size > 1 and bounds is None:
        raise ValueError(f"bounds: softmax attention over {of.size} ranks needs them, the same on every rank")
    position = of.position(q, bounds, documents, continues=False)
    position = position.over(of.for_softmax(q, k, window, position.bounds)).on(q)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    o, _ = attend_at(q, k, v, scale, position, (StateInput(), StateInput()), window)
    return o


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: _function(name, operator) for name, operator in OPERATORS.items()},
    "softmax_attention": _named(
        _softmax_attention,
        "softmax_attention",
        _signature(("q", "k", "v"), _SOFTMAX_OPTIONS, "Tensor"),
        "Causal softmax attention, for hybrids: o_t = Σ_j softmax_j(scale · q_t · k_j) v_j over the tokens j ≤ t.",
        [
            "q: [B, T, H, D], in bf16, fp32 or fp64.",
            "k: [B, T, G, D]; G divides H, each head serves H / G heads of q in a row.",
            "v: [B, T, G, V].",
            "scale: factor of the scores; None is D^-1/2.",
            *_described(_SOFTMAX_OPTIONS[1:3]),
            "bounds: rank r has the tokens [bounds[r], bounds[r + 1]) of each sequence; needed over several ranks.",
            *_described(_SOFTMAX_OPTIONS[4:]),
        ],
        "o, [B, T, H, V] in the dtype of q.",
    ),
}
