"""Scans by name, since a custom op takes tensors and plain values but no objects. The only global of `zeco_train.sp`.

A name stands for one scan as long as that lives. It is a constant of a compiled graph: a graph is compiled anew for
another scan, and holds none alive.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

if TYPE_CHECKING:
    from zeco_train.sp.base import StateScan

_SCANS: WeakValueDictionary[str, StateScan] = WeakValueDictionary()
_HANDLES: WeakKeyDictionary[StateScan, str] = WeakKeyDictionary()
_numbers = itertools.count()


def handle_of(scan: StateScan) -> str:
    """The scan's name, always the same."""
    if scan not in _HANDLES:
        _HANDLES[scan] = handle = f"scan-{next(_numbers)}"
        _SCANS[handle] = scan
    return _HANDLES[scan]


def scan_of(handle: str) -> StateScan:
    """The scan of that name.

    Raises:
        RuntimeError: it is gone; whoever runs a backward pass has to keep the scan of the forward pass.
    """
    scan = _SCANS.get(handle)
    if scan is None:
        raise RuntimeError(f"the scan {handle!r} is gone: keep it until the backward pass is over")
    return scan
