"""Case `operator` with each operator: operands, the reference, results on two ranks, and the peer's refusals."""

from __future__ import annotations

import importlib.util
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.bench_settings import measure
from tests.support.commands import Outcome, run_here
from tests.support.distributed import run_distributed
from tests.support.recurrence import naive_of
from zeco_train.bench import __main__ as command
from zeco_train.bench.operator import Inputs, Shape, context_parallel, peer_attention
from zeco_train.bench.session import Session
from zeco_train.bench.variants import LocalCopyScan
from zeco_train.errors import ConfigError
from zeco_train.ops.mix import mix
from zeco_train.ops.operator import Target
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.oracle import exact_results
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.seam import ScanRequest
from zeco_train.ops.slow_paths import check_kernels, find_slow_paths
from zeco_train.sp.exchange import local_exchange
from zeco_train.system.numbers import relative_error
from zeco_train.training.config import Dtype

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
SHAPES = [
    Shape(4, 8, 16, 70),
    Shape(4, 8, 16, 70, "scalar_decay", 2),
    Shape(4, 8, 16, 70, "scalar_decay"),
    Shape(4, 8, 16, 70, "fixed_decay", 1, "retention"),
    Shape(4, 8, 16, 70, "fixed_decay", None, "none"),
    Shape(4, 8, 16, 70, "delta"),
    Shape(4, 8, 16, 70, "gated_delta", 2),
    Shape(4, 8, 16, 70, "kda"),
    Shape(4, 8, 1, 70, "hgrn"),
    Shape(4, 8, 16, 70, "gsa"),
]
SETTINGS = ["device=cpu", "warmup=1", "runs=2", "flush_mb=0", "timeout_seconds=60", "dtype=fp64"]
SMALL = [*SETTINGS, "heads=[4]", "dims=[[8,16]]", "tokens=[48]", "check_tokens=70"]


def test_operands_have_the_sizes_and_decays_of_their_operator() -> None:
    q, v, of_head = [1, 70, 4, 8], [1, 70, 4, 16], [1, 70, 4]
    sizes = {
        SHAPES[0]: [q, q, v, q],
        SHAPES[1]: [[1, 70, 2, 8], [1, 70, 2, 8], v, of_head],
        SHAPES[3]: [[1, 70, 1, 8], [1, 70, 1, 8], v, [4]],
        SHAPES[4]: [q, q, v, [4]],
        SHAPES[6]: [[1, 70, 2, 8], [1, 70, 2, 8], v, of_head, of_head],
        SHAPES[7]: [q, q, v, q, of_head],
        SHAPES[8]: [q, q],
    }
    for shape, expected in sizes.items():
        assert [list(x.shape) for x in Inputs.random(shape, Dtype.fp32, 0, CPU).operands.values()] == expected, shape
    for operands in (Inputs.random(shape, Dtype.fp64, 0, CPU).operands for shape in SHAPES[5:8]):
        assert torch.allclose(operands["k"].norm(dim=-1), torch.ones(1, dtype=torch.float64))
        assert 0 < operands["beta"].min() < operands["beta"].max() < 1
    decays = [Inputs.random(shape, Dtype.fp64, 0, CPU).operands["log_decay"] for shape in SHAPES[3:5]]
    # As `chunk_retention` of fla 0.6.0 has them.
    assert torch.allclose(decays[0], (1 - 2.0 ** (-5.0 - torch.arange(4).double())).log(), rtol=1e-12)
    assert not decays[1].any()


def test_results_are_outputs_and_gradients_of_all_operands_but_constants() -> None:
    inputs, shape = Inputs.random(SHAPES[3], Dtype.fp64, 3, CPU), SHAPES[3]
    expected = exact_results(OPERATORS[shape.operator], inputs.operands, inputs.do)
    position = SequencePosition((0, shape.tokens), exchange=local_exchange())
    found = inputs.results(lambda *operands: mix(shape.operator, operands, position)[0])
    assert [*found] == [*expected] == ["o", "dq", "dk", "dv"]
    assert all(relative_error(found[name], expected[name]) < 1e-12 for name in found)
    assert [*inputs.results(lambda *operands: mix(shape.operator, operands, position)[0], backward=False)] == ["o"]


