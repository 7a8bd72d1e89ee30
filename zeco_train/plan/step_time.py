"""Time of a step: the sum over kinds of work, each at its rate in `calibration` and for the device.

products      FLOPs of the linear layers and the head, with recomputation
attention     FLOPs of softmax attention, which grow with the sequence
operator      measured seconds per token, head and layer; in PyTorch on GPUs times the measured slow-down
elementwise   bytes of norms, gates, logits and rounding to fp8
optimizer     bytes of norm, clipping and update, its products, and FSDP's copies
parameters    FSDP's first gathers and last reductions; the others' cost to compute, or what no compute hides of them
scans         what exceeds the overlapped work, by the cost model of `zeco_train.collectives`
exchanges     messages of softmax layers, less the attention that overlaps with them
halos         last inputs of convolutions, to the next rank, without overlap
gaps          idle time between kernels; launch-bound time; synchronisation of a step
"""

from __future__ import annotations

from dataclasses import dataclass

from models.spec import BlockSpec
from zeco_train.ops.linear import Matmul
from zeco_train.ops.recompute import Recompute
from zeco_train.plan import calibration as known
from zeco_train.plan.attention_costs import attention_blocks, attention_seconds, plan_exchanges
from zeco_train.plan.case import PlannedCase
from zeco_train.plan.memory import parameter_bytes
from zeco_train.plan.sharding import exposed_parameter_seconds
from zeco_train.plan.traffic import (
    count_scans,
    forward_passes,
    parameter_traffic,
    plan_halos,
    scan_choice,
    scanning_blocks,
)
from zeco_train.training.config import Dtype
from zeco_train.training.optim.optimizer_spec import Precision


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step by kind of work, and its tokens over all ranks."""

    seconds: dict[str, float]
    tokens: int
    world_size: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total

    @property
    def per_device(self) -> float:
        return self.tokens_per_second / self.world_size


def plan_step(case: PlannedCase) -> StepTime:
    """Predicted time of a step."""
    seconds, has_attention = _compute_seconds(case), any(attention_blocks(case))
    if has_attention:
        seconds["attention"] = attention_seconds(case)
    busy = sum(seconds.values())
    seconds["parameters"] = exposed_parameter_seconds(case, busy - seconds["optimizer"])
    seconds["scans"] = exposed_scan_seconds(case)
    if has_attention:
        seconds["exchanges"] = plan_exchanges(case).seconds
    if case.spec.needs_halo:
        seconds["halos"] = plan_halos(case).seconds
    seconds["gaps"] = _gaps(case, busy)
    return StepTime(seconds, case.tokens_per_step, case.world_size)


def operator_seconds(case: PlannedCase, block: BlockSpec) -> tuple[float, float]:
    """Forward and backward seconds of one layer's operators in a pass of a step; softmax has none."""
    found = [_operator_seconds(case, scan) for scan in block.scans]
    return sum(forward for forward, _ in found), sum(backward for _, backward in found)


def _operator_seconds(case: PlannedCase, block: BlockSpec) -> tuple[float, float]:
    dtype, (heads, key_dim, value_dim) = case.config.train.dtype, block.state_shape
    measured = known.operator_time(block.operators[-1], case.machine.is_cpu)
    seconds = measured.seconds
    if not case.machine.is_cpu:
        slower = known.OPERATOR_BANDWIDTH * known.BANDWIDTH_EFFICIENCY / case.machine.bandwidth
        seconds *= slower / known.IN_STEP * (1.0 if dtype is Dtype.bf16 else known.OPERATOR_FP32)
    size = (key_dim + value_dim) / (measured.key_dim + measured.value_dim)
    both = seconds * size * case.tokens * heads * case.slow_down(block)
    return both * measured.forward, both * (1 - measured.forward)


def exposed_scan_seconds(case: PlannedCase) -> float:
    """Exposed communication of the scans per step."""
    exposed, blocks = 0.0, scanning_blocks(case)
    layers = sum(block.count for block in blocks)
    for block in blocks:
        if (choice := scan_choice(case, block)) is None:
            continue
        forward, backward = operator_seconds(case, block)
        if choice.scan.in_series:
            # Each rank computes its outputs between receive and send, serialised over the ranks.
            serial = (case.sp_size - 1) * known.LASP1_SERIAL
            late = [choice.seconds + serial * work for work in (forward, backward)]
        else:
            overlapped = known.OVERLAP_FORWARD * forward, known.OVERLAP_BACKWARD * backward
            if block.scans_matrices:
                beside = case.tokens * block.flops_beside / case.machine.flops[case.config.train.dtype]
                overlapped = beside, beside + known.OVERLAP_MATRICES * backward
            late = [max(0.0, choice.seconds - work) for work in overlapped]
        drift = drift_seconds(case) if choice.scan.one_way else 0.0
        exposed += block.count * case.passes * sum(waited_seconds(each, drift, layers) for each in late)
    return exposed


