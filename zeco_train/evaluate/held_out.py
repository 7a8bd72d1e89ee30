"""The task `validation`: the loss over held-out sequences of any length, and by position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from data.config import DataKind, check_seq_len
from data.loader.opening import open_held_out
from data.loader.sequences import for_task
from data.tokenizer import BYTES
from zeco_train.config.schema import check_documents
from zeco_train.distributed.mesh import main_first
from zeco_train.errors import ConfigError
from zeco_train.evaluate.evaluation import Evaluation
from zeco_train.evaluate.task_registry import TaskResult
from zeco_train.hf.trained import Trained
from zeco_train.lifecycle.join import check_same
from zeco_train.system.numbers import length_name
from zeco_train.tracking.charts import POSITIONS_PLOT_FILE, position_figure
from zeco_train.tracking.positions import PositionLosses, ValidationLoss
from zeco_train.training.forward import Validation, split_of

_ALL = 1 << 62


@dataclass
class HeldOut:
    """Settings of `validation`.

    Attributes:
        lengths: sequence lengths, one evaluation each; empty is data.seq_len.
        sequences: use only the first so many of each store; 0: all. val_loss in training uses the first
            train.eval_sequences.
    """

    lengths: list[int] = field(default_factory=list)
    sequences: int = 0

    def validate(self) -> None:
        if self.sequences < 0:
            raise ConfigError("sequences", self.sequences, "must be ≥ 0; 0 is all")
        if len(set(self.lengths)) < len(self.lengths):
            raise ConfigError("lengths", self.lengths, "names one twice")

    def prepare(self, evaluation: Evaluation, name: str) -> None:
        config, mesh, trained = evaluation.config, evaluation.mesh, evaluation.trained
        if config.data.kind is DataKind.synthetic:
            task = config.data.synthetic.task.value
            allowed = f"data=synthetic holds no text out; take --tasks={task}, or data=tokens data.path=STORE"
            raise ConfigError("--tasks", "validation", allowed)
        size, folders = trained.model.vocab_size, trained.folders
        self._sources = main_first(
            mesh, lambda: open_held_out(config.data, vocab_size=size, tokenizer=_tokenizer(trained), folders=folders)
        )
        digests = {
            source.name or "held-out tokens": source.documents.store.meta.tokens_sha256 for source in self._sources
        }
        check_same(digests, mesh.world_size, "copy the token store to all nodes again")
        # Shorter stores are left out of a length, so only the longest must fit.
        longest = max(self._sources, key=lambda source: source.documents.num_tokens).documents
        for length in self.lengths or [config.data.seq_len]:
            setting = "validation.lengths" if self.lengths else "data.seq_len"
            check_seq_len(
                length,
                mesh.sp_size,
                longest.num_tokens,
                config.train.segments,
                longest.description,
                setting,
                f"validation.lengths=[{longest.num_tokens - 1}] takes it all; "
                "prepare's --validation-fraction decides how much is held out",
            )
            stores = [source.documents.store for source in self._sources]
            check_documents(config.model, config.data, length, stores, setting)
            if (found := self._validation(evaluation, length)[0]).is_empty:
                allowed = f"no label counts in the held-out sequences of {', '.join(found.unlabelled)}"
                raise ConfigError(setting, length, allowed)

    def run(self, evaluation: Evaluation) -> TaskResult:
        by_length = {}
        for length in self.lengths or [evaluation.config.data.seq_len]:
            validation, lines = self._validation(evaluation, length)
            for line in lines:
                evaluation.note(line)
            evaluation.enter(f"validation at {length} tokens")
            loss = validation.loss(evaluation.forward)
            assert loss is not None
            by_length[length] = (loss, lines)
        return _result(by_length, evaluation)

    def _validation(self, evaluation: Evaluation, length: int) -> tuple[Validation, list[str]]:
        config = evaluation.config
        # One token more than the length: the label of the last.
        fitting = [source for source in self._sources if source.documents.num_tokens > length]
        sources = for_task(fitting, config.task, config.model.vocab_size)
        validation = Validation(sources, split_of(config, evaluation.mesh, length), self.sequences or _ALL)
        short = [source.documents for source in self._sources if source not in fitting]
        left_out = [
            f"{documents.store.path}: left out: its {documents.num_tokens:,} tokens are no sequence of {length:,}"
            for documents in short
        ]
        return validation, [*validation.coverage("validation.sequences"), *left_out]


def _tokenizer(trained: Trained) -> Mapping[str, str]:
    # With its digest, which for an export is computed from its files.
    info = trained.tokenizer_info
    is_told = not info or info.get("kind") == BYTES or "sha256" in info
    return info if is_told else trained.tokenizer.info


def _result(by_length: Mapping[int, tuple[ValidationLoss, list[str]]], evaluation: Evaluation) -> TaskResult:
    # With the byte tokenizer one token is one byte; losses of masked tokens are no code length of the text.
    is_bytes = evaluation.trained.tokenizer_info.get("kind") == BYTES and not evaluation.config.task.is_masked
    metrics: dict[str, float] = {}
    lines = []
    for length, (loss, _) in by_length.items():
        of = f"@{length_name(length)}" if len(by_length) > 1 else ""
        metrics |= {f"loss{of}": loss.mean, f"perplexity{of}": loss.perplexity}
        spread = f" ± {loss.error:.4f}" if loss.error is not None else ""
        line = f"{length:>12,} tokens  loss {loss.mean:.4f}{spread}  perplexity {loss.perplexity:.4f}"
        if is_bytes:
            metrics[f"bits_per_byte{of}"] = loss.mean / math.log(2)
            line += f"  {loss.mean / math.log(2):.4f} bits a byte"
        line += f"  ({loss.extent})"
        lines += [line, *(f"{'':>12}  {name}: loss {mean:.4f}" for name, mean in loss.by_store.items())]
        lines.append(f"{'':>12}  {_format_by_position(loss.by_position)}")
    details = {
        "train_length": evaluation.train_len,
        "lengths": {
            str(length): {**loss.as_dict(), "coverage": coverage} for length, (loss, coverage) in by_length.items()
        },
    }
    if not evaluation.mesh.is_main:
        return TaskResult(metrics)
    curves = {length: loss.by_position for length, (loss, _) in by_length.items()}
    figure = position_figure(f"{evaluation.title}: held-out loss by position", curves, evaluation.train_len)
    return TaskResult(metrics, lines, details, {POSITIONS_PLOT_FILE: figure})


def _format_by_position(losses: PositionLosses) -> str:
    buckets = list(zip(pairwise(losses.edges), losses.losses, strict=True))
    buckets = [bucket for bucket in buckets if not math.isnan(bucket[1])] or buckets
    some = sorted({round(index * (len(buckets) - 1) / 5) for index in range(6)})
    losses_of_some = ", ".join(f"{buckets[i][0][0]:,}–{buckets[i][0][1] - 1:,} {buckets[i][1]:.3f}" for i in some)
    return f"loss by position ({len(some)} of {len(buckets)} ranges of tokens): {losses_of_some}"
