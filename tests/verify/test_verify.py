"""`zeco_train.verify`: correct code passes, every kind of broken scan or method is reported, mistakes are refused."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.commands import TORCHRUN, Command, Outcome, check_line
from tests.support.distributed import run_distributed
from zeco_train.config.overrides import load_settings
from zeco_train.lifecycle.join import Launch
from zeco_train.ops import oracle
from zeco_train.ops.operator import Target
from zeco_train.ops.seam import ScanRequest
from zeco_train.ops.slow_paths import find_slow_paths
from zeco_train.ops.softmax.span import Attended, AttendedHeads, Span
from zeco_train.sp.backend import TappedScan
from zeco_train.sp.exchange import local_exchange
from zeco_train.system.files import jsonable
from zeco_train.verify import __main__ as command
from zeco_train.verify import cases
from zeco_train.verify.config import LIMITS, METHODS, VerifyConfig
from zeco_train.verify.reference import ALONE, exact
from zeco_train.verify.report import Deviation, VerifyRow, deviations, line, relative_error, summary
from zeco_train.verify.runs import run_one_device
from zeco_train.verify.whole import LAUNCHED_DOCUMENTS, SOFTMAX, VERIFIED, Whole

pytestmark = pytest.mark.numeric

SMALL = ["heads=2", "key_dim=8", "device=cpu"]
OF_GLA = [*SMALL, "value_dim=5", "operator=gla"]
CPU = torch.device("cpu")


def verify(rank: int, world_size: int, *arguments: str) -> tuple[int, str]:
    """The command, on one of the ranks of `run_distributed`."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    # The ranks have joined through a file, but the command expects the variables of a launcher.
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = command.main(["table=true", *arguments])
    return code, out.getvalue()


def passing(world_size: int, *arguments: str) -> list[str]:
    """The lines of a run in which all comparisons pass; the first rank prints them."""
    (code, table), *others = run_distributed(verify, world_size, *arguments)
    assert (code, others) == (0, [(0, "")] * (world_size - 1)), table
    assert table.splitlines()[-1].startswith("ok: ")
    return table.splitlines()


def rows_of(lines: list[str], name: str) -> list[str]:
    return [row for row in lines if row.startswith(("fp", "bf")) and f" {name} " in row]


def test_kernels_are_asked_about_for_each_operator_and_dtype() -> None:
    config = load_settings(VerifyConfig, ["key_dim=300"]).resolve(torch.device("cuda"), 1)
    found = find_slow_paths(config.calls, Target("cuda"))
    # GLA's kernels have no largest head dim; FlashAttention is of bf16.
    assert [str(path.call) for path in found] == [f"softmax of K 300, V 300 in {dtype}" for dtype in ("fp32", "bf16")]


