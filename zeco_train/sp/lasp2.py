"""LASP-2 (Sun et al., 2025, arXiv 2502.07563), extended to decays: one all-gather, then a prefix on every rank.

Every rank receives the pair (S_q, G_q) of all others, (P − 1) S bytes, and folds those before it in rank order. The
paper's models have no decay and send states only; with a gate the decays must be sent too, or the prefix is wrong. As
with ZeCO the all-gather is launched before the intra-chunk work and waited for after it.
"""

from __future__ import annotations

from zeco_train.collectives.all_gather import ALL_GATHER
from zeco_train.sp.backend import BackendSpec, SpecScan

LASP2 = BackendSpec(
    name="lasp2",
    description="all-gather of all states and decays, beside the work inside chunks (LASP-2)",
    color="#7a3fa8",
    dark_color="#c596f5",
    build=lambda workers, _: SpecScan(workers, ALL_GATHER),
    scans=(ALL_GATHER,),
)
