"""The scans by name. To add one, add its file and a line here."""

from __future__ import annotations

from zeco_train.collectives.all_gather import ALL_GATHER
from zeco_train.collectives.chain import CHAIN
from zeco_train.collectives.doubling import DOUBLING
from zeco_train.collectives.lane import LANE
from zeco_train.collectives.serial import SERIAL
from zeco_train.collectives.two_shot import TWO_SHOT
from zeco_train.collectives.worker import ScanSpec

# All-Scan algorithms (`sp.all_scan.algorithm`), in the order of tables; `auto` breaks ties by this order.
ALL_SCANS: tuple[ScanSpec, ...] = (
    CHAIN,
    TWO_SHOT,
    DOUBLING,
    LANE,
)
SCANS: dict[str, ScanSpec] = {scan.name: scan for scan in (SERIAL, ALL_GATHER, *ALL_SCANS)}
