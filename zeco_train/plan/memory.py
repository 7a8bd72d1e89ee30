"""Memory of a rank: resident memory, and the peak of a step.

The peak of a step is in one of four phases, each of which is summed up by kind:

    loss            activations of all blocks, and the loss with a chunk of logits
    last block      backward pass of the last block: activations of all blocks, and that block's gradients
    layer N         with several kinds of blocks, backward pass of the last block of another kind than the last one's: a
                    softmax layer may hold the keys and values of the whole sequence
    first block     backward pass of the first block: its activations, and the gradients of all parameters
    optimizer       weights, gradients and optimizer state

Weights, gradients and optimizer state are computed from the shapes of the parameters, and exact; the activations of a
block are those listed by its modules (`models.activations`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from models.activations import Part, TokenTensor
from models.spec import BlockSpec, Shape
from zeco_train.distributed.parallelize import Strategy
from zeco_train.ops import CHUNK
from zeco_train.ops.kernel_operands import padded_dim
from zeco_train.ops.operator import Kind
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.registry import OPERATORS
from zeco_train.plan import calibration
from zeco_train.plan.attention import method_costs
from zeco_train.plan.case import Case

KINDS = ("weights", "gradients", "optimizer", "activations", "states", "logits", "buffers", "workspace")

_KEPT_PARTS = {
    Recompute.none: (Part.input, Part.mixer, Part.mlp),
    Recompute.selective: (Part.input, Part.mixer),
    Recompute.full: (Part.input, Part.replay),
}


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank.

    Attributes:
        phases: by phase and kind (`KINDS`).
        outside: memory not allocated through torch.
        headroom: fraction of `available` that stays free.
        available: total memory of a rank.
    """

    phases: dict[str, dict[str, float]]
    outside: float
    headroom: float
    available: float

    @property
    def phase(self) -> str:
        """The phase with the peak."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def kinds(self) -> dict[str, float]:
        """Bytes by kind in the peak phase."""
        return self.phases[self.phase]

    @property
    def peak(self) -> float:
        """Peak memory as reported by torch; on a CPU that of the process."""
        return sum(self.kinds.values())

    @property
    def usable(self) -> float:
        """Upper bound of the peak."""
        return self.available * (1 - self.headroom) - self.outside

    @property
    def fits(self) -> bool:
        """Whether the peak is within the usable memory."""
        return self.peak <= self.usable


def plan_memory(case: Case, headroom: float) -> Memory:
    """The memory of the rank with the highest peak."""
    blocks = list(case.spec.blocks.values())
    first, last = case.block(0), case.block(-1)
    others = dict(list(case.last_layers.items())[1:])
    head, hidden = _loss_bytes(case), case.tokens * case.config.model.hidden_size * case.compute_bytes
    # Master weights of this rank; its reduced gradients take as much again.
    parameters = parameter_bytes(case, case.master_bytes)
    # Gradients of earlier passes of a step exist when the next one begins.
    carried = parameters if case.passes > 1 else 0.0

    # States that the operator's kernels keep: of one layer if blocks are recomputed.
    walked = [dataclasses.replace(last, count=1)] if case.recompute is Recompute.full else blocks
    everywhere = {
        "weights": parameters + _gathered_bytes(case),
        "optimizer": optimizer_bytes(case),
        "states": _state_bytes(case) + sum(block.count * _kept_state_bytes(case, block) for block in walked),
        "buffers": _buffer_bytes(case),
        "workspace": calibration.WORKSPACE_BYTES,
    }
    kept = sum(block.count * case.tokens * kept_bytes_per_token(case, block) for block in blocks)
    whole, passing_back = kept + 16.0 * case.tokens, _passing_back(case, last)
    if case.machine.is_cpu:
        everywhere["workspace"] = calibration.PROCESS_BYTES + _heap_share(case) * (whole + passing_back)
    updating = case.master_bytes * case.config.optim.spec.working(case.spec.parameters)
    phases = {
        "loss": {**everywhere, "gradients": carried, "activations": whole + 3 * hidden, "logits": head},
        "backward of the last block": {
            **everywhere,
            # Largest unit.
            "gradients": max(carried, max(unit_bytes(case, case.master_bytes)) / case.shards),
            "activations": whole + passing_back,
        },
        **{f"backward of layer {at}, {name}": {**everywhere, **_back_to(case, at)} for name, at in others.items()},
        "backward of the first block": {
            **everywhere,
            "gradients": parameters,
            "activations": case.tokens * (kept_bytes_per_token(case, first) + 16.0) + _passing_back(case, first),
            "states": _state_bytes(case) + _kept_state_bytes(case, first),
        },
        "optimizer": {
            "weights": parameters,
            "gradients": parameters,
            "optimizer": everywhere["optimizer"],
            "workspace": everywhere["workspace"] + updating,
        },
    }
    ranks = min(case.world_size, case.gpus_per_node) if case.machine.is_cpu else 1
    outside = 0.0 if case.machine.is_cpu else calibration.OUTSIDE_BYTES
    ordered = {name: {kind: kinds.get(kind, 0.0) for kind in KINDS} for name, kinds in phases.items()}
    return Memory(ordered, outside, headroom, case.machine.memory / ranks)


def _back_to(case: Case, layer: int) -> dict[str, float]:
    """Gradients and activations in the backward pass of a layer: the blocks after it are done."""
    block, model = case.block(layer), case.config.model
    after = [case.block(later) for later in range(layer + 1, model.num_layers)]
    done = sum(_local(shape, case.shards) for each in after for shape in each.parameters) * case.master_bytes
    kept = sum(each.count * kept_bytes_per_token(case, each) for each in case.spec.blocks.values())
    kept -= sum(kept_bytes_per_token(case, each) for each in after)
    parameters = parameter_bytes(case, case.master_bytes)
    own = max(unit_bytes(case, case.master_bytes)) / case.shards
    return {
        "gradients": parameters if case.passes > 1 else min(parameters, done + own),
        "activations": case.tokens * (kept + 16.0) + _passing_back(case, block),
    }


def _heap_share(case: Case) -> float:
    """Overhead of a CPU's allocator relative to the activations."""
    parts = [part for block in case.spec.blocks.values() for part in block.activations.values()]
    widest = max(tensor.width for part in parts for tensor in (*part.kept, *part.gradients))
    largest = case.tokens * widest * case.wide_bytes
    return calibration.HEAP_SHARE if case.passes > 1 and largest < calibration.HEAP_TENSOR else 0.0


