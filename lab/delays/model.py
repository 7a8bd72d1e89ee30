"""What the planner's rules predict for the delays of case `delays`, to be compared with what is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeco_train.bench.backends import state_elements
from zeco_train.bench.session import Session
from zeco_train.bench.variants import Variant
from zeco_train.config.schema import Config
from zeco_train.plan import calibration as known
from zeco_train.plan.case import PlannedCase
from zeco_train.plan.devices import Gpu, machine
from zeco_train.plan.step_time import drift_seconds, operator_seconds, waited_seconds
from zeco_train.plan.traffic import scan_choice, scanning_blocks
from zeco_train.training.config import CudaGraphs

# Whose layers are late in part `drift`: rank 0's all, those of both ranks in turn, or one of rank 0's.
PATTERNS = ("same", "alternating", "once")
# By the scan's direction, forward and reverse.
OVERLAPS = known.OVERLAP_FORWARD, known.OVERLAP_BACKWARD


def late_by(pattern: str, rank: int, layers: int, delay: float) -> list[float]:
    """The delay of each layer on a rank."""
    if pattern == "once":
        return [delay if rank == 0 and layer == layers // 2 else 0.0 for layer in range(layers)]
    return [delay if rank == (layer % 2 if pattern == "alternating" else 0) else 0.0 for layer in range(layers)]


def gpu_of(session: Session) -> Gpu:
    """The planner's device: the rank's own, else an H200."""
    if not session.on_cuda:
        return Gpu.cpu
    name = torch.cuda.get_device_name(session.device).lower()
    return next((gpu for gpu in Gpu if gpu.value in name), Gpu.h200)


@dataclass(frozen=True)
class Predicted:
    """The planner's seconds for a model's step on two ranks that share a sequence.

    Attributes:
        scan: from launch to wait, without overlapped work.
        windows: work that overlaps a scan, forward and backward.
        drift: by which ranks may be apart in a step.
        one_way: a rank that waits does not hold up those before it in the scan's direction.
        layers: of the model.
        alone: the windows of the operator alone, which runs at a higher clock than in a step.
        block: a pass of a layer in a step, of which `drift` is a share.
    """

    scan: float
    windows: tuple[float, float]
    drift: float
    one_way: bool
    layers: int
    alone: tuple[float, float]
    block: float

    @classmethod
    def of(cls, run: Config, variant: Variant, tokens: int, session: Session, *, replayed: bool = True) -> Predicted:
        """For a model of one kind of layers, with this many tokens a rank; `replayed`: if the run's steps are."""
        ranks = session.world_size
        graphs = run.train.cuda_graphs if replayed else CudaGraphs.off
        config = dataclasses.replace(
            run,
            train=dataclasses.replace(run.train, cuda_graphs=graphs),
            sp=variant.sp_config(state_elements(run)),
            data=dataclasses.replace(run.data, seq_len=ranks * tokens, global_batch=1, micro_batch=1),
        )
        case = PlannedCase(config, ranks, ranks, machine(gpu_of(session)), gpus_per_node=ranks)
        (block,) = scanning_blocks(case)
        choice = scan_choice(case)
        assert choice is not None, "states cross ranks"
        forward, backward = operator_seconds(case, block)
        windows = OVERLAPS[0] * forward, OVERLAPS[1] * backward
        faster = 1.0 if case.machine.is_cpu else known.IN_STEP
        alone = windows[0] * faster, windows[1] * faster
        one_way, drift = choice.scan.one_way, drift_seconds(case)
        share = known.DRIFT[case.is_replayed]
        return cls(choice.seconds, windows, drift if one_way else 0.0, one_way, block.count, alone, drift / share)

    @property
    def share(self) -> float:
        """Of a pass of a layer, the time by which ranks may be apart: `DRIFT`."""
        return self.drift / self.block

    def hidden(self, reverse: bool, *, alone: bool = False) -> float:
        """The longest delay of a scan that its window hides."""
        return max(0.0, (self.alone if alone else self.windows)[reverse] - self.scan)

    def operator_growth(self, reverse: bool, delay: float) -> float:
        """Seconds by which the operator alone takes longer if its scan in one direction is delayed."""
        return max(0.0, self.scan + delay - self.alone[reverse]) - max(0.0, self.scan - self.alone[reverse])

    def step_growth(self, reverse: bool, delay: float) -> float:
        """Seconds a layer by which a step takes longer if all its scans in one direction are delayed."""
        late = [max(0.0, self.scan + each - self.windows[reverse]) for each in (delay, 0.0)]
        after, before = (waited_seconds(each, self.drift, self.layers) for each in late)
        return after - before

    def late_growth(self, pattern: str, reverse: bool, delay: float) -> float:
        """Seconds by which a pass takes longer if ranks are late by a pattern (`PATTERNS`).

        After each layer no rank is farther than `drift` behind the other. Before it, a rank that waits for a state has
        its window of work to do meanwhile.
        """
        first, last = (1, 0) if reverse else (0, 1)
        receivers = [(first, last)] if self.one_way else [(first, last), (last, first)]
        by_rank: list[Sequence[float]] = [late_by(pattern, rank, self.layers, delay) for rank in range(2)]
        now = [0.0, 0.0]
        for layer in reversed(range(self.layers)) if reverse else range(self.layers):
            ready = [now[rank] + by_rank[rank][layer] for rank in range(2)]
            now = ready.copy()
            for sender, receiver in receivers:
                now[receiver] = max(now[receiver], ready[sender] - self.hidden(reverse))
            now = [max(each, max(now) - self.drift) for each in now]
        return max(now)

    def overlap_of(self, reverse: bool, hidden: float) -> float:
        """`OVERLAP_FORWARD`, or `OVERLAP_BACKWARD`, with which the operator alone hides so many seconds of delay."""
        return OVERLAPS[reverse] * (self.scan + hidden) / self.alone[reverse]

    def drift_of(self, reverse: bool, delay: float, growth: float) -> float:
        """The least `DRIFT` with which a pass takes no more than `growth` seconds longer if ranks are late in turn.

        If it takes less than with any, the least with which it takes as little as with none: a lower bound.
        """

        def growth_with(drift: float) -> float:
            return dataclasses.replace(self, drift=drift).late_growth("alternating", reverse, delay)

        # Growth falls with the drift.
        low, high = 0.0, self.layers * delay
        wanted = max(growth, growth_with(high)) * (1 + 1e-9)
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if growth_with(middle) <= wanted else (middle, high)
        return high / self.block