def waited_seconds(late: float, drift: float, layers: int) -> float:
    """Seconds that a layer waits, on average over a pass, for states that are `late` after the work that hides them.

    Ranks that may be `drift` apart wait for as much only once: then they stay behind, and their states come in time.
    """
    return max(0.0, late - drift) + min(late, drift) / layers


def drift_seconds(case: PlannedCase) -> float:
    """Seconds by which ranks may be apart: a share of an average block's pass (`calibration.DRIFT`)."""
    seconds = _compute_seconds(case)
    return known.DRIFT[case.is_replayed] * (sum(seconds.values()) - seconds["optimizer"]) / count_scans(case).total


def _compute_seconds(case: PlannedCase) -> dict[str, float]:
    spec, machine, seq_len = case.spec, case.machine, case.config.data.seq_len
    tokens = case.tokens * case.passes
    own = spec.flops_per_token(seq_len)
    again = spec.recomputed_flops_per_token(seq_len, case.recompute, case.segments)
    forwards = forward_passes(case) + (case.passes if case.recompute is Recompute.full else 0)
    traffic, operators = case.config.model.vocab_size * known.LOGIT_TRAFFIC[case.compiled], 0.0
    for name, block in spec.blocks.items():
        forward, backward = operator_seconds(case, block)
        operators += block.count * (forwards * forward + case.passes * backward)
        # All segments but the last have one more forward pass.
        measured, passes = case.measured(name), 1 + (case.segments - 1) / case.segments
        moved = passes * measured.forward_traffic.at(case.tokens) + measured.backward_traffic.at(case.tokens)
        traffic += block.count * moved / case.tokens
    parameters = parameter_bytes(case, 1)
    copies = parameter_traffic(case)
    around = known.REDUCE_TRAFFIC * copies.reductions
    if case.shards > 1:
        around += known.GATHER_TRAFFIC / known.MANY_TENSORS * copies.gathers
    else:
        around += known.WHOLE_GATHER_TRAFFIC * copies.gathers + known.SUM_TRAFFIC[case.world_size == 1] * (
            case.passes - 1
        )
    updates = parameters * known.OPTIMIZER_TRAFFIC / known.OPTIMIZER_SHARE
    copied = parameters * case.shards * around
    saved, rounding = _fp8(case)
    traffic += rounding
    return {
        "products": tokens * (own.linear + again.linear + own.head - saved) / machine.flops[case.config.train.dtype],
        "operator": operators,
        "elementwise": tokens * traffic / machine.bandwidth,
        "optimizer": (updates + copied) / machine.bandwidth + _optimizer_products(case),
    }


def _fp8(case: PlannedCase) -> tuple[float, float]:
    """For one token, FLOPs in bf16 whose time `train.matmul=fp8` saves, and bytes that rounding moves."""
    train, seq_len = case.config.train, case.config.data.seq_len
    # CPUs emulate it, for which there is no rate.
    if train.matmul is not Matmul.fp8 or train.dtype is not Dtype.bf16 or case.machine.is_cpu:
        return 0.0, 0.0
    blocks = case.spec.blocks.values()
    linear = sum(block.count * 2 * k * n for block in blocks for k, n in block.fp8_products)
    share = linear / case.spec.flops_per_token(seq_len, backward=False).linear
    again = share * case.spec.recomputed_flops_per_token(seq_len, case.recompute, case.segments).linear
    rounding = sum(
        block.count * (known.FP8_INPUT_BYTES * k + known.FP8_GRADIENT_BYTES * n)
        for block in blocks
        for k, n in block.fp8_products
    )
    rounding += known.FP8_WEIGHT_BYTES * linear / 2 / case.tokens
    # Forward, and the gradients of the inputs; those of the weights stay in bf16.
    return (2 * linear + again) * (1 - 1 / known.FP8_SPEED), rounding


def _optimizer_products(case: PlannedCase) -> float:
    # Seconds on the rank that has most of them.
    optim = case.config.optim.resolved(case.config.train.dtype.compute)
    master = Dtype.fp64 if case.config.train.dtype is Dtype.fp64 else Dtype.fp32
    dtype = Dtype.bf16 if optim.ns_dtype is Precision.bf16 else master
    return optim.spec.products(case.spec.parameters, case.world_size, optim) / case.machine.flops[dtype]


def _gaps(case: PlannedCase, busy: float) -> float:
    # On a CPU launches are part of the work, and a replayed CUDA graph has none.
    if case.machine.is_cpu or case.is_replayed:
        return known.HOST_STEP
    layers, backward = case.config.model.num_layers, case.passes
    forward = forward_passes(case) + (case.passes if case.recompute is Recompute.full else 0)
    launches = layers * (forward * known.HOST_FORWARD + backward * known.HOST_BACKWARD)
    return known.HOST_STEP + max(layers * (forward + backward) * known.GAPS, launches - busy)
