"""Benchmark case `model`: its comparisons and checks, and the whole case on two CPU ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from unittest import mock

import pytest
import torch

from models.formats.format_registry import formats_of
from models.spec import ModelSpec
from tests.support.bench_settings import QUICK, error_line
from tests.support.distributed import run_distributed
from zeco_train.bench import model, peer, timing
from zeco_train.bench.backends import RandomTokens
from zeco_train.bench.config import ModelConfig, ModelSettings
from zeco_train.bench.model import _Measurement
from zeco_train.bench.session import Session, WrongResultError
from zeco_train.bench.timing import Contender, Summary, time_in_turns
from zeco_train.bench.variants import Variant
from zeco_train.config.schema import load_config
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.join import Launch
from zeco_train.sp.attention.method_registry import AttentionChoice
from zeco_train.sp.backend_registry import SHARING

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["model=gla_2b"], "gla_125m, gla_1b, gla_340m, gla_tiny"),
        (["mixers=[retnet]", "model.mixer=gla"], "model.mixer=gla: is one of mixers=[…] already; leave it out"),
        (["every=[0,100]"], "model.attn.every=100: must be from 1 to model.num_layers"),
        (["seq_len=12288"], "tokens=16384: must divide by seq_len=12288"),
    ],
)
def test_invalid_arguments_print_one_error_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in error_line(["model", *arguments], capsys)


def test_settings_convert_to_run_config() -> None:
    arguments = ["model=gla_125m", "model.num_layers=3", "heads=[6,3]", "segments=2", "recompute=full", "dtype=fp32"]
    config = ModelConfig.load([*arguments, "variants=[dp,zeco:chain:p2p,fla:no_optimizer:compile]", "seed=5"])
    assert config.overrides == ["model.num_layers=3"]
    run = config.run_config(ModelSettings(heads=3))
    assert (run.model.name, run.model.num_layers, run.model.num_heads, run.seed) == ("gla_125m", 3, 3, 5)
    assert (run.train.segments, run.train.recompute.name, run.train.dtype.name) == (2, "full", "fp32")
    # 12 heads split 1536 hidden units, but not the 1024 of the model's file.
    ModelConfig.load(["model=gla_340m", "heads=[12]", "model.hidden_size=1536"])
    assert ModelConfig().steps == 100
    assert ModelConfig().variants == ["dp", "products", *SHARING, "fla", "fla:no_optimizer"]


def test_each_mixer_has_the_file_of_the_size() -> None:
    # Not loaded: that composes each model to check it.
    config = ModelConfig(model="gla_tiny", mixers=["gla", "retnet"], overrides=["model.num_layers=2"])
    runs = [config.run_config(settings) for settings in config.models]
    assert [run.model.name for run in runs] == ["gla_tiny", "retnet_tiny"]
    assert {run.model.num_layers for run in runs} == {2}
    alone = ModelConfig(model="retnet_tiny")
    assert [alone.run_config(settings).model.name for settings in alone.models] == ["retnet_tiny"]


def test_patterns_of_hybrids_are_told_apart_by_name() -> None:
    ring, two_layers = AttentionChoice["ring"], ["model.num_layers=2"]
    config = ModelConfig(model="gla_tiny", overrides=two_layers, every=[0, 2], attention=ring, heads=[2, 1])
    runs = [config.run_config(settings) for settings in config.models]
    assert [(run.model.name, run.model.num_heads, list(run.model.attn.chosen(2))) for run in runs] == [
        ("gla_tiny", 2, []),
        ("gla_tiny", 1, []),
        ("gla_tiny_hybrid_2", 2, [1]),
        ("gla_tiny_hybrid_2", 1, [1]),
    ]
    assert [run.sp.attention.name for run in runs] == ["auto", "auto", "ring", "ring"]


def test_all_variants_get_the_same_tokens() -> None:
    ranks, count, segments = 2, 12, 3
    several = RandomTokens(50, count, 3, mock.Mock(spec=Session), micro_batches=4)
    assert [*several.numbers(0), *several.numbers(1)] == [*range(8)]
    for rank in range(ranks):
        session = mock.Mock(spec=Session, rank=rank, world_size=ranks, device=torch.device("cpu"))
        tokens = RandomTokens(50, count, 3, session)
        stream = tokens.stream(7)
        assert stream.shape == (ranks * count + 1,)
        assert not torch.equal(stream, tokens.stream(8))
        assert torch.equal(tokens.own(7), stream[None, rank * count : (rank + 1) * count])
        for alone in (True, False):
            batches = tokens.batches(7, alone, segments)
            # Each segment of a shared sequence is spread over the ranks: rank 1 follows rank 0 within it.
            starts = [0, 4, 8] if alone else [[0, 8, 16], [4, 12, 20]][rank]
            assert [batch.position.start for batch in batches] == starts
            for batch in batches:
                start = batch.position.start + alone * rank * count
                assert torch.equal(batch.input_ids, stream[None, start : start + 4])
                assert torch.equal(batch.labels, stream[None, start + 1 : start + 5])
                assert batch.position.before() == batch.position.start


def test_all_variants_get_sequences_of_one_length() -> None:
    """With `seq_len` a backend's ranks have shards of the sequences that `dp`'s have whole."""
    whole, shards = [], []
    for rank in range(2):
        session = mock.Mock(spec=Session, rank=rank, world_size=2, device=torch.device("cpu"))
        tokens = RandomTokens(50, 12, 3, session, sequence=6)
        (alone,), parts = tokens.batches(7, True, 1), tokens.batches(7, False, 3)
        assert torch.equal(alone.input_ids, tokens.own(7))
        assert (alone.input_ids.shape, alone.position.start) == ((2, 6), 0)
        assert [part.position.start for part in parts] == [rank, 2 + rank, 4 + rank]
        assert all(len(part.sequence_ids) == len(part.input_ids) == 4 for part in parts)
        whole.append(torch.stack([alone.input_ids, alone.labels]))
        shards.append([torch.stack([part.input_ids, part.labels]) for part in parts])
        assert (tokens.seq_len(True), tokens.seq_len(False)) == (6, 6)
    # Segment by segment, and within it rank by rank.
    joined = torch.cat([shard for segment in zip(*shards, strict=True) for shard in segment], dim=2)
    assert torch.equal(joined, torch.cat(whole, dim=1))


def test_contenders_alternate_and_budget_stops_between_rounds() -> None:
    assert [list(timing.in_rounds(n)) for n in (1, 3, 5, 100)] == [[1], [1, 1, 1], [2, 1, 1, 1], [25, 25, 25, 25]]
    session = mock.Mock(spec=Session, on_cuda=False, world_size=1, enter=mock.Mock())
    session.within_budget.side_effect = [True, True, False]
    issued: list[tuple[str, int]] = []

    def contender(name: str) -> Contender:
        return Contender(Variant(name, name), lambda step: issued.append((name, step)) or 1.5)

    both = [contender("a"), contender("b")]
    with mock.patch.object(timing.dist, "barrier"):
        assert time_in_turns(both, 2, 7, session) == 6  # of rounds of 2, 2, 2 and 1
    # The first step of each turn is not timed, and every step has different tokens.
    assert "".join(name for name, _ in issued) == "aabb" + "aaabbb" + "bbbaaa" + "aaabbb"
    assert [step for _, step in issued] == [*range(len(issued))]
    for each in both:
        assert (len(each.samples), len(each.seconds), each.loss) == (6, 3, 1.5)
    issued.clear()
    session.within_budget.side_effect = None
    with mock.patch.object(timing.dist, "barrier"):
        assert time_in_turns([contender("alone")], 1, 5, session) == 5
    assert len(issued) == 1 + 5


@pytest.mark.parametrize("free", [99e9, 40e9])
def test_graphs_of_a_variant_go_before_the_next_if_both_do_not_fit(free: float) -> None:
    """An error names the variant, and a variant's peak has neither the others' graphs nor their buffers."""
    session = mock.Mock(spec=Session, on_cuda=True, gather=lambda value: [value], enter=mock.Mock())
    session.within_budget.return_value = True
    held: set[str] = set()
    steps: list[str] = []

    class Graphs:
        def __init__(self, name: str) -> None:
            self.name, self.count = name, 0

        are_replays = property(lambda self: self.count > timing.WARM_UP)

        def memory(self) -> tuple[int, int]:
            return (10**10, 3 * 10**10) if self.name in held else (0, 0)

        def release(self) -> None:
            self.count = 0
            held.discard(self.name)

        def step(self, number: int) -> float:
            assert session.enter.call_args.args == (f"gla_1b, {self.name}",)
            self.count += 1
            if self.are_replays:
                held.add(self.name)
            assert free > 50e9 or held <= {self.name}
            steps.append(self.name)
            return 1.5

    def contender(name: str) -> Contender:
        graphs = Graphs(name)
        return Contender(Variant(name, name), graphs.step, graphs=graphs)  # type: ignore[arg-type]

    both = [contender("a"), contender("b")]
    buffers = Contender(Variant("products", "products"), lambda number: 0.0, held_gb=2.0)
    used = lambda: 32 * 10**9 + 10**10 * len(held)  # noqa: E731
    cuda = mock.Mock(mem_get_info=lambda: (free, 80e9), max_memory_allocated=used)
    with (
        mock.patch.object(timing.dist, "barrier"),
        mock.patch.object(timing.torch, "cuda", cuda),
        mock.patch.multiple(timing, mark=lambda session: 0.0, milliseconds=lambda start, end: 1.0),
    ):
        assert time_in_turns([*both, buffers], 3, 8, session, what="gla_1b") == 8
    again = timing.WARM_UP + 2
    assert steps.count("b") == 3 + 8 + (4 if free > 50e9 else 1 + 3 * again)
    assert [each.peak_gb for each in both] == [70.0, 70.0]


def test_nonfinite_last_loss_raises() -> None:
    session = mock.Mock(spec=Session, rank=0, world_size=2, gather=lambda value: [value, value])
    contender = Contender(
        Variant("zeco", "zeco"), mock.Mock(), samples=[1.0, 3.0], seconds=[0.0025], loss=torch.tensor(2.0)
    )
    row = contender.as_row(session)
    assert (row["wall_ms"], row["median_ms"], row["loss"], row["peak_gb"]) == (2.5, 2.0, 2.0, None)
    contender.loss = math.nan
    with pytest.raises(WrongResultError, match="the last loss"):
        contender.as_row(session)


def test_wrong_first_loss_raises() -> None:
    config = ModelConfig.load([*QUICK, "dtype=fp32"])
    session = mock.Mock(spec=Session, rank=0)
    measurement = _Measurement(config.run_config(ModelSettings(heads=2)), config, session, mock.Mock())
    guess = math.log(259)
    dp, lasp1, zeco = (Variant(name, name) for name in ("dp", "lasp1", "zeco"))
    measurement._check_losses({dp: guess + 0.1, lasp1: guess, zeco: guess + 1e-6})
    for losses, says in (
        ({dp: 1.2 * guess}, r"dp is wrong.* log\(vocabulary\)"),
        ({dp: math.nan}, r"dp is wrong.* log\(vocabulary\)"),
        ({dp: guess, lasp1: guess, zeco: guess + 0.01}, "zeco is wrong.* to be that of lasp1"),
    ):
        with pytest.raises(WrongResultError, match=says):
            measurement._check_losses(losses)


VARIANTS = ["dp", "dp:no_optimizer", "products", "zeco:chain", "fla"]
# A hybrid at equal work, whose `dp` must have the backends' first loss, or nothing is timed; and mixers, of which
# Mamba-2's convolutions exchange a state with a matrix as its transition.
HYBRID = ["heads=[2]", "every=[2]", "attention=ring", "seq_len=16"]
MIXERS = ["mixers=[gla,mamba2]", "segments=2", "recompute=full", "strategy=zero3", "micro_batches=3"]


def _case(rank: int, world_size: int, folder: str, settings: list[str]) -> str:
    arguments = ["model=gla_tiny", "model.num_layers=2", "device=cpu", "tokens=[32]", "steps=2", "warmup=1"]
    arguments += ["check_tokens=32", "timeout_seconds=60", "dtype=fp64", f"out={folder}", *settings]
    if "every=[2]" in settings:
        arguments += ["model.hidden_size=32", "model.intermediate_size=32"]
    config = ModelConfig.load([*arguments, f"variants=[{','.join(VARIANTS)}]"])
    session = Session.open(config, Launch(rank, world_size, rank, world_size))
    model.CASE.measure(config, session)
    with pytest.raises(ConfigError) as refused:
        model.CASE.measure(ModelConfig.load([*arguments, "segments=1", "tokens=[30]", "seq_len=15"]), session)
    session.drain()
    return str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [HYBRID, pytest.param(MIXERS, marks=pytest.mark.campaign)], ids=["hybrid", "mixers"]
)
def test_model_case_on_two_ranks(tmp_path: Path, settings: list[str]) -> None:
    assert run_distributed(_case, 2, str(tmp_path), settings) == ["seq_len=15: must divide by 2 ranks"] * 2
    results = json.loads((tmp_path / "results.json").read_text())
    names = ["gla_tiny_hybrid_2"] if settings == HYBRID else ["gla_tiny", "mamba2_tiny"]
    rows = {(row["model"], row["variant"]): row for row in results["rows"]}
    assert [*rows] == [(name, variant) for name in names for variant in VARIANTS[:-1]]
    for (name, variant), row in rows.items():
        trains = variant != "products"
        assert [len(of_rank) for of_rank in row["samples_ms_by_rank"]] == [2, 2]
        assert row["median_ms"] == Summary.of(row["samples_ms_by_rank"]).median
        assert row["loss"] == (pytest.approx(math.log(259), rel=0.05) if trains else None)
        assert row["seq_len"] == (
            (16 if settings == HYBRID else 64 if "l" in variant[:1] else row["seq_len"]) if trains else None
        )
        assert row["wall_ms"] == pytest.approx(1e3 * median(row["seconds_by_block"]))
        assert row["tokens_per_second_per_gpu"] == pytest.approx(32e3 * row["micro_batches"] / row["wall_ms"])
        assert row["ratio"] == pytest.approx(rows[name, "dp"]["wall_ms"] / row["wall_ms"])
        assert (row["tokens"], row["mfu"], row["micro_batches"]) == (32, None, 1 if settings == HYBRID else 3)
        if variant == "zeco:chain":
            assert row["relative_error"] < 1e-10
            assert row["exposed_ms"] > 0
        else:
            assert row["exposed_ms"] is None
    assert rows[names[0], "zeco:chain"]["choice"] == "chain of 1 blocks by gloo"
    table = (tmp_path / "table.txt").read_text()
    assert table.count("fla is not measured: variants=fla: flash-linear-attention's kernels need CUDA") == len(names)
    assert "2 steps of each variant; the papers' are 100" in table
    assert ("products: of the plain step, without recompute and segments" in table) == (settings == MIXERS)
    assert (tmp_path / "mixers.md").exists() == (settings == MIXERS)


@pytest.mark.parametrize(
    "mixer",
    [
        pytest.param("retnet", marks=pytest.mark.slow),
        *(pytest.param(mixer, marks=pytest.mark.campaign) for mixer in ("gla", "linear", "hgrn", "hgrn2")),
    ],
)
def test_peer_of_a_mixer_has_our_parameters_and_set_buffers(mixer: str) -> None:
    config = load_config(["model=gla_tiny", f"model.mixer={mixer}", "model.num_layers=1"]).model
    assert formats_of(config)[0].library == "fla"
    ours = {name: p.detach() for name, p in ModelSpec(config).build().named_parameters()}
    theirs = peer._build(config, ours, torch.device("cpu"))
    assert all(torch.equal(p, ours[name]) for name, p in theirs.named_parameters())
    buffers = dict(theirs.named_buffers())
    assert [*buffers] == (["model.layers.0.attn.rotary.inv_freq"] if mixer == "retnet" else [])
    for frequencies in buffers.values():
        half = torch.arange(len(frequencies)) / len(frequencies)
        assert torch.allclose(frequencies, 1e4**-half)
