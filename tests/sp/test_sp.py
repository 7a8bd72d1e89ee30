"""Every backend, on every rank, against the recurrence over the whole sequence: outputs, gradients, states, carries."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from models.mixer_registry import MIXERS
from tests.sp.test_operators import compare, found_by
from tests.support.comparison import largest
from tests.support.distributed import on_ranks
from tests.support.operator_cases import expected_of_rows, in_dtype, make, own_tokens
from tests.support.recurrence import naive_gla
from tests.support.sp_reference import CONFIGS, RecordedExchange, build_scans
from zeco_train.collectives import ScanWorker, serial
from zeco_train.collectives.topology import Topology
from zeco_train.collectives.worker import ScanSpec
from zeco_train.errors import ConfigError
from zeco_train.ops import mix as mix_module
from zeco_train.ops.gla import chunked
from zeco_train.ops.layer_states import StateInput
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
# Of two sequences without documents.
WHOLE: dict[str, Any] = {"starts": ((), ())}
PARITY: list[dict[str, Any]] = [
    {"decay": "mixed"},
    {"decay": "mixed", "carry": False, "want_carry": False},
    {"decay": "none", "carry": False, "want_carry": False},
    {"decay": "mixed", "strided": True},
    {"decay": "mixed", "loss": "carry"},
    {"decay": "mixed", "loss": "o"},
]


def parity(rank: int, world_size: int, scans: dict[str, RecordedExchange], quick: bool) -> None:
    for number, settings in enumerate(PARITY):
        for lengths in LENGTHS[world_size][number % 2 :][:1] if quick else LENGTHS[world_size]:
            for place, (backend, scan) in enumerate(scans.items()):
                # Every backend has the first case, and a fourth of the others.
                if not quick or number == 0 or (place + number) % 4 == 0:
                    compare("gla", backend, scan, rank, lengths, **WHOLE, **settings)


class Sequence:
    """Two sequences of GLA, and what a rank has of them."""

    def __init__(self, lengths: tuple[int, ...], dtype: torch.dtype = torch.float64) -> None:
        self.bounds = [*itertools.accumulate(lengths, initial=0)]
        self.values = make("gla", self.bounds[-1], "mixed", B=2)
        if dtype is not torch.float64:
            self.values = in_dtype("gla", self.values, dtype)

    @functools.cached_property
    def wanted(self) -> dict[str, Tensor]:
        wide = {key: x.double() for key, x in self.values.items()}
        return expected_of_rows("gla", wide, ((), ()), carry_in=True, carry_out=True)

    def found(self, scan: RecordedExchange, rank: int) -> dict[str, Tensor]:
        """Of a rank's tokens."""
        start, stop = self.bounds[rank : rank + 2]
        own = own_tokens("gla", self.values, slice(start, stop))
        return found_by("gla", own, SequencePosition((start, stop), exchange=scan))

    def errors(self, found: dict[str, Tensor], rank: int) -> dict[str, float]:
        """Maximum deviation of each tensor, relative to its maximum over all ranks."""
        mine = own_tokens("gla", self.wanted, slice(*self.bounds[rank : rank + 2]))
        largest_of = {key: x.abs().max().item() for key, x in self.wanted.items()}
        return {key: (x.double() - mine[key]).abs().max().item() / largest_of[key] for key, x in found.items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(x, expected[key]) for key, x in found.items())


def determinism(rank: int, world_size: int, scans: dict[str, RecordedExchange], quick: bool) -> None:
    sequence = Sequence(LENGTHS[world_size][0])
    if quick:
        scans = {name: scans[name] for name in ("lasp1", "chain/1", "auto")}
    runs = [{name: sequence.found(scan, rank) for name, scan in scans.items()} for _ in range(2)]
    for name in scans:
        assert same(runs[0][name], runs[1][name]), f"two runs of {name}"
    # One block is the whole state: both fold the same tensors. Theirs lie elsewhere and may be strided otherwise, and
    # a vectorised exp differs from that of a loop's remainder by some eps of 2e-16.
    for name, tensor in runs[0]["chain/1"].items():
        error = (tensor - runs[0]["lasp1"][name]).norm()
        assert error <= 1e-14 * tensor.norm(), f"{name} of a chain of one block and lasp1 differ by {error:.1e}"


def precision(rank: int, world_size: int, scans: dict[str, RecordedExchange], quick: bool) -> None:
    """The rounding error of several ranks is at most about twice that of one rank in the same dtype."""
    lengths = LENGTHS[world_size][-1] if world_size > 1 else LENGTHS[1][0]
    for dtype in (torch.bfloat16,) if quick else (torch.float32, torch.bfloat16):
        sequence, whole = Sequence(lengths, dtype), Sequence((sum(lengths),), dtype)
        alone = whole.errors(whole.found(RecordedExchange(local_exchange()), 0), 0)
        states = largest([alone["carry_out"], alone["dcarry_in"]])
        assert states < 2e-6, f"states of one rank are off by {states:.1e}"
        for name, scan in [*scans.items()][:: 3 if quick else 1]:
            for tensor, error in sequence.errors(sequence.found(scan, rank), rank).items():
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
    sequence = Sequence((1,) * world_size)
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
            sequence.found(scan, rank)
        assert events == expected, f"{name}: {events}"


@pytest.mark.parametrize(
    ("world_size", "quick"), [(3, True), *(pytest.param(n, False, marks=pytest.mark.campaign) for n in range(1, 5))]
)
@on_ranks()
def test_every_backend_equals_the_recurrence(rank: int, world_size: int, quick: bool) -> None:
    """Also replays, bit-identical repetition, lower precision, and overlap of scans and compute.

    All checks of a world size in one spawn; the traceback of a failure shows which part.
    """
    scans = build_scans(tuple(range(world_size)))
    parity(rank, world_size, scans, quick)
    determinism(rank, world_size, scans, quick)
    precision(rank, world_size, scans, quick)
    order_of_calls(rank, world_size, scans)
    for scan in scans.values():
        scan.drain()


@pytest.mark.parametrize("name", ["gated_deltanet", "kda"])
def test_delta_rules_compute_their_gate_between_launch_and_wait(name: str) -> None:
    """And the gradient of its weight; a replay computes it, too, and launches nothing."""
    exchange = RecordedExchange(local_exchange())
    layer = MIXERS[name](MIXERS[name].config_class(), 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(1, 9, layer.config.hidden_size, requires_grad=True)
    position, decay = SequencePosition((0, 9), exchange=exchange).on(x), layer.wide_parameters
    assert decay is not None
    states, events = [StateInput()] * 2, exchange.events
    with mock.patch.multiple(
        mix_module, **{each: noted(events, mix_module, each) for each in ("linear", "weight_grad")}
    ):
        y, outputs = layer(x, position, states, decay())
        rest = ["wait", "finish"]
        assert events == ["launch forward", *rest, "launch forward", "linear", *rest]
        events.clear()
        y.sum().backward()
        assert events == ["launch reverse", "weight_grad", *rest, "launch reverse", *rest]
        events.clear()
        layer(x, position, [StateInput(output.received) for output in outputs], decay())
        assert events == ["linear"]


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
