"""The Triton kernels of the delta rules against the PyTorch passes in fp64: interpreted, and on a GPU.

The interpreter computes in fp32 what a GPU computes in three tf32 parts, so it tests everything but the hardware.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support import interpreter
from tests.support.distributed import run_distributed
from tests.support.few import one_of
from tests.support.kernel_cases import SHARED_MEMORY, DeltaCase, both_results, compiling, relative_error
from tests.support.positions import position_of
from tests.support.waiting import ENOUGH
from zeco_train.ops.delta.chunked import CHUNKED
from zeco_train.ops.documents import find_restarts
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.mix import mix_at
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.passes import Passes
from zeco_train.ops.seam import Exchange
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

SCALE = 0.7


def _found(case: DeltaCase, tensors: dict[str, Tensor], scale: float, doc_ids: Tensor | None) -> dict[str, Tensor]:
    """Results of the kernels."""
    from zeco_train.ops.delta import cuda  # late: imports Triton, whose mode is fixed at import

    kept = cuda.options_for(tensors["k"])
    kept = kept if case.joining is None else replace(kept, joining=case.joining, programs=264)
    with mock.patch.object(cuda, "options_for", return_value=kept):
        return both_results(_kernels(case.rule), case.names, tensors, scale, doc_ids)


def _kernels(rule: str) -> Passes:
    from zeco_train.ops.delta import cuda

    return cuda.CUDA_DELTA if rule == "delta" else cuda.CUDA_GATED


def delta_errors(case: DeltaCase, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Error of each result, norm over norm; that of M also over the norm of the identity.

    Random keys leave little of a state after some hundred tokens, and rounding errors are of the size of what they left
    before.
    """
    tensors, doc_ids = case.tensors(dtype, device), case.doc_ids(device)
    scale = case.shape[4] ** -0.5
    found = _found(case, tensors, scale, doc_ids)
    expected = both_results(CHUNKED, case.names, {name: x.double() for name, x in tensors.items()}, scale, doc_ids)
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    identity = found["M"].shape[:3].numel() ** 0.5
    errors["M over I"] = (found["M"] - expected["M"]).norm().item() / identity
    if "g" in case.names and doc_ids is not None:
        errors["dg at restarts"] = found["dg"][:, find_restarts(doc_ids)].abs().sum().item()
    return errors


