"""Calls compiled, recorded and replayed (`zeco_train.kernels.replay`): equal launches and results, by form."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support import interpreter
from tests.support.commands import REPOSITORY
from tests.support.distributed import run_distributed
from tests.support.kernel_cases import KernelCase
from zeco_train.ops import mix as mix_module
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.mix import mix_at
from zeco_train.ops.operator import Target, assume
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

if TYPE_CHECKING:
    from zeco_train.kernels.replay import Steps


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, without records, and without a GPU."""
    from zeco_train.kernels import replay

    monkeypatch.setattr(replay, "_tapes", {})
    monkeypatch.setattr(replay, "_compiled", set())
    monkeypatch.setattr(replay, "driver", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return replay


def _driver(**more: Any) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 90, 32)
    own = {"target": lambda: target, "device": lambda: 0, "stream": lambda device: 7}
    driver.set_active(SimpleNamespace(**{f"get_current_{name}": found for name, found in own.items()}, **more))
    torch.cuda.is_current_stream_capturing = lambda: False


def _run(replay: Any, tensors: Sequence[Tensor], steps: Callable[[], Steps], received: Tensor, form: object = 0) -> Any:
    call = replay.call(form, tensors, steps)
    results = [next(call), next(call), call.send(received)]
    return results[0], results[2]


def _kernels_of_hgrn(rank: int, world_size: int, cache: str) -> tuple[list[str], int]:
    from triton import knobs

    from zeco_train.kernels import replay
    from zeco_train.ops.hgrn.kernels import CUDA

    knobs.cache.dir = cache
    # No `launcher_cls`: a kernel that is run is an AttributeError.
    _driver()
    names, threads = list[str](), set[int]()

    def listener(src: Any, **rest: Any) -> None:
        names.append(src.name)
        threads.add(threading.get_ident())

    knobs.compilation.listener = listener
    tensors = KernelCase("hgrn", 150, (1, 2, 2, 64, 1)).tensors(torch.bfloat16, torch.device("cpu"))
    operands = [tensors[name] for name in OPERATORS["hgrn"].operands]

    def steps() -> Steps:
        local = CUDA.forward(operands, 1.0, None)
        yield local.state, local.transition
        local.overlap()
        yield local.outputs((yield))

    replay.call("hgrn", operands, steps)
    return names, len(threads - {threading.get_ident()})


@pytest.mark.slow
def test_kernels_are_compiled_by_threads_and_not_launched(tmp_path: Any) -> None:
    names, threads = run_distributed(_kernels_of_hgrn, 1, str(tmp_path), fresh=True)[0]
    assert {*names} == {"summaries_kernel", "starts_kernel", "outputs_kernel"}
    assert threads > 1


def test_steps_are_run_compiled_recorded_and_replayed_by_form(replay: Any) -> None:
    runs = list[int]()

    def found(tokens: int, offset: int = 0, form: object = 0) -> None:
        x, received = torch.randn(2 * tokens + offset)[offset:].view(1, tokens, 2), torch.randn(2, 2)

        def steps() -> Steps:
            runs.append(tokens)
            own = x.mT[0] @ x[0]
            yield own, None
            y = torch.empty_like(own)
            torch.add(own, 1.0, out=y)
            z = torch.cat([y, (yield)])
            z[0] = 3.0
            yield z, [own]

        (own, _), (z, (again,)) = _run(replay, [x], steps, received, form)
        assert own is again
        assert torch.equal(own, x.mT[0] @ x[0])
        assert torch.equal(z[1:], torch.cat([own + 1.0, received])[1:])
        assert bool((z[0] == 3.0).all())

    # Compiled and run, recorded, replayed; other lengths whose kernels are the same are not compiled.
    for tokens in (1024, 1024, 1024, 1024, 2048, 2048, 2048, 1040, 1056, 1000, 1001):
        found(tokens)
    assert runs == [1024] * 3 + [2048] * 2 + [1040] * 2 + [1056] * 2 + [1000] * 2 + [1001] * 2
    # A tensor that begins elsewhere, or has another form beside it.
    runs.clear()
    for _ in range(4):
        found(1024, offset=1)
        found(1024, form="other")
    assert len(runs) == 2 + 3


