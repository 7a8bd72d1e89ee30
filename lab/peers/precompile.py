"""Question: can fla's chunk_kda under context parallelism be compiled once, before ranks need it?
Command: python -m lab.peers.precompile [kda|gated_delta] [H K V T]
Date: 2026-11-24, 296a790, kda 16 128 128 16384, before lab/results/operator_2xh100_kda_fla_cp.txt
Answer: yes, by a pass over fla 0.6.0's functions in which kernels of Triton 3.6 and 3.7 are compiled and not run.

Environment: TRITON_CACHE_DIR, shared with the ranks; TUNE_THREADS, that compile; TUNE_DEVICE=cpu compiles nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from triton.runtime._async_compile import AsyncCompileMode, active_mode
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from zeco_train.errors import ConfigError, ZecoError
from zeco_train.system.code_cache import use_private_caches

# By name of `bench operator`: fla's module and function, and whether g has a decay for each key.
_FUNCTIONS = {
    "kda": ("fla.ops.kda", "chunk_kda", True),
    "gated_delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", False),
}


class Compilation:
    """Compiles in threads what a pass would launch.

    Attributes:
        mode: has all that was submitted.
        problems: of kernels that could not be submitted, one line each.
    """

    def __init__(self, threads: int) -> None:
        self.mode = AsyncCompileMode(ThreadPoolExecutor(threads), ignore_errors=True)
        self.problems: list[str] = []

    @contextmanager
    def instead_of_launches(self) -> Iterator[None]:
        """Within it, kernels are submitted instead of launched, those with an autotuner in each configuration."""
        launch = JITFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            # Set here, since the backward pass has a thread, and so a context, of its own.
            token = active_mode.set(self.mode)
            try:
                return launch(kernel, *args, grid=grid, warmup=True, **kwargs)
            except Exception as error:
                self.problems.append(f"{kernel.fn.__name__}: {error}")
                return None
            finally:
                active_mode.reset(token)

        def run_all(tuner: Any, *args: Any, **kwargs: Any) -> None:
            tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
            configurations = tuner.prune_configs(kwargs) if len(tuner.configs) > 1 else tuner.configs
            for configuration in configurations:
                tuner.fn.run(*args, **kwargs, **configuration.all_kwargs())
            tuner.nargs = None

        with mock.patch.object(JITFunction, "run", run), mock.patch.object(Autotuner, "run", run_all):
            yield

    def wait(self) -> tuple[int, int]:
        """Wait for all; returns how many were submitted, and how many of them failed."""
        failed = sum(1 for future in as_completed(self.mode.raw_futures) if future.exception() is not None)
        return len(self.mode.raw_futures), failed


def _imported(operator: str) -> tuple[Callable[..., tuple[Tensor, ...]], Any, Any]:
    """Fla's function, its class of contexts, and its module that gathers states.

    Raises:
        ConfigError: fla is not installed.
    """
    module, name, _ = _FUNCTIONS[operator]
    try:
        function = getattr(import_module(module), name)
        return function, import_module("fla.ops.cp").FLACPContext, import_module("fla.ops.cp.chunk_delta_h")
    except ImportError as error:
        raise ConfigError("operator", operator, f"flash-linear-attention is not installed ({error})") from error


def run_pass(operator: str, sizes: tuple[int, int, int, int], device: torch.device) -> None:
    """Call fla's function, forward alone and forward + backward, as a rank between others would.

    Args:
        operator: see `_FUNCTIONS`.
        sizes: H, K, V, and T of a rank.
        device: of the tensors.

    Raises:
        ConfigError: fla is not installed.
        RuntimeError: fla's, where it needs the result of a kernel or another device.
    """
    function, context_class, chunks = _imported(operator)
    heads, keys, values, tokens = sizes
    borders = torch.tensor([0, tokens], dtype=torch.int32)
    context = context_class(
        group=dist.group.WORLD,
        cu_seqlens=borders.to(device),
        cu_seqlens_cpu=borders,
        is_last_rank=False,
        is_first_rank=False,
        pre_num_ranks=1,
        post_num_ranks=1,
    )

    def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(1, tokens, heads, *shape, dtype=dtype, device=device, requires_grad=True)

    def gathered(part: Tensor, group: object = None) -> tuple[Tensor, None]:
        return part.new_empty(2, *part.shape), None

    g = leaf(keys, dtype=torch.float32) if _FUNCTIONS[operator][2] else leaf(dtype=torch.float32)
    operands = leaf(keys), leaf(keys), leaf(values), g, leaf(dtype=torch.float32)
    with mock.patch.object(chunks, "all_gather_into_tensor", gathered):
        with torch.no_grad():
            function(*operands, cp_context=context)
        o = function(*operands, cp_context=context)[0]
        o.backward(torch.zeros_like(o))


def main(arguments: list[str]) -> int:
    """Compile, and print how many kernels; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab.peers.precompile", description="compile fla's kernels")
    parser.add_argument("operator", nargs="?", default="kda", choices=_FUNCTIONS)
    for name, default in (("H", 16), ("K", 128), ("V", 128), ("T", 16_384)):
        parser.add_argument(name, nargs="?", type=int, default=default)
    options = parser.parse_args(arguments)
    try:
        return _compile(options.operator, (options.H, options.K, options.V, options.T))
    except ZecoError as error:
        print(error.line, file=sys.stderr)
        return error.exit_code


def _compile(operator: str, sizes: tuple[int, int, int, int]) -> int:
    start = time.perf_counter()
    device = torch.device(os.environ.get("TUNE_DEVICE", "cuda"))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("TUNE_DEVICE", device, "needs a GPU, for which kernels are compiled")
        use_private_caches()
    threads = int(os.environ.get("TUNE_THREADS", "0")) or os.cpu_count() or 1
    compilation = Compilation(threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with compilation.instead_of_launches():
            run_pass(operator, sizes, device)
    except RuntimeError as error:
        print(f"the pass ended early: {error}", file=sys.stderr)
    finally:
        dist.destroy_process_group()
    submitted, failed = compilation.wait()
    took = f"{time.perf_counter() - start:.0f} s"
    print(f"{operator}: {submitted} compiled by {threads} threads, {failed} failed, {took}", flush=True)
    for problem in sorted(set(compilation.problems)):
        print(problem, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
