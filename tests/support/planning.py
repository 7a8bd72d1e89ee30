"""Cases and plans of the planner, for its tests."""

from __future__ import annotations

import contextlib
import io

from zeco_train.plan.advice import Option
from zeco_train.plan.case import Case, build_case
from zeco_train.plan.command import main, make_plan
from zeco_train.plan.config import parse
from zeco_train.plan.report import Plan

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
GLA_1B = ["model=gla_1b", "train.dtype=bf16", "data.global_batch=1"]


def make_case(*arguments: str) -> Case:
    return build_case(parse(arguments))[0]


def make(*arguments: str) -> Plan:
    return make_plan(parse(arguments))


def planned(*arguments: str) -> Option:
    return make(*arguments).planned


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the planner's command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()
