"""The elementwise recurrence against fla's own; its kernels under Triton's interpreter, compiled for GPUs, and on them.

`test_passes.py` has its passes in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tests.support.distributed import run_distributed
from tests.support.interpreter import patch_bf16, skip_overflow_checks
from tests.support.kernel_cases import SHARED_MEMORY, both_results, compiling, relative_error
from tests.support.recurrence import naive_hgrn
from zeco_train.ops.documents import find_doc_ids
from zeco_train.ops.hgrn.chunked import CHUNKED
from zeco_train.ops.mix import mix
from zeco_train.ops.passes import Passes
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

# Largest log-decay of a token, by channel in turn: none, weak, medium, and so strong that nothing is left.
RATES = (0.0, 0.02, 0.5, 50.0)


def tensors(batch: int, tokens: int, heads: int, key_dim: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * tokens + key_dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape, rates = (batch, tokens, heads, key_dim), torch.tensor(RATES, dtype=torch.float64)
    strength = torch.rand(shape, generator=generator, dtype=torch.float64)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "x": random(*shape).to(dtype),
        "g": (-rates[torch.arange(key_dim) % len(RATES)] * strength).to(wide),
        "do": random(*shape).to(dtype),
        **{name: random(batch, heads, key_dim, 1).to(wide) for name in ("R", "D_in")},
    }


def both_passes(passes: Passes, values: dict[str, Tensor], doc_ids: Tensor | None) -> dict[str, Tensor]:
    """All results of the two passes of one rank, given R and D_in."""
    found = both_results(passes, ("x", "g"), values, 1.0, doc_ids)
    return {**found, "M": found["M"].exp()}


def expected(values: dict[str, Tensor], doc_ids: Tensor | None) -> dict[str, Tensor]:
    """The same by the recurrence: what a start of zero leaves, and what a unit of the start becomes."""
    leaves = [values[name].double().requires_grad_() for name in ("x", "g", "R")]
    x, g, start = leaves
    o, end = naive_hgrn(x, g, initial_state=start, doc_ids=doc_ids)
    with torch.no_grad():
        _, own = naive_hgrn(x, g, doc_ids=doc_ids)
        _, unit = naive_hgrn(torch.zeros_like(x), g, initial_state=torch.ones_like(start), doc_ids=doc_ids)
    outputs, grads = [o, end], [values["do"].double(), values["D_in"].double()]
    dx, dg = torch.autograd.grad(outputs, leaves[:2], grads, retain_graph=True)
    (of_start,) = torch.autograd.grad([o], [start], grads[:1], materialize_grads=True)
    results = {"S": own, "M": unit.squeeze(-1), "o": o, "D": of_start, "dx": dx, "dg": dg}
    return {name: x.detach() for name, x in results.items()}


def doc_ids_of(documents: Sequence[int] | None, before: int, tokens: int) -> Tensor | None:
    borders = None if documents is None else torch.tensor([*documents, tokens])
    return find_doc_ids(borders, before, tokens, torch.device("cpu"))


def test_weak_and_strong_decays_have_all_digits() -> None:
    """Each channel relative to its own: where decays are e^-50, dg is 1e-22 of dx."""
    values = tensors(1, 200, 1, 4)
    values["g"][..., 3] = -50.0
    found, wanted = both_passes(CHUNKED, values, None), expected(values, None)
    for key in ("o", "dx", "dg"):
        for channel in range(4):
            off = (found[key] - wanted[key])[..., channel].norm()
            assert off <= 1e-13 * wanted[key][..., channel].norm(), (key, RATES[channel])


@pytest.mark.slow
def test_equals_fla() -> None:
    """fla's plain recurrence, in fp32: it has no other dtype."""
    from fla.ops.hgrn.naive import naive_recurrent_hgrn

    values = {key: x.float() for key, x in tensors(2, 90, 2, 6).items()}
    x, g, start = (values[key].flatten(2) if key != "R" else values[key].flatten(1) for key in ("x", "g", "R"))
    o, end = naive_recurrent_hgrn(x, g, initial_state=start, output_final_state=True)
    shard = SequencePosition((0, 90), exchange=local_exchange())
    found, carry = mix("hgrn", [values["x"], values["g"]], shard, carry_in=values["R"], want_carry=True)
    assert carry is not None
    torch.testing.assert_close(found.flatten(2), o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(carry.flatten(1), end, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [pytest.param(None, marks=pytest.mark.campaign), (0, 4, 5)])
def test_operator_passes_opcheck(documents: tuple[int, ...] | None) -> None:
    """Shapes, dtypes and strides that a compiler is promised, and no aliases."""
    values, scan = tensors(1, 9, 2, 4, torch.float32), local_exchange()
    leaves = [values[name].requires_grad_() for name in ("x", "g")]
    place = scan.handle(torch.device("cpu")), doc_ids_of(documents, 1, 9)
    arguments = (leaves, "hgrn", 1.0, *place, None, values["R"].requires_grad_(), True)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    opcheck(torch.ops.zeco.mix.default, arguments, test_utils=tests)


# --- kernels ---

# Tokens, heads, channels of a head, batch, documents, tokens of the first document before these.
#
# With steps of 4 tokens and runs of 8 under the interpreter, of 16 and 64 on a GPU: several steps, runs and programs;
# borders at the edges of all of them; one token.
KERNEL_CASES = {
    "several runs": (13, 2, 35, 1, None, 0),
    "many runs": (45, 1, 3, 1, None, 0),
    "documents": (18, 1, 5, 1, (0, 1, 2, 7, 8, 9, 15, 16, 17), 1),
    "a new document at the first token": (10, 1, 5, 1, (0,), 0),
    "one token": (1, 2, 3, 2, None, 0),
}
QUICK = ["several runs", "documents", "one token"]
OTHERS = [name for name in KERNEL_CASES if name not in QUICK]
# On a GPU.
LONG = {
    "long": (5_000, 3, 70, 2, None, 0),
    "long, with documents": (9_000, 2, 5, 1, (0, 1, 15, 16, 63, 64, 65, 4000, 8999), 1),
}
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


def _kernel_errors(name: str, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Norms of differences from the recurrence in fp64 over norms; that results repeat is checked on GPUs."""
    from zeco_train.ops.hgrn.kernels import CUDA

    tokens, heads, key_dim, batch, documents, before = (KERNEL_CASES | LONG)[name]
    values, doc_ids = tensors(batch, tokens, heads, key_dim, dtype), doc_ids_of(documents, before, tokens)
    wanted = expected(values, doc_ids)
    # As heads of a wider projection: not contiguous.
    for key in ("x", "do"):
        values[key] = torch.cat([values[key], torch.full_like(values[key], torch.nan)], -1)[..., :key_dim]
    values = {key: x.to(device) for key, x in values.items()}
    doc_ids = None if doc_ids is None else doc_ids.to(device)
    found = both_passes(CUDA, values, doc_ids)
    if device == "cuda":
        again = both_passes(CUDA, values, doc_ids)
        assert all(torch.equal(found[key], again[key]) for key in found)
    assert (found["o"].dtype, found["dx"].dtype, found["dg"].dtype) == (dtype, dtype, torch.float32)
    return {key: relative_error(found[key].cpu(), x) for key, x in wanted.items()}


def _interpreted(rank: int, world_size: int, names: list[str]) -> dict[str, float]:
    from zeco_train.ops.hgrn import kernels as launch

    patch_bf16()
    skip_overflow_checks()
    # Short steps and runs, of which more than one step is joined: the interpreter takes a millisecond a token.
    launch.WALK, launch._JOINED = launch.WALK._replace(rows=4, shortest=8, programs=64), 4
    found = {}
    for name in names:
        dtypes = DTYPES if name == "several runs" else [torch.float32]
        for dtype in dtypes:
            errors = _kernel_errors(name, dtype, "cpu")
            # Written so that a NaN is one too.
            found |= {f"{name}, {dtype}: {key}": error for key, error in errors.items() if not error <= DTYPES[dtype]}
    return found


@pytest.mark.parametrize("names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["quick", "others"])
def test_kernels_match_fp64_under_interpreter(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter is chosen when Triton is imported, so the kernels run in a separate process.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_interpreted, 1, names, fresh=True) == [{}]


def _compiled(rank: int, world_size: int, capability: int) -> dict[str, int]:
    from zeco_train.ops.hgrn.kernels import CUDA

    values = tensors(1, 150, 2, 64, torch.bfloat16)
    with compiling(capability) as shared:
        both_passes(CUDA, values, doc_ids_of((0, 70), 1, 150))
    return shared


@pytest.mark.campaign
@pytest.mark.parametrize("capability", [90, 80])
def test_kernels_compile_for_gpus(capability: int) -> None:
    [shared] = run_distributed(_compiled, 1, capability, fresh=True)
    assert shared.keys() == {"summaries_kernel", "starts_kernel", "outputs_kernel", "grads_kernel"}
    assert max(shared.values()) <= SHARED_MEMORY[capability]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNEL_CASES | LONG)
def test_kernels_match_fp64_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    assert max(_kernel_errors(name, dtype, "cuda").values()) <= DTYPES[dtype]


@pytest.mark.gpu
def test_kernels_are_as_fast_as_those_of_fla() -> None:
    """16,384 tokens of 2,048 channels in bf16, forward + backward; also in GB/s of what has to be moved."""
    from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn

    x, do = (torch.randn(1, 16384, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    g = torch.nn.functional.logsigmoid(torch.randn(x.shape, device="cuda"))
    shard = SequencePosition((0, 16384), exchange=local_exchange())
    ways = {
        "ours": lambda x, g: mix("hgrn", [x, g], shard)[0],
        "chunk_hgrn": lambda x, g: chunk_hgrn(x.flatten(2), g.flatten(2))[0].view(x.shape),
        "fused_recurrent_hgrn": lambda x, g: fused_recurrent_hgrn(x.flatten(2), g.flatten(2))[0].view(x.shape),
    }
    milliseconds = {}
    for name, way in ways.items():
        leaves, times = [x.clone().requires_grad_(), g.clone().requires_grad_()], []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(10_000_000)
            start.record()
            torch.autograd.grad(way(*leaves), leaves, do)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        milliseconds[name] = sorted(times)[len(times) // 2]
    # Forward x, g → o; backward x, g, do → dx, dg.
    moved = x.numel() * (2 + 4 + 2 + 2 + 4 + 2 + 2 + 4)
    print({name: f"{each:.3f} ms, {moved / each / 1e6:.0f} GB/s" for name, each in milliseconds.items()})
    assert milliseconds["ours"] <= min(milliseconds.values())
