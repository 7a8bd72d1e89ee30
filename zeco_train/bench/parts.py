"""What a step's kernels take, by part of the step, told by their names.

| part | kernels |
|---|---|
| products | matrix products: cuBLAS's and CUTLASS's |
| operator | of `zeco_train/kernels`, but for the packages below; attention |
| elementwise | compiled by Inductor, the loss and norms among them; `kernels/rows`, `ops/gated_norm` |
| optimizer | `kernels/adamw`; the norm of gradients, and other functions of lists |
| copies | `kernels/pack`, FSDP2's and others; copies of memory |
| communication | NCCL's, `kernels/all_scan` |
| other | the rest |

Kernels that run at the same time count in full, each in its part: parts may add up to more than the step.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import zeco_train

PARTS = ("products", "operator", "elementwise", "optimizer", "copies", "communication", "other")
# Of packages of kernels; of any other it is the operator.
_PACKAGES = {
    "adamw": "optimizer",
    "pack": "copies",
    "all_scan": "communication",
    "rows": "elementwise",
    "gated_norm": "elementwise",
}
# In order: the first that is found in a name decides.
_OTHERS = (
    (r"nccl", "communication"),
    (r"gemm|nvjet|xmma|cutlass|splitk", "products"),
    (r"flash", "operator"),
    (r"^triton_", "elementwise"),
    (r"chunk_cat|catarray|split_with_sizes|copy", "copies"),
    (r"multi_tensor_apply", "optimizer"),
)
_KERNEL = re.compile(r"^def (\w+_kernel)\(", re.MULTILINE)


@functools.cache
def own_kernels() -> Mapping[str, str]:
    """The part of each of this project's kernels, by name."""
    found: dict[str, str] = {}
    for folder in zeco_train.__path__:
        for file in sorted(Path(folder).glob("**/kernels/**/*.py")):
            inside = file.relative_to(folder).parts
            part = next((part for package, part in _PACKAGES.items() if package in inside), "operator")
            found |= dict.fromkeys(_KERNEL.findall(file.read_text(encoding="utf-8")), part)
    return found


def part_of(event: Mapping[str, Any]) -> str:
    """The part that an event of a Chrome trace belongs to: a kernel, or a copy or filling of memory."""
    if event["cat"] != "kernel":
        return "copies"
    name = event["name"]
    if name in own_kernels():
        return own_kernels()[name]
    return next((part for pattern, part in _OTHERS if re.search(pattern, name.lower())), "other")


def milliseconds(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds by part, of events with durations in µs; without parts that have none."""
    found = dict.fromkeys(PARTS, 0.0)
    for event in events:
        found[part_of(event)] += event["dur"] / 1e3
    return {part: spent for part, spent in found.items() if spent}


def described(parts: Mapping[str, float]) -> str:
    """For notes."""
    return ", ".join(f"{part} {spent:.1f}" for part, spent in parts.items())
