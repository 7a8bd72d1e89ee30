"""Machine code of Hopper GPUs: are the descriptors of its wgmma instructions what the compiler meant?

A descriptor's low word is a shared-memory address, shifted by 4 bits and cut to 14; its high word holds strides and the
swizzling, a constant. ptxas 12.8, which Triton 3.6 and 3.7 come with, sometimes keeps the base of shared memory in the
uniform register that it then takes for one of these words. The product reads any memory, or none. That shows in the
code: the word is the base of shared memory plus a constant, which no right descriptor is.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path

import triton

# The base of a program's shared memory is computed by one instruction, `ULEA UR, UR, 0x400, 0x18`.
_BASE = re.compile(r"0x18$")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_UNIFORM = re.compile(r"UR(\d+)$")


def wrong_descriptors(cubin: bytes) -> list[str]:
    """The wgmma instructions of which a descriptor's word is an address that was not shifted."""
    return _wrong_in(listing_of(cubin))


@functools.lru_cache(maxsize=1)
def listing_of(cubin: bytes) -> str:
    """The machine code as text, with labels."""
    return _tool("nvdisasm", "-c", cubin)


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    found = _USAGE.search(_tool("cuobjdump", "-res-usage", cubin))
    assert found is not None
    return int(found[1]), int(found[2])


def _tool(name: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def _wrong_in(listing: str) -> list[str]:
    """The instructions in the order of the text, which for the loops of kernels is that of their first run.

    A uniform register holds a constant (False, n), the base of shared memory plus a constant (True, n), or, if it is
    missing, anything else.
    """
    known: dict[int, tuple[bool, int]] = {}
    wrong = []
    for operation, text in _INSTRUCTION.findall(listing):
        operands = [operand.strip().removesuffix(".reuse") for operand in text.split(",")]
        if operation.startswith("HGMMA") and (descriptor := re.search(r"gdesc\[UR(\d+)\]", text)):
            first = int(descriptor[1])
            # Two descriptors of two words; the first one is not read if the left operand lies in registers.
            words = range(first if operands[1].startswith("gdesc") else first + 2, first + 4)
            wrong += [f"{operation} {text}: UR{word}" for word in words if known.get(word, (False, 0))[0]]
        elif target := _UNIFORM.match(operands[0]):
            _assign(operation, int(target[1]), operands[1:], known)
    return wrong


def _assign(operation: str, target: int, operands: list[str], known: dict[int, tuple[bool, int]]) -> None:
    def value(operand: str) -> tuple[bool, int] | None:
        if operand in ("URZ", "RZ"):
            return False, 0
        if re.match(r"-?0x[0-9a-f]+$", operand):
            return False, int(operand, 16)
        register = _UNIFORM.match(operand)
        return known.get(int(register[1])) if register else None

    values = [value(operand) for operand in operands if not re.match(r"!?U?PT?\d*$", operand)]
    result = None
    if operation == "UMOV":
        result = values[0]
    elif operation in ("UIADD3", "UIADD3.X") and None not in values:
        bases, constants = zip(*[found for found in values if found is not None], strict=True)
        result = (any(bases), sum(constants)) if sum(bases) <= 1 else None
    elif operation == "ULEA" and _BASE.search(operands[-1]) and values[1] == (False, 0x400):
        result = True, 0
    elif operation == "UIADD3.64" and (low := _UNIFORM.match(operands[0])):
        high = known.get(int(low[1]) + 1)
        result = None if values[0] is None or values[1] is None else (values[0][0], values[0][1] + values[1][1])
        known.pop(target + 1, None)
        if high is not None:
            known[target + 1] = high
    elif ".64" in operation or "WIDE" in operation:
        known.pop(target + 1, None)
    known.pop(target, None)
    if result is not None:
        known[target] = result