def parameter_bytes(case: Case, itemsize: int) -> float:
    """Total over this rank's parameters.

    Where a parameter does not divide evenly, the largest shard counts, that of the first ranks.
    """
    return float(itemsize * sum(_local(shape, case.shards) for shape, _ in case.spec.parameters))


def optimizer_bytes(case: Case) -> float:
    """Optimizer state of this rank's parameters."""
    state_bytes = case.config.optim.spec.state_bytes
    elements = ((_local(shape, case.shards), rule) for shape, rule in case.spec.parameters)
    return float(sum(state_bytes(count, case.master_bytes, rule) for count, rule in elements))


def kept_bytes_per_token(case: Case, block: BlockSpec) -> float:
    """Bytes per token that a block keeps from its forward pass to its backward pass."""
    kept = (block.activations[part].kept for part in _KEPT_PARTS[case.recompute])
    return sum(_sum(case, tensors, case.in_pytorch(block)) for tensors in kept)


def _sum(case: Case, tensors: Iterable[TokenTensor], in_pytorch: bool) -> float:
    """Bytes per token."""
    return float(
        sum(
            tensor.width * (case.wide_bytes if tensor.wide else case.compute_bytes)
            for tensor in tensors
            if (tensor.compiled if case.compiled else tensor.eager) and (tensor.cpu if in_pytorch else tensor.gpu)
        )
    )


def _passing_back(case: Case, block: BlockSpec) -> float:
    """Memory of a block's backward pass in addition to the kept tensors.

    That is recomputed activations, with recompute=full up to the block's output, and the gradients inside it. The
    mixer's gradients come after the MLP's kept tensors are freed.
    """
    in_pytorch = case.in_pytorch(block)
    kept = {part: _sum(case, activations.kept, in_pytorch) for part, activations in block.activations.items()}
    gradients = {part: _sum(case, activations.gradients, in_pytorch) for part, activations in block.activations.items()}
    if block.attention is not None and case.tokens:
        gradients[Part.mixer] += method_costs(case, block.attention).held / case.tokens
    again = sum(kept[part] for part in _KEPT_PARTS[Recompute.none] if part not in _KEPT_PARTS[case.recompute])
    output = case.config.model.hidden_size * case.compute_bytes if case.recompute is Recompute.full else 0
    backward = max(gradients[Part.mlp], gradients[Part.mixer] - kept[Part.mlp])
    return case.tokens * backward + case.tokens * (again + output)