LONG, SHORT = 1e9, 0.5
DOCUMENTS = (0, 40, 64, 65, 100, 150)
SMALL = {
    "one token": DeltaCase((1, 1, 1, 1, 16, 16)),
    "kda, odd sizes": DeltaCase((1, 140, 1, 2, 24, 40), rate=1.0),
    "kda, documents": DeltaCase((1, 150, 1, 1, 16, 24), documents=DOCUMENTS),
    "kda, documents, two segments": DeltaCase(
        (1, 130, 1, 1, 16, 24), documents=(0, 40, 64, 65, 100, 130), joining=SHORT
    ),
    "kda, documents, one segment": DeltaCase((1, 150, 1, 1, 16, 16), documents=DOCUMENTS, before=0, joining=LONG),
    "kda, one document, that continues": DeltaCase((1, 130, 1, 1, 16, 16), documents=(0, 130)),
    "kda, strong decays": DeltaCase((1, 130, 1, 1, 16, 16), rate=50.0),
    "kda, resets": DeltaCase((1, 130, 1, 1, 16, 16), reset=-3e38),
    "kda, tiles of K and V": DeltaCase((1, 130, 1, 1, 40, 72), joining=LONG),
    "gated_delta, groups, batches": DeltaCase((2, 66, 1, 2, 16, 8), rule="gated_delta", rate=1.0),
    "gated_delta, documents": DeltaCase((1, 150, 1, 1, 40, 16), rule="gated_delta", documents=DOCUMENTS),
    "gated_delta, strong decays": DeltaCase((1, 130, 1, 1, 16, 16), rule="gated_delta", rate=50.0),
    "gated_delta, resets": DeltaCase((1, 130, 1, 1, 16, 16), rule="gated_delta", reset=-3e38),
    "delta": DeltaCase((1, 140, 1, 2, 16, 24), rule="delta"),
    "delta, documents, one segment": DeltaCase((1, 150, 1, 1, 16, 16), rule="delta", documents=DOCUMENTS, joining=LONG),
}
# Of three chunks the first two are one segment; and two chunks of two sequences with two heads of one group.
QUICK = ["kda, documents, two segments", "gated_delta, groups, batches"]
LARGE = {
    **SMALL,
    **{
        f"{rule}, {name}": replace(case, rule=rule)
        for rule in ("kda", "gated_delta", "delta")
        for name, case in {
            "128 channels": DeltaCase((1, 2000, 2, 4, 128, 128), joining=None),
            "64 channels": DeltaCase((2, 1000, 3, 3, 64, 64), rate=1.0),
            "wide values": DeltaCase((1, 1000, 2, 2, 128, 256), documents=(0, 70, 128, 700, 1000)),
            "the widest heads": DeltaCase((1, 700, 2, 2, 256, 256)),
            "no power of two": DeltaCase((1, 1000, 2, 4, 96, 160), documents=(0, 70, 128, 700, 1000)),
            "weak decays": DeltaCase((1, 4096, 2, 2, 128, 128), rate=0.005, joining=None),
            "strong decays everywhere": DeltaCase((1, 1000, 1, 1, 64, 128), rate=50.0),
        }.items()
    },
}
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


