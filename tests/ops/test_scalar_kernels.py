"""The Triton kernels of scalar decays against the recurrence in fp64, with autograd: interpreted, and on a GPU.

The interpreter computes in fp32 what a GPU computes in three tf32 parts, so it tests everything but the hardware.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support import interpreter
from tests.support.distributed import run_distributed
from tests.support.few import one_of
from tests.support.kernel_cases import SHARED_MEMORY, RankCase, both_results, compiling, relative_error
from zeco_train.ops.documents import find_restarts

pytestmark = pytest.mark.numeric


@dataclass(frozen=True)
class ScalarCase(RankCase):
    """One rank's tokens, with one decay a head.

    Attributes:
        shape: B, T, G, H, K, V.
        fixed: decays are constant in time.
        changes: of the kept `Tuning`; few programs make long segments.
    """

    fixed: bool = False
    changes: tuple[tuple[str, int], ...] = ()

    def tensors(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Random inputs."""
        B, T, G, H, K, V = self.shape
        of_decays = (H,) if self.fixed else (B, T, H)
        return self.random((B, T, G, K), (B, T, H, V), of_decays, dtype, device)


def _recurrence(operands: Sequence[Tensor], scale: float, state: Tensor, restarts: Tensor | None) -> tuple[Tensor, ...]:
    """o and the last state, token by token."""
    q, k, v, g = operands
    repeats, outputs = v.shape[2] // q.shape[2], []
    q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
    decays = g.exp().expand(v.shape[:3])
    if restarts is not None:
        decays = decays.masked_fill(restarts[:, None], 0.0)
    for query, key, value, decay in zip(*(x.unbind(1) for x in (q, k, v, decays)), strict=True):
        state = decay[..., None, None] * state + key[..., :, None] * value[..., None, :]
        outputs.append(scale * (query[..., None, :] @ state).squeeze(-2))
    return torch.stack(outputs, dim=1), state


def _expected(tensors: dict[str, Tensor], scale: float, doc_ids: Tensor | None) -> dict[str, Tensor]:
    """Results in fp64; those of the rank's ends are of its whole effect on them."""
    leaves = [tensors[name].double().requires_grad_() for name in ("q", "k", "v", "g", "R")]
    *operands, incoming = leaves
    o, state = _recurrence(operands, scale, incoming, None if doc_ids is None else find_restarts(doc_ids))
    grads = torch.autograd.grad([o, state], leaves, [tensors["do"].double(), tensors["D_in"].double()])
    names = ("dq", "dk", "dv", "dg", "D")
    return {"o": o.detach(), "S": state.detach(), **dict(zip(names, grads, strict=True))}


def _found(case: ScalarCase, tensors: dict[str, Tensor], scale: float, doc_ids: Tensor | None) -> dict[str, Tensor]:
    """Results of the two passes."""
    from zeco_train.ops.scalar_decay import cuda  # late: imports Triton, whose mode is fixed at import

    passes, plain = (cuda.CUDA_FIXED if case.fixed else cuda.CUDA_SCALAR), cuda.options_for
    with mock.patch.object(cuda, "options_for", lambda *x: dataclasses.replace(plain(*x), **dict(case.changes))):
        found = both_results(passes, ("q", "k", "v", "g"), tensors, scale, doc_ids)
    survives = found.pop("M").double().exp()[..., None]
    return {**found, "S": found["S"] + survives * tensors["R"], "D": found["D"] + survives * tensors["D_in"]}


