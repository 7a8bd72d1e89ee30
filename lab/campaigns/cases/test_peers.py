"""The scripts of lab/peers without a GPU: their error lines, and how they compile configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from triton import Config
from triton.runtime._async_compile import active_mode
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from lab.peers import precompile, tuned

pytestmark = pytest.mark.campaign

CONFIGURATIONS = [Config({"BLOCK": 16}), Config({"BLOCK": 32})]


def _autotuner(launch: Callable[..., object], measured: Callable[[], object]) -> Autotuner:
    def kernel() -> None: ...

    def measure(call: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
        measured()
        return [1.0]

    function = SimpleNamespace(fn=kernel, run=launch)
    return Autotuner(function, ["x"], CONFIGURATIONS, ["x"], None, None, do_bench=measure, cache_results=True)


def test_tuned_compiles_all_configurations_before_it_times_any(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The original one asks for the GPU.
    monkeypatch.setattr(Autotuner, "check_disk_cache", lambda self, key, configurations, measure: measure())
    events: list[object] = []

    def launch(x: int, BLOCK: int, warmup: bool = False, **_: Any) -> None:
        events.append(("compiled" if warmup and active_mode.get() else "launched", BLOCK))

    with tuned.parallel_tuning():
        _autotuner(launch, lambda: events.append("timed")).run(1, grid=(1,), warmup=False)
    assert events == [("compiled", 16), ("compiled", 32), "timed", "timed", ("launched", 16)]
    assert "tuned kernel: 2 configurations" in capsys.readouterr().err


def test_precompile_submits_every_configuration_and_launches_none(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = []

    def run(kernel: Any, x: int, grid: Any, warmup: bool, BLOCK: int, **_: Any) -> None:
        mode = active_mode.get()
        assert mode is not None
        assert warmup
        if BLOCK == 32:
            raise ValueError("no such block")
        submitted.append(BLOCK)
        mode.submit(BLOCK, lambda: None, lambda compiled: None)

    monkeypatch.setattr(JITFunction, "run", run)
    compilation = precompile.Compilation(threads=1)

    def launch(*args: Any, **kwargs: Any) -> None:
        JITFunction.run(SimpleNamespace(fn=launch), *args, **kwargs)

    with compilation.instead_of_launches():
        _autotuner(launch, lambda: pytest.fail("timed")).run(1, grid=(1,), warmup=False)
    assert submitted == [16]
    assert compilation.wait() == (1, 0)
    assert compilation.problems == ["launch: no such block"]