def _interpreted(rank: int, world_size: int, names: list[str]) -> dict[str, dict[str, float]]:
    errors = {}
    for name in names:
        errors[name] = delta_errors(SMALL[name], torch.float32, torch.device("cpu"))
        # In the first case the interpreter checks the arithmetic of addresses.
        interpreter.skip_overflow_checks()
    return errors


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param([name for name in SMALL if name not in QUICK], marks=pytest.mark.campaign)],
    ids=["quick", "others"],
)
def test_delta_kernels_match_fp64_under_interpreter(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter is chosen when Triton is imported, so the kernels run in a separate process.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, errors in run_distributed(_interpreted, 1, names, fresh=True)[0].items():
        assert errors.pop("dg at restarts", 0.0) == 0.0, name
        assert all(error <= LIMITS[torch.float32] for error in errors.values()), f"{name}: {errors}"
        assert len(errors) == (9 if SMALL[name].rule == "delta" else 10)


def _crossing_restarts(rank: int, world_size: int, rules: list[str]) -> list[str]:
    """Results of one document that depend on the size of the other one's numbers."""
    interpreter.skip_overflow_checks()
    wrong = []
    for rule in rules:
        # The border is in the second chunk.
        case = DeltaCase((1, 80, 1, 1, 16, 16), rule=rule, documents=(0, 66, 80))
        doc_ids, quiet = case.doc_ids(torch.device("cpu")), case.tensors(torch.float32, torch.device("cpu"))
        wanted = _found(case, quiet, SCALE, doc_ids)
        for loud, kept in ((slice(0, 66), slice(66, 80)), (slice(66, 80), slice(0, 66))):
            tensors = {name: x.clone() for name, x in quiet.items()}
            for name in ("q", "v", "do"):
                tensors[name][:, loud] *= 1e8
            found = _found(case, tensors, SCALE, doc_ids)
            for name in ("o", *(f"d{operand}" for operand in case.names)):
                if torch.equal(wanted[name][:, loud], found[name][:, loud]):
                    wrong.append(f"{rule}: {name} is not louder")
                if not torch.equal(wanted[name][:, kept], found[name][:, kept]):
                    wrong.append(f"{rule}: {name} of {kept} changes")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules", [["kda"], pytest.param(["delta", "gated_delta"], marks=pytest.mark.campaign)], ids=["kda", "others"]
)
def test_no_value_or_gradient_crosses_restart_in_kernels(rules: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, not within rounding: a restart is a product with 0."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_crossing_restarts, 1, rules, fresh=True) == [[]]


def _wrong_segments(rank: int, world_size: int, rules: list[str]) -> list[str]:
    """Errors of the public operator on two segments of a sequence, with carries, documents and recomputation."""
    interpreter.skip_overflow_checks()
    scan, wrong = local_exchange(), []
    for rule in rules:
        case = DeltaCase((1, 80, 1, 1, 16, 24), rule=rule, rate=0.5)
        tensors = case.tensors(torch.float32, torch.device("cpu"))
        results = []
        for dtype, passes in ((torch.float64, None), (torch.float32, _kernels(rule))):
            leaves = {name: tensors[name].to(dtype).detach().requires_grad_() for name in (*case.names, "R")}
            kept = OPERATORS[rule] if passes is None else replace(OPERATORS[rule], portable=passes, cuda=None)
            with mock.patch.dict(OPERATORS, {rule: kept}):
                o, end = _over_segments(rule, leaves, scan, with_replay=passes is not None)
                ends = [tensors["do"].to(dtype), tensors["D_in"].to(dtype)]
                grads = torch.autograd.grad([o, end], [*leaves.values()], ends)
            results.append([o.detach(), end.detach(), *grads])
        errors = {
            name: relative_error(*pair)
            for name, pair in zip(("o", "end", *leaves), zip(*results[::-1], strict=True), strict=True)
        }
        if any(error > LIMITS[torch.float32] for error in errors.values()):
            wrong.append(f"{rule}: {errors}")
    return wrong


def _over_segments(rule: str, leaves: dict[str, Tensor], scan: Exchange, *, with_replay: bool) -> tuple[Tensor, Tensor]:
    """o and the last state; with a replay the second segment's outputs are those of a second pass from its state."""
    *operands, carry = leaves.values()
    o = []
    for start, stop in ((0, 66), (66, 80)):
        place = position_of(scan, start, stop, (0, 30, 70, 80), continues=True).on(operands[0][:, start:stop])
        local = [x[:, start:stop] for x in operands]
        out, state_output = mix_at(rule, local, SCALE, place, StateInput(carry_in=carry, want_carry=True))
        if with_replay and start:
            replayed = StateInput(incoming_state=state_output.received.detach(), carry_in=carry, want_carry=True)
            again, _ = mix_at(rule, local, SCALE, place, replayed)
            assert torch.equal(out, again)
            out = again
        o.append(out)
        carry = state_output.carry_out
    return torch.cat(o, 1), carry


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules", [["kda"], pytest.param(["delta", "gated_delta"], marks=pytest.mark.campaign)], ids=["kda", "others"]
)
def test_kernels_serve_segments_with_carries_documents_and_replay(
    rules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_wrong_segments, 1, rules, fresh=True) == [[]]


