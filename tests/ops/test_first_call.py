"""Kernels of an operator's first call: compiled by several threads, none launched, once for each form of call."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.kernel_cases import KernelCase
from zeco_train.ops import first_call
from zeco_train.ops.first_call import compiled_at_once, compiling_first
from zeco_train.ops.operator_registry import OPERATORS


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


def test_passes_run_once_for_each_form_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, inside = [], []

    @contextmanager
    def at_once(threads: int) -> Iterator[None]:
        inside.append(threads)
        yield
        inside.pop()

    def noted(pass_: str) -> Any:
        plain = getattr(OPERATORS["gla"].portable, pass_)

        def start(operands: Any, *rest: Any) -> Any:
            if inside:
                compiled.append((pass_, operands[0].shape[1]))
            return plain(operands, *rest)

        return start

    monkeypatch.setattr(first_call, "compiled_at_once", at_once)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plain = OPERATORS["gla"].portable
    passes = compiling_first(plain._replace(forward=noted("forward"), backward=noted("backward")))

    def call(tokens: int, needs_grad: bool = False) -> None:
        operands = [-torch.rand(1, tokens, 2, 16) for _ in range(4)]
        operands[0].requires_grad_(needs_grad)
        found, expected = (each.forward(operands, 1.0, None) for each in (passes, plain))
        for local in (found, expected):
            local.overlap()
        assert torch.equal(found.outputs(found.state), expected.outputs(expected.state))

    # Other lengths whose kernels are the same, then two that do not divide by 16.
    for tokens in (1024, 2048, 1024, 1040, 1056, 1000, 1001):
        call(tokens)
    assert compiled == [("forward", tokens) for tokens in (1024, 1040, 1000)]
    # With gradients of the backward pass, too.
    call(1040, needs_grad=True)
    assert compiled[3:] == [("forward", 1040), ("backward", 1040)]


def _launches(rank: int, world_size: int, cache: str) -> list[list[Any]]:
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from zeco_train.ops.scalar_decay.kernels.decays import decay_sums_kernel

    knobs.cache.dir, found = cache, list[Any]()

    def launcher(*compiled: Any) -> Any:
        return lambda *where: found.append((*where[:6], *(getattr(x, "shape", x) for x in where[9:])))

    numbers = itertools.count()
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 18},
        load_binary=lambda *binary: (0, next(numbers), 32, 0, 1024),
    )
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 7,
            launcher_cls=launcher, utils=utils,
        )
    )  # fmt: skip

    def launched() -> list[Any]:
        found.clear()
        for dtype, start, (T, H, C) in itertools.product(
            (torch.float32, torch.float64),
            (0, 1, 4),
            ((64, 1, 16), (64, 3, 16), (64, 16, 16), (64, 16, 32), (1, 16, 16)),
        ):
            g = torch.zeros(T * H + start, dtype=dtype)[start:]
            decay_sums_kernel[(T, 1)](g, torch.zeros(T * H), T, H, C=C, HEADS=16, num_warps=4 + 4 * (start > 1))
        return [*found]

    results = [launched(), launched()]
    with compiled_at_once(1):
        results.append(launched())
    knobs.runtime.launch_enter_hook.add(print)
    return [*results, launched()]


@pytest.mark.slow
def test_a_kernel_looked_up_is_the_one_that_triton_launches(tmp_path: Any) -> None:
    first, found, inside, observed = run_distributed(_launches, 1, str(tmp_path), fresh=True)[0]
    assert first == found == observed
    assert not inside
    # Of other dtypes, alignments, warps, constants, and numbers that are 1, divide by 16 or do neither.
    assert len({launch[4] for launch in found}) == len(found) == 30
