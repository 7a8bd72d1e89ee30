"""Deviations of results, pass criteria, and the table."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.system.terminal import format_heading, format_row
from zeco_train.verify.whole import CONSTANTS, STATES, VERIFIED

_OPERANDS = dict.fromkeys(itertools.chain.from_iterable(OPERATORS[name].operands for name in VERIFIED))
TENSORS = ("o", *(f"d{name}" for name in _OPERANDS if name not in CONSTANTS), *STATES)
# Sequence parallelism regroups sums, as another chunking on one device (into as many pieces) does: both are the same
# kind of noise, whose norms fluctuate: 1.05 at most on 4 H200s, 1.07 on CPUs. A scan that loses precision exceeds it.
LARGEST_RATIO = 1.25
# In place of a backend: the operator's own passes in fp64, on inputs of the row's dtype.
FLOAT64 = "float64 itself"
# Differences below this are rounding of the results themselves, relative to their norm: one unit in the last place of
# bf16, a few ulps of an accumulation dtype.
FLOORS = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-21, torch.float64: 2.0**-50}
# Of dg, where each token has the sum of terms of all later ones, which cancel in part. In fp64 with 60 tokens two
# chunkings differ by up to 1.2e-15, and where memory is aligned otherwise the ratio of two such differences was 1.56.
_FLOOR_OF_DECAYS = 4.0


@dataclass(frozen=True)
class Deviation:
    """Deviation of one tensor on one rank.

    Attributes:
        error: from float64: norm of the difference over norm, the largest over heads; of dg over all heads.
        ratio: norm of the difference from one device, relative to that of another chunking on it, if it has the tensor.
        where: the head, and which of several calls, or the parameter.
    """

    error: float
    ratio: float | None = None
    where: str = ""


@dataclass(frozen=True)
class VerifyRow:
    """One backend on one sequence.

    Attributes:
        dtype, tokens, sp_size, layout, backend: what was compared; tokens of a rank.
        deviations: by rank and tensor.
        limit: of the errors.
        reason: why it was skipped.
        problem: why there are no results.
        on_own_ranks: not on the launched ones.
        uses: parts of the trainer that took part, such as "scan chain".
    """

    dtype: str
    tokens: int
    sp_size: int
    layout: str
    backend: str
    deviations: tuple[dict[str, Deviation], ...] = ()
    limit: float = 0.0
    reason: str = ""
    problem: str = ""
    on_own_ranks: bool = False
    uses: tuple[str, ...] = ()

    @property
    def worst(self) -> dict[str, tuple[float, int]]:
        """The largest error of each tensor, and its rank; the worst tensor first."""
        found: dict[str, tuple[float, int]] = {}
        for rank, ranks in enumerate(self.deviations):
            for tensor, deviation in ranks.items():
                if tensor not in found or _order(deviation.error) > _order(found[tensor][0]):
                    found[tensor] = deviation.error, rank
        return dict(sorted(found.items(), key=lambda item: -_order(item[1][0])))

    @property
    def ratio(self) -> tuple[float, str, int] | None:
        """The largest ratio, its tensor and rank."""
        found = [
            (deviation.ratio, tensor, rank)
            for rank, ranks in enumerate(self.deviations)
            for tensor, deviation in ranks.items()
            if deviation.ratio is not None
        ]
        return max(found, key=lambda entry: _order(entry[0]), default=None)

    @property
    def failures(self) -> list[str]:
        """Failures, one per tensor, the largest error first. NaN is a failure."""
        if self.problem:
            return [self.problem]
        texts = []
        for tensor, (error, rank) in self.worst.items():
            if not error <= self.limit:
                where = f" ({where})" if (where := self.deviations[rank][tensor].where) else ""
                texts.append(f"{tensor} on rank {rank}{where} is off by {error:.1e} > {self.limit:.0e}")
        if self.ratio is not None and not self.ratio[0] <= LARGEST_RATIO:
            ratio, tensor, rank = self.ratio
            texts.append(
                f"{tensor} on rank {rank} differs from one device {ratio:.1f} × as much as another chunking there"
            )
        return texts

    def as_dict(self) -> dict[str, object]:
        ranks = [
            {tensor: {"error": d.error, "ratio": d.ratio} for tensor, d in sorted(deviations.items())}
            for deviations in self.deviations
        ]
        fields = ("dtype", "tokens", "sp_size", "layout", "backend", "limit", "on_own_ranks")
        head = {name: getattr(self, name) for name in fields}
        return head | {"skipped": self.reason, "ok": not self.failures, "failures": self.failures, "ranks": ranks}


def _order(error: float) -> float:
    # NaN counts as the largest: it compares false with every number, so `max` could pass over it.
    return math.inf if math.isnan(error) else error


def deviations(
    actual: dict[str, Tensor], expected: dict[str, Tensor], runs: tuple[dict[str, Tensor], ...] = ()
) -> dict[str, Deviation]:
    """Compare a rank's results with float64, and, if given, with the two runs on one device."""
    found = {}
    for name in TENSORS:
        if name not in actual:
            continue
        assert actual[name].shape == expected[name].shape, f"{name} has shape {list(actual[name].shape)}"
        error = relative_error(name, actual[name], expected[name])
        ratio = None
        if runs and name in runs[0]:
            once, twice = (run[name] for run in runs)
            norm = _norms(name, once).sum().sqrt()
            difference, other = ((_norms(name, x, once).sum().sqrt()) for x in (actual[name], twice))
            least = FLOORS[actual[name].dtype] * norm * (_FLOOR_OF_DECAYS if name == "dg" else 1.0)
            ratio = 0.0 if difference == 0 else float(difference / torch.maximum(other, least))
        found[name] = Deviation(error, ratio)
    return found


