"""Settings with which a run fits, fastest first: recomputation and segments, then more ranks; the best shard size."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from models.mixer_registry import longest_document
from zeco_train.distributed.config import Strategy
from zeco_train.errors import ConfigError
from zeco_train.ops.recompute import Recompute
from zeco_train.plan.attention_costs import attention_blocks, problem_of
from zeco_train.plan.case import PlannedCase
from zeco_train.plan.memory import Memory, plan_memory
from zeco_train.plan.sharding import parameter_seconds
from zeco_train.plan.step_time import StepTime, plan_step
from zeco_train.system.numbers import divisors, largest

# Shorter segments per rank leave a device idle; this also bounds their number.
LEAST_TOKENS = 1024
_MOST_RANKS, _MOST_TOKENS = 1 << 16, 1 << 40


@dataclass(frozen=True)
class Option:
    """A case with its predicted memory and time."""

    case: PlannedCase
    memory: Memory
    time: StepTime

    @property
    def setting(self) -> str:
        """The option as overrides."""
        return f"train.recompute={self.case.recompute.value} train.segments={self.case.segments}"


def evaluate(case: PlannedCase, headroom: float) -> Option:
    """Plan one case."""
    return Option(case, plan_memory(case, headroom), plan_step(case))


def options(case: PlannedCase, headroom: float) -> list[Option]:
    """Fastest first, for each recompute setting the fewest segments that fit, and the case itself if it fits."""
    fitting: list[Option] = []
    for recompute, segments in itertools.product(Recompute, legal_segments(case)):
        # Memory decreases with the number of segments, except for boundary states.
        if fitting and fitting[-1].case.recompute is recompute:
            continue
        candidate = case.with_changes(recompute=recompute, segments=segments)
        if plan_memory(candidate, headroom).fits:
            fitting.append(evaluate(candidate, headroom))
    own = evaluate(case, headroom)
    if own.memory.fits and own.setting not in [option.setting for option in fitting]:
        fitting.append(own)
    return sorted(fitting, key=lambda option: option.time.total)


def legal_segments(case: PlannedCase) -> list[int]:
    """Numbers of segments that divide the sequence, with at least `LEAST_TOKENS` tokens of each on a rank.

    Only 1 with layers that read the whole sequence at once: unmasked ones, and softmax attention.
    """
    if not case.config.model.causal or any(attention_blocks(case)):
        return [1]
    length = case.config.data.seq_len // case.sp_size
    return [1, *(count for count in divisors(length)[1:] if length // count >= LEAST_TOKENS)]


def longest_sequence(case: PlannedCase, headroom: float, unit: int = LEAST_TOKENS, most: int = _MOST_TOKENS) -> int:
    """Tokens of the longest sequence that fits, a multiple of `unit` tokens a rank and segment; 0: none does."""
    step = unit * case.sp_size * case.segments
    limit = min(most, longest_document(case.config.model) or most)

    def fits(number: int) -> bool:
        return plan_memory(case.with_changes(seq_len=number * step), headroom).fits

    return step * largest(fits, case.config.data.seq_len // step, limit // step)


def longest_sequences(case: PlannedCase, headroom: float) -> dict[str, dict[str, int | str]]:
    """By strategy and recompute setting the tokens of `longest_sequence`, or why the setting is refused."""
    found: dict[str, dict[str, int | str]] = {}
    for strategy, recompute in itertools.product(Strategy, Recompute):
        size = -1 if strategy.is_replicated else case.config.parallel.shard_size
        one = case.with_changes(strategy=strategy, recompute=recompute, shard_size=size)
        try:
            one.config.validate()
            result: int | str = longest_sequence(one, headroom)
        except ConfigError as error:
            result = str(error)
        found.setdefault(strategy.value, {})[recompute.value] = result
    return found


def more_ranks(case: PlannedCase, headroom: float) -> Option | None:
    """The fastest option on the fewest ranks that share a sequence, doubled until one fits; None if none does."""
    if not case.config.sp.spec.scans:
        return None
    while case.world_size < _MOST_RANKS:
        case = dataclasses.replace(case, world_size=2 * case.world_size, sp_size=2 * case.sp_size)
        if problem_of(case, case.config.sp.attention.value) is not None:
            return None
        if case.config.data.seq_len // case.sp_size < LEAST_TOKENS:
            return None
        if fitting := options(case.with_changes(segments=1), headroom):
            return fitting[0]
    return None


def fastest_shards(case: PlannedCase, headroom: float) -> Option | None:
    """The case with the fastest `parallel.shard_size` that fits, the largest of equals; None without one."""
    if case.config.parallel.strategy.is_replicated:
        return None
    sizes = reversed(divisors(case.world_size))
    fitting = (evaluate(case.with_changes(shard_size=size), headroom) for size in sizes)
    return min((option for option in fitting if option.memory.fits), key=lambda one: one.time.total, default=None)


def shard_note(planned: Option, headroom: float) -> str | None:
    """A line on the fastest shard size, if it makes a step 1 % faster."""
    best = fastest_shards(planned.case, headroom)
    if best is None or best.time.total > 0.99 * planned.time.total:
        return None
    wire, own = parameter_seconds(best.case).total, parameter_seconds(planned.case).total
    return (
        f"parallel.shard_size={best.case.shards}: a step of {best.time.total:.4g} s, not {planned.time.total:.4g} with "
        f"shards over {planned.case.shards} ranks; FSDP's collectives take {wire:.3g} s, not {own:.3g}, mostly beside "
        "compute"
    )
