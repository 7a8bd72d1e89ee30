"""Memory of a rank, by kind, in each phase of a step that may have the peak.

    loss            activations of all blocks, and the loss with a chunk of logits
    last block      its backward pass: activations of all blocks, and that block's gradients
    layer N         with several kinds of blocks, backward pass of the last one of another kind than the last block's: a
                    softmax layer may hold the keys and values of the whole sequence
    first block     its backward pass: its activations, and the gradients of all parameters
    optimizer       weights, gradients and optimizer state

Weights, gradients and optimizer state are exact, by the shapes of the parameters; activations are measured
(`zeco_train.plan.activations`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from models.spec import Shape
from zeco_train.distributed.config import Strategy
from zeco_train.plan import calibration
from zeco_train.plan.attention_costs import method_costs
from zeco_train.plan.case import PlannedCase

KINDS = ("weights", "gradients", "optimizer", "activations", "states", "logits", "buffers", "workspace")


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank.

    Attributes:
        phases: by phase and kind (`KINDS`).
        outside: not allocated through torch.
        fragments: what the pool of CUDA graphs may hold beside the peak, at most: gradients keep their place in it,
            which splits the memory that activations have freed. Measured: none to 0.7 of the gradients' bytes.
        headroom: fraction of `available` that stays free.
        available: in all.
    """

    phases: dict[str, dict[str, float]]
    outside: float
    fragments: float
    headroom: float
    available: float

    @property
    def phase(self) -> str:
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
        return self.available * (1 - self.headroom) - self.outside - self.fragments

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable


def plan_memory(case: PlannedCase, headroom: float) -> Memory:
    """The memory of the rank with the highest peak."""
    mixers = [case.config.model.mixer_of(layer) for layer in range(case.config.model.num_layers)]
    head, hidden = _loss_bytes(case), case.tokens * case.config.model.hidden_size * case.compute_bytes
    # Master weights of this rank; its reduced gradients take as much again.
    parameters = parameter_bytes(case, case.master_bytes)
    # Gradients of earlier passes of a step exist when the next one begins.
    carried = case.passes > 1

    everywhere = {
        "weights": parameters + _gathered_bytes(case),
        "optimizer": optimizer_bytes(case),
        "states": _state_bytes(case),
        "workspace": calibration.WORKSPACE_BYTES,
    }
    whole, passing_back = kept_bytes(case, mixers) + 16.0 * case.tokens, _passing_back(case, mixers[-1])
    if case.machine.is_cpu:
        everywhere["workspace"] = calibration.PROCESS_BYTES
        largest = max(case.measured(name).widest.at(case.tokens) for name in case.spec.blocks)
        if case.passes > 1 and largest < calibration.HEAP_TENSOR:
            everywhere["workspace"] += calibration.HEAP_SHARE * (whole + passing_back)
    updating = case.master_bytes * case.config.optim.spec.working(case.spec.parameters)
    # The last layer of each kind, in the order of the backward pass.
    last_of_kind = {name: at for at, name in enumerate(mixers)}
    names = {at: f"layer {at}, {name}" for name, at in sorted(last_of_kind.items(), key=lambda pair: -pair[1])}
    names |= {len(mixers) - 1: "the last block", 0: "the first block"}
    phases = {
        "loss": {
            **everywhere,
            "gradients": _held_gradients(case),
            "activations": whole + 3 * hidden,
            "logits": head,
            "buffers": _buffer_bytes(case) if carried else 0.0,
        },
        **{f"backward of {name}": {**everywhere, **_passing(case, at, carried)} for at, name in names.items()},
        "optimizer": {
            "weights": parameters,
            "gradients": parameters,
            "optimizer": everywhere["optimizer"],
            "workspace": everywhere["workspace"] + updating,
        },
    }
    ranks = min(case.world_size, case.gpus_per_node) if case.machine.is_cpu else 1
    outside = 0.0 if case.machine.is_cpu else calibration.OUTSIDE_BYTES
    fragments = parameters if case.is_replayed and not carried else 0.0
    ordered = {name: {kind: kinds.get(kind, 0.0) for kind in KINDS} for name, kinds in phases.items()}
    return Memory(ordered, outside, fragments, headroom, case.machine.memory / ranks)


def _passing(case: PlannedCase, layer: int, carried: bool) -> dict[str, float]:
    # The backward pass of a layer: the blocks after it are done. Theirs are the gradients, unless those have a place of
    # their own; and their gathered weights are freed in the last backward pass of a step, which may be the only one.
    model, blocks = case.config.model, case.spec.blocks
    mixers = [model.mixer_of(at) for at in range(model.num_layers)]
    kind, after = mixers[layer], mixers[layer + 1 :]
    gathered = _gathered_bytes(case)
    if not carried and case.config.parallel.strategy not in (Strategy.zero3, Strategy.torch_ddp):
        gathered -= case.compute_bytes * sum(_elements(blocks[name].parameters) for name in after)
    reduced = case.master_bytes * sum(_elements(blocks[name].parameters, case.shards) for name in after)
    parameters = parameter_bytes(case, case.master_bytes)
    return {
        "weights": parameters + gathered,
        "gradients": max(_held_gradients(case), reduced),
        "activations": kept_bytes(case, mixers[: layer + 1]) + 16.0 * case.tokens + _passing_back(case, kind),
        "buffers": _buffer_bytes(case),
    }


