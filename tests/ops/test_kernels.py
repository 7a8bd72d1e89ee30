"""The operators' Triton kernels against the PyTorch passes in fp64: under Triton's interpreter, and on a GPU.

The interpreter computes in fp32 what a GPU computes in three tf32 parts, so it tests everything but the hardware.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support import interpreter
from tests.support.distributed import run_distributed
from tests.support.kernel_cases import SHARED_MEMORY, KernelCase, compiling, relative_error
from tests.support.positions import position_of
from zeco_train.ops.kept import TileOptions
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.mix import mix_at
from zeco_train.ops.operator import Target, assume
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.passes import BackwardBase, ForwardBase, keeping_states
from zeco_train.ops.scalar_decay.kernels.launch import ScalarDecayTuning
from zeco_train.ops.seam import Exchange
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
DELTA = ("kda", "gated_delta", "delta")
FEW, MANY, LONG = (("programs", 4),), (("joining", 0.1), ("programs", 264)), (("joining", 1e9), ("programs", 264))
# Of scalar decays: segments of two chunks of 32 or 16 tokens, states for dg at the ends of each; one segment.
SHORT = (("programs", 264), ("span", 2), ("chunk", 32))
SHORTEST = (("programs", 264), ("span", 2), ("chunk", 16))
ONE_SEGMENT = (("programs", 1), ("span", 2))
# All chunks at once, from stored states: tiles of K and V, two heads of a group a program.
_TILES = {name: TileOptions(16, 16, 4, 1) for name in ("outputs", "value_grads", "grads")}
BY_CHUNKS = (("states", TileOptions(32, 16, 4, 1)), *_TILES.items(), ("chunk", 32), ("span", 2))
_NARROW_KEYS = TileOptions(16, 32, 4, 1)
# Pairs apart, in the backward pass, whose chunks are shorter.
_PAIRS = ScalarDecayTuning(states=_NARROW_KEYS, grads=TileOptions(64, 64, 4, 1), chunk=16, span=4, pairs=True)
BY_PAIRS = (*BY_CHUNKS, ("states", _NARROW_KEYS), ("backward", _PAIRS))
BORDERS = (0, 40, 64, 65, 100)
# Odd lengths and dims, long and short segments, decays down to e^-50 a token, restarts on and off the chunks' borders.
SMALL = {
    "gla, one token": KernelCase("gla", 1),
    "gla, segments and documents": KernelCase("gla", 130, (1, 2, 2, 5, 7), 3.3, (0, 70, 128), changes=FEW),
    "gla, odd sizes": KernelCase("gla", 150, (2, 2, 2, 5, 7), 1.0, changes=FEW),
    "gla, tiles of K and V": KernelCase("gla", 200, (1, 1, 1, 40, 48), changes=FEW),
    "gla, strong decays": KernelCase("gla", 66, rate=-47.0, vanishing=1),  # from e^-50 to e^-3: no chunk is steep
    "gla, steep chunks": KernelCase("gla", 200, (1, 1, 1, 48, 80), 60.0, (0, 64, 130), vanishing=1, changes=FEW),
    "gla, mild chunks and others": KernelCase("gla", 500, (1, 2, 2, 5, 7), 3.3),
    "gla, the strongest reset": KernelCase("gla", 150, reset=-3e38),
    "gla, documents": KernelCase("gla", 300, documents=(0, 70, 128, 129, 200), changes=(("programs", 2),)),
    "gla, a document starts the rank": KernelCase("gla", 200, documents=(0, 64), before=0),
    "gla, one document, that continues": KernelCase("gla", 100, documents=(0,)),
    # A tile has at least 64 keys in bf16, 32 in fp32: padded keys must not contribute.
    "gla, 16 keys": KernelCase("gla", 200, (1, 2, 2, 16, 64), documents=(0, 70, 128)),
    "gla, 48 keys": KernelCase("gla", 130, (1, 2, 2, 48, 64), 1.0, (0, 100)),
    "scalar, one token": KernelCase("scalar_decay", 1),
    "scalar, two groups": KernelCase("scalar_decay", 40, (1, 2, 4, 8, 24), documents=(0, 20), changes=SHORTEST),
    "fixed": KernelCase("fixed_decay", 40, (1, 1, 2, 16, 16), changes=SHORTEST),
    "scalar, documents": KernelCase(
        "scalar_decay", 270, (1, 1, 2, 16, 16), documents=(0, 70, 128, 129, 200), changes=SHORT
    ),
    "scalar, batches": KernelCase("scalar_decay", 100, (2, 2, 2, 16, 8), changes=SHORT),
    "scalar, one segment": KernelCase("scalar_decay", 270, changes=ONE_SEGMENT),
    "scalar, tiles of K and V": KernelCase("scalar_decay", 140, (1, 1, 2, 40, 72), changes=SHORT),
    "scalar, strong decays": KernelCase("scalar_decay", 140, rate=50.0),
    "scalar, no decay": KernelCase("scalar_decay", 140, rate=0.0),
    "scalar, resets": KernelCase("scalar_decay", 140, reset=-3e38, changes=SHORT),
    "scalar, a document starts the rank": KernelCase("scalar_decay", 140, documents=(0, 64), before=0),
    "fixed, documents": KernelCase("fixed_decay", 270, (1, 1, 2, 16, 16), 0.2, (0, 70, 128, 129, 200), changes=SHORT),
    "scalar, by chunks": KernelCase(
        "scalar_decay",
        40,
        (1, 2, 4, 8, 24),
        documents=(0, 20),
        changes=(*BY_CHUNKS, ("programs", 1), ("walks_forward", True), ("grads", _NARROW_KEYS)),
    ),
    "fixed, by chunks": KernelCase("fixed_decay", 40, (1, 2, 2, 40, 72), changes=(*BY_CHUNKS, ("programs", 264))),
    "fixed, by tiles of keys": KernelCase(
        "fixed_decay", 75, (1, 1, 2, 33, 24), 0.2, (0, 16, 40), changes=(*BY_CHUNKS, ("key_tiles", _NARROW_KEYS))
    ),
    "scalar, by pairs": KernelCase(
        "scalar_decay", 75, (1, 2, 4, 8, 24), documents=(0, 20), changes=(*BY_PAIRS, ("programs", 1))
    ),
    "scalar, by pairs, batches": KernelCase(
        "scalar_decay", 70, (2, 1, 4, 40, 24), changes=(*BY_PAIRS, ("programs", 24))
    ),
    "fixed, by pairs": KernelCase("fixed_decay", 75, (1, 2, 4, 40, 24), changes=BY_PAIRS),
    "scalar, by pairs, strong decays": KernelCase("scalar_decay", 140, (1, 1, 2, 16, 16), rate=50.0, changes=BY_PAIRS),
    "scalar, by pairs, resets": KernelCase("scalar_decay", 140, (1, 1, 2, 16, 16), reset=-3e38, changes=BY_PAIRS),
    "scalar, by pairs, one token": KernelCase("scalar_decay", 1, (1, 1, 2, 16, 16), changes=BY_PAIRS),
    "scalar, by chunks, sums of heads": KernelCase(
        "scalar_decay", 70, (2, 1, 4, 40, 24), changes=(*BY_CHUNKS, ("chunk", 16), ("programs", 16))
    ),
    "scalar, by chunks, documents": KernelCase(
        "scalar_decay", 270, (1, 1, 1, 16, 40), 0.2, (0, 70, 128, 129, 200), changes=(*BY_CHUNKS, ("programs", 264))
    ),
    "scalar, by chunks, strong decays": KernelCase("scalar_decay", 140, rate=50.0, changes=BY_CHUNKS),
    "scalar, by chunks, no decay": KernelCase("scalar_decay", 140, rate=0.0, changes=BY_CHUNKS),
    "scalar, by chunks, resets": KernelCase("scalar_decay", 140, reset=-3e38, changes=BY_CHUNKS),
    "scalar, by chunks, one token": KernelCase("scalar_decay", 1, changes=BY_CHUNKS),
    "kda, one token": KernelCase("kda", 1),
    "kda, odd sizes": KernelCase("kda", 140, (1, 1, 2, 24, 40), 1.0, changes=MANY),
    "kda, documents": KernelCase("kda", 130, (1, 1, 1, 16, 24), documents=BORDERS, changes=(("joining", 0.5),)),
    "kda, one segment": KernelCase("kda", 150, documents=BORDERS, before=0, changes=LONG),
    "kda, one document, that continues": KernelCase("kda", 130, documents=(0,), changes=MANY),
    "kda, strong decays": KernelCase("kda", 130, rate=50.0, changes=MANY),
    "kda, resets": KernelCase("kda", 130, reset=-3e38, changes=MANY),
    "kda, mild decays, tiles of K and V": KernelCase("kda", 130, (1, 1, 1, 40, 72), 2.4, changes=LONG),
    "kda, plain chunks and others": KernelCase("kda", 200, (1, 1, 2, 24, 16), 3.0, documents=(0, 100), changes=MANY),
    "kda, half of the channels vanish": KernelCase("kda", 150, (1, 1, 1, 16, 24), vanishing=2, changes=MANY),
    "kda, channels vanish, documents": KernelCase("kda", 150, (1, 1, 1, 16, 24), documents=BORDERS, vanishing=1),
    "gated, groups, batches": KernelCase("gated_delta", 66, (2, 1, 2, 16, 8), 1.0, changes=MANY),
    "gated, documents": KernelCase("gated_delta", 150, (1, 1, 1, 40, 16), documents=BORDERS, changes=MANY),
    "gated, strong decays": KernelCase("gated_delta", 130, rate=50.0, changes=MANY),
    "gated, resets": KernelCase("gated_delta", 130, reset=-3e38, changes=MANY),
    "gated, wide values": KernelCase("gated_delta", 66, (1, 1, 2, 24, 272), changes=MANY),
    "delta": KernelCase("delta", 140, (1, 1, 2, 16, 24), changes=MANY),
    "delta, documents": KernelCase("delta", 150, documents=BORDERS, changes=LONG),
    "gsa, one token": KernelCase("gsa", 1),
    "gsa, segments and documents": KernelCase("gsa", 130, (1, 2, 2, 5, 7), 3.3, (0, 70, 128), changes=FEW),
    "gsa, tiles of K and V": KernelCase("gsa", 200, (2, 1, 1, 40, 48), changes=FEW),
    "gsa, strong decays": KernelCase("gsa", 130, rate=50.0),
    "gsa, steep chunks": KernelCase("gsa", 200, (1, 1, 1, 48, 16), 60.0, (0, 64, 130), vanishing=1, changes=FEW),
    "gsa, the strongest reset": KernelCase("gsa", 150, reset=-3e38),
    "gsa, a document starts the rank": KernelCase("gsa", 200, documents=(0, 64), before=0),
    # With steps of 4 tokens and runs of 8 under the interpreter, of 16 and 64 on a GPU: several of all.
    "hgrn, several runs": KernelCase("hgrn", 13, (2, 1, 1, 35, 1), 50.0),
    "hgrn, many runs": KernelCase("hgrn", 45, (1, 1, 1, 3, 1), 0.5),
    "hgrn, documents": KernelCase("hgrn", 18, (1, 1, 1, 5, 1), documents=(0, 1, 2, 7, 8, 9, 15, 16, 17)),
    "hgrn, a new document at the first token": KernelCase("hgrn", 10, (1, 1, 1, 5, 1), documents=(0,), before=0),
    "hgrn, one token": KernelCase("hgrn", 1, (2, 2, 2, 3, 1)),
    # With steps of 8 tokens under the interpreter, of 16 on a GPU; states of 3, 5 and 1 numbers are padded.
    "mamba1, several runs": KernelCase("mamba1", 13, (2, 1, 35, 3, 1)),
    "mamba1, many runs": KernelCase("mamba1", 45, (1, 1, 3, 16, 1)),
    "mamba1, documents": KernelCase("mamba1", 18, (1, 1, 5, 5, 1), documents=(0, 1, 2, 7, 8, 9, 15, 16, 17)),
    "mamba1, a new document at the first token": KernelCase("mamba1", 10, (1, 1, 2, 1, 1), documents=(0,), before=0),
    "mamba1, one token": KernelCase("mamba1", 1, (2, 1, 3, 4, 1)),
    # More than a run of tokens (16 here) and a program's channels (128).
    "conv, several runs": KernelCase("short_conv", 37, (1, 4, 130)),
    "conv, documents": KernelCase("short_conv", 45, (1, 4, 5), documents=(0, 1, 2, 8, 15, 16, 19, 32, 43)),
    "conv, one document that continues": KernelCase("short_conv", 19, (1, 3, 5), documents=(0,)),
    "conv, width 2": KernelCase("short_conv", 18, (2, 2, 5)),
    "conv, one token": KernelCase("short_conv", 1, (2, 4, 5)),
    "conv, documents at the edges of runs": KernelCase("short_conv", 18, (1, 3, 5), documents=(0, 1, 8, 15, 16)),
    "conv, two tiles of channels": KernelCase("short_conv", 9, (2, 4, 130)),
    "conv, a token less than the state": KernelCase("short_conv", 2, (1, 4, 5), documents=(0, 1)),
    "conv, as long as the state": KernelCase("short_conv", 3, (2, 4, 5)),
}
# Three chunks, of which the first two are a segment; both kinds of chunks; borders of documents; groups; batches.
QUICK = {
    "decays": [
        *("gla, segments and documents", "scalar, two groups", "fixed", "scalar, by chunks", "fixed, by tiles of keys"),
        *("scalar, by pairs", "gsa, segments and documents", "gla, steep chunks", "gla, strong decays"),
    ],
    "delta rules": ["kda, documents", "gated, groups, batches"],
    "elementwise": [
        *("hgrn, several runs", "hgrn, documents", "hgrn, one token", "conv, documents at the edges of runs"),
        "mamba1, documents",
        *("conv, two tiles of channels", "conv, a token less than the state"),
    ],
}
SLOW = [
    "fixed, by chunks",
    "scalar, by chunks, sums of heads",
    *("scalar, by pairs, batches", "fixed, by pairs"),
    "gla, odd sizes",
    "gla, a document starts the rank",
    "hgrn, many runs",
    "mamba1, several runs",
    "conv, several runs",
    "conv, documents",
]
# Of the elementwise kernels bf16, too: their interpreted arithmetic is that of a GPU.
IN_BF16 = ("hgrn, several runs", "mamba1, several runs")


def limit(case: KernelCase, name: str, dtype: torch.dtype) -> float:
    """Of fp32 cumulative decays round relative to their sum within the chunk, hence less exact for strong decays.

    Of bf16 8 bits in each operand, an rms error of 2^-9/√3 each; a few in a row. dg of scalar decays is a number per
    token and head, as inexact as one product of two sums of bf16 products may be. dg of pairs is 0 if decays vanish.
    """
    if case.vanishing == 1 and case.rate > 0 and name == "dg":
        return 1.0 + 1e-4
    if case.operator in ("hgrn", "mamba1", "short_conv"):
        return (1e-6 if case.operator == "short_conv" else 2e-6) if dtype == torch.float32 else 5e-3
    loose = case.operator in DELTA or (case.operator == "scalar_decay" and name == "dg")
    return 1e-4 if dtype == torch.float32 else 1e-2 if loose else 5e-3


def wrong(name: str, case: KernelCase, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """The errors that are too large."""
    found = case.errors(dtype, device)
    # Written so that a NaN is one, too.
    return {f"{name}, {dtype}: {key}": error for key, error in found.items() if not error <= limit(case, key, dtype)}


def _interpreted(rank: int, world_size: int, names: list[str]) -> dict[str, float]:
    from zeco_train.ops.hgrn import kernels as of_hgrn
    from zeco_train.ops.mamba1 import kernels as of_mamba1
    from zeco_train.ops.short_conv import kernels as of_conv

    # Short steps and runs, of which more than one step is joined: the interpreter takes a millisecond a token.
    of_hgrn.WALK, of_hgrn._JOINED = of_hgrn.WALK._replace(rows=4, shortest=8, programs=64), 4
    of_mamba1.WALK = of_mamba1.WALK._replace(rows=8, shortest=8, programs=64)
    of_conv.OUTPUTS, of_conv.GRADS = (walk._replace(shortest=16) for walk in (of_conv.OUTPUTS, of_conv.GRADS))
    found = {}
    for name in names:
        found |= wrong(name, SMALL[name], torch.float32, CPU)
        if name in KEEPING:
            with keeping_states():
                kept = wrong(name, SMALL[name], torch.float32, CPU)
            found |= {f"{key}, states kept": error for key, error in kept.items()}
        # In the first case the interpreter checks the arithmetic of addresses.
        interpreter.skip_overflow_checks()
    for name in {*IN_BF16} & {*names}:
        interpreter.patch_bf16()
        found |= wrong(name, SMALL[name], torch.bfloat16, CPU)
    return found


KEEPING = ("gla, segments and documents", "gla, odd sizes")
OTHERS = [name for name in SMALL if name not in (*itertools.chain(*QUICK.values()), *SLOW)]


@pytest.mark.parametrize(
    "names",
    [
        *QUICK.values(),
        pytest.param(SLOW, marks=pytest.mark.slow),
        pytest.param(OTHERS, marks=pytest.mark.campaign),
    ],
    ids=[*QUICK, "slow", "others"],
)
def test_kernels_match_fp64_under_interpreter(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter is chosen when Triton is imported, so the kernels run in a separate process.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_interpreted, 1, names, fresh=True) == [{}]


def test_some_chunks_of_a_case_are_mild_and_some_are_not() -> None:
    """A program of the second launch then skips some of its chunks and computes others."""
    case = SMALL["gla, segments and documents"]
    sums = case.tensors(torch.float32, CPU)["g"][:, :128].view(-1, 64, 2, 5).cumsum(1)
    farthest = torch.maximum(sums[:, 0] - sums[:, 31], sums[:, 31] - sums[:, 63]).amax(-1)
    assert bool((farthest <= 60).any(0).all())
    assert bool((farthest > 60).any(0).all())


def compiled(rank: int, world_size: int, capability: int, dtype: torch.dtype, case: KernelCase) -> dict[str, int]:
    """Shared memory of each kernel, compiled for a GPU that this machine need not have."""
    tensors = case.tensors(dtype, CPU)
    with compiling(capability) as found, assume(Target("cuda", divmod(capability, 10))):
        case.found(tensors)
    return found


@pytest.mark.slow
def test_kernels_compile_within_shared_memory() -> None:
    """The GPU compiler runs without a GPU and refuses code that the interpreter accepts: narrow tiles of odd sizes."""
    odd = KernelCase("gla", 192, (1, 2, 2, 40, 24), 0.2, (0, 70))
    miscompiled = KernelCase("delta", 65, (1, 1, 1, 64, 16), documents=(0, 6))
    for case, count in ((odd, 8), (miscompiled, 5)):
        found = run_distributed(compiled, 1, 90, torch.bfloat16, case, fresh=True)[0]
        assert len(found) == count
        assert max(found.values()) <= SHARED_MEMORY[90], found


def _crossing_restarts(rank: int, world_size: int, rules: list[str]) -> list[str]:
    """Results of one document that depend on the size of the other one's numbers."""
    interpreter.skip_overflow_checks()
    found = []
    for rule in rules:
        # The border is in the second chunk.
        case = KernelCase(rule, 80, documents=(0, 66), changes=MANY)
        quiet = case.tensors(torch.float32, CPU)
        wanted = case.found(quiet)
        for loud, kept in ((slice(0, 66), slice(66, 80)), (slice(66, 80), slice(0, 66))):
            tensors = {name: x.clone() for name, x in quiet.items()}
            for name in ("q", "v", "do"):
                tensors[name][:, loud] *= 1e8
            results = case.found(tensors)
            for name in ("o", *(f"d{operand}" for operand in OPERATORS[rule].operands)):
                if torch.equal(wanted[name][:, loud], results[name][:, loud]):
                    found.append(f"{rule}: {name} is not louder")
                if not torch.equal(wanted[name][:, kept], results[name][:, kept]):
                    found.append(f"{rule}: {name} of {kept} changes")
    return found


