"""Cases and plans of the planner, for its tests."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from models.config import LanguageModelConfig
from models.language_model import Block
from models.mixer_registry import LAYERS
from models.parameters import cast
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import Recompute
from zeco_train.plan.__main__ import main, make_plan
from zeco_train.plan.advice import Option, evaluate
from zeco_train.plan.case import PlannedCase, build_case
from zeco_train.plan.config import parse
from zeco_train.plan.report import Plan
from zeco_train.sp.exchange import local_exchange

# No width is divisible by 3, and not all of them by 4.
SMALL = [
    "model.vocab_size=259",
    "model.num_layers=2",
    "model.hidden_size=50",
    "model.num_heads=5",
    "model.intermediate_size=77",
    "data.seq_len=768",
    "data.global_batch=4",
]
# Its block is compiled once for all tests; others are measured faster without a compiler.
GLA_1B = ["model=gla_1b", "train.dtype=bf16", "data.global_batch=1"]
EAGER = "train.compile=never"


def make_case(*arguments: str) -> PlannedCase:
    return build_case(parse(arguments))[0]


def make(*arguments: str) -> Plan:
    return make_plan(parse(arguments))


def planned(*arguments: str) -> Option:
    return evaluate(make_case(*arguments), 0.05)


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the planner's command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def counted(owner: Any, name: str, count: Callable[..., int], add: Callable[[int], object]) -> Any:
    """In place of a function one that also hands on what `count` makes of each call."""
    original = getattr(owner, name)

    def record(*args: Any, **options: Any) -> Any:
        add(count(*args, **options))
        return original(*args, **options)

    return mock.patch.object(owner, name, record)


def saved_bytes(
    config: LanguageModelConfig, dtype: torch.dtype, recompute: Recompute, compiled: bool, tokens: int
) -> int:
    """What autograd keeps of a block, its parameters aside."""
    block = Block(config, LAYERS[config.mixer_of(0)], 0)
    cast(block, dtype)
    block.recompute = recompute
    if compiled:
        # What the compiler keeps is decided before it makes code.
        block.compile_compute(backend="aot_eager_decomp_partition")
    of_residual = accumulation_dtype(dtype) if config.has_wide_residual else dtype
    x = torch.randn(1, tokens, config.hidden_size, dtype=of_residual, requires_grad=True)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    shard = SequencePosition((0, tokens), exchange=local_exchange())
    shared, own = block.attn.shared, block.attn.wide_parameters
    part = None if own is None else own()
    if shared is not None:
        parameter = torch.zeros(shared.shape(config), dtype=accumulation_dtype(dtype), requires_grad=True)
        part = shared.parts(parameter)[0]
    place = shard.on(x, with_positions=block.attn.reads_positions)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y, *_ = block(x, place, shared=part)
    del y
    return sum(kept.values())


def kept_by_token(
    config: LanguageModelConfig, dtype: torch.dtype, recompute: Recompute = Recompute.none, compiled: bool = False
) -> float:
    """Bytes that autograd keeps of a block for each further token."""
    short, long = (saved_bytes(config, dtype, recompute, compiled, tokens) for tokens in (128, 384))
    return (long - short) / 256


def case_of(config: LanguageModelConfig, *arguments: str, compiled: bool = False) -> PlannedCase:
    """Of a model."""
    case = make_case(f"train.compile={'always' if compiled else 'never'}", *arguments)
    return dataclasses.replace(case, config=dataclasses.replace(case.config, model=config))