_SCANS = ("lasp1", "lasp2", "zeco:chain:p2p", "zeco:two_shot:p2p", "zeco")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "dtypes"),
    [(2, "fp64"), *(pytest.param(*case, marks=pytest.mark.campaign) for case in ((2, "bf16"), (4, "fp64")))],
)
def test_every_backend_on_every_split_passes(world_size: int, dtypes: str) -> None:
    table = passing(world_size, *OF_GLA, "tokens=[16]", f"dtypes=[{dtypes}]")
    for backend in _SCANS:
        rows = rows_of(table, backend)
        assert {row.split()[1] for row in rows} == {str(n) for n in (1, 2, 4) if world_size % n == 0}, backend
        assert all(row.endswith(" ok") for row in rows)
    assert len(rows_of(table, "dp")) == 2  # groups of one rank, with and without documents
    skipped = [row for row in table if "skipped:" in row]
    assert len(skipped) == 2 * (world_size // 2)
    assert all("symmetric" in row and "needs GPUs of one NVLink domain" in row for row in skipped)


@pytest.mark.slow
def test_every_method_passes_with_documents_and_windows() -> None:
    table = passing(2, *SMALL, "operator=softmax", "sp_sizes=[2]", "heads=4", "tokens=[24]", "dtypes=[fp64]")
    assert len(rows_of(table, "one device, in halves")) == 2, "without a window, where queries are paired"
    layouts = ["", ", window 36", ", documents over ranks", ", documents over ranks, window 36"]
    for name in ("one device", "one device, in shards", *METHODS):
        rows = rows_of(table, name)
        assert all(row.endswith(" ok") for row in rows), name
        assert [layout for layout in layouts if any(f"softmax B1 H4/2{layout}  " in row for row in rows)] == layouts, (
            name
        )
        assert len(rows) == 4
    assert not rows_of(table, "lasp2")


@pytest.mark.slow
def test_plain_run_includes_softmax_with_the_fewest_tokens_and_writes_its_results(tmp_path: Path) -> None:
    """And a method that cannot spread the heads is skipped in one row."""
    selected = ["backends=[lasp2,zeco:chain:symmetric]", "methods=[ring,ulysses]", "sp_sizes=[2]", "tokens=[12,9]"]
    out = tmp_path / "results.json"
    table = passing(2, *SMALL, "value_dim=5", *selected, "dtypes=[fp64]", "heads=3", f"out={out}")
    tokens = {name: [row.split()[3] for row in rows_of(table, name)] for name in ("lasp2", "ring")}
    assert tokens == {"lasp2": ["12", "12", "9", "9"], "ring": ["9"] * 4}
    (row,) = rows_of(table, "ulysses")
    assert row.endswith("skipped: needs ranks that divide the 3 heads of queries, not 2")
    results = json.loads(out.read_text())
    assert results["machine"]["ranks"] == "2"
    of_documents = {row["backend"]: row for row in results["rows"] if row["layout"].endswith("documents over ranks")}
    assert of_documents["lasp2"]["ok"]
    assert set(of_documents["lasp2"]["ranks"][1]) == {"o", "dq", "dk", "dv", "dg", "R", "D_in"}
    assert [row["skipped"] for row in results["rows"] if row["backend"] == "zeco:chain:symmetric"][0]  # noqa: RUF015


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operator", [name for name in VERIFIED if name != "gla"])
def test_operators_on_one_device_are_within_the_limits(operator: str, dtype: torch.dtype) -> None:
    whole = Whole("a test", operator, 100, 1, heads=5, groups=5, key_dim=6, value_dim=5, documents=LAUNCHED_DOCUMENTS,
                  carry=True, dtype=dtype, is_launched=True)  # fmt: skip
    (expected,) = exact(whole)
    for run in run_one_device(whole, whole.part(0), ALONE).values():
        limit = LIMITS["fp32" if dtype is torch.float32 else "bf16"]
        for name, deviation in deviations(run, expected).items():
            assert deviation.error <= limit, name


class BrokenScan(TappedScan):
    """A scan with a fault in its inputs or outputs."""

    def __init__(self, scan: Any, rank: int, fault: str) -> None:
        super().__init__(scan)
        self._rank, self._fault = rank, fault

    def launch(self, request: ScanRequest) -> Any:
        if self._fault == "decays dropped":
            request = replace(request, transition=torch.zeros_like(request.transition))
        return super().launch(request)

    def received(self, request: ScanRequest, state: Tensor) -> Tensor:
        if self._fault == "no reverse scan" and request.reverse:
            return torch.zeros_like(state)
        if self._fault == "off on rank 1" and self._rank == 1 and not request.reverse:
            return state * 1.02
        return state.bfloat16().to(state.dtype) if self._fault == "low precision" else state


class BrokenMethod:
    """A method with a fault."""

    def __init__(self, method: Any, rank: int, fault: str) -> None:
        self._method, self._rank, self._fault = method, rank, fault
        self.heads_over = method.heads_over

    def forward(self, q: Tensor, k: Tensor, v: Tensor, span: Span, *rest: Any) -> Attended | AttendedHeads:
        if self._fault == "window ignored":
            span = replace(span, window=None)
        found = self._method.forward(q, k, v, span, *rest)
        return found._replace(o=found.o * 1.02) if self._fault == "off on rank 1" and self._rank == 1 else found

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, *rest: Any) -> tuple[Any, ...]:
        dq, dk, dv = self._method.backward(do, q, k, v, attended, *rest)
        if self._fault == "low precision":
            dv = dv.half().to(dv.dtype)
        # What rank 1 reads of rank 0's tokens is left out.
        return dq, torch.zeros_like(dk) if self._fault == "gradients lost" and self._rank == 0 else dk, dv


# By operator: settings, and faults; bf16 is in `DTYPE`.
SCAN_FAULTS = ("none", "decays dropped", "no reverse scan", "off on rank 1", "low precision")
METHOD_FAULTS = ("none", "off on rank 1", "gradients lost", "low precision", "window ignored")
OF_FAULTS = {
    "gla": ([*OF_GLA, "backends=[lasp2]"], SCAN_FAULTS),
    SOFTMAX: ([*SMALL, "operator=softmax", "window=8", "methods=[ring]"], METHOD_FAULTS),
}


def once(found: dict[Whole, Any], function: Any, whole: Whole, *rest: Any) -> Any:
    return found[whole] if whole in found else found.setdefault(whole, function(whole, *rest))


