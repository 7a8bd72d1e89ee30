"""Models of the papers' machines, fitted to their tables, with few parameters.

ZeCO (Tables 2 to 6), seven parameters, times in ms:

    scan(P)  = start + hop (P − 1)                                  Table 2, All-Scan
    zeco     = dp + 2 scan(P) + operator_extra                      Tables 3 and 4; dp as in the table
    dp       = step_16k n / 16,384 + step_fixed + step_doubling log₂(P / 8)      Tables 5 and 6, n tokens a GPU
    zeco     = dp + 20 (2 scan(P) + layer_extra)                    Tables 5 and 6, of 20 layers

Nothing is hidden behind compute: what a layer costs above dp in the paper is twice its collective. Other rows have no
parameter of their own: all-gather and LASP-2 take a state a rank over 50 GB/s, the network card of a DGX H100, and
LASP-1 takes the planner's serial share of the operator a rank. Their errors show how much of them the paper's own
tables do not explain.

LASP-2 (Table 6), two parameters: a step takes fixed + per_16k n / 16,384 seconds for a sequence of n tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zeco_train.bench.figures import reference
from zeco_train.plan.calibration import LASP1_SERIAL

LAYERS = 20
NODE = 8
# 400 Gbit/s for each GPU of a DGX H100, ms a byte.
_MS_PER_BYTE = 1e3 / 50e9


def _state_bytes(heads: int, width: int) -> int:
    """A state in fp32; [K, V] of a head is (D / H)² (ZeCO, A.2)."""
    return heads * (width // heads) ** 2 * 4


_COLLECTIVE, _OPERATOR, _MODEL = _state_bytes(32, 4096), _state_bytes(16, 2048), _state_bytes(32, 2048)
# Weight of a ratio's error against a relative error of a time: 0.03 of one is as bad as 0.1 of the other.
_RATIO_WEIGHT = 10 / 3
# No fitted row errs by more: a time by this share, a ratio by 0.3 of it.
_LIMIT = 0.095
FITTED = ("all_scan", "zeco", "dp")


@dataclass(frozen=True)
class Row:
    """A value of a paper's table beside the model's.

    Attributes:
        table: of the paper.
        method: column.
        gpus, tokens: of the row; tokens a GPU, of the whole sequence for LASP-2; 0: the table has none.
        paper, model: in the unit of the table: ms, or tokens/s.
        paper_ratio, model_ratio: throughput relative to dp's, where both are in the table.
        dp: the operator's time without communication, in the paper's row.
    """

    table: str
    method: str
    gpus: int
    tokens: int
    paper: float
    model: float
    paper_ratio: float | None = None
    model_ratio: float | None = None
    dp: float = 0.0

    @property
    def error(self) -> float:
        """Relative error of the model."""
        return self.model / self.paper - 1

    @property
    def ratio_error(self) -> float | None:
        """Difference of the ratios to dp."""
        return None if self.paper_ratio is None or self.model_ratio is None else self.model_ratio - self.paper_ratio


@dataclass(frozen=True)
class Machine:
    """The ZeCO paper's cluster: the seven parameters, in ms."""

    start: float
    hop: float
    operator_extra: float
    layer_extra: float
    step_16k: float
    step_fixed: float
    step_doubling: float

    def scan(self, gpus: float) -> float:
        """All-Scan of one state."""
        return self.start + self.hop * (gpus - 1)

    def gather(self, gpus: float, state_bytes: float) -> float:
        """All-gather of a state of each GPU."""
        return self.start + (gpus - 1) * state_bytes * _MS_PER_BYTE

    def step(self, method: str, gpus: float, tokens: float) -> float:
        """A training step, for a method that `tables` has."""
        dp = self.step_16k * tokens / 16_384 + self.step_fixed + self.step_doubling * math.log2(gpus / NODE)
        return dp + LAYERS * self._above_dp(method, gpus, tokens, _MODEL, self.layer_extra)

    def operator(self, method: str, gpus: float, tokens: float, dp: float) -> float:
        """Forward + backward of the operator, of which dp's is given."""
        return dp + self._above_dp(method, gpus, tokens, _OPERATOR, self.operator_extra, dp)

    def _above_dp(
        self, method: str, gpus: float, tokens: float, state_bytes: float, extra: float, operator: float | None = None
    ) -> float:
        if method == "dp":
            return 0.0
        if method == "zeco":
            return 2 * self.scan(gpus) + extra
        if method == "lasp2":
            return 2 * self.gather(gpus, state_bytes)
        # The model's operator has as many channels as Tables 3 and 4 measure: 6.4 ms for 16,384 tokens.
        operator = operator or 6.4 * tokens / 16_384
        return (gpus - 1) * (2 * self.hop + LASP1_SERIAL * operator)


