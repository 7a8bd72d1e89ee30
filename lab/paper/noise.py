"""Throughput when ranks are late by chance: a simulation of a step, block by block.

Every block of every rank takes its time times 1 + σ|x|, with x normal: kernels are late, never early. Ranks wait for
each other in two ways. FSDP's collectives hold all of them within a share of a block of the slowest (`DRIFT` of the
planner's calibration). A scan gives a rank its state no sooner than T after the latest rank of its node and of those
before it; until then it has its window of overlapped work. In the backward pass the order is reversed. Efficiency is
the time of a step without the scans, with the same noise, over that with them.

That noise is independent from block to block is an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.paper.ours import DEVICES, gla_1b
from zeco_train.plan import calibration as known
from zeco_train.plan.case import PlannedCase
from zeco_train.plan.step_time import operator_seconds, plan_step
from zeco_train.plan.traffic import scan_choice, scanning_blocks
from zeco_train.sp.backend_registry import BACKENDS

# GPUs of a sequence and tokens a GPU: also 8M tokens over 256 and over 1,024.
SIZES = ((256, 16_384), (256, 32_768), (1024, 8_192), (1024, 16_384), (4096, 16_384))
NOISES = (0.0, 0.01, 0.02, 0.05)
# Work of a block before its scan starts: norms, projections, and the state of the rank's tokens.
_BEFORE = 0.35


@dataclass(frozen=True)
class Noisy:
    """Efficiency of zeco relative to dp, with noise of σ `noise`."""

    device: str
    gpus: int
    tokens: int
    alpha: float
    scan: str
    noise: float
    efficiency: float


def noisy(alphas: tuple[float, ...] = (8.0, 25.0)) -> list[Noisy]:
    """Efficiencies of the fastest scan over `SIZES`, for latencies between nodes in µs."""
    rows = []
    for device in DEVICES:
        for gpus, tokens in SIZES:
            for alpha in alphas:
                case = gla_1b(device, gpus, tokens, alpha)
                choice = scan_choice(case.by(BACKENDS["zeco"]))
                # A chain's later hops would count again for ranks that are late already.
                assert choice is not None
                assert not choice.scan.one_way
                step = Step.of(case)
                for noise in NOISES:
                    value = step.efficiency(choice.seconds, noise)
                    rows.append(Noisy(device, gpus, tokens, alpha, choice.scan.name, noise, value))
    return rows


@dataclass(frozen=True)
class Step:
    """Times of a step in seconds, as planned for dp.

    Attributes:
        ranks: of the sequence.
        blocks: number of layers.
        forward: of a block; the backward pass, of products mostly, takes twice that.
        windows: work of a block that overlaps a scan, forward and backward.
        optimizer: of the whole step.
        together: adjacent ranks that wait for each other's states, those of a node; 1: only for the ranks before.
        drift: share of a block's time by which ranks may be apart.
    """

    ranks: int
    blocks: int
    forward: float
    windows: tuple[float, float]
    optimizer: float
    together: int = 1
    drift: float = known.DRIFT[True]

    @classmethod
    def of(cls, case: PlannedCase) -> Step:
        """The step of a model with one kind of blocks."""
        (block,) = scanning_blocks(case)
        whole, (forward, backward) = plan_step(case.by(BACKENDS["dp"])), operator_seconds(case, block)
        optimizer = whole.seconds["optimizer"]
        windows = known.OVERLAP_FORWARD * forward, known.OVERLAP_BACKWARD * backward
        forward = (whole.total - optimizer) / 3 / block.count
        together, drift = case.topology.ranks_per_node, known.DRIFT[case.is_replayed]
        return cls(case.sp_size, block.count, forward, windows, optimizer, together, drift)

    def efficiency(self, scan_seconds: float, noise: float, seeds: int = 4) -> float:
        """Mean efficiency of simulated steps; scans take `scan_seconds` from the latest rank on."""
        pairs = ((self.seconds(None, noise, seed), self.seconds(scan_seconds, noise, seed)) for seed in range(seeds))
        return sum(dp / zeco for dp, zeco in pairs) / seeds

    def seconds(self, scan_seconds: float | None, noise: float, seed: int) -> float:
        """Time of the slowest rank in a simulated step; None: without scans."""
        random = np.random.default_rng(seed)
        now: NDArray[np.float64] = np.zeros(self.ranks)
        ends = (np.arange(self.ranks) // self.together + 1) * self.together - 1
        for seconds, window in zip((self.forward, 2 * self.forward), self.windows, strict=True):
            for _ in range(self.blocks):
                now = np.maximum(now, now.max() - self.drift * seconds)
                took = seconds * (1 + noise * np.abs(random.standard_normal(self.ranks)))
                if scan_seconds is None:
                    now = now + took
                    continue
                launched = now + _BEFORE * took
                latest = np.maximum.accumulate(launched)
                if self.together == 1:
                    arrived = np.concatenate(([-np.inf], latest[:-1] + scan_seconds))
                else:
                    arrived = latest[ends] + scan_seconds
                now = np.maximum(launched + window, arrived) + (1 - _BEFORE) * took - window
            # The backward pass runs from the last rank down.
            now = now[::-1]
        return float(now.max()) + self.optimizer
