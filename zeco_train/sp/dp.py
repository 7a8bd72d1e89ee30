"""Data parallelism: every rank holds whole sequences, nothing crosses ranks, and the scan is over one rank."""

from __future__ import annotations

from zeco_train.collectives import PendingScan, ScanRequest, scan_alone
from zeco_train.sp.backend import ScanBackend


class LocalScan(ScanBackend):
    """The exclusive scan over a single rank: `wait` gives back `carry_in`, or zeros. Needs no couriers."""

    def start(self, request: ScanRequest) -> PendingScan:
        return scan_alone(request)
