"""Verification of softmax attention: every method passes, faults of a method and of its ranks do not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.distributed import run_distributed
from tests.verify.test_verify import CPU, run_command, verify
from zeco_train.config.overrides import load_settings
from zeco_train.lifecycle.join import Launch
from zeco_train.ops import oracle
from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.verify import cases
from zeco_train.verify.config import METHODS, VerifyConfig
from zeco_train.verify.reference import SequenceRank, exact_attention
from zeco_train.verify.report import deviations
from zeco_train.verify.sequences import AttentionSequence

pytestmark = pytest.mark.numeric
QUICK = ["operator=softmax", "device=cpu", "sp_sizes=[2]", "key_dim=8"]


def _rows(table: str, name: str) -> list[str]:
    return [row for row in table.splitlines() if f" {name} " in row]


@pytest.mark.slow
def test_every_method_passes_with_documents_and_windows() -> None:
    results = run_distributed(run_command, 2, *QUICK, "tokens=[24]", "dtypes=[fp64]")
    table = results[0][1]
    assert [code for code, _ in results] == [0, 0], table
    assert ", operator softmax" in table.splitlines()[0]
    assert len(_rows(table, "one device, in halves")) == 2, "without a window, where queries are paired"
    for name in ("one device", "one device, in shards", *METHODS):
        rows = _rows(table, name)
        assert all(row.endswith(" ok") for row in rows), name
        assert [layout for layout in _LAYOUTS if any(f"softmax, {layout}  " in row for row in rows)] == _LAYOUTS, name
        assert len(rows) == 4
    assert not _rows(table, "lasp2")


_LAYOUTS = ["one document", "one document, window 36", "documents", "documents, window 36"]


@pytest.mark.slow
def test_plain_run_includes_softmax_with_the_fewest_tokens() -> None:
    """And a method that cannot spread the heads is skipped in one row."""
    arguments = [
        "backends=[lasp2]",
        "methods=[ring,ulysses]",
        "sp_sizes=[2]",
        "tokens=[12,9]",
        "dtypes=[fp64]",
        "heads=3",
    ]
    results = run_distributed(verify, 2, *arguments)
    table = results[0][1]
    assert [code for code, _ in results] == [0, 0], table
    tokens = {name: [row.split()[3] for row in _rows(table, name)] for name in ("lasp2", "ring")}
    assert tokens == {"lasp2": ["12", "12", "9", "9"], "ring": ["9"] * 4}
    (row,) = _rows(table, "ulysses")
    assert row.endswith("skipped: needs ranks that divide the 3 heads of queries, not 2")


class BrokenMethod:
    """A method with a fault."""

    def __init__(self, method: Any, rank: int, fault: str) -> None:
        self._method, self._rank, self._fault = method, rank, fault

    def forward(self, q: Tensor, k: Tensor, v: Tensor, span: Span, *rest: Any) -> Attended:
        if self._fault == "window ignored":
            span = replace(span, window=None)
        found = self._method.forward(q, k, v, span, *rest)
        return found._replace(o=found.o * 1.02) if self._fault == "off on rank 1" and self._rank == 1 else found

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, *rest: Any) -> tuple[Any, ...]:
        dq, dk, dv = self._method.backward(do, q, k, v, attended, *rest)
        if self._fault == "low precision":
            dv = dv.half().to(dv.dtype)
        # What rank 1 reads of rank 0's tokens is left out.
        return dq, torch.zeros_like(dk) if self._fault == "gradients lost" and self._rank == 0 else dk, dv


def failures_of_broken_methods(rank: int, world_size: int) -> dict[str, list[str]]:
    failures, build = {}, cases.build_attention
    arguments = [*QUICK, "heads=2", "tokens=[24]", "documents=false", "window=8", "methods=[ring]", "dtypes=[fp32]"]
    config = load_settings(VerifyConfig, arguments).resolve(CPU, world_size)
    for fault in ("none", "off on rank 1", "gradients lost", "low precision", "window ignored"):

        def broken(*args: Any, fault: str = fault) -> Any:
            return BrokenMethod(build(*args), rank, fault)

        with mock.patch.object(cases, "build_attention", broken):
            verification = cases.Verification(config, Launch(rank, world_size, rank), CPU, lambda activity: None)
            rows = list(verification.rows())
            verification.drain()
        names = ["one device", "one device, in shards", "ring"]
        assert [row.backend for row in rows] == names
        assert not any(row.failures for row in rows[:-1]), "only the method is broken"
        failures[fault] = rows[-1].failures
    return failures


@pytest.mark.slow
def test_broken_methods_fail_with_tensor_and_rank() -> None:
    first, second = run_distributed(failures_of_broken_methods, 2)
    assert first == second, "all ranks judge alike"
    assert not first["none"]
    assert any(text.startswith("o on rank 1 is off by 2.0e-02 > 1e-03") for text in first["off on rank 1"])
    assert [text.split(" is off")[0] for text in first["gradients lost"][:-1]] == ["dk on rank 0"]
    # detected only by the comparison with one device
    (found,) = first["low precision"]
    assert found.startswith("dv on rank ")
    assert "as much as another chunking there" in found
    assert any(text.startswith("o on rank") for text in first["window ignored"])


@pytest.mark.few
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_reference_is_softmax_over_the_visible_keys(documents: bool, window: int | None) -> None:
    """A few queries at a time, against the formula over the whole sequence."""
    sequence = AttentionSequence("a test", 40, 1, 1, 4, 6, 6, torch.float64, documents, key_heads=2, window=window)
    q, k, v, do = (x.requires_grad_(name != "do") for name, x in sequence.part(0).items())
    borders = sequence.borders if documents else [0, 40]
    scores = torch.einsum("bihk,bjhk->bhij", q, k.repeat_interleave(2, 2)) / math.sqrt(6)
    for i in range(40):
        start = max(border for border in borders if border <= i)
        first = start if window is None else max(start, i - window + 1)
        scores[:, :, i, :first] = scores[:, :, i, i + 1 :] = -torch.inf
    o = torch.einsum("bhij,bjhv->bihv", scores.softmax(-1), v.repeat_interleave(2, 2))
    grads = torch.autograd.grad(o, (q, k, v), do)
    expected = dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=True))
    with mock.patch.object(oracle, "_SCORES", 4 * 40 * 9):
        found = exact_attention(sequence, SequenceRank(0, 1))
    for name, deviation in deviations(found, expected).items():
        assert deviation.error <= 1e-13, name
