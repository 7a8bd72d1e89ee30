"""Shared by the tests of sequence parallelism: every backend over some ranks, with a record of its scans."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from zeco_train.collectives.scan_registry import ALL_SCANS
from zeco_train.ops.seam import Exchange, LaunchedScan, ScanRequest, StateScan
from zeco_train.sp.all_scan_config import AllScanAlgorithm, AllScanConfig
from zeco_train.sp.backend_registry import SHARING, Backend, SPConfig
from zeco_train.sp.exchange import connect
from zeco_train.sp.zeco import ZECO

TIMEOUT = timedelta(seconds=60)
CONFIGS = {
    **{name: SPConfig(Backend[name]) for name in SHARING if name != ZECO.name},
    "auto": SPConfig(),
    **{
        scan.name + (f"/{blocks}" if scan.best_blocks else ""): SPConfig(
            all_scan=AllScanConfig(AllScanAlgorithm[scan.name], blocks=blocks)
        )
        for scan in ALL_SCANS
        for blocks in (("1", "3") if scan.best_blocks else ("auto",))
    },
}


class RecordingScan:
    """Wrapper of a scan that records every call and the result of each `wait` (`R` forward, `D_in` in reverse)."""

    def __init__(self, scan: StateScan, events: list[str], received: dict[str, Tensor]) -> None:
        self._scan, self.events, self.received = scan, events, received

    def launch(self, request: ScanRequest) -> RecordingPendingScan:
        self.events.append("launch reverse" if request.reverse else "launch forward")
        return RecordingPendingScan(self, self._scan.launch(request), "D_in" if request.reverse else "R")

    def drain(self) -> None:
        self._scan.drain()


class RecordingPendingScan:
    def __init__(self, record: RecordingScan, pending: LaunchedScan, name: str) -> None:
        self._record, self._pending, self._name = record, pending, name

    def wait(self) -> Tensor:
        self._record.events.append("wait")
        received = self._pending.wait()
        self._record.received[self._name] = received.clone()
        return received

    def finish(self) -> None:
        self._record.events.append("finish")
        self._pending.finish()

    def carry_out(self) -> Tensor:
        self._record.events.append("carry_out")
        return self._pending.carry_out()


class RecordedExchange(Exchange):
    """An exchange whose scan of states is recorded; not halos, where they are scans of their own."""

    events: list[str]
    received: dict[str, Tensor]

    def __init__(self, exchange: Exchange) -> None:
        events: list[str] = []
        received: dict[str, Tensor] = {}
        states = RecordingScan(exchange.states, events, received)
        halo = states if exchange.halo is exchange.states else exchange.halo
        vars(self).update(vars(exchange), states=states, halo=halo, events=events, received=received)
        self._register()


def build_scans(ranks: tuple[int, ...], *names: str, with_halo: bool = True) -> dict[str, RecordedExchange]:
    """These, or all, backends on separate groups. Must be called on all ranks, including those not in `ranks`."""
    scans = {}
    for name in names or (*CONFIGS, *(["dp"] if len(ranks) == 1 else [])):
        groups = dist.new_group(ranks), dist.new_group(ranks)
        halo = (dist.new_group(ranks), dist.new_group(ranks)) if with_halo and len(ranks) > 1 else None
        config = CONFIGS.get(name, SPConfig(Backend["dp"]))
        scans[name] = RecordedExchange(connect(config, groups, TIMEOUT, halo=halo))
    return scans
