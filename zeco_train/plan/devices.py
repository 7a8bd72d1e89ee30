"""Devices of the planner: data sheets, at their achieved share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch

from zeco_train.collectives.cost_model import MEASURED, Costs, Link
from zeco_train.distributed.mesh import total_memory
from zeco_train.ops.operator import Target
from zeco_train.plan import calibration as known
from zeco_train.tracking.metrics import PEAK_FLOPS
from zeco_train.training.config import Dtype

GIB = 1 << 30


class Gpu(Enum):
    """Devices by name."""

    h200 = "h200"
    h100 = "h100"
    a100 = "a100"
    cpu = "cpu"


# Compute capability; GiB of memory, as reported by torch; dense FLOP/s in bf16, and in fp32 and fp64; bytes/s of
# memory; of NVLink, per direction.
_DATA_SHEETS = {
    Gpu.h200: ((9, 0), 139.8, PEAK_FLOPS["H200"], 67e12, 4.8e12, 450e9),
    Gpu.h100: ((9, 0), 79.1, PEAK_FLOPS["H100"], 67e12, 3.35e12, 450e9),
    Gpu.a100: ((8, 0), 79.1, PEAK_FLOPS["A100"], 19.5e12, 2.0e12, 300e9),
}


@dataclass(frozen=True)
class Machine:
    """A device with its achieved rates.

    Attributes:
        name: as on the command line.
        memory: bytes of a device; on a CPU those of the machine, shared by its ranks.
        flops: of matrix products in a step, FLOP/s, by compute dtype.
        bandwidth: of memory, bytes/s.
        link, node_link: between devices of a machine and of different ones, bytes/s per device and direction.
        scans: costs of the scans' messages, by link.
    """

    name: str
    memory: float
    flops: dict[Dtype, float]
    bandwidth: float
    link: float
    node_link: float
    scans: Mapping[Link, Costs] = field(default_factory=lambda: MEASURED)

    @property
    def has_fp8(self) -> bool:
        """Whether it multiplies in fp8, or emulates that."""
        return self.name != Gpu.a100.value

    @property
    def is_cpu(self) -> bool:
        return self.name == Gpu.cpu.value

    @property
    def target(self) -> Target:
        return Target("cpu") if self.is_cpu else Target("cuda", _DATA_SHEETS[Gpu(self.name)][0])


def machine(gpu: Gpu) -> Machine:
    """The device of that name."""
    if gpu is Gpu.cpu:
        memory = total_memory(torch.device("cpu"))[0]
        flops = dict(zip((Dtype.bf16, Dtype.fp32, Dtype.fp64), known.CPU_FLOPS, strict=True))
        return Machine("cpu", float(memory), flops, known.CPU_BANDWIDTH, known.CPU_LINK, known.CPU_LINK)
    _, gib, narrow, wide, bandwidth, link = _DATA_SHEETS[gpu]
    peaks = {Dtype.bf16: narrow, Dtype.fp32: wide, Dtype.fp64: wide}
    return Machine(
        gpu.value,
        memory=gib * GIB,
        flops={dtype: peak * known.MATMUL_EFFICIENCY * known.IN_STEP for dtype, peak in peaks.items()},
        bandwidth=bandwidth * known.BANDWIDTH_EFFICIENCY,
        link=link * known.LINK_EFFICIENCY,
        # 400 Gbit/s per GPU.
        node_link=50e9 * known.LINK_EFFICIENCY,
    )
