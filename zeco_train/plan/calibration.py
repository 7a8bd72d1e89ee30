"""Every measured or assumed constant of the planner but those of operators (`Operator.time`), each in its folder.

Quantities that depend on the model alone, such as kept tensors, are measured (`zeco_train.plan.activations`).
"""

from __future__ import annotations

from typing import NamedTuple

from zeco_train.ops.operator import OperatorTime
from zeco_train.ops.registry import DEFAULT, OPERATORS

# Tokens whose logits exist at a time, on CPUs and on GPUs (`zeco_train/ops/loss.py`).
LOSS_CHUNK = {True: 2048, False: 8192}

# On GPUs: allocations of libraries through torch (cuBLAS); and memory outside of torch's statistics: the CUDA context,
# NCCL's buffers, symmetric memory of All-Scan.
WORKSPACE_BYTES = 0.2e9
OUTSIDE_BYTES = 2.0e9
# A CPU process with torch imported.
PROCESS_BYTES = 0.6e9
# glibc keeps freed tensors of up to 32 MB and cannot reuse all of them: this overhead relative to the activations of
# each pass, if a step has several (gla_tiny, 32 segments of 16,384 tokens: 2.0 GB; 1.2 GB if all of them are mmapped,
# with MALLOC_MMAP_THRESHOLD_=131072).
HEAP_TENSOR, HEAP_SHARE = 32 << 20, 0.8

# Bytes per logit that the loss reads and writes, compiled (2 ms for 16,384 × 32,000 of them on an H200) and not.
LOGIT_TRAFFIC = {True: 14.0, False: 40.0}
# Bytes per parameter of this rank that norm and AdamW read and write, and the share of the bandwidth that they reach:
# 1.3 and 7.8 ms, gla_1b on one H200.
OPTIMIZER_TRAFFIC = 32.0
OPTIMIZER_SHARE = 0.85
# Bytes per parameter of the model for casts and copies around its all-gather (once) and its gradient's reduction
# (once): 3.2 and 1.8 ms. FSDP's kernels, around the gather, reach a lower share; gradients are packed by ours.
GATHER_TRAFFIC, REDUCE_TRAFFIC = 8.0, 6.0  # the latter with bf16 gradients, which are reduced in fp32
MANY_TENSORS = 0.75
# Where a rank holds all parameters, they are cast in place: 1.66 ms, gla_1b on one H200. Further passes of a step add
# their gradients to its sums: 2.80 ms by the kernel of a single rank, 4.97 ms by torch's of several. All of one run.
WHOLE_GATHER_TRAFFIC = 6.9
SUM_TRAFFIC = {True: 11.6, False: 20.6}

# GPUs are limited by power: in a step they run at 1,500 to 1,700 MHz, a kernel alone at up to 1,980. Throughput of
# matrix products and the operator in a step relative to that alone: on an H200 0.92 in the first steps of a cool one
# (products 148 ms instead of 137, gla_1b with 16,384 tokens), 0.81 under sustained load (169 ms).
IN_STEP = 0.86

# Of the measurements of operators (`Operator.time`).
OPERATOR_BANDWIDTH = 4.8e12
# In fp32, by kernels that multiply in three tf32 parts.
OPERATOR_FP32 = 3.0


def operator_time(operator: str, is_cpu: bool) -> OperatorTime:
    """The measured time to take for an operator."""
    of, default = OPERATORS[operator], OPERATORS[DEFAULT]
    found = (of.cpu_time or default.cpu_time) if is_cpu else (of.time or default.time)
    assert found is not None
    return found


# Rate of softmax attention relative to that of matrix products, over the pairs that queries read, forward and backward:
# about what FlashAttention-2 publishes for H100s and 128 channels, 380 and 330 TFLOP/s. Assumed on all devices and in
# all dtypes; not measured here.
ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.5, 0.42

