"""Injected delays: a rank that is late in a layer, or a scan that takes longer, by a number of microseconds.

On CUDA a kernel spins on the stream that is to be delayed; its duration is in device memory, so one captured CUDA graph
is replayed with any delays. On CPUs the thread sleeps that computes, or that runs the scans.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from importlib import import_module

import torch
from torch import Tensor

from zeco_train.collectives.worker import ScanJob
from zeco_train.ops.seam import Exchange, ScanRequest
from zeco_train.sp.backend import ScanBackend, TappedScan

# Threads of the kernel: a warp.
_LANES = 32


class Place(Enum):
    """What is delayed: `compute` is this rank's own work, and so its state too; `scan` is the scan alone."""

    compute = 0
    scan = 1


class Spins:
    """The delays of a pass through a model, by place, direction of the scan and layer; none at first.

    Args:
        layers: layers that exchange states; each launches one scan in each direction per pass.
        device: of the passes.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self.layers = layers
        self._nanoseconds = torch.zeros(len(Place), 2, layers, dtype=torch.int64, device=device)
        # Triton is imported only where it runs.
        self._kernel = import_module("lab.delays.spin_kernel").spin_kernel if device.type == "cuda" else None

    def table(self, place: Place, reverse: bool, microseconds: Sequence[float]) -> Tensor:
        """Delays for `load`: of one place, and of the layers' scans in one direction; 0 elsewhere."""
        table = torch.zeros(self._nanoseconds.shape, dtype=torch.int64)
        table[place.value, int(reverse)] = torch.tensor([round(1e3 * each) for each in microseconds])
        return table.to(self._nanoseconds.device)

    def load(self, table: Tensor) -> None:
        """Delay from now on, in the order of the current stream, as the table says."""
        self._nanoseconds.copy_(table)

    def spend(self, place: Place, reverse: bool, layer: int) -> None:
        """Delay the current stream, or on CPUs the calling thread."""
        index = (2 * place.value + int(reverse)) * self.layers + layer
        if self._kernel is None:
            time.sleep(int(self._nanoseconds.view(-1)[index]) / 1e9)
        else:
            # Also for no delay: what is compared differs in nothing but the time that this takes.
            self._kernel[(1,)](self._nanoseconds, index, LANES=_LANES, num_warps=1)

    def measure(self, microseconds: float, runs: int = 5) -> float:
        """Microseconds that a delay of so many takes on the GPU, with its launch; the least of a few. Synchronises."""
        self.load(self.table(Place.compute, False, [microseconds] * self.layers))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for before, after in events:
            before.record()
            self.spend(Place.compute, False, 0)
            after.record()
        self.load(torch.zeros_like(self._nanoseconds))
        torch.cuda.synchronize()
        return min(1e3 * before.elapsed_time(after) for before, after in events)


class _Spin(ScanJob):
    """A delay in the order of a worker's scans. Nobody waits for its result."""

    operation = "spin"

    def __init__(self, request: ScanRequest, spins: Spins, layer: int) -> None:
        super().__init__(request)
        self._spins, self._layer = spins, layer

    def run(self) -> None:
        self._spins.spend(Place.scan, self.request.reverse, self._layer)


class SpinningScan(TappedScan):
    """Another scan with delays: before each launch on the current stream, and on the scan's own before it sends.

    Args:
        scan: that is delayed; not LASP-1, which communicates in its caller.
        spins: the delays. Passes launch a scan in each layer, first to last, and in reverse from last to first.
    """

    def __init__(self, scan: ScanBackend, spins: Spins) -> None:
        super().__init__(scan)
        self._worker, self._spins = scan.worker, spins
        self._launched = {False: 0, True: 0}

    def launched(self, request: ScanRequest) -> None:
        """See `TappedScan`."""
        reverse, layers = request.reverse, self._spins.layers
        layer = self._launched[reverse] % layers
        layer = layers - 1 - layer if reverse else layer
        self._launched[reverse] += 1
        self._spins.spend(Place.compute, reverse, layer)
        self._worker(request).launch(_Spin(request, self._spins, layer))


def spinning(exchange: Exchange, spins: Spins) -> Exchange:
    """An exchange whose scans of states are delayed."""
    scan = exchange.states
    assert isinstance(scan, ScanBackend)
    return exchange.replaced(states=SpinningScan(scan, spins))
