"""Bytes on the wire, of one rank: what it sends to others, for one scan and for a step, by backend; and FSDP's traffic.

A scan sends what `zeco_train/collectives` says on the wire, S bytes a state, P ranks (DESIGN, section 4); the rank that
sends most counts. `carry_out`, wanted between segments, adds a broadcast for the chains and nothing for an all-gather.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeco_train.distributed.parallelize import Strategy
from zeco_train.plan.case import Case
from zeco_train.plan.memory import parameter_bytes, unit_bytes


@dataclass(frozen=True)
class Scans:
    """Scans of a step on one rank.

    Attributes:
        forward, backward: in all layers, segments and micro-batches.
        with_carry: of both, those that also give the state after the last rank.
    """

    forward: int
    backward: int
    with_carry: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def count_scans(case: Case) -> Scans:
    """One a layer, pass and direction, whatever is recomputed: what was received is replayed. With segments a carry is
    handed on, forward from each but the last, and its gradient back from each."""
    layers = case.config.model.num_layers
    passes = layers * case.passes
    carries = 0 if case.segments == 1 else layers * case.micro_steps * (2 * case.segments - 1)
    return Scans(passes, passes, carries)


def scan_bytes(case: Case, way: str, *, want_carry: bool = False) -> float:
    """Bytes that the busiest rank sends for one scan of states like the model's; `way`: chain and two_shot of All-Scan,
    and the other backends by their names."""
    ranks, state, (heads, _, value_dim) = case.sp_size, float(case.state_bytes), case.spec.state_shape
    if ranks == 1 or way == "dp":
        return 0.0
    pair = state * (1 + 1 / value_dim)
    match way:
        case "chain" | "lasp1":
            # The last rank sends no state on, but broadcasts the carry: it is as busy as the others.
            return state
        case "lasp2":
            # An all-gather in which every rank sends its own to each other one.
            return pair * (ranks - 1)
        case "two_shot":
            columns = heads * value_dim
            width = -(-columns // ranks)
            sent = (width + _heads_touched(value_dim, columns, width)) * (ranks - 1)
            returned = width * (ranks - 1) * (2 if want_carry else 1)
            return (sent + returned) * state / columns
        case _:
            raise ValueError(f"no such way over the wire: {way}")


def _heads_touched(value_dim: int, columns: int, width: int) -> int:
    """Heads whose columns an owner has, at most (`zeco_train/collectives/two_shot.py`)."""
    starts = range(0, columns, width)
    return max((min(start + width, columns) - 1) // value_dim - start // value_dim + 1 for start in starts)


def step_bytes(case: Case, way: str) -> float:
    """Bytes that a rank sends in a step for all scans."""
    scans = count_scans(case)
    plain = scans.total - scans.with_carry
    return plain * scan_bytes(case, way) + scans.with_carry * scan_bytes(case, way, want_carry=True)


@dataclass(frozen=True)
class ParameterTraffic:
    """FSDP's, of a step and rank.

    Attributes:
        gathered, scattered: bytes sent within the ranks that shard, for whole parameters and for their gradients.
        summed: bytes sent between copies of shards.
        gathers, reductions: how often a step gathers the model, and reduces its gradient.
    """

    gathered: float
    scattered: float
    summed: float
    gathers: int
    reductions: int

    @property
    def total(self) -> float:
        return self.gathered + self.scattered + self.summed


def parameter_traffic(case: Case) -> ParameterTraffic:
    """In rings: (n − 1)/n of what is gathered or scattered leaves a rank, twice that of what is summed over n ranks."""
    shards, copies = case.shards, case.world_size // case.shards
    strategy, whole = case.config.parallel.strategy, parameter_bytes(case, 1) * shards
    gathers, gathered = case.passes, whole * case.passes
    if strategy is Strategy.zero2:
        gathers, gathered = 1, whole
    elif strategy is Strategy.zero3:
        # Dropped behind each forward pass, too. A pass for the states alone leaves the head out, if it is a unit.
        gathers = forward_passes(case) + case.passes
        head = 0.0 if case.config.model.tie_word_embeddings else unit_bytes(case, 1)[-2]
        gathered = whole * gathers - head * (forward_passes(case) - case.passes)
    # `ddp` sums whole gradients once a step, as do the copies of `hsdp`; sharded ones are reduced in every pass.
    reductions = 1 if strategy is Strategy.ddp else case.passes
    return ParameterTraffic(
        gathered=gathered * case.compute_bytes * (shards - 1) / shards,
        scattered=reductions * whole * case.wide_bytes * (shards - 1) / shards,
        summed=2 * whole / shards * case.wide_bytes * (copies - 1) / copies,
        gathers=gathers,
        reductions=reductions,
    )


def forward_passes(case: Case) -> int:
    """Through the blocks, in a step: each segment but the last also without gradients, for the states between."""
    return case.micro_steps * (2 * case.segments - 1)