def test_what_cannot_be_replayed_is_not_and_results_are_deleted(replay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outside, kept = torch.ones(3), list[Tensor]()

    def found(x: Tensor, y: Tensor, other: Tensor | None = None, error: bool = False) -> bool:
        """Whether the steps were not run, but their record."""
        runs = []

        def steps() -> Steps:
            runs.append(error)
            if error:
                raise ValueError("refused")
            yield x - (y if other is None else other), (x * 2.0).sum()
            yield (yield)

        call = replay.call(other is None, [x, y], steps)
        assert torch.equal(next(call)[0], x - (y if other is None else other))
        next(call)
        kept[:] = [each for each in call.gi_frame.f_locals.values() if isinstance(each, Tensor)]
        assert call.send(x) is not None
        return not runs

    x, y = torch.randn(3), torch.randn(3)
    # A tensor from elsewhere; an error; one tensor in two places, which a record does not tell apart.
    assert not any(found(x, y, outside) for _ in range(4))
    for _ in range(3):
        with pytest.raises(ValueError, match="refused"):
            found(x, y, error=True)
        assert not found(x, x)
    assert [found(x, y), found(x, y), found(x, x)] == [False, True, True]
    assert not kept
    monkeypatch.setattr(replay.knobs.runtime, "launch_enter_hook", print)
    assert not found(x, y)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: 2.0 if x[0] > 0.0 else 3.0,
        lambda x: sum(x.tolist()),
        lambda x: torch.ones(9)[: x.abs().sum().int()].sum(),
    ],
)
def test_calls_in_which_values_are_read_are_not_recorded(replay: Any, read: Callable[[Tensor], Any]) -> None:
    for _ in range(5):
        x = torch.randn(3)

        def steps(x: Tensor = x) -> Steps:
            yield x * read(x), None
            yield (yield)

        assert torch.equal(_run(replay, [x], steps, x)[0][0], x * read(x))
    assert [*replay._tapes.values()] == [False]


def test_states_and_constants_are_checked_in_every_call(replay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix_module, "_call", lambda form, *tensors, steps: replay.call(form, tensors, steps))
    qkv, state, decay = torch.randn(3, 1, 8, 2, 4).unbind(), torch.randn(1, 2, 4, 4), torch.full((2,), -0.1)
    position = SequencePosition((0, 8), exchange=local_exchange())

    def call(state: Tensor, decay: Tensor = decay) -> Tensor:
        return mix_at("fixed_decay", [*qkv, decay], 1.0, position, StateInput(incoming_state=state))[0]

    outputs = [call(state) for _ in range(4)]
    assert all(map(callable, replay._tapes.values()))
    assert torch.equal(outputs[0], outputs[3])
    for wrong in (state[:, :1], state.double()[..., :1], torch.randn(1)):
        with pytest.raises(ValueError, match=r"^incoming_state: "):
            call(wrong)
    with pytest.raises(ValueError, match=r"^log_decay: expected a constant"):
        call(state, decay.clone().requires_grad_())


def _launches(rank: int, world_size: int, cache: str) -> list[list[Any]]:
    from triton import knobs

    from zeco_train.kernels import replay
    from zeco_train.ops.scalar_decay.kernels.decays import decay_sums_kernel

    knobs.cache.dir, found = cache, list[Any]()

    def address(x: Any) -> Any:
        return x.data_ptr() if isinstance(x, Tensor) else x

    def launcher(*compiled: Any) -> Any:
        return lambda *where: found.append((*where[:6], *map(address, where[9:])))

    numbers = itertools.count()
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 18},
        load_binary=lambda *binary: (0, next(numbers), 32, 0, 1024),
    )
    _driver(launcher_cls=launcher, utils=utils)
    starts, shapes = (0, 1, 4), ((64, 1, 16), (64, 3, 16), (64, 16, 16), (64, 16, 32), (1, 16, 16))
    memory = [torch.zeros(2, 2000, dtype=dtype) for dtype in (torch.float32, torch.float64)]

    def launched() -> list[Any]:
        found.clear()
        for both, start, (T, H, C) in itertools.product(memory, starts, shapes):
            g, sums = both[0, start : start + T * H].view(1, T, H), both[1, : T * H].view(1, T, H)

            def steps(
                g: Tensor = g, sums: Tensor = sums, T: int = T, H: int = H, C: int = C, start: int = start
            ) -> Steps:
                decay_sums_kernel[(T, 1)](g, sums, T, H, C=C, HEADS=16, num_warps=4 + 4 * (start > 1))
                yield g, None
                yield
                yield g

            _run(replay, [g, sums], steps, g[0], (C, start > 1))
        return [*found]

    results = [launched() for _ in range(4)]
    assert len(replay._tapes) == 30
    assert all(map(callable, replay._tapes.values()))
    knobs.runtime.launch_enter_hook.add(print)
    return [*results, launched()]