def scalar_errors(case: ScalarCase, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Error of each result, norm over norm; of a fixed decay's gradient, which is not computed, its largest number."""
    tensors, doc_ids = case.tensors(dtype, device), case.doc_ids(device)
    scale = case.shape[4] ** -0.5
    found, expected = _found(case, tensors, scale, doc_ids), _expected(tensors, scale, doc_ids)
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    if case.fixed:
        errors["dg"] = found["dg"].abs().max().item()
    elif doc_ids is not None:
        errors["dg at restarts"] = found["dg"][:, find_restarts(doc_ids)].abs().max().item() if doc_ids[-1] else 0.0
    return errors


LONG = (("programs", 1), ("span", 2))
# Segments of two chunks of 32 tokens, states for dg at the ends of each.
SHORT = (("programs", 264), ("span", 2), ("chunk", 32))
SHORTEST = (("programs", 264), ("span", 2), ("chunk", 16))
DOCUMENTS = (0, 70, 128, 129, 200, 270)
SMALL = {
    "one token": ScalarCase((1, 1, 1, 1, 16, 16)),
    "three chunks, two groups": ScalarCase((1, 40, 2, 4, 8, 24), documents=(0, 20, 40), changes=SHORTEST),
    "three chunks, fixed": ScalarCase((1, 40, 1, 2, 16, 16), fixed=True, changes=SHORTEST),
    "groups of two heads": ScalarCase((1, 140, 2, 4, 8, 24), rate=1.0, changes=SHORT),
    "documents": ScalarCase((1, 270, 1, 2, 16, 16), documents=DOCUMENTS, changes=SHORT),
    "fixed": ScalarCase((1, 140, 1, 2, 16, 16), fixed=True, changes=SHORT),
    "batches": ScalarCase((2, 100, 2, 2, 16, 8), changes=SHORT),
    "one segment": ScalarCase((1, 270, 1, 1, 16, 16), changes=LONG),
    "tiles of K and V": ScalarCase((1, 140, 1, 2, 40, 72), changes=SHORT),
    "strong decays": ScalarCase((1, 140, 1, 1, 16, 16), rate=50.0),
    "no decay": ScalarCase((1, 140, 1, 1, 16, 16), rate=0.0),
    "resets": ScalarCase((1, 140, 1, 1, 16, 16), reset=-3e38, changes=SHORT),
    "a document starts the rank": ScalarCase((1, 140, 1, 1, 16, 16), documents=(0, 64, 140), before=0),
    "one document, that continues": ScalarCase((1, 100, 1, 1, 16, 16), documents=(0, 100)),
    "fixed, documents, groups": ScalarCase((1, 270, 1, 2, 16, 16), fixed=True, documents=DOCUMENTS, changes=SHORT),
}
QUICK = ["three chunks, two groups", "three chunks, fixed"]
SLOW = ["documents"]
LARGE = {
    **{name: dataclasses.replace(case, changes=LONG if case.changes == LONG else ()) for name, case in SMALL.items()},
    "RetNet's heads": ScalarCase((1, 1000, 4, 4, 128, 256), fixed=True),
    "wide keys": ScalarCase((1, 2000, 4, 4, 128, 128)),
    "Mamba-2's heads": ScalarCase((1, 777, 1, 16, 128, 64)),
    "64 channels": ScalarCase((2, 1000, 3, 3, 64, 64), documents=None),
    "the widest heads": ScalarCase((1, 700, 2, 2, 256, 256)),
    "no power of two": ScalarCase((1, 1000, 2, 4, 96, 160), documents=(0, 70, 128, 700, 1000)),
    "weak decays": ScalarCase((1, 2000, 2, 2, 128, 128), rate=0.005),
    "strong decays everywhere": ScalarCase((1, 1000, 1, 1, 64, 128), rate=50.0),
}
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
# dg is a number per token and head, with few of them and weak decays little more than <S, dS> at a few borders: as
# inexact as one product of two sums of bf16 products may be.
LIMIT_OF_DG = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


def _interpreted(rank: int, world_size: int, names: list[str]) -> dict[str, dict[str, float]]:
    interpreter.skip_overflow_checks()
    return {name: scalar_errors(SMALL[name], torch.float32, torch.device("cpu")) for name in names}


def _ulps_of_sums(rank: int, world_size: int) -> float:
    """The largest error of the sums of strong decays in chunks, in units of the last place."""
    from zeco_train.ops.scalar_decay.kernels.launch import decay_sums

    g = -50.0 * torch.rand((1, 128, 2), generator=torch.Generator().manual_seed(0))
    exact = g.double().view(1, 2, 64, 2).cumsum(2).view(1, 128, 2).mT
    places = torch.finfo(torch.float32).eps * 2.0 ** exact.abs().log2().floor()
    return float(((decay_sums(g, 64) - exact).abs() / places).max())


def test_sums_of_decays_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decay is a difference of two of them."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_ulps_of_sums, 1, fresh=True)[0] <= 0.5


@pytest.mark.parametrize(
    "names",
    [
        QUICK,
        pytest.param(SLOW, marks=pytest.mark.slow),
        pytest.param([name for name in SMALL if name not in QUICK + SLOW], marks=pytest.mark.campaign),
    ],
    ids=["quick", "slow", "others"],
)
def test_scalar_kernels_match_fp64_under_interpreter(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter is chosen when Triton is imported, so the kernels run in a separate process.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, errors in run_distributed(_interpreted, 1, names, fresh=True)[0].items():
        assert all(error <= LIMITS[torch.float32] for error in errors.values()), f"{name}: {errors}"
        assert errors.get("dg at restarts", 0.0) == 0.0, name
        assert len(errors) >= 7


COMPILED = {
    "sm_90, narrow heads": (90, torch.bfloat16, ScalarCase((1, 512, 2, 2, 64, 64))),
    "sm_90, wide keys": (90, torch.bfloat16, ScalarCase((1, 512, 2, 2, 128, 128))),
    "sm_90, the widest heads": (90, torch.bfloat16, ScalarCase((1, 512, 1, 2, 256, 256), fixed=True)),
    "sm_90, fp32": (90, torch.float32, ScalarCase((1, 512, 2, 2, 128, 128), fixed=True, documents=(0, 70, 512))),
    "sm_80": (80, torch.bfloat16, ScalarCase((1, 512, 2, 2, 128, 128), documents=(0, 70, 512))),
}


def _compiled(rank: int, world_size: int, name: str) -> dict[str, int]:
    """Shared memory of each kernel, compiled for a GPU that this machine need not have."""
    from zeco_train.ops.scalar_decay import cuda
    from zeco_train.ops.scalar_decay.kernels import launch

    capability, dtype, case = COMPILED[name]
    kept = launch.find(divmod(capability, 10), dtype, max(case.shape[4:]))
    cpu = torch.device("cpu")
    with compiling(capability) as found, mock.patch.object(cuda, "options_for", return_value=kept):
        _found(case, case.tensors(dtype, cpu), 1.0, case.doc_ids(cpu))
    return found


@pytest.mark.campaign
@pytest.mark.parametrize("name", one_of(COMPILED, "sm_90, narrow heads"))
def test_scalar_kernels_compile_within_shared_memory(name: str) -> None:
    """The GPU compiler runs without a GPU and refuses code that the interpreter accepts."""
    found = run_distributed(_compiled, 1, name, fresh=True)[0]
    capability, _, case = COMPILED[name]
    assert len(found) == (4 if case.fixed else 6)
    assert max(found.values()) <= SHARED_MEMORY[capability], found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LARGE)
def test_scalar_kernels_match_fp64_on_gpu(name: str, dtype: torch.dtype) -> None:
    errors = scalar_errors(LARGE[name], dtype, torch.device("cuda"))
    print(name, dtype, {tensor: f"{error:.1e}" for tensor, error in errors.items()})
    assert errors.pop("dg") <= LIMIT_OF_DG[dtype], errors
    assert all(error <= LIMITS[dtype] for error in errors.values()), errors


@pytest.mark.gpu
def test_scalar_kernels_do_not_synchronise_and_are_deterministic() -> None:
    """Neither pass synchronises the host, also with documents; repetitions are bit-identical."""
    case = ScalarCase((1, 1000, 1, 4, 128, 64), documents=(0, 300, 1000))
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
