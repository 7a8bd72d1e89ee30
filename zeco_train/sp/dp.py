"""Data parallelism: every rank holds whole sequences, nothing is communicated, and the scan is over one rank."""

from __future__ import annotations

from zeco_train.collectives import scan_alone
from zeco_train.ops.seam import ScanRequest
from zeco_train.sp.backend import BackendSpec, Chosen, ScanBackend


class LocalScan(ScanBackend):
    """The exclusive scan over a single rank: `wait` returns `carry_in`, or zeros. Needs no workers."""

    def choose(self, request: ScanRequest) -> Chosen:
        """The scan over this rank; complete at once."""
        return Chosen(scan_alone)


DP = BackendSpec(
    name="dp",
    description="data parallelism: every rank has sequences of its own, nothing crosses ranks",
    color="#1f8a53",
    dark_color="#4cc38a",
    build=lambda workers, _: LocalScan(),
)