@pytest.mark.slow
def test_launches_replayed_are_those_of_triton(tmp_path: Any) -> None:
    first, *others = run_distributed(_launches, 1, str(tmp_path), fresh=True)[0]
    assert all(found == first for found in others)
    # Of other dtypes, alignments, warps, constants, and numbers that are 1, divide by 16 or do neither.
    assert len({launch[4] for launch in first}) == len(first) == 30


def _unlike_first_calls(rank: int, world_size: int, cases: list[tuple[Any, ...]]) -> list[str]:
    """Calls that give other bits than the same without records, by the interpreter in place of a GPU."""
    from triton.runtime.interpreter import InterpretedFunction

    from zeco_train.kernels import replay

    interpreter.skip_overflow_checks()
    plain, found, exchange = InterpretedFunction.__getitem__, [], local_exchange()

    def launching(kernel: Any, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            with torch._C.DisableTorchFunction():
                plain(kernel, grid)(*arguments, **constants)

        current = getattr(replay.local, "recording", None)
        return launch if current is None else lambda *x, **more: current.__torch_function__(launch, (), x, more)

    def replayed(form: Any, *tensors: Any, steps: Any) -> Steps:
        return replay.call(form, tensors, steps)

    def as_they_are(form: Any, *tensors: Any, steps: Any) -> Steps:
        return steps()

    torch.cuda.is_current_stream_capturing = lambda: False
    patches = (
        mock.patch.object(InterpretedFunction, "__getitem__", launching),
        mock.patch.multiple(replay, _is_observed=lambda: False, driver=mock.MagicMock()),
        assume(Target("cuda", (9, 0))),
    )
    with patches[0], patches[1], patches[2]:
        for name, tokens, sizes, borders in cases:
            operator, case = OPERATORS[name], KernelCase(name, tokens, sizes, 0.5)
            tensors = case.tensors(torch.float32, torch.device("cpu"))
            documents = [borders] * sizes[0]
            place = SequencePosition((0, tokens), documents=documents, exchange=exchange).on(tensors["do"])
            for turn in range(4):
                results = []
                for run in (as_they_are, replayed):
                    names = *operator.operands, "R"
                    leaves = [tensors[each].detach() * (1.0 - 0.1 * turn) for each in names]
                    wanted = [x.requires_grad_() for x, each in zip(leaves, names, strict=True) if each != "log_decay"]
                    with mock.patch.object(mix_module, "_call", run):
                        carried = StateInput(carry_in=leaves[-1], want_carry=True)
                        o, state_output = mix_at(name, leaves[:-1], 0.7, place, carried)
                        end = state_output.carry_out
                        grads = torch.autograd.grad([o, end], wanted, [tensors["do"], tensors["D_in"]])
                    results.append([o.detach(), end.detach(), *grads])
                if not all(map(torch.equal, *results)):
                    found.append(f"{name}, call {turn}")
    # A forward and a backward pass of each case.
    recorded = sum(map(callable, replay._tapes.values()))
    return [*found, *([] if recorded == 2 * len(cases) else [f"{recorded} records"])]


CASES = [
    ("kda", 70, (1, 1, 2, 5, 7), (0, 30, 70)),  # padded
    pytest.param(("gla", 40, (2, 2, 2, 16, 16), (0, 10, 40)), marks=pytest.mark.campaign),  # by rows
    *(
        pytest.param((name, 70, (1, 2, 2, 16, 16), (0, 30, 70)), marks=pytest.mark.campaign)
        for name in ("gla", "scalar_decay", "fixed_decay", "delta", "gated_delta", "gsa")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_replayed_passes_give_the_bits_of_others(case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_unlike_first_calls, 1, [case], fresh=True) == [[]]


def test_launches_of_operators_kernels_are_recorded() -> None:
    """Those of `triton.jit` itself are not."""
    for path in (REPOSITORY / "zeco_train" / "ops").rglob("*.py"):
        assert "triton.jit" not in path.read_text(), path
