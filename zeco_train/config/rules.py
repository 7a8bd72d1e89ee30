"""Rules between the sections of a run: softmax layers, documents' lengths, the task, and torch's DDP."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from data.config import DataConfig, DataKind
from data.loader.masking import TaskConfig
from data.store import TokenStore
from models.attn import AttnConfig
from models.config import LanguageModelConfig
from models.mixer_registry import check_document, longest_document, unmasked_mixers
from zeco_train.distributed.config import Strategy
from zeco_train.errors import ConfigError
from zeco_train.sp.backend_registry import SPConfig
from zeco_train.sp.exchange import check_softmax
from zeco_train.training.config import TrainConfig

# Of section `model.attn`: they choose the layers; the others shape them.
_CHOOSING = ("every", "offset", "layers")
# Layers that a message names.
_NAMED = 4


def check_attention(model: LanguageModelConfig, sp: SPConfig, segments: int) -> None:
    """Check that nothing cuts what softmax layers read, and that their heads can be spread over `sp.size` ranks."""
    if not (chosen := model.attn.chosen(model.num_layers)):
        return
    # The first ones, since a mistyped number of layers can be huge.
    named = ", ".join(map(str, itertools.islice(chosen, _NAMED))) + (", …" if len(chosen) > _NAMED else "")
    where = f"the model has softmax attention at layer{'s' if len(chosen) > 1 else ''} {named}"
    if not model.causal:
        raise ConfigError("model.causal", "false", f"softmax layers are causal for now, and {where}")
    if segments > 1:
        allowed = f"must be 1: segments need layers with a state of constant size, and {where}"
        raise ConfigError("train.segments", segments, allowed)
    if sp.size > 0:
        check_softmax(sp, model, sp.size)


def check_strategy(strategy: Strategy, train: TrainConfig) -> None:
    """Check that torch's own DDP is not asked for what it does not do here."""
    if strategy is not Strategy.torch_ddp:
        return
    for name, value, refused, allowed in (
        ("dtype", train.dtype.value, "bf16", "must be fp32 or fp64 with parallel=torch_ddp, which casts no weights"),
        ("matmul", train.matmul.value, "fp8", "must be bf16, the compute dtype, with parallel=torch_ddp"),
        ("compile", train.compile.value, "always", "must be auto or never with parallel=torch_ddp, which is eager"),
    ):
        if value == refused:
            raise ConfigError(f"train.{name}", value, allowed)


def needs(model: LanguageModelConfig) -> Iterator[tuple[str, str, bool]]:
    """Keys of several sections that have an effect only with softmax layers, as `needs` of one section."""
    has_softmax = bool(model.attn.chosen(model.num_layers))
    for name in ("sp.attention", *(f"model.attn.{field.name}" for field in dataclasses.fields(AttnConfig))):
        if name.rpartition(".")[2] not in _CHOOSING:
            yield name, "model.attn.every", has_softmax


def check_documents(
    model: LanguageModelConfig,
    data: DataConfig,
    seq_len: int,
    stores: Iterable[TokenStore],
    field: str = "data.seq_len",
) -> None:
    """Check that the model is defined for all documents of sequences of this length.

    All documents of the stores count, so all ranks find the same: in a batch only the rank with a document's end
    has its length, and the others would wait for it in a scan. No document continues from one sequence to the next.

    Raises:
        ConfigError: names `field`, the setting that holds the length, or the store with a document that is too long.
    """
    limit = longest_document(model)
    if limit is None or seq_len <= limit:
        return
    if not data.reset_state_at_document:
        check_document(model, field, seq_len)
    for store in stores:
        within = f"tokens of the longest document of {store.path} within {field}={seq_len}"
        check_document(model, within, min(store.longest_document(), seq_len))


def check_task(task: TaskConfig, model: LanguageModelConfig, data: DataConfig, segments: int) -> None:
    """Check that the model reads exactly what its task lets it read, and that nothing cuts an unmasked sequence."""
    if task.is_masked:
        if model.causal:
            problem = "a causal model would not read the tokens after a mask; set model.causal=false"
            raise ConfigError("task", "mlm", problem)
        if data.kind is DataKind.synthetic:
            raise ConfigError("task", "mlm", "data=synthetic has labels of its own; take another data=")
    if model.causal:
        return
    able = unmasked_mixers()
    if (decaying := next((name for name in model.mixer_counts() if name not in able), None)) is not None:
        allowed = f"the decays of {decaying} need an order; mixers without: {', '.join(able) or 'none yet'}"
        raise ConfigError("model.causal", "false", allowed)
    if not task.is_masked:
        raise ConfigError("model.causal", "false", "the model would read the token to predict; take task=mlm")
    if segments > 1:
        problem = "an unmasked model reads the whole sequence at once; must be 1 with model.causal=false"
        raise ConfigError("train.segments", segments, problem)
    if data.reset_state_at_document:
        problem = "an unmasked model reads the whole sequence; must be false with model.causal=false"
        raise ConfigError("data.reset_state_at_document", "true", problem)
    if not data.has_labels_across:
        problem = "labels of task=mlm are the tokens themselves; must be true or null"
        raise ConfigError("data.labels_across_documents", "false", problem)
