"""The variants of the benchmarks, by name.

all_gather, all_reduce          of the states, by `torch.distributed`: the baselines
lasp1, lasp2, …                 the scans of these backends
zeco[:ALGORITHM[:TRANSPORT[:BLOCKS]]]   All-Scan, with the settings of `sp.all_scan`; BLOCKS also `paper`, which cuts
                                a state into pieces of 16,384 elements, as the ZeCO paper does
dp[:no_optimizer]               each rank its own sequence, nothing crosses ranks; of a model: without norm and update
copy                            the step of the scans, with the scan replaced by a copy of this rank's own state
products                        only the matrix products of the model's step: the upper bound, on this GPU
fla                             flash-linear-attention on one rank's tokens, the peer: its function, or its model
fla_cp                          its own context parallelism, over all ranks' tokens
fla[:no_optimizer][:compile]    of its model: forward and backward alone, with bf16 weights; its blocks compiled
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.collectives import PendingScan
from zeco_train.collectives.one_kernel import PAPER_BLOCK
from zeco_train.collectives.registry import ALL_SCANS
from zeco_train.errors import ConfigError
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.registry import OPERATORS
from zeco_train.ops.seam import AttentionMethod, Exchange, ScanRequest, StateScan
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.sp.all_scan_config import AllScanAlgorithm, AllScanConfig, AllScanTransport
from zeco_train.sp.registry import BACKENDS, SHARING, Backend, SPConfig


def _in_one_kernel() -> Iterator[str]:
    for scan in ALL_SCANS:
        if scan.kernel:
            yield f"zeco:{scan.name}:symmetric"
            if scan.best_blocks:
                yield f"zeco:{scan.name}:symmetric:paper"


ANCHORS = ("all_gather", "all_reduce")
SCAN_VARIANTS = (
    *ANCHORS,
    *(name for name in SHARING if not BACKENDS[name].section),
    *(f"zeco:{scan.name}:p2p" for scan in ALL_SCANS),
    *_in_one_kernel(),
    *(name for name in SHARING if BACKENDS[name].section),
)
# Of case `operator`.
BENCHED = tuple(name for name, operator in OPERATORS.items() if operator.peers)
OPERATOR_VARIANTS = ("dp", "copy", *SHARING, "fla")
FLA_CP = "fla_cp"
# Functions of flash-linear-attention; those of the second line know one rank's tokens only.
PEERS = ("fla", FLA_CP)
ALONE = ("dp", "fla")
PRODUCTS = "products"
MODEL_VARIANTS = ("dp", PRODUCTS, *SHARING, "fla", "fla:no_optimizer")
NO_OPTIMIZER = "no_optimizer"
PEER_SETTINGS = (NO_OPTIMIZER, "compile")


def check_variants(names: Sequence[str], *kinds: str, peer_settings: Sequence[str] = ()) -> None:
    """Raise `ConfigError` if the list is empty, has duplicates, or has a variant that is not of these kinds."""
    if not names or len(set(names)) < len(names):
        raise ConfigError("variants", list(names), f"must be a list of different ones of {', '.join(kinds)}")
    for name in names:
        kind, *settings = name.split(":")
        allowed = f"must be one of {', '.join(kinds)}; zeco takes :ALGORITHM:TRANSPORT:BLOCKS"
        if peer_settings:
            allowed += f", fla takes :{' and :'.join(peer_settings)}, dp :{NO_OPTIMIZER}"
        with_settings = ("zeco", "fla", *(("dp",) if peer_settings else ()))
        if kind not in kinds or (settings and kind not in with_settings):
            raise ConfigError("variants", name, allowed)
        if kind == "dp" and settings not in ([], [NO_OPTIMIZER]):
            raise ConfigError("variants", name, allowed)
        if kind == "zeco":
            # Checks the settings only; the size of the state does not matter for that.
            _all_scan(name, 1)
        if kind == "fla" and (not set(settings) <= set(peer_settings) or len(set(settings)) < len(settings)):
            raise ConfigError("variants", name, allowed)


def is_dp(name: str) -> bool:
    """Whether each rank has its own sequence, with whatever settings."""
    return name.partition(":")[0] == "dp"


def sp_config(name: str, state_elements: int) -> SPConfig:
    """The backend settings of a variant with a scan, for states of this many elements."""
    backend = Backend[name.split(":")[0]]
    return SPConfig(backend, all_scan=_all_scan(name, state_elements) if backend.name == "zeco" else AllScanConfig())


def _all_scan(name: str, state_elements: int) -> AllScanConfig:
    _, *given = name.split(":")
    algorithm, transport, blocks, *rest = [*given, *("auto", "auto", "auto")[len(given) :]]
    if rest:
        raise ConfigError("variants", name, "zeco takes :ALGORITHM:TRANSPORT:BLOCKS at most")
    for value, options in ((algorithm, AllScanAlgorithm), (transport, AllScanTransport)):
        if value not in options.__members__:
            raise ConfigError("variants", name, f"{value} must be one of {', '.join(options.__members__)}")
    if blocks == "paper":
        blocks = str(max(1, state_elements // PAPER_BLOCK))
    config = AllScanConfig(AllScanAlgorithm[algorithm], AllScanTransport[transport], blocks)
    config.validate()
    return config


def over_all_ranks(scan: StateScan, attention: AttentionMethod | None = None) -> Exchange:
    """One sequence over all ranks, by a stand-in for their scans."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return Exchange(scan, scan, attention, is_first=rank == 0, is_last=rank == size - 1)