def _loss_bytes(case: Case) -> float:
    """Logits of a chunk, their gradient, and the gradient of the head's weight."""
    model = case.config.model
    chunk = min(calibration.LOSS_CHUNK[case.machine.is_cpu], case.tokens) * model.vocab_size
    # In fp32 and fp64 the gradient overwrites the logits; a compiled loss needs no fp32 copy of them.
    narrow = case.compute_bytes < case.wide_bytes
    logits = (2 * case.compute_bytes if narrow else case.wide_bytes) + (
        case.wide_bytes if narrow and not case.compiled else 0
    )
    return float(chunk * logits + model.vocab_size * model.hidden_size * case.wide_bytes)


def _state_bytes(case: Case) -> float:
    """R and the carries of each layer and segment, transitions that are matrices, and the buffers of a scan."""
    kept = case.segments
    if case.segments > 1:
        # The carries into each segment, and the gradients at both ends of one.
        kept += case.segments + 2
        if case.is_replayed:
            # Fixed inputs of a part, and the results of at most three first and four second passes of other forms.
            kept += 3 + 3 * 2 + 4
    held = max((scan.held_states(case.sp_size) for scan in case.config.sp.scans_over(case.topology)), default=0)
    of_all_layers = case.batch * case.spec.state_elements * case.wide_bytes
    # Kept for the backward pass of a segment; recomputation makes those of one layer at a time.
    matrices = 0 if case.recompute is Recompute.full else case.batch * case.spec.matrix_elements * case.wide_bytes
    return float(kept * of_all_layers + held * case.state_bytes + matrices)


def _kept_state_bytes(case: Case, block: BlockSpec) -> float:
    """States that the operator's kernels keep for the backward pass, in one layer.

    Those at all chunks' borders, or those that walks over chunks start from, and their transitions if matrices.
    """
    if not block.state_shapes or case.in_pytorch(block):
        return 0.0
    operator, heads = OPERATORS[block.operators[-1]], block.state_shape[0]
    key_dim, value_dim = map(padded_dim, block.state_shape[1:])
    if operator.walk_programs is None:
        return case.tokens / CHUNK * heads * key_dim * value_dim * case.compute_bytes
    columns = value_dim + (key_dim if operator.kind is Kind.matrix else 0)
    programs = operator.walk_programs(key_dim, value_dim)
    if programs == 0:
        return 0.0
    # Long sequences have as many walks as run at once.
    of_all = case.batch * heads
    walks = of_all * max(1, programs // (-(-value_dim // 64) * of_all))
    return float(walks * key_dim * columns * 4)


def _gathered_bytes(case: Case) -> float:
    """Unsharded parameters in the compute dtype: of the model; with zero3 of the root and two adjacent others."""
    sizes = unit_bytes(case, case.compute_bytes)
    if case.config.parallel.strategy is Strategy.zero3:
        # The last unit is the root: its parameters are gathered beside those of the others.
        *units, root = sizes
        return max(map(sum, itertools.pairwise(units)), default=sum(units)) + root
    return sum(sizes)


def _buffer_bytes(case: Case) -> float:
    """FSDP's buffers: the unsharded gradient of a unit, and the inputs of two reductions."""
    sizes = sorted(unit_bytes(case, 1))
    reduce_bytes = case.wide_bytes
    return sizes[-1] * case.compute_bytes + sum(sizes[-2:]) * reduce_bytes


def unit_bytes(case: Case, itemsize: int) -> list[float]:
    """Unsharded parameters of each FSDP unit, in the order of `ModelSpec.units`, padded to divide evenly.

    Wide parameters are counted with `itemsize` as well: they are too few to matter.
    """
    return [
        float(itemsize * case.shards * sum(_local(shape, case.shards) for shape, _ in unit)) for unit in case.spec.units
    ]


def _local(shape: Shape, shards: int) -> int:
    return -(-shape[0] // shards) * math.prod(shape[1:])
