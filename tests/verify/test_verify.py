"""`zeco_train.verify`: correct code passes, every kind of broken scan is reported, invalid arguments are refused."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.commands import TORCHRUN, Command, Outcome, check_line
from tests.support.comparison import largest
from tests.support.distributed import run_distributed
from tests.support.recurrence import recurrence
from zeco_train.config.overrides import load_settings
from zeco_train.lifecycle.join import Launch
from zeco_train.ops import oracle
from zeco_train.ops.operator import Target
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.seam import ScanRequest
from zeco_train.ops.slow_paths import find_slow_paths
from zeco_train.sp.exchange import local_exchange
from zeco_train.system.files import jsonable
from zeco_train.verify import cases, command
from zeco_train.verify import runs as huge
from zeco_train.verify.config import LIMITS, VerifyConfig
from zeco_train.verify.reference import SequenceRank, exact
from zeco_train.verify.report import Deviation, VerifyRow, deviations, line, relative_error, summary
from zeco_train.verify.runs import run_one_device
from zeco_train.verify.sequences import VERIFIED, Sequence

pytestmark = pytest.mark.numeric

SMALL = ["heads=2", "key_dim=8", "value_dim=5", "device=cpu"]
CPU = torch.device("cpu")


def small(**changes: Any) -> Sequence:
    fields = {"tokens": 100, "num_ranks": 1, "batch": 1, "heads": 2, "key_dim": 6, "value_dim": 5}
    fields |= {"dtype": torch.float64, "documents": False, "carry": True}
    return Sequence("a test", **(fields | changes))  # type: ignore[arg-type]


def verify(rank: int, world_size: int, *arguments: str) -> tuple[int, str]:
    """The command for a small case, on one of the ranks of `run_distributed`."""
    return run_command(rank, world_size, *SMALL, *arguments)


def run_command(rank: int, world_size: int, *arguments: str) -> tuple[int, str]:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    # The ranks have joined through a file, but the command expects the variables of a launcher.
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = command.main(["table=true", *arguments])
    return code, out.getvalue()


def test_kernels_are_asked_about_for_each_operator_and_dtype() -> None:
    config = load_settings(VerifyConfig, ["key_dim=300"]).resolve(torch.device("cuda"), 1)
    found = find_slow_paths(config.calls, Target("cuda"))
    # GLA's kernels have no largest head dim; FlashAttention is of bf16.
    assert [str(path.call) for path in found] == [f"softmax of K 300, V 300 in {dtype}" for dtype in ("fp32", "bf16")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "dtypes"),
    [(2, "fp64"), *(pytest.param(*case, marks=pytest.mark.campaign) for case in ((2, "bf16"), (4, "fp64")))],
)
def test_every_backend_on_every_split_passes(world_size: int, dtypes: str) -> None:
    results = run_distributed(verify, world_size, "operator=gla", "tokens=[16]", f"dtypes=[{dtypes}]")
    table = results[0][1].splitlines()
    assert [code for code, _ in results] == [0] * world_size, results[0][1]
    assert all(not out for _, out in results[1:])
    assert table[-1].startswith("ok: ")
    for backend in ("lasp1", "lasp2", "zeco:chain:p2p", "zeco:two_shot:p2p", "zeco"):
        rows = [row for row in table if f" {backend} " in row]
        assert {row.split()[1] for row in rows} == {str(n) for n in (1, 2, 4) if world_size % n == 0}, backend
        assert all(row.endswith(" ok") for row in rows)
    assert sum(" dp " in row for row in table) == 2  # groups of one rank, with and without documents
    skipped = [row for row in table if "skipped:" in row]
    assert len(skipped) == 2 * (world_size // 2)
    assert all("symmetric" in row and "needs GPUs of one NVLink domain" in row for row in skipped)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("operator", [name for name in VERIFIED if name != "gla"])
def test_every_backend_passes_with_every_operator(operator: str) -> None:
    """Of two heads one has no decays in `SMALL`; of five, four have decays up to 20 a token."""
    arguments = ["tokens=[30]", "dtypes=[fp64]", "sp_sizes=[2]", "heads=5", f"operator={operator}"]
    results = run_distributed(verify, 2, *arguments)
    assert [code for code, _ in results] == [0, 0], results[0][1]
    table = results[0][1].splitlines()
    assert f", operator {operator}" in table[0]
    rows = [row for row in table if row.endswith(" ok")]
    assert sum(" float64 itself " in row for row in rows) == 2
    for backend in ("lasp1", "lasp2", "zeco:chain:p2p", "zeco:two_shot:p2p", "zeco"):
        assert sum(f" {backend} " in row for row in rows) == 2, backend


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operator", [name for name in VERIFIED if name != "gla"])
def test_operators_on_one_device_are_within_the_limits(operator: str, dtype: torch.dtype) -> None:
    sequence = small(tokens=100, heads=5, documents=True, dtype=dtype, operator=operator)
    part, place = sequence.part(0), SequenceRank(0, 1)
    expected = exact(sequence, part, place)
    for run in run_one_device(sequence, part, place).values():
        limit = LIMITS["fp32" if dtype is torch.float32 else "bf16"]
        for name, deviation in deviations(run, expected).items():
            assert deviation.error <= limit, name


class BrokenScan:
    """A scan with a fault in its inputs or outputs."""

    def __init__(self, scan: Any, rank: int, fault: str) -> None:
        self._scan, self._rank, self._fault = scan, rank, fault

    def launch(self, request: ScanRequest) -> Any:
        if self._fault == "decays dropped":
            request = replace(request, transition=torch.zeros_like(request.transition))
        state, reverse = request.state, request.reverse
        pending = self._scan.launch(request)
        wait: Callable[[], Tensor] = pending.wait
        if self._fault == "no reverse scan" and reverse:
            pending.wait = lambda: torch.zeros_like(wait())
        if self._fault == "off on rank 1" and self._rank == 1 and not reverse:
            pending.wait = lambda: wait() * 1.02
        if self._fault == "low precision":
            pending.wait = lambda: wait().bfloat16().to(state.dtype)
        return pending

    def drain(self) -> None:
        self._scan.drain()


def failures_of_broken_scans(rank: int, world_size: int) -> dict[str, list[str]]:
    failures = {}
    build = cases.connect
    arguments = ["operator=gla", "tokens=[24]", "documents=false", "sp_sizes=[2]", "backends=[lasp2]"]
    for fault, dtype in (
        ("none", "fp32"),
        ("decays dropped", "fp32"),
        ("no reverse scan", "fp32"),
        ("off on rank 1", "bf16"),
        ("low precision", "fp32"),
    ):
        config = load_settings(VerifyConfig, [*SMALL, *arguments, f"dtypes=[{dtype}]"]).resolve(CPU, world_size)

        def broken(*args: Any, fault: str = fault) -> Any:
            return build(*args).wrapped(lambda scan: BrokenScan(scan, rank, fault))

        with mock.patch.object(cases, "connect", broken):
            verification = cases.Verification(config, Launch(rank, world_size, rank), CPU, lambda activity: None)
            rows = list(verification.rows())
            verification.drain()
        failures[fault] = [failure for row in rows for failure in row.failures]
        assert rows[-1].backend == "lasp2"
        assert not any(row.failures for row in rows[:-1]), "only the backend is broken"
    return failures


def test_broken_scans_fail_with_tensor_and_rank() -> None:
    first, second = run_distributed(failures_of_broken_scans, 2)
    assert first == second, "all ranks judge alike"
    assert not first["none"]
    assert any(text.startswith("carry_out on rank") for text in first["decays dropped"])
    reverse = first["no reverse scan"]
    assert any(text.startswith("D_in on rank 0 is off by 1.0e+00") for text in reverse)
    assert any(text.startswith("dv on rank 0") for text in reverse)
    assert not any(text.startswith(("o ", "R ", "dq ")) for text in reverse)
    assert any(text.startswith("R on rank 1 is off by 2.0e-02 > 1e-02") for text in first["off on rank 1"])
    assert not any("rank 0" in text for text in first["off on rank 1"] if text.startswith(("R", "o", "dq")))
    # detected only by the comparison with one device
    assert any("as much as another chunking there" in text for text in first["low precision"])


def test_wrong_result_gives_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "operator=gla", "tokens=[16]", "dtypes=[fp64]", "backends=[dp]", "documents=false"]
    build = cases.connect
    with mock.patch.object(
        cases, "connect", lambda *args: build(*args).wrapped(lambda scan: BrokenScan(scan, 0, "no reverse scan"))
    ):
        assert command.main(arguments) == 1
        short = capsys.readouterr().out.splitlines()
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
    assert command.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("ok: 4 of 4 comparisons ok")


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("operator=softmin", ("operator=softmin", "gla", "softmax")),
        ("operator=softmax backends=[lasp2]", ("backends=", "would be ignored by operator=softmax")),
        ("operator=softmax carry=true", ("carry=", "would be ignored by operator=softmax")),
        ("operator=scalar_decay window=8", ("window=8", "would be ignored by operator=scalar_decay")),
        ("methods=[rings]", ("methods=rings", "all_gather, ulysses, ring, all_gather:unpaired")),
        ("methods=[]", ("methods=[]", "must be a list of")),
        ("window=1", ("window=1", "≥ 2")),
        ("heads=4 key_heads=3", ("key_heads=3", "must divide the 4 heads of queries")),
        ("tokens=[4]", ("tokens=[4]", "≥ 8")),
        ("token=[64]", ("token=[64]", "tokens")),
        ("backends=[lasp3]", ("backends=lasp3", "lasp1")),
        ("dtypes=[fp64,fp64]", ("dtypes", "twice")),
        ("sp_sizes=[2]", ("sp_sizes=2", "must divide the number of ranks: 1")),
        ("huge=true", ("huge=true", "needs a CUDA device")),
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


@pytest.mark.slow
def test_results_file(tmp_path: Path) -> None:
    arguments = ["operator=gla", "tokens=[20]", "sp_sizes=[2]", "dtypes=[fp32]", "documents=true"]
    run_distributed(verify, 2, *arguments, f"out={tmp_path / 'results.json'}")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["machine"]["ranks"] == "2"
    rows = {row["backend"]: row for row in results["rows"]}
    assert rows["zeco"]["ok"]
    assert set(rows["zeco"]["ranks"][1]) == {"o", "dq", "dk", "dv", "dg", "R", "D_in"}
    assert rows["zeco:chain:symmetric"]["skipped"]


@pytest.mark.processes
@pytest.mark.slow
def test_hanging_rank_ends_verification_after_timeout(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, sys, time\n"
        "from tests.support.gate import meet\n"
        "from zeco_train.verify import cases, command\n"
        "run = cases.run_backend\n"
        "def stop(*args):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        time.sleep(600)\n"
        "    return run(*args)\n"
        "cases.run_backend = stop\n"
        "meet()\n"
        "sys.exit(command.main(sys.argv[1:]))\n"
    )
    with torchrun(2, tmp_path, [str(script)], *SMALL, "tokens=[20]", "timeout=10", "sp_sizes=[2]") as run:
        outcome = run.wait()
    assert outcome.code != 0
    assert len(outcome.errors) == 1, outcome
    assert "every rank is alive: one is stuck, or slower than timeout" in outcome.errors[0]


@pytest.mark.processes
@pytest.mark.gpu
@pytest.mark.slow
def test_verification_passes_on_gpus(tmp_path: Path) -> None:
    ranks = 1 << min(torch.cuda.device_count(), 4).bit_length() - 1
    with torchrun(ranks, tmp_path, ["-m", "zeco_train.verify"], "tokens=[1000]", "out=results.json") as run:
        outcome = run.wait()
    print(outcome.out)
    assert outcome.code == 0, outcome
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["dtype"] for row in rows} == {"fp32", "bf16"}
    assert not [row for row in rows if not row["ok"]]
    skipped = [row["skipped"] for row in rows if row["skipped"]]
    devices = range(ranks)
    if all(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b):
        assert not skipped, "the GPUs reach each other's memory"
    assert all("NVLink" in reason for reason in skipped)


@pytest.mark.few(1)
@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("operator", VERIFIED)
def test_piecewise_float64_equals_recurrence(operator: str, documents: bool, carry: bool) -> None:
    sequence = small(tokens=150, documents=documents, carry=carry, operator=operator)
    part, states = sequence.part(0), sequence.carries()
    expected = recurrence(
        operator,
        dict(zip(OPERATORS[operator].operands, sequence.complete(part), strict=True)),
        part["do"],
        sequence.restarts,
        states.get("carry_in"),
        states.get("dcarry_out"),
    )
    with mock.patch.object(oracle, "_PIECE", 64):
        pieces = exact(sequence, part, SequenceRank(0, 1))
    left_out = {"dlog_decay"} if carry else {"dlog_decay", "carry_out", "dcarry_in"}
    assert pieces.keys() - {"R", "D_in"} == expected.keys() - left_out
    for name, deviation in deviations({name: expected[name] for name in pieces.keys() & expected}, pieces).items():
        assert deviation.error <= 1e-13, name


def test_documents_straddle_ranks_and_start_at_an_edge() -> None:
    sequence = small(tokens=64, num_ranks=4, documents=True)
    positions = [sequence.position(local_exchange(), range(0, 257, 64), rank) for rank in range(4)]
    assert [position.before() for position in positions] == [1, 32, 96, 0]
    borders = [found.tolist() for position in positions if (found := position.cu_seqlens()) is not None]
    assert borders == [[0, 3, 21, 32, 64], [0, 64], [0, 16, 64], [0, 32, 64]]
    assert small(documents=True, carry=False).position(local_exchange(), (0, 64)).before() == 0


def test_huge_detects_error_in_last_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge, "_TOKENS", 128)
    config = load_settings(VerifyConfig, ["value_dim=4"])
    sequence = huge.huge_sequence(config, torch.float32, "a test", elements=128 * 4 * 4)
    assert (sequence.heads, sequence.key_dim) == (5, 64)
    sound = huge.huge_deviations(sequence, CPU)
    assert largest(deviation.error for deviation in sound.values()) < 1e-5
    run = huge.run_backend

    def overflowing(*args: Any) -> dict[str, Tensor]:
        results = run(*args)
        results["dv"][:, -1, -1] = 0
        return results

    monkeypatch.setattr(huge, "run_backend", overflowing)
    assert huge.huge_deviations(sequence, CPU)["dv"].error > 1e-2


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


def test_zero_gradient_must_match_exactly() -> None:
    zero = torch.zeros(1, 2, 3, 4)
    assert relative_error("dq", zero, zero) == 0
    assert relative_error("dq", zero + 1e-30, zero) == math.inf


def test_relative_error_of_outputs_is_of_worst_head() -> None:
    expected = torch.tensor([100.0, 1.0]).expand(1, 3, 5, 2).transpose(2, 3)
    actual = expected.clone()
    actual[:, :, 1] *= 1.1
    assert relative_error("o", actual, expected) == pytest.approx(0.1)
    assert relative_error("dg", actual, expected) < 2e-3
