"""Question: can a peer's kernels, which are tuned at their first run, be tuned within the time of a benchmark?
Command: torchrun --standalone --nproc-per-node 2 -m lab.peers.tuned MODULE …
Date: 2026-11-24, 296a790, for lab/results/operator_2xh100_kda_fla_cp.txt and model_1xh200_fla.txt
Answer: yes, all configurations are compiled at once, then timed for 40 ms (TUNE_REP_MS) instead of 100. TUNE_THREADS:
    that compile. It replaces methods of Triton 3.6 and 3.7 that are not public.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import triton.testing
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.autotuner import Autotuner

from zeco_train.errors import ConfigError

RANKS = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
THREADS = int(os.environ.get("TUNE_THREADS", "0")) or max(1, (os.cpu_count() or 1) // RANKS)
REP_MS = int(os.environ.get("TUNE_REP_MS", "40"))


@contextmanager
def parallel_tuning() -> Iterator[None]:
    """Within it, autotuners compile all configurations of a kernel at once before they time them."""
    launch, look_up = Autotuner.run, Autotuner.check_disk_cache

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.call_to_tune = args, kwargs
        try:
            return launch(self, *args, **kwargs)
        finally:
            # It would keep the tensors alive.
            self.call_to_tune = None

    def check_disk_cache(self: Any, key: Any, configurations: Sequence[Any], measure: Callable[[], None]) -> bool:
        args, kwargs = self.call_to_tune

        def compile_and_measure() -> None:
            start = time.perf_counter()
            _compile_all(self, args, kwargs, configurations)
            compiled = time.perf_counter()
            measure()
            if os.environ.get("RANK", "0") == "0":
                took = f"{compiled - start:.1f} s + {time.perf_counter() - compiled:.1f} s"
                name, count = self.base_fn.__name__, len(configurations)
                print(f"tuned {name}: {count} configurations, {took}", file=sys.stderr, flush=True)

        return look_up(self, key, configurations, compile_and_measure)

    measurer = property(lambda self: self._do_bench or partial(triton.testing.do_bench, warmup=10, rep=REP_MS))
    with (
        mock.patch.object(Autotuner, "run", run),
        mock.patch.object(Autotuner, "check_disk_cache", check_disk_cache),
        mock.patch.object(Autotuner, "do_bench", measurer),
    ):
        yield


def _compile_all(tuner: Any, args: Sequence[Any], kwargs: dict[str, Any], configurations: Sequence[Any]) -> None:
    # One that cannot be compiled is compiled again, and left out, by the autotuner itself.
    with ThreadPoolExecutor(THREADS) as pool, AsyncCompileMode(pool, ignore_errors=True):
        for configuration in configurations:
            tuner.fn.run(*args, **{**kwargs, "warmup": True}, **configuration.all_kwargs())


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # of its package; a name that no module can have
        return False


def main(arguments: list[str]) -> int:
    """Run the module that is the first argument, with the others; returns the exit code if it does not exit itself."""
    module = arguments[0] if arguments else ""
    if not _exists(module):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            error = ConfigError("MODULE", module, "must be a module that can be imported, such as zeco_train.bench")
            print(error.line, file=sys.stderr)
        return ConfigError.exit_code
    with parallel_tuning(), mock.patch.object(sys, "argv", [*arguments]):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