class LocalCopyScan:
    """A `StateScan` without communication: `wait` returns a copy of this rank's own state, for timing only.

    A step with it does everything but the communication, so the difference to a step with a scan is the exposed
    communication. Its results are wrong.
    """

    def launch(self, request: ScanRequest) -> PendingScan:
        """See `StateScan`."""
        scan = PendingScan(request.want_carry)
        for promise in scan.futures:
            promise.set_result(request.state.clone())
        return scan

    def drain(self) -> None:
        """Nothing is sent."""


class GatheredAttention:
    """An `AttentionMethod` that all-gathers keys and values, and sums their gradients over the ranks.

    It shares no code with the methods, which are checked against it. All ranks have equally many tokens.

    Args:
        num_calls: of the kernel, each with as many of a rank's queries: another number rounds differently.
    """

    def __init__(self, num_calls: int = 1) -> None:
        self._num_calls = num_calls

    def forward(self, q: Tensor, k: Tensor, v: Tensor, span: Span, bounds: Sequence[int], scale: float) -> Attended:
        """See `AttentionMethod`."""
        k, v = self.gather([k, v], bounds)
        found = [attend(part, k, v, own, 0, scale) for own, part in zip(self._cut(span), self._split(q), strict=True)]
        return Attended(torch.cat([each.o for each in found], 1), torch.cat([each.lse for each in found], 2))

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attended: Attended,
        span: Span,
        bounds: Sequence[int],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionMethod`."""
        k, v = self.gather([k, v], bounds)
        lses = attended.lse.chunk(self._num_calls, 2)
        parts = zip(self._cut(span), *map(self._split, (do, q, attended.o)), lses, strict=True)
        grads = [attend_backward(dop, qp, k, v, Attended(o, lse), own, 0, scale) for own, dop, qp, o, lse in parts]
        sums = [torch.stack([grad[i] for grad in grads]).sum(0, dtype=accumulation_dtype(q.dtype)) for i in (1, 2)]
        for grad in sums:
            dist.all_reduce(grad)
        dk, dv = (grad[:, span.start : span.stop] for grad in sums)
        return torch.cat([grad[0] for grad in grads], 1), dk, dv

    def _split(self, x: Tensor) -> Sequence[Tensor]:
        return x.chunk(self._num_calls, 1)

    def _cut(self, span: Span) -> list[Span]:
        # As `chunk` cuts.
        size = -(-(span.stop - span.start) // self._num_calls)
        return [span.part(start, min(start + size, span.stop)) for start in range(span.start, span.stop, size)]

    def gather(self, tensors: Sequence[Tensor], bounds: Sequence[int]) -> list[Tensor]:
        """See `AttentionMethod`."""
        del bounds
        found = []
        for tensor in (tensor.contiguous() for tensor in tensors):
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, tensor)
            found.append(torch.cat(parts, 1))
        return found


class GatheredScan:
    """A `StateScan` that all-gathers the states and folds them in float64, while its caller waits.

    It shares no code with the backends, which are checked against it.
    """

    def launch(self, request: ScanRequest) -> PendingScan:
        """See `StateScan`."""
        ranks = range(dist.get_world_size())
        # In reverse the transition is a view, whose strides a collective cannot take.
        own = request.state, request.transition.contiguous()
        states, transitions = ([torch.empty_like(tensor) for _ in ranks] for tensor in own)
        dist.all_gather(states, own[0])
        dist.all_gather(transitions, own[1])
        scan, dtype = PendingScan(request.want_carry), request.state.dtype
        running = request.first_incoming().double()
        for rank in reversed(ranks) if request.reverse else ranks:
            if rank == dist.get_rank():
                scan.incoming.set_result(running.to(dtype))
            transition = transitions[rank].double()
            kept = transition @ running if transition.ndim == 4 else transition.exp().unsqueeze(-1) * running
            running = kept + states[rank].double()
        if scan.carry is not None:
            scan.carry.set_result(running.to(dtype))
        return scan

    def drain(self) -> None:
        """Each launch waits for what it sends."""


def gathered_exchange(num_calls: int = 1) -> Exchange:
    """The exchange that backends and methods are checked against; `num_calls` as of `GatheredAttention`."""
    return over_all_ranks(GatheredScan(), GatheredAttention(num_calls))