class _Refused(torch.autograd.Function):
    """A function whose gradient is refused, as by fla for gates on some GPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        raise RuntimeError("Triton < 3.7.1 on Hopper\nproduces incorrect results")


def _peer(operator: str, change: Callable[[Tensor], Tensor]) -> Any:
    def function(q: Tensor, k: Tensor, v: Tensor, decays: Tensor | None = None, normalize: bool = True) -> Any:
        decays = torch.zeros(v.shape[2], dtype=v.dtype) if decays is None else decays
        o, state = naive_of(OPERATORS[operator])(q, k, v, decays)
        assert operator == "scalar_decay" or not normalize
        return change(o), state

    return SimpleNamespace(chunk_simple_gla=function, chunk_linear_attn=function)


def _run_with_peer(
    tmp_path: Path, operator: str, change: Callable[[Tensor], Tensor], *more: str, expected_code: int = 0
) -> tuple[dict[str, Any], Outcome]:
    arguments = [f"operator={operator}", "variants=[dp,fla]", f"out={tmp_path}", *more]
    with mock.patch.object(Session, "import_fla", return_value=_peer(operator, change)):
        outcome = run_here(command.main, "operator", *SMALL, *arguments)
    assert outcome.code == expected_code, outcome
    return json.loads((tmp_path / "results.json").read_text()), outcome


def test_rows_that_run_in_pytorch_on_a_gpu_are_marked_and_its_peers_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes are asked about as on a GPU, and timed on the CPU."""
    gpu = Target("cuda")
    patched = {
        "operator.find_slow_paths": lambda calls, target, tokens: find_slow_paths(calls, gpu, tokens),
        "session.check_kernels": lambda field, wanted, calls, target: check_kernels(field, wanted, calls, gpu),
    }
    for name, function in patched.items():
        monkeypatch.setattr(f"zeco_train.bench.{name}", function)
    settings = "decay=none", "dims=[[8,257]]", "passes=[forward]"
    results, outcome = _run_with_peer(tmp_path, "fixed_decay", lambda o: o, *settings)
    notes = {row["variant"]: row.get("note") for row in results["rows"]}
    assert notes["dp"].startswith("fixed_decay of K 8, V 257 in fp64 in PyTorch, slower than kernels")
    assert notes["fla"] is None
    warning = "bench operator: fixed_decay of K 8, V 257 in fp64 runs in PyTorch, slower than kernels"
    assert outcome.out.count(warning) == 1
    assert sum(note.startswith(warning) for note in results["notes"]) == 1


@pytest.mark.slow
def test_right_peer_is_measured_and_a_refused_gradient_leaves_its_forward_pass(tmp_path: Path) -> None:
    results, _ = _run_with_peer(tmp_path / "both", "scalar_decay", _Refused.apply)
    assert {row["variant"] for row in results["rows"]} == {"dp"}
    expected = "is refused by fla itself (Triton < 3.7.1 on Hopper produces incorrect results); passes=[forward] may be"
    assert any(f"fla is not measured: variants=fla: {expected} measured" == note for note in results["notes"])
    results, _ = _run_with_peer(tmp_path / "forward", "scalar_decay", _Refused.apply, "passes=[forward]")
    assert [row["variant"] for row in results["rows"]] == ["dp", "fla"]
    results, _ = _run_with_peer(tmp_path / "right", "fixed_decay", lambda o: o, "decay=none")
    rows = [row for row in results["rows"] if row["variant"] == "fla"]
    assert [row["pass"] for row in rows] == ["forward", "forward_backward"]
    assert all(row["relative_error"] < 1e-12 for row in rows)


def test_wrong_peer_is_a_failure_and_the_others_are_timed(tmp_path: Path) -> None:
    results, outcome = _run_with_peer(tmp_path, "scalar_decay", lambda o: 1.2 * o, expected_code=1)
    assert "FAILED: fla is not measured, it is wrong: o on rank 0 has a relative error of 0.2" in outcome.err
    assert {row["variant"] for row in results["rows"]} == {"dp"}


@pytest.mark.parametrize(
    ("shape", "module", "function"),
    [
        (SHAPES[5], "fla.ops.delta_rule", "chunk_delta_rule"),
        (Shape(4, 8, 16, 70, "gated_delta"), "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        (SHAPES[7], "fla.ops.kda", "chunk_kda"),
    ],
)
def test_peers_of_delta_rules_take_the_same_operands(shape: Shape, module: str, function: str) -> None:
    session, operator = mock.Mock(spec=Session), OPERATORS[shape.operator]
    session.import_fla.side_effect = {module: SimpleNamespace(**{function: naive_of(operator)})}.get
    inputs = Inputs.random(shape, Dtype.fp64, 0, CPU)
    found = inputs.results(peer_attention(shape, session))
    expected = inputs.results(lambda *operands: naive_of(operator)(*operands)[0])
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_peer_without_heads_takes_channels_side_by_side() -> None:
    """fla's own plain recurrence, in fp32: it has no other dtype."""
    package = importlib.util.find_spec("fla")
    assert package is not None
    assert package.submodule_search_locations is not None
    # By its path: the package itself takes seconds to import.
    naive = runpy.run_path(str(Path(package.submodule_search_locations[0], "ops", "hgrn", "naive.py")))
    session = mock.Mock(spec=Session)
    session.import_fla.side_effect = {"fla.ops.hgrn": SimpleNamespace(chunk_hgrn=naive["naive_recurrent_hgrn"])}.get
    inputs = Inputs.random(SHAPES[8], Dtype.fp32, 0, CPU)
    found = inputs.results(peer_attention(SHAPES[8], session))
    expected = inputs.results(lambda *operands: naive_of(OPERATORS["hgrn"])(*operands)[0])
    assert all(relative_error(found[name], expected[name]) < 1e-6 for name in expected)


def test_peer_without_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="not groups=2"):
        peer_attention(SHAPES[1], mock.Mock(spec=Session))


