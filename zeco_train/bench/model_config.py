"""Settings of case `model`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zeco_train.bench import variants as known
from zeco_train.bench.config import OfModelConfig
from zeco_train.config.execution import Compile, CudaGraphs
from zeco_train.config.schema import Config
from zeco_train.distributed.parallelize import Strategy
from zeco_train.errors import ConfigError
from zeco_train.ops.linear import Matmul
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.attention.registry import AttentionChoice
from zeco_train.sp.registry import SHARING
from zeco_train.system.numbers import check_least


class ModelSettings(NamedTuple):
    """What distinguishes the models of case `model`; None is what the model's file has.

    Attributes:
        mixer: of which the file with the same size is taken.
        every: softmax attention in one layer of this many; 0: none.
        heads: H.
    """

    mixer: str | None = None
    every: int | None = None
    heads: int | None = None


@dataclass
class ModelConfig(OfModelConfig):
    """Settings of case `model`.

    Attributes:
        variants: dp, lasp1, lasp2, zeco train; dp:no_optimizer runs dp's passes alone; `products` runs only the matrix
            products of their plain step, as an upper bound, on the same GPU in the same turns; fla is the peer, with
            :no_optimizer and :compile.
        budget_seconds: each `fla` reserves as much of it as one of the other variants has taken; configurations with
            more tokens per rank are not started, and fewer steps are timed, if that would not be left.
        mixers: to measure one after the other, each with its file of the size of `model`; empty: the model's own.
        every: to measure one after the other, softmax attention in one layer of this many, 0 in none, as
            `model.attn.every`; empty: the model's own.
        attention: method of softmax layers over ranks, as `sp.attention`.
        heads, tokens: H (null: that of the model's file), and tokens per rank and micro-batch; all combinations are
            measured, tokens innermost.
        seq_len: tokens of a sequence, with dp and with the backends; tokens are multiples of it. 0: a sequence is all
            tokens of a rank with dp, and those of all ranks with a backend. Softmax layers do more work the longer a
            sequence is, so that hybrids are compared at equal work only with one length.
        micro_batches: of `tokens` tokens per rank each, of a step.
        steps: timed optimizer steps of each variant; the papers' are 100. Fewer, with a note, if another quarter of
            them would not end within budget_seconds.
        dtype, matmul, compile, cuda_graphs, recompute, segments: as train.py's `train.dtype` and so on. Only dtype
            applies to `products`, and none to `fla`, which is trained in bf16.
        strategy: parallelism of the parameters; not hsdp, which would shard over other ranks with `dp` than with the
            rest.
        check_tokens: tokens per rank in the correctness check.
        trace: also profile one step of each variant that trains, and note the overlap of communication and compute, the
            time in which nothing runs, and what the parts of the step take (`zeco_train.bench.parts`).
    """

    variants: list[str] = field(default_factory=lambda: list(known.MODEL_VARIANTS))
    mixers: list[str] = field(default_factory=list)
    every: list[int] = field(default_factory=list)
    attention: AttentionChoice = AttentionChoice["auto"]
    heads: list[int] | None = None
    tokens: list[int] = field(default_factory=lambda: [16_384, 32_768])
    seq_len: int = 0
    micro_batches: int = 1
    steps: int = 100
    matmul: Matmul = Matmul.bf16
    compile: Compile = Compile.auto
    cuda_graphs: CudaGraphs = CudaGraphs.auto
    recompute: Recompute = Recompute.none
    segments: int = 1
    strategy: Strategy = Strategy.zero2
    check_tokens: int = 256
    trace: bool = False

    def validate(self) -> None:
        """See `CaseConfig.validate`."""
        super().validate()
        known.check_variants(self.variants, "dp", known.PRODUCTS, *SHARING, "fla", peer_settings=known.PEER_SETTINGS)
        self._check_lists(tokens=1, **({} if self.heads is None else {"heads": 1}))
        check_least(self, seq_len=0, micro_batches=1, steps=1, segments=1, check_tokens=1)
        for tokens in (*self.tokens, self.check_tokens):
            if tokens % self.segments:
                name = "check_tokens" if tokens == self.check_tokens else "tokens"
                raise ConfigError(name, tokens, f"must divide by segments={self.segments}")
        for tokens in self.tokens if self.seq_len else ():
            if tokens % self.seq_len:
                raise ConfigError("tokens", tokens, f"must divide by seq_len={self.seq_len}")
        if self.strategy is Strategy.hsdp:
            raise ConfigError("strategy", self.strategy.name, "must be ddp, zero2 or zero3")
        for name in ("mixers", "every"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ConfigError(name, values, "must be a list of different ones")
        for settings in self.models:
            self.run_config(settings)

    @property
    def models(self) -> list[ModelSettings]:
        """The models to measure."""
        own: list[None] = [None]
        combinations = itertools.product(self.mixers or own, self.every or own, self.heads or own)
        return [ModelSettings(*settings) for settings in combinations]

    def run_config(self, settings: ModelSettings) -> Config:
        """The configuration of a training run of a model.

        Raises:
            ConfigError: an unknown or invalid model.
        """
        mixer, every, heads = settings
        for text in self.overrides:
            key, _, value = text.lstrip("+").partition("=")
            if key == "model.num_heads":
                raise ConfigError(key, value, "write heads=[…] here")
            if key == "model.mixer" and mixer is not None:
                raise ConfigError(key, value, "is one of mixers=[…] already; leave it out")
            if key == "model.attn.every" and every is not None:
                raise ConfigError(key, value, "is one of every=[…] already; leave it out")
        # Refused for a model without softmax layers; a pattern without is there to compare with.
        has_method = self.attention.name != "auto" and every != 0
        run = self._load_run(
            *([] if mixer is None else [f"model.mixer={mixer}"]),
            *([] if every is None else [f"model.attn.every={every or 'null'}"]),
            *([] if heads is None else [f"model.num_heads={heads}"]),
            *([f"sp.attention={self.attention.name}"] if has_method else []),
            f"train.matmul={self.matmul.name}",
            f"train.compile={self.compile.name}",
            f"train.cuda_graphs={self.cuda_graphs.name}",
            f"train.recompute={self.recompute.name}",
            f"train.segments={self.segments}",
            f"parallel.strategy={self.strategy.name}",
        )
        if every:
            # Results of several patterns are told apart by name.
            run.model = replace(run.model, name=f"{run.model.name}_hybrid_{every}")
        return run
