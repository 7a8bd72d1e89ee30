"""Kernels of an operator's first call: compiled by several threads, none launched, once for each form of call."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.kernel_cases import KernelCase
from zeco_train.ops import first_call
from zeco_train.ops.first_call import compile_backward, compiled_at_once
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.passes import Passes


def _kernels_of_hgrn(rank: int, world_size: int, cache: str) -> tuple[list[str], int, bool]:
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction, driver

    knobs.cache.dir = cache
    target, plain = GPUTarget("cuda", 90, 32), JITFunction.run
    # No `launch`: a kernel that is run is an AttributeError.
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    names, threads = list[str](), set[int]()

    def listener(src: Any, **rest: Any) -> None:
        names.append(src.name)
        threads.add(threading.get_ident())

    knobs.compilation.listener = listener
    case = KernelCase("hgrn", 150, (1, 2, 2, 64, 1))
    with compiled_at_once(4):
        case.found(case.tensors(torch.bfloat16, torch.device("cpu")))
    return names, len(threads - {threading.get_ident()}), JITFunction.run is plain


@pytest.mark.slow
def test_kernels_are_compiled_by_threads_and_not_launched(tmp_path: Any) -> None:
    names, threads, is_restored = run_distributed(_kernels_of_hgrn, 1, str(tmp_path), fresh=True)[0]
    assert {*names} == {"summaries_kernel", "starts_kernel", "outputs_kernel", "grads_kernel"}
    assert threads > 1
    assert is_restored


class _OnGPU(torch.Tensor):
    # Of another device, for what looks at it only.
    device = torch.device("cuda", 0)  # type: ignore[assignment]


def test_passes_run_once_for_each_form_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def backward(operands: Any, *rest: Any) -> Any:
        calls.append(tuple(operands[0].shape))
        return SimpleNamespace(overlap=list, operand_grads=lambda grad: (), state_grad=None)

    passes = OPERATORS["gla"].portable._replace(backward=backward)
    served = mock.Mock(output=2, portable="PyTorch's")
    monkeypatch.setitem(OPERATORS, "gla", served)
    monkeypatch.setattr(first_call, "_compiled", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(first_call, "compiled_at_once", lambda threads: mock.MagicMock())

    def call(tokens: int, kind: type = _OnGPU, passes: Passes = passes) -> None:
        operands = [torch.zeros(1, tokens, 2, 16).as_subclass(kind) for _ in range(4)]
        compile_backward("gla", passes, operands, operands[2], [], None, 1.0, None)

    # Other lengths whose kernels are the same; then two whose sizes do not divide by 16; and a CPU's.
    for tokens in (1024, 2048, 1024, 1040, 1056, 1000, 1001):
        call(tokens)
    call(999, torch.Tensor)
    assert [tokens for _, tokens, *_ in calls] == [1024, 1040, 1000]
    # What PyTorch's own passes serve has no kernels.
    served.select.return_value = served.portable
    call(64)
    assert len(calls) == 3