def relative_error(name: str, actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖, the largest over heads; of dg over all heads."""
    difference, norm = _norms(name, actual, expected), _norms(name, expected)
    if name == "dg":
        # Under strong decays it is a small difference of large sums, relative to which it is rounded.
        difference, norm = difference.sum(), norm.sum()
    # An expected gradient of exactly zero must be matched exactly.
    return float(torch.where(difference == 0, 0.0, difference / norm).sqrt().max())


def _norms(name: str, x: Tensor, other: Tensor | None = None) -> Tensor:
    # Squared norms per head, [H], of x or of x − other, in fp64; in slices, to save memory.
    heads, along = (1, 2) if name in STATES else (2, 1)
    sums = torch.zeros(x.shape[heads], dtype=torch.float64, device=x.device)
    others = itertools.repeat(None) if other is None else other.split(1 << 16, along)
    for piece, own in zip(x.split(1 << 16, along), others, strict=False):
        off = piece.double() if own is None else piece.double() - own.double()
        sums += off.square().sum([dim for dim in range(x.ndim) if dim != heads])
    return sums


_COLUMNS = {
    "dtype": ("dtype", "<6"),
    "tokens": ("tokens", "<13"),
    "layout": ("sequence", "<55"),
    "backend": ("backend", "<23"),
    **{tensor: (tensor, ">10:.1e") for tensor in TENSORS},
    "ratio": ("ratio", ">7:.2f"),
    "worst": ("  worst", "<19"),
    "verdict": ("verdict", "<"),
}
_OWN_RANKS_COLUMNS = {
    "dtype": ("dtype", "<6"),
    "tokens": ("tokens", "<11"),
    "layout": ("on ranks of its own", "<86"),
    "backend": ("over", "<20"),
    "largest": ("error", ">8:.1e"),
    "verdict": ("  verdict", "<"),
}


def header(*, own_ranks: bool = False) -> str:
    """The first line of the table of the launched ranks, or of own ranks."""
    return format_heading(_OWN_RANKS_COLUMNS if own_ranks else _COLUMNS, gap="")


def line(row: VerifyRow) -> str:
    """A row of the table: errors from float64, the maximum over ranks."""
    columns = _OWN_RANKS_COLUMNS if row.on_own_ranks else _COLUMNS
    first = {"dtype": row.dtype, "tokens": f"{row.sp_size} × {row.tokens:,}"}
    first |= {"layout": row.layout, "backend": row.backend}
    if row.reason:
        return f"{''.join(f'{first[name]:{columns[name][1]}}' for name in first)} skipped: {row.reason}"
    worst = row.worst
    top = next(iter(worst), "")
    verdict = f"FAILED: {'; '.join(row.failures)}" if row.failures else "ok"
    cells: dict[str, object] = {tensor: error for tensor, (error, _) in worst.items()}
    if row.on_own_ranks:
        cells |= {"largest": worst[top][0] if top else None, "verdict": f"  {verdict}"}
    else:
        place = f"  {top} rank {worst[top][1]}" if top else "  "
        cells |= {"ratio": row.ratio and row.ratio[0], "worst": place, "verdict": verdict}
    return format_row(first | cells, columns, gap="")


def failure(row: VerifyRow) -> str:
    """A row that failed, without the table."""
    return f"FAILED: {row.dtype} {row.sp_size} × {row.tokens:,} {row.layout} {row.backend}: {'; '.join(row.failures)}"


def summary(rows: list[VerifyRow]) -> str:
    """The last line."""
    failed = [row for row in rows if row.failures]
    skipped = sum(bool(row.reason) for row in rows)
    compared = len(rows) - skipped
    limits = ", ".join(dict.fromkeys(f"{_computed_in(row)} {row.limit:.0e}" for row in rows if row.limit))
    text = f"{compared - len(failed)} of {compared} comparisons ok"
    if any(row.ratio for row in rows):
        limits += f"; difference from one device at most {LARGEST_RATIO} × that of another chunking there"
    return f"{'FAILED' if failed else 'ok'}: {text} (errors allowed: {limits}), {skipped} skipped"


def _computed_in(row: VerifyRow) -> str:
    if any(use.startswith("strategy ") for use in row.uses):
        return f"training steps {row.dtype}"
    return "fp64" if row.backend == FLOAT64 else row.dtype