ONE_RULE = pytest.mark.parametrize(
    "rules", [["kda"], pytest.param(["delta", "gated_delta"], marks=pytest.mark.campaign)], ids=["kda", "others"]
)


@pytest.mark.slow
@ONE_RULE
def test_no_value_or_gradient_crosses_restart_in_kernels(rules: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, not within rounding: a restart is a product with 0."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_crossing_restarts, 1, rules, fresh=True) == [[]]


def _wrong_segments(rank: int, world_size: int, rules: list[str]) -> list[str]:
    """Errors of the public operator on two segments of a sequence, with carries, documents and recomputation."""
    interpreter.skip_overflow_checks()
    scan, found = local_exchange(), []
    for rule in rules:
        operator = OPERATORS[rule]
        assert operator.cuda is not None
        tensors = KernelCase(rule, 80, (1, 1, 1, 16, 24), 0.5).tensors(torch.float32, CPU)
        results = []
        for dtype, passes in ((torch.float64, None), (torch.float32, resolve_name(operator.cuda))):
            leaves = {name: tensors[name].to(dtype).detach().requires_grad_() for name in (*operator.operands, "R")}
            kept = operator if passes is None else replace(operator, portable=passes, cuda=None)
            with mock.patch.dict(OPERATORS, {rule: kept}):
                o, end = _over_segments(rule, leaves, scan, with_replay=passes is not None)
                ends = [tensors["do"].to(dtype), tensors["D_in"].to(dtype)]
                grads = torch.autograd.grad([o, end], [*leaves.values()], ends)
            results.append([o.detach(), end.detach(), *grads])
        names, pairs = ("o", "end", *leaves), zip(*results[::-1], strict=True)
        errors = {name: relative_error(*pair) for name, pair in zip(names, pairs, strict=True)}
        if any(error > 1e-4 for error in errors.values()):
            found.append(f"{rule}: {errors}")
    return found


def _over_segments(rule: str, leaves: dict[str, Tensor], scan: Exchange, *, with_replay: bool) -> tuple[Tensor, Tensor]:
    """o and the last state; with a replay the second segment's outputs are those of a second pass from its state."""
    *operands, carry = leaves.values()
    o = []
    for start, stop in ((0, 66), (66, 80)):
        place = position_of(scan, start, stop, (0, 30, 70, 80), continues=True).on(operands[0][:, start:stop])
        local = [x[:, start:stop] for x in operands]
        out, state_output = mix_at(rule, local, 0.7, place, StateInput(carry_in=carry, want_carry=True))
        if with_replay and start:
            replayed = StateInput(incoming_state=state_output.received.detach(), carry_in=carry, want_carry=True)
            again, _ = mix_at(rule, local, 0.7, place, replayed)
            assert torch.equal(out, again)
            out = again
        o.append(out)
        carry = state_output.carry_out
    return torch.cat(o, 1), carry


@pytest.mark.slow
@ONE_RULE
def test_kernels_serve_segments_with_carries_documents_and_replay(
    rules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_wrong_segments, 1, rules, fresh=True) == [[]]


def _errors_without_summaries(rank: int, world_size: int) -> list[float]:
    """Of o and the gradients, over one rank and segment, without carries: states at its borders are not computed."""
    from zeco_train.ops.scalar_decay.kernels.launch import CUDA_SCALAR, ScalarDecayKernels

    operator, place = OPERATORS["scalar_decay"], position_of(local_exchange(), 0, 80, (0, 30, 80))
    tensors, results = KernelCase("scalar_decay", 80, (1, 1, 2, 16, 16)).tensors(torch.float32, CPU), []
    for dtype, kept in ((torch.float64, operator), (torch.float32, replace(operator, portable=CUDA_SCALAR, cuda=None))):
        leaves = [tensors[name].to(dtype).detach().requires_grad_() for name in operator.operands]
        refused = mock.patch.object(ScalarDecayKernels, "summaries", side_effect=AssertionError)
        with mock.patch.dict(OPERATORS, {"scalar_decay": kept}), refused:
            o, _ = mix_at("scalar_decay", leaves, 0.7, place.on(leaves[0]), StateInput())
            results.append([o.detach(), *torch.autograd.grad(o, leaves, tensors["do"].to(dtype))])
    return [relative_error(*pair) for pair in zip(*results[::-1], strict=True)]


def test_states_that_no_rank_reads_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert max(run_distributed(_errors_without_summaries, 1, fresh=True)[0]) < 1e-5


def _joins_from_zero(rank: int, world_size: int) -> tuple[int, list[str]]:
    """Joins, one of them of M, of passes that know that R and D_in are 0; results that differ from other passes'."""
    from zeco_train.ops.delta.kernels.launch import DeltaKernels

    case = KernelCase("gated_delta", 150, (1, 1, 2, 16, 16), changes=MANY)
    tensors = case.tensors(torch.float32, CPU)
    tensors |= {name: torch.zeros_like(tensors[name]) for name in ("R", "D_in")}
    plain = case.found(tensors)
    bases = [mock.patch.object(base, "from_zero", True) for base in (ForwardBase, BackwardBase)]
    counted = mock.patch.object(DeltaKernels, "join", autospec=True, side_effect=DeltaKernels.join)
    with bases[0], bases[1], counted as join:
        found = case.found(tensors)
    return join.call_count, [name for name in plain if not torch.equal(plain[name], found[name])]


def test_segments_that_nothing_precedes_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_joins_from_zero, 1, fresh=True) == [(3, [])]


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