def _elements(shapes: Iterable[Shape], shards: int = 1) -> int:
    return sum(_local(shape, shards) for shape in shapes)


def parameter_bytes(case: PlannedCase, itemsize: int) -> float:
    """Bytes of a rank's parameters, of the first ranks' if they do not divide evenly."""
    shards = case.shards
    return float(itemsize * sum(_local(shape, shards) for shape, _ in case.spec.parameters))


def _held_gradients(case: PlannedCase) -> float:
    # What a step's earlier passes have left when the next one begins; torch's DDP has the memory of all from the start.
    own = parameter_bytes(case, case.master_bytes)
    if case.config.parallel.strategy is Strategy.torch_ddp:
        return own
    return own * (case.shards if case.config.parallel.strategy is Strategy.zero1 else 1) * (case.passes > 1)


def optimizer_bytes(case: PlannedCase) -> float:
    """Optimizer state of this rank's parameters."""
    state_bytes, shards = case.config.optim.spec.state_bytes, case.shards
    parameters = case.spec.parameters
    return float(sum(state_bytes(_local(shape, shards), case.master_bytes, rule) for shape, rule in parameters))


def kept_bytes(case: PlannedCase, mixers: Iterable[str]) -> float:
    """Bytes that blocks of these kinds keep for their backward pass."""
    blocks = case.spec.blocks.items()
    more = {name: method_costs(case, block).kept for name, block in blocks if block.attention is not None}
    return sum(case.measured(name).kept.at(case.tokens) + more.get(name, 0.0) for name in mixers)


def _passing_back(case: PlannedCase, name: str) -> float:
    # Of a block's backward pass, in addition to what it keeps; a method of softmax attention holds more.
    measured, block = case.measured(name), case.spec.blocks[name]
    passing = measured.backward.at(case.tokens)
    if block.attention is None:
        return passing
    return max(passing, measured.attending.at(case.tokens) + method_costs(case, block).held)


def _loss_bytes(case: PlannedCase) -> float:
    # Logits of a chunk, their gradient, and the gradient of the head's weight.
    model = case.config.model
    chunk = min(calibration.LOSS_CHUNK[case.machine.is_cpu], case.tokens) * model.vocab_size
    # In fp32 and fp64 the gradient overwrites the logits; else there is one more copy, in fp32 if it is not compiled.
    narrow = case.compute_bytes < case.wide_bytes
    more = case.compute_bytes if case.compiled else case.wide_bytes
    logits = 2 * case.compute_bytes + more if narrow else case.wide_bytes
    return float(chunk * logits + model.vocab_size * model.hidden_size * case.wide_bytes)


def _state_bytes(case: PlannedCase) -> float:
    # R and the carries of each layer and segment, and the buffers of a scan.
    kept = case.segments
    if case.segments > 1:
        # The carries into each segment, and the gradients at both ends of one.
        kept += case.segments + 2
        if case.is_replayed:
            # Fixed inputs of a part, and the results of at most three first and four second passes of other forms.
            kept += 3 + 3 * 2 + 4
    held = max((scan.held_states(case.sp_size) for scan in case.config.sp.scans_over(case.topology)), default=0)
    of_all_layers = case.batch * case.spec.state_elements * case.wide_bytes
    return float(kept * of_all_layers + held * case.state_bytes)


def _gathered_bytes(case: PlannedCase) -> float:
    # Unsharded parameters in the compute dtype: of the model; with zero3 of the root and two adjacent others.
    sizes = unit_bytes(case, case.compute_bytes)
    if case.config.parallel.strategy is Strategy.torch_ddp:
        return 0.0
    if case.config.parallel.strategy is Strategy.zero3:
        # The last unit is the root: its parameters are gathered beside those of the others.
        *units, root = sizes
        return max(map(sum, itertools.pairwise(units)), default=sum(units)) + root
    return sum(sizes)


def _buffer_bytes(case: PlannedCase) -> float:
    # The root's unsharded gradient, and the inputs of two reductions of FSDP, which one rank does not make.
    sizes = unit_bytes(case, 1)
    is_fsdp = case.world_size > 1 and case.config.parallel.strategy is not Strategy.torch_ddp
    reduced = sum(sorted(sizes)[-2:]) if is_fsdp else 0.0
    return sizes[-1] * case.compute_bytes + reduced * case.wide_bytes


def unit_bytes(case: PlannedCase, itemsize: int) -> list[float]:
    """Unsharded parameters of each FSDP unit, in the order of `ModelSpec.units`, padded to divide evenly."""
    # Wide parameters count with `itemsize` as well: they are too few to matter.
    shards = case.shards
    return [float(itemsize * shards * sum(_local(shape, shards) for shape, _ in unit)) for unit in case.spec.units]


def _local(shape: Shape, shards: int) -> int:
    return -(-shape[0] // shards) * math.prod(shape[1:])
