"""Every backend, on every rank, against the recurrence over the whole sequence: outputs, gradients, states, carries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.comparison import largest
from tests.support.distributed import run_distributed
from tests.support.recurrence import naive_gla
from tests.support.sp_reference import (
    CONFIGS,
    KEY_DIM,
    Case,
    RecordedExchange,
    Reference,
    assert_same,
    build_scans,
    check_segments,
    ordinary_pass,
    replayed_pass,
)
from zeco_train.collectives import ScanWorker, serial
from zeco_train.collectives.topology import Topology
from zeco_train.collectives.worker import ScanSpec
from zeco_train.errors import ConfigError
from zeco_train.ops.gla import chunked
from zeco_train.ops.mix import mix
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.all_scan_config import AllScanAlgorithm, AllScanConfig
from zeco_train.sp.backend_registry import BACKENDS, Backend, SPConfig
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric

# Tokens of each rank: one alone, whole chunks, chunks and a remainder; a short rank first, inside and last.
LENGTHS = {
    1: ((100,), (1,)),
    2: ((1, 130), (65, 64)),
    3: ((70, 1, 33), (64, 37, 1)),
    4: ((1, 129, 64, 37), (33, 65, 2, 1)),
}


PARITY: dict[str, dict[str, Any]] = {
    "carry that only one rank may read": {"carry": True, "poison": True},
    "mixed decays": {},
    "no decay": {"rates": (0.0,) * KEY_DIM},
    "replicated carry and strided tensors": {"carry": True, "strided": True},
    "loss of the carry alone": {"carry": True, "loss": "carry"},
    "carry that is not in the loss": {"carry": True, "loss": "o"},
}


def parity(rank: int, world_size: int, scans: dict[str, RecordedExchange], quick: bool) -> None:
    for number, (name, settings) in enumerate(PARITY.items()):
        for lengths in LENGTHS[world_size][number % 2 :][:1] if quick else LENGTHS[world_size]:
            case = Case(name, (lengths,), **settings)
            reference = Reference(case)
            for place, (backend, scan) in enumerate(scans.items()):
                # Every backend has the first case, and a third of the others.
                if quick and number and (place + number) % 3:
                    continue
                results = ordinary_pass(case, scan, rank)
                reference.check(results, rank, backend)
                if not case.carry or case.strided:
                    continue
                scan.events.clear()
                replayed = replayed_pass(case, scan, rank, results)
                launches = [event for event in scan.events if event.startswith("launch")]
                assert launches == ["launch reverse"], f"a replay launched {launches}: {backend}, {case.name}"
                assert_same(replayed, results, f"replay, {backend}, {case.name}")


def determinism(rank: int, world_size: int, scans: dict[str, RecordedExchange], quick: bool) -> None:
    case = Case("two runs", LENGTHS[world_size][:1], carry=True)
    if quick:
        scans = {name: scans[name] for name in ("lasp1", "chain/1", "auto")}
    runs = [{name: ordinary_pass(case, scan, rank) for name, scan in scans.items()} for _ in range(2)]
    for name in scans:
        assert_same(runs[0][name], runs[1][name], f"two runs of {name}")
    # One block is the whole state: both fold the same tensors. Theirs lie elsewhere and may be strided otherwise, and
    # a vectorised exp differs from that of a loop's remainder by some eps of 2e-16.
    for name, tensor in runs[0]["chain/1"].items():
        error = (tensor - runs[0]["lasp1"][name]).norm()
        assert error <= 1e-14 * tensor.norm(), f"{name} of a chain of one block and lasp1 differ by {error:.1e}"


def precision(rank: int, world_size: int, scans: dict[str, RecordedExchange], quick: bool) -> None:
    """The rounding error of several ranks is at most about twice that of one rank in the same dtype."""
    lengths = LENGTHS[world_size][-1] if world_size > 1 else LENGTHS[1][0]
    for dtype in (torch.bfloat16,) if quick else (torch.float32, torch.bfloat16):
        case = Case(f"{dtype}", (lengths,), rates=(0.0, 1e-3, 1e-2, 0.1, 1.0, 5.0, 50.0), carry=True, dtype=dtype)
        reference = Reference(case)
        whole = replace(case, lengths=((sum(lengths),),))
        alone = Reference(whole).errors(ordinary_pass(whole, RecordedExchange(local_exchange()), 0), 0)
        # States are fp32 for both dtypes, so the error of bf16 outputs does not apply to them.
        alone["R"] = alone["D_in"] = largest([alone["carry_out"], alone["dcarry_in"]])
        assert alone["R"] < 2e-6, f"states of one rank are off by {alone['R']:.1e}"
        for name, scan in scans.items():
            errors = reference.errors(ordinary_pass(case, scan, rank), rank)
            for tensor, error in errors.items():
                bound = 2 * alone[tensor] + 4 * 2.0**-24
                assert error <= bound, f"{tensor} is off by {error:.1e} > {bound:.1e}: {name}, {dtype}, rank {rank}"


def noted(events: list[str], owner: object, name: str) -> Callable[..., Any]:
    """The function of that name, wrapped to append its name to `events`."""
    function = getattr(owner, name)

    def call(*args: object, **options: object) -> Any:
        events.append(name)
        return function(*args, **options)

    return call


def order_of_calls(rank: int, world_size: int, scans: dict[str, RecordedExchange]) -> None:
    """Scans run beside the intra-chunk work; LASP-1 receives before the outputs and sends after them."""
    case = Case("order of calls", LENGTHS[world_size][-1:], carry=True)
    for name, scan in scans.items():
        # Expected communication calls after each call of the seam.
        launch, wait, finish = [], [], []
        if name == "lasp1":
            wait, finish = ["recv_incoming"], ["send_folded"]
        elif world_size > 1:
            launch = ["submit"]
        seam = (["wait"], ["finish", *finish, "carry_out"])
        expected = [
            *("local_states", "launch forward", *launch, "intra_scores", *seam[0], *wait, "outputs", *seam[1]),
            *("local_state_grads", "launch reverse", *launch, "local_states", "intra_grads"),
            *(*seam[0], *wait, "operand_grads", *seam[1]),
        ]
        events = scan.events
        events.clear()
        phases = ("local_states", "intra_scores", "local_state_grads", "intra_grads")
        forward, backward = chunked._GlaForward, chunked._GlaBackward
        with (
            mock.patch.multiple(chunked, **{phase: noted(events, chunked, phase) for phase in phases}),
            mock.patch.object(forward, "outputs", noted(events, forward, "outputs")),
            mock.patch.object(backward, "operand_grads", noted(events, backward, "operand_grads")),
            mock.patch.object(ScanWorker, "submit", noted(events, ScanWorker, "submit")),
            mock.patch.object(serial, "recv_incoming", noted(events, serial, "recv_incoming")),
            mock.patch.object(serial, "send_folded", noted(events, serial, "send_folded")),
        ):
            ordinary_pass(case, scan, rank)
        assert events == expected, f"{name}: {events}"


def suite(rank: int, world_size: int, quick: bool) -> None:
    """All checks of a world size in one spawn; the traceback of a failure shows which part."""
    scans = build_scans(tuple(range(world_size)))
    parity(rank, world_size, scans, quick)
    determinism(rank, world_size, scans, quick)
    precision(rank, world_size, scans, quick)
    order_of_calls(rank, world_size, scans)
    case = Case("two segments", LENGTHS[world_size], carry=True)
    reference = Reference(case)
    for place, (name, scan) in enumerate(scans.items()):
        if not quick or place % 3 == 0:
            check_segments(case, scan, rank, reference, name)
        scan.drain()
    dist.barrier()  # keep ranks alive until their peers have received everything


@pytest.mark.parametrize(
    ("world_size", "quick"), [(3, True), *(pytest.param(n, False, marks=pytest.mark.campaign) for n in range(1, 5))]
)
def test_every_backend_equals_the_recurrence(world_size: int, quick: bool) -> None:
    """Also replays, two segments, bit-identical repetition, lower precision, and overlap of scans and compute."""
    run_distributed(suite, world_size, quick)


def test_piecewise_reference_equals_whole_recurrence() -> None:
    case = Case("reference", ((1, 30, 9), (17, 2, 3)), carry=True)
    tokens = [case.tensors[name] for name in ("q", "k", "v", "g")]
    o, final_state = naive_gla(*tokens, initial_state=case.tensors["carry_in"])
    reference = Reference(case)
    assert torch.equal(reference.whole["o"], o)
    assert torch.equal(reference.carries["carry_out"], final_state)


def test_every_backend_and_algorithm_is_tested() -> None:
    assert {config.backend for config in CONFIGS.values()} | {Backend["dp"]} == set(Backend)
    assert {config.all_scan.algorithm for config in CONFIGS.values()} == set(AllScanAlgorithm)


def test_a_backend_has_settings_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its section is not All-Scan's."""

    class Section:
        def scans_over(self, topology: Topology) -> tuple[ScanSpec, ...]:
            return BACKENDS["lasp1"].scans

        def topology(self, found: Topology) -> Topology:
            return Topology((1, 1))

    config = SPConfig(Backend["lasp2"], all_scan=AllScanConfig(AllScanAlgorithm["chain"]))
    vars(config)["deadline"] = section = Section()
    monkeypatch.setitem(BACKENDS, "lasp2", replace(BACKENDS["lasp2"], section="deadline"))
    assert config.settings is section
    assert (config.scans_over(Topology((2,))), config.topology(Topology((2,)))) == (
        BACKENDS["lasp1"].scans,
        Topology((1, 1)),
    )
    assert SPConfig().settings == AllScanConfig()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (SPConfig(size=0), "sp.size"),
        (SPConfig(size=-2), "sp.size"),
        *((SPConfig(all_scan=AllScanConfig(blocks=text)), "sp.all_scan.blocks") for text in ("0", "-1", "many", "1.5")),
    ],
)
def test_configuration_out_of_range_is_named(config: SPConfig, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.validate()
    assert caught.value.field == field


def test_autocast_changes_nothing() -> None:
    """Forward and backward, for fp32 tokens in a region of bf16."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(1, 100, 2, 8, generator=generator).requires_grad_() for _ in range(3)]
    g = -torch.rand(1, 100, 2, 8, generator=generator)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            o, _ = mix("gla", (*tokens, g), SequencePosition((0, 100), exchange=local_exchange()))
            results.append([o, *torch.autograd.grad(o, tokens, torch.ones_like(o))])
    assert all(torch.equal(plain, cast) for plain, cast in zip(*results, strict=True))


@pytest.mark.few
@pytest.mark.parametrize("num_tokens", [1, 64, 65])
@pytest.mark.parametrize("heads", [1, 2])
def test_single_chunk_or_head_equals_recurrence(num_tokens: int, heads: int) -> None:
    """Chunk and token layouts coincide here; outputs of a custom op must be separate tensors all the same."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, num_tokens, heads, 8
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3))
    g = (-torch.rand(shape, generator=generator, dtype=torch.float64)).requires_grad_()
    do = torch.randn(shape, generator=generator, dtype=torch.float64)
    o, _ = mix("gla", (q, k, v, g), SequencePosition((0, num_tokens), exchange=local_exchange()))
    expected, _ = naive_gla(q, k, v, g)
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-12)
    grads, wanted = (torch.autograd.grad(out, (q, k, v, g), do) for out in (o, expected))
    for own, reference in zip(grads, wanted, strict=True):
        torch.testing.assert_close(own, reference, rtol=0, atol=1e-11)
