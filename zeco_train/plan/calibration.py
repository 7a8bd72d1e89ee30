"""The planner's measured and assumed constants, as of 2026-11-26; the times of operators are in their folders.

Most are of gla_1b with 16,384 tokens on H200s: docs/benchmarks.md, lab/results/.
"""

from __future__ import annotations

from typing import NamedTuple

from zeco_train.ops.operator import OperatorTime
from zeco_train.ops.operator_registry import DEFAULT, OPERATORS

# --- memory, bytes ---

# Tokens whose logits exist at a time, on CPUs and on GPUs (`zeco_train/ops/loss.py`).
LOSS_CHUNK = {True: 2048, False: 8192}
# cuBLAS's through torch, 32 MiB for each of two streams. Outside of torch's statistics: CUDA context, NCCL's buffers,
# symmetric memory.
WORKSPACE_BYTES, OUTSIDE_BYTES = 0.07e9, 2.0e9
# A CPU process with torch imported. glibc cannot reuse all freed tensors of up to 32 MB: its overhead relative to the
# activations of each pass, if a step has several.
PROCESS_BYTES = 0.6e9
HEAP_TENSOR, HEAP_SHARE = 32 << 20, 0.8

# --- elementwise work, bytes ---

# Per logit of the loss, compiled and not.
LOGIT_TRAFFIC = {True: 14.0, False: 40.0}
# Per parameter of this rank, of norm and AdamW, and the share of the bandwidth that they reach.
OPTIMIZER_TRAFFIC, OPTIMIZER_SHARE = 32.0, 0.85
# Per parameter of the model, of casts and copies around its gather (at a lower share of the bandwidth) and its
# gradient's reduction in fp32.
GATHER_TRAFFIC, REDUCE_TRAFFIC, MANY_TENSORS = 8.0, 6.0, 0.75
# Where a rank holds all parameters: their cast, and adding up the gradients of further passes, on one rank and several.
WHOLE_GATHER_TRAFFIC, SUM_TRAFFIC = 6.9, {True: 11.6, False: 20.6}
# Rounding to fp8 in a pass: per number of an input, of an output's gradient, and of a weight by rows and columns.
FP8_INPUT_BYTES, FP8_GRADIENT_BYTES, FP8_WEIGHT_BYTES = 1.0, 3.0, 6.0

# --- rates ---

# Achieved share of a data sheet's figure: matrix products in bf16 alone, elementwise kernels, NCCL.
MATMUL_EFFICIENCY, BANDWIDTH_EFFICIENCY, LINK_EFFICIENCY = 0.79, 0.8, 0.7
# Throughput in a step relative to a kernel alone, since power limits the clock: 0.92 cool, 0.81 under sustained load.
IN_STEP = 0.86
# Products in fp8 relative to bf16, in a step.
FP8_SPEED = 1.87
# Memory bandwidth of the GPU on which operators were measured, and their time in fp32 relative to bf16 (tf32 x 3).
OPERATOR_BANDWIDTH, OPERATOR_FP32 = 4.8e12, 3.0
# Softmax attention relative to matrix products, forward and backward, by kernel (H100, 16 heads of 128, 16,384 tokens).
ATTENTION = {
    "cuDNN": (0.78, 0.68),
    "cuDNN, backward FlashAttention 2": (0.78, 0.21),
    "FlashAttention 2": (0.41, 0.40),
    # The slow-down of products is relative to it.
    "PyTorch's products": (0.41, 0.40),
    # Assumed.
    "PyTorch's SDPA": (0.5, 0.42),
}
# One core per rank: FLOP/s in bf16, fp32, fp64; bytes/s of memory, and of gloo between processes.
CPU_FLOPS, CPU_BANDWIDTH, CPU_LINK = (5e9, 70e9, 35e9), 10e9, 1e9

# --- waiting ---

# Shares of the operator's forward and backward pass that overlap a scan (lab/results/delays_2xh200.txt; by kernels'
# times 0.17 of scalar decays' backward pass by chunks), and of both between LASP-1's receive and send, in series over
# the ranks (4 GPUs).
OVERLAP_FORWARD, OVERLAP_BACKWARD, LASP1_SERIAL = 0.19, 0.37, 0.27
# Of delta rules' backward pass, the walk for their states (published_shapes_changes_1xh100.txt); forward there is none.
OVERLAP_MATRICES = 0.17
# Share of a block's time by which ranks drift apart, launched by the host and replayed as CUDA graphs: 2 and 4 GPUs,
# assumed for more.
DRIFT = {False: 0.12, True: 0.23}
# Seconds per byte sent by NCCL that it takes from the overlapped compute.
NCCL_SECONDS = 2e-12
# Seconds, without CUDA graphs: between the kernels of a block; to launch a block's forward and backward pass. And of a
# step: synchronisation for loss and norm, the loader.
GAPS, HOST_FORWARD, HOST_BACKWARD, HOST_STEP = 0.2e-3, 2.4e-3, 4.8e-3, 2.0e-3


class Protocol(NamedTuple):
    """A protocol of NCCL: seconds of any collective and of each hop, and its share of a link's bandwidth."""

    start: float
    hop: float
    node_hop: float
    share: float


# By which NCCL chooses: LL, LL128 and Simple over NVLink and network (src/graph/tuning.cc of 2.12; not measured here).
RINGS = (
    Protocol(3.6e-6, 0.85e-6, 2.7e-6, 0.25),
    Protocol(10.0e-6, 1.9e-6, 4.0e-6, 0.92),
    Protocol(8.4e-6, 3.4e-6, 9.6e-6, 1.0),
)
TREES = (
    Protocol(4.4e-6, 0.94e-6, 5.0e-6, 0.9 / 3.8),
    Protocol(4.4e-6, 1.2e-6, 8.5e-6, 0.9 * 0.915),
    Protocol(0.0, 28e-6, 50e-6, 0.9),
)


def operator_time(operator: str, is_cpu: bool) -> OperatorTime:
    """The measured time to take for an operator: its own, else that of the default operator."""
    of, default = OPERATORS[operator], OPERATORS[DEFAULT]
    found = (of.cpu_time or default.cpu_time) if is_cpu else (of.time or default.time)
    assert found is not None
    return found
