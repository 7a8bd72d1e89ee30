"""The backends that ZeCO is compared with: data parallelism, LASP-1 and LASP-2."""

from __future__ import annotations

from zeco_train.collectives import scan_alone
from zeco_train.collectives.all_gather import ALL_GATHER
from zeco_train.collectives.serial import SERIAL
from zeco_train.ops.seam import ScanRequest
from zeco_train.sp.backend import BackendSpec, Chosen, ScanBackend, SpecScan


class LocalScan(ScanBackend):
    """The exclusive scan over a single rank: `wait` returns `carry_in`, or zeros. Needs no workers."""

    def choose(self, request: ScanRequest) -> Chosen:
        return Chosen(scan_alone)


# Every rank holds whole sequences, and the scan is over one rank.
DP = BackendSpec(
    name="dp",
    description="data parallelism: every rank has sequences of its own, nothing crosses ranks",
    color="#1f8a53",
    dark_color="#4cc38a",
    build=lambda workers, _: LocalScan(),
)

# Sun et al., 2024, arXiv 2404.02882, Algorithms 2 and 3: a rank does its local compute (lines 7–10), then receives R_p
# from the rank before it (12), computes the outputs that use it (14–15), folds (16) and sends R_{p+1} on (17); the
# backward pass likewise, from the last rank to the first. `wait` receives, `finish` folds and sends; what is computed
# between them is serialised over the ranks, so time grows with P(α + βS + compute).
LASP1 = BackendSpec(
    name="lasp1",
    description="one rank after the other, in series with the compute (LASP-1)",
    color="#8a6d1d",
    dark_color="#d9b23c",
    build=lambda workers, _: SpecScan(workers, SERIAL),
    scans=(SERIAL,),
)

# Sun et al., 2025, arXiv 2502.07563, extended to decays: every rank receives the pair (S_q, G_q) of all others,
# (P − 1) S bytes, and folds those before it in rank order. The paper's models have no decay and send states only; with
# a gate the decays must be sent too, or the prefix is wrong. As with ZeCO the all-gather is launched before the
# intra-chunk work and waited for after it.
LASP2 = BackendSpec(
    name="lasp2",
    description="all-gather of all states and decays, beside the work inside chunks (LASP-2)",
    color="#7a3fa8",
    dark_color="#c596f5",
    build=lambda workers, _: SpecScan(workers, ALL_GATHER),
    scans=(ALL_GATHER,),
)