def test_copied_scan_returns_its_own_state() -> None:
    state = torch.randn(1, 2, 3, 4)
    pending = LocalCopyScan().launch(ScanRequest(state, torch.zeros(1, 2, 3), want_carry=True))
    received = pending.wait()
    pending.finish()
    assert torch.equal(received, state)
    assert received.data_ptr() != state.data_ptr()
    assert torch.equal(pending.carry_out(), state)


HEADS, KEYS, VALUES, TOKENS = 2, 4, 8, 24
SIZES = [f"heads=[{HEADS}]", f"dims=[[{KEYS},{VALUES}]]", f"tokens=[{TOKENS}]", f"check_tokens={TOKENS}"]
# A state, and a matrix transition, in fp64.
STATE, MATRIX = HEADS * KEYS * VALUES * 8e-6, HEADS * KEYS * KEYS * 8e-6


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    into = x.new_empty(dist.get_world_size(group) * x.shape[1], *x.shape[2:])
    dist.all_gather_into_tensor(into, x.detach()[0].contiguous(), group=group)
    return into[None]


def _chunk_kda(*operands: Tensor, cp_context: SimpleNamespace) -> tuple[Tensor, None]:
    """As fla's function takes its operands: this rank's, of the sequence that its context knows."""
    whole = [_gathered(x, cp_context.group) for x in operands]
    assert cp_context.cu_seqlens.tolist() == cp_context.cu_seqlens_cpu.tolist() == [0, whole[0].shape[1]]
    tokens, rank = operands[0].shape[1], dist.get_rank(cp_context.group)
    return naive_of(OPERATORS["kda"])(*whole)[0][:, rank * tokens : (rank + 1) * tokens], None


def _import(session: Session, module: str, variant: str = "fla") -> Any:
    if variant == "fla":
        raise ConfigError("variants", variant, "is not here")
    return {
        "fla.ops.kda": SimpleNamespace(chunk_kda=_chunk_kda),
        "fla.ops.cp": SimpleNamespace(build_cp_context=SimpleNamespace),
    }[module]


def _case(rank: int, world_size: int, folder: str) -> None:
    variants = "variants=[dp,copy,zeco:chain,lasp1,lasp2,fla,fla_cp]"
    settings = [*SETTINGS, *SIZES, variants, "operator=kda", "trace=true", "passes=[forward]", f"out={folder}"]
    with mock.patch.object(Session, "import_fla", _import):
        measure(rank, world_size, "operator", *settings)


@pytest.mark.slow
def test_case_on_two_ranks_and_bytes_of_its_variants(tmp_path: Path) -> None:
    run_distributed(_case, 2, str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    rows = {row["variant"]: row for row in results["rows"]}
    # The stand-in gathers q, k, g, v and beta.
    gathered = TOKENS * HEADS * (3 * KEYS + VALUES + 1) * 8e-6
    expected = {"dp": None, "copy": None, "zeco:chain": STATE, "lasp1": STATE, "lasp2": STATE + MATRIX}
    expected["fla_cp"] = gathered
    assert [*rows] == [row["variant"] for row in results["rows"]] == [*expected]
    for name, sent in expected.items():
        assert rows[name]["sent_mb"] == (None if sent is None else pytest.approx(sent)), name
        assert name == "copy" or rows[name]["relative_error"] < 1e-12
    zeco, copy, dp = (rows[name] for name in ("zeco:chain", "copy", "dp"))
    assert zeco["exposed_us"] == pytest.approx(1e3 * (zeco["median_ms"] - copy["median_ms"]))
    assert zeco["ratio"] == zeco["median_ms"] / dp["median_ms"]
    assert zeco["tokens_per_second_per_gpu"] == pytest.approx(1e3 * TOKENS / zeco["median_ms"])
    assert dp["exposed_us"] is None
    assert any(note.startswith("fla is not measured: variants=fla: ") for note in results["notes"])
    assert any("no trace on a CPU" in note for note in results["notes"])


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        (Shape(4, 8, 16, 70), "variants=fla_cp: fla has context parallelism for gated_delta and kda, not gla"),
        (Shape(4, 8, 16, 70, "kda", 2), "variants=fla_cp: is measured with as many heads of q and k as of v; not 2"),
        (Shape(4, 8, 16, 70, "kda"), "variants=fla_cp: flash-linear-attention's kernels need CUDA"),
    ],
)
def test_fla_cp_is_refused_by_name(shape: Shape, problem: str) -> None:
    session = mock.Mock(on_cuda=False, world_size=2, device=torch.device("cpu"))
    session.import_fla = lambda *names: Session.import_fla(session, *names)
    with pytest.raises(ConfigError, match=problem):
        context_parallel(shape, session)