def fit() -> Machine:
    """Fit the seven parameters to the rows of All-Scan, ZeCO and dp, and to the ratios of ZeCO to dp."""
    system: list[list[float]] = []
    targets: list[float] = []

    def add(coefficients: Sequence[float], value: float, scale: float) -> None:
        system.append([c * scale for c in coefficients])
        targets.append(value * scale)

    for row in reference("zeco_collectives_ms"):
        add([1, row["gpus"] - 1, 0, 0, 0, 0, 0], row["all_scan"], 1 / row["all_scan"])
    for row in reference("zeco_operator_ms"):
        add([2, 2 * (row["gpus"] - 1), 1, 0, 0, 0, 0], row["zeco"] - row["dp"], 1 / row["zeco"])
    for row in reference("zeco_model_tokens_per_second_per_gpu"):
        gpus, tokens = row["gpus"], row["seq_len_per_gpu"]
        dp, zeco = (1e3 * tokens / row[name] for name in ("dp", "zeco"))
        of_dp = [0, 0, 0, 0, tokens / 16_384, 1, math.log2(gpus / NODE)]
        of_zeco = [2 * LAYERS, 2 * LAYERS * (gpus - 1), 0, LAYERS, *of_dp[4:]]
        add(of_dp, dp, 1 / dp)
        add(of_zeco, zeco, 1 / zeco)
        # dp / zeco − its value in the table, times the paper's time instead of the model's.
        add([d - dp / zeco * z for d, z in zip(of_dp, of_zeco, strict=True)], 0.0, _RATIO_WEIGHT / zeco)
    return Machine(*map(float, _fit(np.array(system), np.array(targets))))


def tables() -> list[Row]:
    """Every row of the papers' tables with the model's value."""
    machine, rows = fit(), list[Row]()
    for row in reference("zeco_collectives_ms"):
        gpus = int(row["gpus"])
        modelled = {"all_scan": machine.scan(gpus), "all_gather": machine.gather(gpus, _COLLECTIVE)}
        rows += [Row("ZeCO 2", name, gpus, 0, row[name], value) for name, value in modelled.items()]
    for row in reference("zeco_operator_ms"):
        gpus, tokens, dp = int(row["gpus"]), int(row["seq_len_per_gpu"]), row["dp"]
        table = f"ZeCO {3 if tokens == 16_384 else 4}"
        for name in ("zeco", "lasp2", "lasp1"):
            value = machine.operator(name, gpus, tokens, dp)
            rows.append(Row(table, name, gpus, tokens, row[name], value, dp=dp))
    for row in reference("zeco_model_tokens_per_second_per_gpu"):
        gpus, tokens = int(row["gpus"]), int(row["seq_len_per_gpu"])
        dp = machine.step("dp", gpus, tokens)
        for name in ("dp", "zeco", "lasp2", "lasp1"):
            if name in row:
                step = machine.step(name, gpus, tokens)
                ratios = (None, None) if name == "dp" else (row[name] / row["dp"], dp / step)
                table = f"ZeCO {5 if tokens == 16_384 else 6}"
                rows.append(Row(table, name, gpus, tokens, row[name], 1e3 * tokens / step, *ratios))
    fixed, per_16k = fit_lasp2()
    for row in reference("lasp2_scalability"):
        if "tokens_per_second" in row:
            length = row["seq_len"]
            value = length / (fixed + per_16k * length / 16_384)
            rows.append(Row("LASP-2 6", "lasp2", int(row["gpus"]), int(length), row["tokens_per_second"], value))
    return rows


def fit_lasp2() -> tuple[float, float]:
    """Seconds of a step of LASP-2's Table 6: fixed, and for each 16,384 tokens of the sequence."""
    rows = [row for row in reference("lasp2_scalability") if "tokens_per_second" in row]
    seconds = np.array([row["seq_len"] / row["tokens_per_second"] for row in rows])
    system = np.array([[1, row["seq_len"] / 16_384] for row in rows]) / seconds[:, None]
    found = _fit(system, np.ones(len(rows)))
    # Centred, so that throughputs err no more than times: 1 / (1 − e) exceeds 1 + e.
    ratios = system @ found
    fixed, per_16k = found / math.sqrt(ratios.min() * ratios.max())
    return float(fixed), float(per_16k)


def _fit(system: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x of least squares whose |system x − targets| stay within the limit.

    Weights of large errors grow until they do (Lawson's algorithm, which would go on to the least of largest errors).
    """
    weights = np.full(len(targets), 1 / len(targets))
    best, least = np.zeros(system.shape[1]), math.inf
    for _ in range(1000):
        roots = np.sqrt(weights)
        found = np.linalg.lstsq(system * roots[:, None], targets * roots, rcond=None)[0]
        errors = np.abs(system @ found - targets)
        if errors.max() < least:
            best, least = found, float(errors.max())
        if least <= _LIMIT:
            break
        weights *= errors
        weights /= weights.sum()
    return best