# Shares of the operator's pass that overlap a scan (scores, forward; scores' gradients, backward), and of forward +
# backward between LASP-1's receive and send, serialised over the ranks: measured 0.27 on 4 GPUs (exposed time relative
# to the operator's, 16k and 32k, H 16 and 32).
# The first two are what `lab.delays` found hidden of delayed scans on 2 H200s, 0.195 and 0.176 forward and 0.376 and
# 0.369 backward with 16k and 32k tokens, H 16; with 4k 0.30 and 0.45, since a part does not depend on the length
# (lab/results/delays_2xh200.txt).
OVERLAP_FORWARD, OVERLAP_BACKWARD = 0.19, 0.37
LASP1_SERIAL = 0.27
# Share of a block's time by which ranks may drift apart, since FSDP's collectives hold them together: a delay of up to
# that is waited for once a pass, and only what exceeds it in every layer. Fitted to measured steps of `lasp1` on 4
# H200s, which take 5, 5 and 10 ms longer than those of `dp` (16k, 16k and 32k tokens a rank, the operator's first
# kernels), and 0 and 18 ms (16k and 32k, later kernels): by this 8, 8, 15, 4 and 6; without drift 29, 29, 56, 23 and
# 42. `lab.delays` makes two H200s late in turn, by 1.6 ms a layer: 0.115 with zero2 and 0.17 with ddp if the host
# launches the kernels. In steps that are replayed as CUDA graphs nothing holds the two: they drift as far as these
# delays ask for, 0.23 of a block, and longer delays may find more. Assumed for more ranks; the ZeCO paper's runs on 8
# to 256 GPUs look as if there were none. By whether steps are replayed:
DRIFT = {False: 0.12, True: 0.23}

# Seconds per byte sent by NCCL that it takes from the overlapped compute, by using SMs and bandwidth: matrix products
# of gla_1b take 157 to 160 ms on 4 H200s and 148 on one, for 5.2 GB.
NCCL_SECONDS = 2e-12


class Protocol(NamedTuple):
    """A protocol of NCCL.

    Attributes:
        start: seconds of any collective.
        hop, node_hop: seconds from rank to rank inside a node, and from node to node.
        share: of a link's bandwidth.
    """

    start: float
    hop: float
    node_hop: float
    share: float


# NCCL's own table, by which it chooses (src/graph/tuning.cc of 2.12: LL, LL128 and Simple over NVLink and network; LL's
# hops over NVLink 1.8 times as long between nodes). Not measured here.
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
# Seconds between the kernels of a block, each pass, without CUDA graphs: 8 ms of a step of gla_1b with 20 blocks on an
# H200. With graphs there is nothing left to see: 48.4, 72.4 and 226.5 ms at 2,048, 4,096 and 16,384 tokens, of which
# the rest of this model explains 47.1, 72.8 and 227.1.
GAPS = 0.2e-3
# Seconds to launch a block's forward and its backward pass, with its part of FSDP and the optimizer; a lower bound of
# the pass without CUDA graphs: a step of gla_1b takes 154 ms (131 to 174) with 2,048 tokens, 145 with 4,096 (H200).
HOST_FORWARD, HOST_BACKWARD = 2.4e-3, 4.8e-3
# Other seconds of a step: synchronisation for the loss and norm, the loader.
HOST_STEP = 2.0e-3

# Rate of products in fp8 relative to bf16, in a step: gla_1b with 16,384 tokens on an H200 takes 47 ms for those that
# take 88 in bf16. And bytes that rounding moves in a pass for each number of an input, which the kernel that computes
# it rounds; of an output's gradient, which is read in bf16; and of a weight, which is rounded by rows and by columns.
FP8_SPEED = 1.87
FP8_INPUT_BYTES, FP8_GRADIENT_BYTES, FP8_WEIGHT_BYTES = 1.0, 3.0, 6.0

# Achieved fraction of a data sheet's figure: by the matrix products of gla_1b in bf16, alone (790 TFLOP/s on an H200);
# by elementwise kernels (20 ms a step of 16,384 tokens, for the traffic in `TRAFFIC`); by NCCL.
MATMUL_EFFICIENCY = 0.79
BANDWIDTH_EFFICIENCY = 0.8
LINK_EFFICIENCY = 0.7
# One core per rank of the two in docs/benchmarks.md: FLOP/s in bf16, fp32, fp64; bytes/s of memory, and of gloo between
# processes.
CPU_FLOPS = (5e9, 70e9, 35e9)
CPU_BANDWIDTH = 10e9
CPU_LINK = 1e9
