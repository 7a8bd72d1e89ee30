"""Question: what do kernels take of a Hopper GPU, at shapes that others published: registers, stack, shared memory?
Command: python -m lab.campaigns.registers [--only TEXT] > lab/results/registers_sm90.txt
Date: 27 November 2026, Triton 3.7.1, a CPU.
Answer: lab/results/registers_sm90.txt. Registers and stack (bytes; what spills is there) are a thread's, shared memory
    (kB) a program's. A kernel that is compiled in several ways has several lines.

Kernels are compiled, not run, so this needs no GPU. `tests/lab/test_registers.py` compares one shape with the table.
"""

from __future__ import annotations

import argparse
import multiprocessing
from typing import Any

import torch

from lab.campaigns.descriptors import usage
from lab.campaigns.published_shapes import SHAPES, Shape
from tests.support.kernel_cases import KernelCase, compiling
from zeco_train.ops.operator import Target, assume


def lines_of(shape: Shape) -> list[str]:
    """A line for each kernel of the shape's forward and backward pass, in bf16."""
    found: dict[str, None] = {}

    def seen(name: str, made: Any) -> None:
        registers, stack = usage(made.asm["cubin"])
        data = made.metadata
        found[
            f"{shape!s:<50} {name:<26} {registers:>4} {stack:>5} {data.shared / 1024:>6.0f}"
            f" {data.num_warps:>5} {data.num_stages:>6}"
        ] = None

    case = KernelCase(shape.operator, 1024, (1, shape.G, shape.H, shape.K, shape.V))
    with compiling(90, seen), assume(Target("cuda", (9, 0))):
        case.found(case.tensors(torch.bfloat16, torch.device("cpu")))
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes with this in their line")
    only = parser.parse_args().only
    print(f"{'shape':<50} {'kernel':<26} {'regs':>4} {'stack':>5} {'shared':>6} {'warps':>5} {'stages':>6}")
    # A process a shape: compilers and drivers are the process's.
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        for lines in pool.imap(lines_of, [shape for shape in SHAPES if only in str(shape)], chunksize=1):
            print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
