"""LASP-1 (Sun et al., 2024, arXiv 2404.02882), Algorithms 2 and 3: one neighbour after the other.

A rank does its local compute (lines 7–10), then receives R_p from the rank before it (12), computes the outputs that
use it (14–15), folds (16) and sends R_{p+1} on (17); the backward pass likewise, from the last rank to the first. The
compute between receive and send is serialised over the ranks, so time grows with P(α + βS + compute). Nothing is
launched ahead: `wait` receives and `finish` folds and sends.
"""

from __future__ import annotations

from zeco_train.collectives.serial import SERIAL
from zeco_train.sp.backend import BackendSpec, SpecScan

LASP1 = BackendSpec(
    name="lasp1",
    description="one rank after the other, in series with the compute (LASP-1)",
    color="#8a6d1d",
    dark_color="#d9b23c",
    build=lambda workers, _: SpecScan(workers, SERIAL),
    scans=(SERIAL,),
)