def _wrongly_resized(rank: int, world_size: int) -> list[tuple[int, ...]]:
    from zeco_train.kernels.rows import resize_kernel

    found = []
    for rows, width, new in ((50, 33, 48), (50, 48, 33), (1, 17, 32)):
        x, y = torch.randn(rows, width), torch.full((rows, new), torch.nan)
        resize_kernel[(rows * new // 256 + 1,)](x, y, y.numel(), width, new, 256)
        if not torch.equal(y, torch.nn.functional.pad(x, [0, new - width])):
            found.append((rows, width, new))
    return found


def test_rows_are_cut_and_filled_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_wrongly_resized, 1, fresh=True) == [[]]


class Recorder:
    """Stands in for a kernel and records the constants of its launches."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *arguments: object, **constants: object) -> None:
        self.launches.append(constants)


@pytest.mark.parametrize("K", [5, 16, 32, 48, 64, 96, 128, 256])
def test_miscompiled_tile_sizes_are_never_requested(K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 the gradient kernels never use tiles of fewer than 64 keys or values, whatever the stored tuning."""
    from zeco_train.ops.gla.kernels import launch

    kernels = Recorder(), Recorder()
    for name, kernel in zip(("plain_grads_kernel", "other_grads_kernel"), kernels, strict=True):
        monkeypatch.setattr(launch, name, kernel)
    q = torch.empty(1, 64, 1, K, dtype=torch.bfloat16)
    v, b, narrow = torch.empty(1, 64, 1, 16, dtype=torch.bfloat16), q.float(), launch.TileOptions(16, 16, 4, 1)
    for options in (launch.options_for(q), launch.GlaTuning(plain_grads=narrow, other_grads=narrow)):
        launcher = launch.GlaKernels(q, v, None, 1.0, options)
        launcher.grads(q, q, v, b, v, launch.WalkOperands(q, q, b, b), v, v)
        for kernel in kernels:
            assert all(min(constants["BK"], constants["BV"]) >= 64 for constants in kernel.launches)
    assert [len(kernel.launches) for kernel in kernels] == [2, 2]
