"""Every constant of the planner that was measured or is assumed. To calibrate is to edit this file and no other.

What follows from a model alone, such as the tensors that it keeps, its modules say themselves (`models.activations`).
"""

from __future__ import annotations

# The operator's forward pass on GPUs keeps the states that its walks start from: so many tiles [K, V] over all heads.
WALKS = 264
# Tokens whose logits exist at a time, on CPUs and not (`zeco_train/ops/loss.py`).
LOSS_CHUNK = {True: 2048, False: 8192}

# On GPUs: what libraries allocate through torch (cuBLAS); and what lies outside of torch's figures: the CUDA context,
# NCCL's buffers, memory that ranks share for All-Scan.
WORKSPACE_BYTES = 0.2e9
OUTSIDE_BYTES = 2.0e9
# A CPU process with torch imported.
PROCESS_BYTES = 0.6e9
# glibc keeps freed tensors of up to 32 MB, and cannot give all of them out again: so much more, of the activations of
# each pass, where a step has several (gla_tiny, 32 segments of 16,384 tokens: 2.0 GB; with all of them in mappings of
# their own, MALLOC_MMAP_THRESHOLD_=131072, 1.2 GB).
HEAP_TENSOR, HEAP_SHARE = 32 << 20, 0.8

# Without `torch.compile` each step of a formula reads and writes memory: so many times the compiled traffic.
EAGER_TRAFFIC = 6.0
# Of a logit, bytes that the loss reads and writes, compiled (2 ms for 16,384 × 32,000 of them on an H200) and not.
LOGIT_TRAFFIC = {True: 14.0, False: 40.0}
# Of a parameter on this rank, bytes that norm and AdamW read and write; of a parameter of the model, casts and copies
# around its gathering (once) and its gradient's reduction (once). Kernels over many tensors have a lower bandwidth than
# those of a block: 12.6 ms for the former and 7 ms for the latter, gla_1b on one H200.
OPTIMIZER_TRAFFIC = 32.0
GATHER_TRAFFIC, REDUCE_TRAFFIC = 8.0, 8.0
MANY_TENSORS = 0.75

# GPUs are limited by power: in a step they run at 1,500 to 1,700 MHz, a kernel alone at up to 1,980. What matrix
# products and the operator reach in a step, of what they reach alone: on an H200 0.92 in the first steps of a cool one
# (products 148 ms in place of 137, gla_1b with 16,384 tokens), 0.81 where nothing else gives it a rest (169 ms).
IN_STEP = 0.86

# The operator alone on an H200: seconds a token and head, forward + backward, at K 64, V 128 (1.051 ms for 16,384
# tokens and 16 heads, 0.326 of them forward; docs/benchmarks.md), and the forward pass's share. Other heads in
# proportion to K + V.
OPERATOR_SECONDS = 4.01e-9
OPERATOR_FORWARD = 0.31
OPERATOR_KEY_DIM, OPERATOR_VALUE_DIM = 64, 128
OPERATOR_BANDWIDTH = 4.8e12
# In fp32, by kernels that multiply in three tf32 parts.
OPERATOR_FP32 = 3.0
# The same on a CPU core, in PyTorch and fp32 (60.7 ms for 4,096 tokens and 4 heads on two).
OPERATOR_SECONDS_CPU = 7.4e-6

# Shares of the operator's pass that run while a scan does (scores, forward; states again and scores' gradients,
# backward), and of forward + backward that lie between LASP-1's receive and send, in series over the ranks: measured
# 0.27 on 4 GPUs (exposed time against operator's, 16k and 32k, H 16 and 32).
OVERLAP_FORWARD, OVERLAP_BACKWARD = 0.2, 0.35
LASP1_SERIAL = 0.27
# Blocks by which LASP-1's ranks may drift apart, since FSDP gathers one block ahead: within that a pass waits for a
# turn through all ranks once, not in every layer. 4 H200s, 16,384 tokens a rank: a step takes 2 to 5 ms more than the
# other backends' (1.4 by this), while 20 layers that are measured alone wait 27 ms. Not measured on more.
LASP1_DRIFT = 1.0

# Seconds that a byte which NCCL sends takes from the compute beside it, by multiprocessors and bandwidth: matrix
# products of gla_1b take 157 to 160 ms on 4 H200s and 148 on one, for 5.2 GB.
NCCL_SECONDS = 2e-12
# Seconds between the kernels of a block, each pass: 8 ms of a step of gla_1b with 20 blocks on an H200.
GAPS = 0.2e-3
# Seconds that the host takes to launch a block's forward and its backward pass; a pass cannot be faster than that.
HOST_FORWARD, HOST_BACKWARD = 1.0e-3, 2.0e-3
# Seconds of a step that go to neither: waits for the loss and norm, the loader.
HOST_STEP = 2.0e-3

# What of a data sheet's figure is achieved: by the matrix products of gla_1b in bf16, alone (790 TFLOP/s on an H200);
# by elementwise kernels (20 ms a step of 16,384 tokens, for what `TRAFFIC` counts); by NCCL.
MATMUL_EFFICIENCY = 0.79
BANDWIDTH_EFFICIENCY = 0.8
LINK_EFFICIENCY = 0.7
# One core a rank of the two that the figures of docs/benchmarks.md are from: FLOP/s in bf16, fp32, fp64; bytes/s of
# memory, and of gloo between processes.
CPU_FLOPS = (5e9, 70e9, 35e9)
CPU_BANDWIDTH = 10e9
CPU_LINK = 1e9