def failures_of_faults(rank: int, world_size: int) -> dict[tuple[str, str], list[str]]:
    """Failures of the last row, a faulty scan's or method's, by operator and fault."""
    failures, connect, build = {}, cases.connect, cases.build_attention
    # What no fault reaches is the same for all of an operator and dtype.
    known = {name: partial(once, {}, getattr(cases, name)) for name in ("exact", "run_in_float64", "run_one_device")}
    for operator, (arguments, faults) in OF_FAULTS.items():
        settings = load_settings(VerifyConfig, [*arguments, "tokens=[24]", "documents=false", "sp_sizes=[2]"])
        for fault in faults:
            dtype = "bf16" if (operator, fault) == ("gla", "off on rank 1") else "fp32"
            config = replace(settings, dtypes=[dtype]).resolve(CPU, world_size)

            def broken(*args: Any, fault: str = fault) -> Any:
                return connect(*args).wrapped(lambda scan: BrokenScan(scan, rank, fault))

            def broken_method(*args: Any, fault: str = fault) -> Any:
                return BrokenMethod(build(*args), rank, fault)

            with mock.patch.multiple(cases, connect=broken, build_attention=broken_method, **known):
                verification = cases.Verification(config, Launch(rank, world_size, rank), CPU, lambda activity: None)
                *others, last = verification.rows()
                verification.drain()
            assert last.backend == ("lasp2" if operator == "gla" else "ring")
            assert not any(row.failures for row in others), "only the backend or method is broken"
            failures[operator, fault] = last.failures
    return failures


def test_broken_scans_and_methods_fail_with_tensor_and_rank() -> None:
    found, second = run_distributed(failures_of_faults, 2)
    assert found == second, "all ranks judge alike"
    assert not found["gla", "none"]
    assert not found[SOFTMAX, "none"]
    assert any(text.startswith("carry_out on rank") for text in found["gla", "decays dropped"])
    reverse = found["gla", "no reverse scan"]
    assert any(text.startswith("D_in on rank 0 is off by 1.0e+00") for text in reverse)
    assert any(text.startswith("dv on rank 0") for text in reverse)
    assert not any(text.startswith(("o ", "R ", "dq ")) for text in reverse)
    off = found["gla", "off on rank 1"]
    assert any(text.startswith("R on rank 1 is off by 2.0e-02 > 1e-02") for text in off)
    assert not any("rank 0" in text for text in off if text.startswith(("R", "o", "dq")))
    assert any(text.startswith("o on rank 1 is off by 2.0e-02 > 1e-03") for text in found[SOFTMAX, "off on rank 1"])
    assert [text.split(" is off")[0] for text in found[SOFTMAX, "gradients lost"][:-1]] == ["dk on rank 0"]
    assert any(text.startswith("o on rank") for text in found[SOFTMAX, "window ignored"])
    # Detected only by the comparison with one device.
    assert any("as much as another chunking there" in text for text in found["gla", "low precision"])
    (found_dv,) = found[SOFTMAX, "low precision"]
    assert found_dv.startswith("dv on rank ")
    assert "as much as another chunking there" in found_dv


def test_wrong_result_gives_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*OF_GLA, "tokens=[16]", "dtypes=[fp64]", "backends=[dp]", "documents=false"]
    build = cases.connect
    with mock.patch.object(
        cases, "connect", lambda *args: build(*args).wrapped(lambda scan: BrokenScan(scan, 0, "no reverse scan"))
    ):
        with mock.patch.object(command, "_PROGRESS_SECONDS", 0):
            assert command.main(arguments) == 1
        printed = capsys.readouterr()
        short = printed.out.splitlines()
        assert [line.partition(" in ")[0] for line in printed.err.splitlines()] == [
            f"… {n} comparisons" for n in range(1, 5)
        ]
        assert command.main([*arguments, "table=true"]) == 1
        table = capsys.readouterr().out.splitlines()
    # Without the table only the comparison that failed, and one line that says how to get it.
    assert [line for line in short if line.startswith("fp64")] == []
    assert "table=true" in short[-6]
    assert short[-5].startswith("FAILED: fp64 1 × 16 ")
    for out in (short, table):
        assert "on rank 0 is off by" in out[-5]
        assert out[-3].startswith("not covered here: what these settings leave out")
        assert out[-1].startswith("FAILED: 3 of 4 comparisons ok")
    assert sum(line.startswith("fp64") for line in table) == 4


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("operator=softmin", ("operator=softmin", "gla", "softmax")),
        ("operator=softmax backends=[lasp2]", ("backends=", "would be ignored by operator=softmax")),
        ("operator=scalar_decay window=8", ("window=8", "would be ignored by operator=scalar_decay")),
        ("methods=[rings]", ("methods=rings", "all_gather, ulysses, ring, all_gather:unpaired")),
        ("methods=[]", ("methods=[]", "must be a list of")),
        ("window=1", ("window=1", "≥ 2")),
        ("heads=4 key_heads=3", ("key_heads=3", "must divide the 4 heads of queries")),
        ("tokens=[4]", ("tokens=[4]", "≥ 8")),
        ("token=[64]", ("token=[64]", "tokens")),
        ("dtypes=[fp64,fp64]", ("dtypes", "twice")),
        ("sp_sizes=[2]", ("sp_sizes=2", "must divide the number of ranks: 1")),
        ("documents=perhaps", ("documents=perhaps", "true or false")),
        ("heads=0", ("heads=0", "≥ 1")),
        ("out=/no/such/folder/results.json", ("out=/no/such/folder/results.json", "does not exist")),
        ("timeout=0", ("timeout=0", "> 0")),
        ("nonsense", ("nonsense", "KEY=VALUE")),
    ],
)
def test_invalid_arguments_give_one_line_errors(
    argument: str, parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code = command.main(["device=cpu", *argument.split()])
    captured = capsys.readouterr()
    check_line(Outcome(code, captured.out, captured.err), 2, *parts)


def torchrun(ranks: int, folder: Path, script: list[str], *arguments: str) -> Command:
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)]
    return Command([*launcher, *script, *arguments], folder)