def test_wrong_operands_are_refused_by_name() -> None:
    case = DeltaCase((1, 70, 2, 4, 8, 8), rule="gated_delta")
    x = case.tensors(torch.float32, torch.device("cpu"))
    for name, changed in (
        ("q", {"q": x["q"][:, :, :1].repeat(1, 1, 3, 1), "k": x["k"][:, :, :1].repeat(1, 1, 3, 1)}),
        ("k", {"k": x["k"].bfloat16()}),
        ("g", {"g": x["g"][..., :3]}),
        ("beta", {"beta": x["beta"][:, :5]}),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: expected"):
            OPERATORS[case.rule].check([{**x, **changed}[name] for name in case.names], None)


COMPILED = {
    "sm_90, kda": (90, torch.bfloat16, DeltaCase((1, 512, 2, 2, 128, 128))),
    "sm_90, gated_delta": (90, torch.bfloat16, DeltaCase((1, 512, 2, 2, 128, 256), rule="gated_delta")),
    "sm_90, the widest heads": (90, torch.bfloat16, DeltaCase((1, 512, 2, 2, 256, 256), documents=(0, 70, 512))),
    "sm_90, delta, fp32": (90, torch.float32, DeltaCase((1, 512, 2, 2, 128, 128), rule="delta")),
    "sm_80, gated_delta": (80, torch.bfloat16, DeltaCase((1, 512, 2, 2, 128, 128), rule="gated_delta")),
}


def _compiled(rank: int, world_size: int, name: str) -> dict[str, int]:
    """Shared memory of each kernel, compiled for a GPU that this machine need not have."""
    from zeco_train.ops.delta import cuda
    from zeco_train.ops.delta.kernels import tuning

    capability, dtype, case = COMPILED[name]
    kept = tuning.find(divmod(capability, 10), dtype, case.shape[4])
    cpu = torch.device("cpu")
    with compiling(capability) as found, mock.patch.object(cuda, "options_for", return_value=kept):
        both_results(_kernels(case.rule), case.names, case.tensors(dtype, cpu), 1.0, case.doc_ids(cpu))
    return found


@pytest.mark.campaign  # up to 15 s with an empty cache of Triton
@pytest.mark.parametrize("name", one_of(COMPILED, "sm_90, gated_delta"))
def test_delta_kernels_compile_within_shared_memory(name: str) -> None:
    """The GPU compiler runs without a GPU and refuses code that the interpreter accepts."""
    found = run_distributed(_compiled, 1, name, fresh=True)[0]
    capability, _, case = COMPILED[name]
    assert len(found) == (5 if case.rule == "delta" else 6)
    assert max(found.values()) <= SHARED_MEMORY[capability], found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LARGE)
def test_delta_kernels_match_fp64_on_gpu(name: str, dtype: torch.dtype) -> None:
    errors = delta_errors(LARGE[name], dtype, torch.device("cuda"))
    print(name, dtype, {tensor: f"{error:.1e}" for tensor, error in errors.items()})
    assert errors.pop("dg at restarts", 0.0) == 0.0
    errors.pop("M")
    assert {tensor: error for tensor, error in errors.items() if error > LIMITS[dtype]} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["delta", "gated_delta", "kda"])
def test_delta_kernels_do_not_synchronise_and_are_deterministic(rule: str) -> None:
    """Neither pass synchronises the host, also with documents; repetitions are bit-identical."""
    case = DeltaCase((1, 2000, 1, 4, 128, 64), documents=(0, 300, 2000), rule=rule, joining=None)
    device = torch.device("cuda")
    tensors, doc_ids = case.tensors(torch.bfloat16, device), case.doc_ids(device)
    first = _found(case, tensors, 0.125, doc_ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = _found(case, tensors, 0.125, doc_ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


# A user's first step: a new process with an empty Triton cache.
FIRST_PASSES = """
import time
import torch
from tests.ops.test_delta_kernels import DeltaCase, _found

device = torch.device("cuda")
for rule in ("kda", "gated_delta", "delta"):
    case = DeltaCase((1, 4096, 16, 16, 128, 128), rule=rule, joining=None)
    tensors = case.tensors(torch.bfloat16, device)
    torch.cuda.synchronize()
    started = time.perf_counter()
    _found(case, tensors, 0.125, None)
    torch.cuda.synchronize()
    print(f"{rule} {time.perf_counter() - started:.1f}", flush=True)
"""


@pytest.mark.processes
@pytest.mark.gpu
def test_first_passes_of_delta_kernels_take_at_most_15_seconds(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", FIRST_PASSES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=ENOUGH,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    seconds = [float(line.split()[-1]) for line in result.stdout.splitlines()]
    assert len(seconds) == 3
    assert max(seconds) <= 15.0, result.stdout
