"""What docs/papers.md computes: each function is one value, as text, by the planner's own formulas.

Question: what do those formulas say of the papers' rows that need more GPUs than there are here?
Command: python -m lab.paper.page
Date: 2026-11-27
Answer: docs/papers.md, the rows that are marked as computed.
"""

from __future__ import annotations

from lab.paper import ours
from zeco_train.bench.config import LongestConfig
from zeco_train.bench.longest import planned_tokens
from zeco_train.collectives.chain import CHAIN, best_blocks
from zeco_train.collectives.cost_model import MEASURED, Link, Load
from zeco_train.distributed.config import Strategy
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.attention.method import AttentionLoad
from zeco_train.sp.attention.method_registry import METHODS

# The state of ZeCO's Table 2: 32 heads of 128 × 128 in fp32.
_STATE = (1, 32, 128, 128)


def _gathered(ranks: int) -> float:
    # GB beside the layer's own, of ZeCO's Section 4.1: 8,192 tokens a GPU, width 4,096, in bf16, forward and backward.
    load = AttentionLoad(32, 32, 128, 8192, ranks, None, itemsize=2, wide=4)
    return METHODS["all_gather"].costs(load).held / 1e9


def gather_of_keys() -> str:
    """Memory of gathered keys and values, and the number of GPUs that 80 GB hold."""
    most = max(ranks for ranks in range(2, 512) if _gathered(ranks) <= 80)
    sizes = ", ".join(f"{_gathered(ranks):.1f} GB on {ranks}" for ranks in (8, 64, 128, 256))
    return f"{sizes}; 80 GB are full beyond {most} GPUs"


def blocks_by_messages() -> str:
    """K that the cost model chooses for that state, by NCCL's messages."""
    counts = {ranks: best_blocks(MEASURED[Link.nccl], Load(ranks, _STATE, 4)) for ranks in (2, 8, 256)}
    return ", ".join(f"{blocks} on {ranks} GPUs" for ranks, blocks in counts.items())


def boundary_of_equation_12() -> str:
    """The time of one block over that of the best K, by the cost model, on 8 GPUs by NCCL's messages."""
    costs, load = MEASURED[Link.nccl], Load(8, _STATE, 4)
    best = best_blocks(costs, load)
    return (
        f"1 block takes {CHAIN.seconds(costs, load, 1) / CHAIN.seconds(costs, load, best):.2f} times as long as {best}"
    )


def _planned(gpus: int, tokens: int) -> str:
    rows = {row.backend: row for row in ours._rows("h100", gpus, tokens, ours.ALPHA)}
    return ", ".join(f"{name} {rows[name].efficiency:.3f}" for name in ("zeco", "lasp2", "lasp1"))


def steps_of_256_gpus_16k() -> str:
    """Throughput of gla_1b relative to dp, 16k tokens a GPU, by the planner."""
    return _planned(256, 16_384)


def steps_of_256_gpus_32k() -> str:
    """The same with 32k."""
    return _planned(256, 32_768)


def steps_of_8_gpus_16k() -> str:
    """The same on one node of 8."""
    return _planned(8, 16_384)


def traffic_of_scans() -> str:
    """What a layer's two scans read and write more than `dp`, 16 heads of 64 × 128, at the planner's rate of an H100.

    In each direction the own state is read, the incoming one written, and the one that leaves written.
    """
    state = 16 * 64 * 128 * 4
    seconds = 6 * state / ours.gla_1b("h100", 8, 16_384, ours.ALPHA).machine.bandwidth
    return f"{6 * state / 1e6:.2f} MB, {1e6 * seconds:.1f} µs"


def _longest(ranks: int, strategy: Strategy, every: int | None = None) -> str:
    # Tokens without and with recomputation.
    config = LongestConfig(model="lightning_1b", ranks=ranks, variants=["lasp1" if ranks > 1 else "dp"])
    found = []
    for recompute in (Recompute.none, Recompute.full):
        run = config.load_trial(config.trial_overrides(every, strategy, recompute, config.variants[0]))
        found.append(f"{planned_tokens(config, run, 'h100') or 0:,}")
    return ", ".join(found)


def longest_by_ddp() -> str:
    """The planner's longest sequences of lightning_1b on H100s of 80 GB with DDP, by LASP-1 on two."""
    return f"{_longest(1, Strategy.ddp)} (1 GPU); {_longest(2, Strategy.ddp)} (2 GPUs, LASP-1)"


def longest_by_zero3() -> str:
    """The same with ZeRO-3, which is FSDP."""
    return f"{_longest(1, Strategy.zero3)} (1 GPU); {_longest(2, Strategy.zero3)} (2 GPUs, LASP-1)"


def longest_of_hybrids() -> str:
    """The same with DDP, of the model with softmax attention in one layer of four."""
    return f"{_longest(1, Strategy.ddp, 4)} (1 GPU); {_longest(2, Strategy.ddp, 4)} (2 GPUs, LASP-1)"