@pytest.mark.parametrize(("documents", "window"), [(LAUNCHED_DOCUMENTS, 7), (None, None)])
def test_reference_is_softmax_over_the_visible_keys(documents: str | None, window: int | None) -> None:
    """A few queries at a time, against the formula over the whole sequence."""
    whole = Whole("a test", SOFTMAX, 40, 1, heads=4, groups=2, key_dim=6, value_dim=6, documents=documents,
                  window=window, is_launched=True)  # fmt: skip
    q, k, v, do = (x.requires_grad_(name != "do") for name, x in whole.part(0).items())
    scores = torch.einsum("bihk,bjhk->bhij", q, k.repeat_interleave(2, 2)) / math.sqrt(6)
    for i in range(40):
        start = max(border for border in whole.borders if border <= i)
        first = start if window is None else max(start, i - window + 1)
        scores[:, :, i, :first] = scores[:, :, i, i + 1 :] = -torch.inf
    o = torch.einsum("bhij,bjhv->bihv", scores.softmax(-1), v.repeat_interleave(2, 2))
    grads = torch.autograd.grad(o, (q, k, v), do)
    expected = dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=True))
    with mock.patch.object(oracle, "_SCORES", 4 * 40 * 9):
        (found,) = exact(whole)
    for name, deviation in deviations(found, expected).items():
        assert deviation.error <= 1e-13, name


def test_documents_straddle_ranks_and_start_at_an_edge() -> None:
    whole = Whole("a test", "gla", 64, 4, documents=LAUNCHED_DOCUMENTS, carry=True)
    positions = [whole.position(local_exchange(), rank) for rank in range(4)]
    assert [position.before() for position in positions] == [1, 32, 96, 0]
    borders = [found.tolist() for position in positions if (found := position.cu_seqlens()) is not None]
    assert borders == [[0, 3, 21, 32, 64], [0, 64], [0, 16, 64], [0, 32, 64]]
    assert replace(whole, carry=False).position(local_exchange(), 0).before() == 0


def test_non_finite_results_never_pass() -> None:
    x = torch.ones(1, 3, 2, 4)
    for wrong in (math.nan, math.inf):
        broken = x.clone()
        broken[0, 1, 1, 2] = wrong
        found = deviations({"o": broken}, {"o": x}, ({"o": x}, {"o": x}))
        row = VerifyRow("fp32", 3, 1, "one document", "dp", ({"dq": Deviation(0.0)}, found), 1e-3)
        assert row.failures[0].startswith("o on rank 1 is off by")
        assert "FAILED" in line(row)
        assert summary([row]).startswith("FAILED: 0 of 1")
        json.dumps(jsonable(row.as_dict()), allow_nan=False)


def test_relative_error_is_of_the_worst_head_and_a_zero_gradient_must_match_exactly() -> None:
    expected = torch.tensor([100.0, 1.0]).expand(1, 3, 5, 2).transpose(2, 3)
    actual = expected.clone()
    actual[:, :, 1] *= 1.1
    assert relative_error("o", actual, expected) == pytest.approx(0.1)
    assert relative_error("dg", actual, expected) < 2e-3
    zero = torch.zeros(1, 2, 3, 4)
    assert relative_error("dq", zero, zero) == 0
    assert relative_error("dq", zero + 1e-30, zero) == math.inf
