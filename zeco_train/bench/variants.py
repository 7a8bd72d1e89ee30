"""The variants of the benchmarks, by name.

all_gather, all_reduce          of the states, by `torch.distributed`: the baselines
lasp1, lasp2, …                 the scans of these backends
lasp2:PARTS                     its all-gather in so many parts (LASP-2, Table 5)
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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from zeco_train.collectives import PendingScan
from zeco_train.collectives.all_gather import ALL_GATHER
from zeco_train.collectives.one_kernel import PAPER_BLOCK
from zeco_train.collectives.scan_registry import ALL_SCANS
from zeco_train.errors import ConfigError
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.seam import AttentionMethod, Exchange, ScanRequest, StateScan
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.sp.all_scan_config import MOST_BLOCKS, AllScanAlgorithm, AllScanConfig, AllScanTransport
from zeco_train.sp.backend import BackendSpec, SpecScan
from zeco_train.sp.backend_registry import BACKENDS, SHARING, Backend, SPConfig

NO_OPTIMIZER, PRODUCTS, FLA_CP = "no_optimizer", "products", "fla_cp"
# Settings behind the name, of models.
_OF_MODELS = {"fla": (NO_OPTIMIZER, "compile"), "dp": (NO_OPTIMIZER,)}


@dataclass(frozen=True)
class Variant:
    """What a benchmark compares; see `parse_variants` for the user's notation.

    Attributes:
        algorithm, transport, blocks: of `zeco`, as in `sp.all_scan`; blocks also `paper`, and of `lasp2` its parts.
        updates: a step of a model includes norm and update.
        compiled: the blocks of the peer's model are.
    """

    name: str
    kind: str
    algorithm: AllScanAlgorithm = AllScanAlgorithm.auto
    transport: AllScanTransport = AllScanTransport.auto
    blocks: str = "auto"
    updates: bool = True
    compiled: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def has_scan(self) -> bool:
        """Whether states cross ranks by a backend."""
        return self.kind in SHARING

    @property
    def is_dp(self) -> bool:
        """Whether it is our own code, with a sequence of each rank's own."""
        return self.kind == "dp"

    @property
    def is_peer(self) -> bool:
        """Whether it is of flash-linear-attention (fla)."""
        return self.kind in ("fla", FLA_CP)

    @property
    def is_alone(self) -> bool:
        """Whether nothing crosses ranks: each has its own sequence."""
        return self.kind in ("dp", "fla")

    @property
    def file_name(self) -> str:
        return self.name.replace(":", "-")

    def sp_config(self, state_elements: int) -> SPConfig:
        """The backend's settings, for states of this many elements; `ConfigError` if they do not go together."""
        if self.kind == "lasp2" and self.blocks != "auto":
            return _InParts(Backend[self.kind], parts=int(self.blocks))
        if self.kind != "zeco":
            return SPConfig(Backend[self.kind])
        blocks = str(max(1, state_elements // PAPER_BLOCK)) if self.blocks == "paper" else self.blocks
        config = AllScanConfig(self.algorithm, self.transport, blocks)
        config.validate()
        return SPConfig(Backend[self.kind], all_scan=config)


@dataclass
class _InParts(SPConfig):
    # LASP-2 with its all-gather in several parts, which only benchmarks compare.
    parts: int = 1

    @property
    def spec(self) -> BackendSpec:
        return replace(super().spec, build=lambda workers, _: SpecScan(workers, ALL_GATHER, self.parts))


ANCHORS = ("all_gather", "all_reduce")
# Defaults of the cases.
SCAN_VARIANTS = (
    *ANCHORS,
    *(name for name in SHARING if not BACKENDS[name].section),
    *(f"zeco:{scan.name}:p2p" for scan in ALL_SCANS),
    *(
        f"zeco:{scan.name}:symmetric{blocks}"
        for scan in ALL_SCANS
        if scan.kernel
        for blocks in (("", ":paper") if scan.best_blocks else ("",))
    ),
    *(name for name in SHARING if BACKENDS[name].section),
)
OPERATOR_VARIANTS = ("dp", "copy", *SHARING, "fla")
MODEL_VARIANTS = ("dp", PRODUCTS, *SHARING, "fla", f"fla:{NO_OPTIMIZER}")
# Operators of case `operator`: those whose operands have sizes of `Shape` only, and do not read the whole sequence.
BENCHED = tuple(
    name for name, each in OPERATORS.items() if {*"".join(each.dims)} <= {*"BTGHKV"} and not each.reads_whole
)


def parse_variants(names: Sequence[str], *kinds: str, of_model: bool = False) -> list[Variant]:
    """Variants of these kinds; `of_model`: with the settings that only models have.

    Raises:
        ConfigError: none, one twice, another kind, or a setting that it does not take.
    """
    if not names or len(set(names)) < len(names):
        raise ConfigError("variants", list(names), f"must be a list of different ones of {', '.join(kinds)}")
    allowed = f"must be one of {', '.join(kinds)}; zeco takes :ALGORITHM:TRANSPORT:BLOCKS, lasp2 :PARTS"
    settings = _OF_MODELS if of_model else {}
    allowed += "".join(f", {kind} takes :{' and :'.join(legal)}" for kind, legal in settings.items())
    found = []
    for name in names:
        kind, *given = name.split(":")
        in_parts = kind == "lasp2" and len(given) == 1 and given[0].isdecimal() and 1 <= int(given[0]) <= MOST_BLOCKS
        taken = kind == "zeco" or in_parts or (len(set(given)) == len(given) and {*given} <= {*settings.get(kind, ())})
        if kind not in kinds or not taken:
            raise ConfigError("variants", name, allowed)
        if kind == "zeco":
            found.append(_all_scan(name, given))
        elif in_parts:
            found.append(Variant(name, kind, blocks=given[0]))
        else:
            found.append(Variant(name, kind, updates=NO_OPTIMIZER not in given, compiled="compile" in given))
    return found


def backend_variant(name: str) -> Variant:
    """A backend with its settings, such as `zeco:chain`."""
    return parse_variants([name], *SHARING)[0]


def _all_scan(name: str, given: Sequence[str]) -> Variant:
    algorithm, transport, blocks, *rest = [*given, *("auto", "auto", "auto")[len(given) :]]
    if rest:
        raise ConfigError("variants", name, "zeco takes :ALGORITHM:TRANSPORT:BLOCKS at most")
    for value, options in ((algorithm, AllScanAlgorithm), (transport, AllScanTransport)):
        if value not in options.__members__:
            raise ConfigError("variants", name, f"{value} must be one of {', '.join(options.__members__)}")
    variant = Variant(name, "zeco", AllScanAlgorithm[algorithm], AllScanTransport[transport], blocks)
    # For its errors, which do not depend on the size of the state.
    variant.sp_config(1)
    return variant


def over_all_ranks(scan: StateScan, attention: AttentionMethod | None = None) -> Exchange:
    """One sequence over all ranks, by a stand-in for their scans."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return Exchange(scan, scan, attention, is_first=rank == 0, is_last=rank == size - 1)


class LocalCopyScan:
    """A `StateScan` without communication: `wait` returns a copy of this rank's own state, which is wrong.

    A step with it does all but the communication: a step with a scan takes the exposed communication longer.
    """

    def launch(self, request: ScanRequest) -> PendingScan:
        """A scan that has ended."""
        scan = PendingScan(request.want_carry)
        for promise in scan.futures:
            promise.set_result(request.state.clone())
        return scan

    def drain(self) -> None:
        """Nothing is sent."""


class _GatheredAttention:
    # An `AttentionMethod` that all-gathers keys and values, and sums their gradients over ranks with equally many
    # tokens.
    heads_over = 1

    def __init__(self, num_calls: int) -> None:
        self._num_calls = num_calls

    def forward(self, q: Tensor, k: Tensor, v: Tensor, span: Span, bounds: Sequence[int], scale: float) -> Attended:
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
        del bounds
        return [torch.cat(gather_all(tensor), 1) for tensor in tensors]


class _GatheredScan:
    # A `StateScan` that all-gathers the states and folds them in float64, while its caller waits.

    def launch(self, request: ScanRequest) -> PendingScan:
        ranks = range(dist.get_world_size())
        states, transitions = gather_all(request.state), gather_all(request.transition)
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


def gather_all(tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor, of one shape, by rank. Collective."""
    # A transition in reverse is a view, whose strides a collective cannot take.
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def gathered_exchange(num_calls: int = 1) -> Exchange:
    """The exchange that backends and methods are checked against, by code of its own.

    `num_calls`: of the attention kernel, each with as many of a rank's queries; another number rounds differently.
    """
    return over_all_ranks(_GatheredScan(), _GatheredAttention(num_calls))
