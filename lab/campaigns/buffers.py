"""Triton's code of Hopper's asynchronous products: does a loop overwrite what they still read?

A pipelined loop copies tiles to shared memory for later steps, into buffers in turn. It needs one more of them for
tiles of products that are still in flight at the end of a step; Triton 3.6 and 3.7 have none for a tile that the loop
also reads in registers. Its next copy then goes where the product reads: results are wrong, and differently each time.
"""

from __future__ import annotations

import re

_ALLOCATED = re.compile(r"(%[\w#]+) = ttg.local_alloc : \(\) -> !ttg.memdesc<(\d+)x")
_VIEW = re.compile(r"(%[\w#]+) = ttg.memdesc_\w+ (%[\w#]+)")
_COPY = re.compile(r"async_copy_global_to_local %[\w#]+, (%[\w#]+)")
_PRODUCT = re.compile(r"warp_group_dot (%[\w#]+), (%[\w#]+),")
_IN_FLIGHT = re.compile(r"warp_group_dot_wait.*pendings = [1-9]")


def overwritten_buffers(ttgir: str) -> list[str]:
    """Buffers that products in flight at the end of a loop's step read, and that copies of this step overwrite.

    A loop copies as many steps ahead as were copied before it: with as many buffers, into the one just read.
    """
    views: dict[str, str] = {}
    buffers: dict[str, tuple[int, int]] = {}  # how many, and in how many loops
    copies: dict[str, int] = {}  # before the loop that reads it
    loops: list[tuple[str, set[str], list[str]]] = []  # their closing lines, what their products read, waits
    wrong = []
    for line in ttgir.splitlines():
        if found := _ALLOCATED.search(line):
            buffers[found[1]], copies[found[1]] = (int(found[2]), len(loops)), 0
        elif found := _VIEW.search(line):
            views[found[1]] = views.get(found[2], found[2])
        elif found := _COPY.search(line):
            buffer = views[found[1]]
            copies[buffer] += buffers[buffer][1] == len(loops)
        elif "scf.for " in line:
            loops.append((line[: len(line) - len(line.lstrip())] + "}", set(), []))
        elif loops and (found := _PRODUCT.search(line)):
            loops[-1][1].update(buffers.keys() & {views.get(operand) for operand in found.groups()})
        elif loops and _IN_FLIGHT.search(line):
            loops[-1][2].append(line)
        elif loops and line.startswith(loops[-1][0]):
            _, read, waits = loops.pop()
            wrong += [
                f"{buffer} of {buffers[buffer][0]}" for buffer in read if waits and copies[buffer] >= buffers[buffer][0]
            ]
    return sorted(wrong)
