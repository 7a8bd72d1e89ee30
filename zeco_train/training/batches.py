"""The batches of a run and its held-out sequences, with a check of the first batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from data.loader import DataSplit, SequenceLoader, for_task
from data.loader.batches import OpenedData, SequenceSource
from zeco_train.config.schema import Config
from zeco_train.distributed.mesh import ProcessMesh, agree, gather
from zeco_train.errors import DataError
from zeco_train.system.numbers import IGNORE_INDEX
from zeco_train.training.validation import Validation

logger = logging.getLogger(__name__)


class RunData(NamedTuple):
    """Batches of any step, and the held-out sequences."""

    loader: SequenceLoader
    validation: Validation


def split_of(config: Config, mesh: ProcessMesh) -> DataSplit:
    """This rank's part of each batch."""
    data = config.data
    return mesh.split(
        data.seq_len,
        data.micro_batch,
        documents=data.reset_state_at_document,
        segments=config.train.segments,
        labels_across_documents=data.has_labels_across,
    )


def read_batches(config: Config, data: OpenedData, split: DataSplit, consumed: int, mesh: ProcessMesh) -> RunData:
    """The batches and the held-out sequences of a run that has consumed so many sequences. Collective.

    Raises:
        DataError: `check_shards_fit`.
    """
    sources, held_out = (for_task(some, config.task, config.model.vocab_size) for some in (data.train, data.validation))
    loader = _build_loader(config, sources, split)
    _log_data(loader, sources, config)
    validation = Validation(held_out, split, config.train.eval_sequences)
    for line in validation.coverage():
        logger.info("validation: %s", line)
    if mesh.is_main:
        for description in validation.unlabelled:
            logger.warning("no validation loss of %s: no label in its held-out sequences counts", description)
    # With all labels: shards meet where the label of the last token is the first token of the next shard.
    plain = _build_loader(config, data.train, replace(split, labels_across_documents=True))
    check_shards_fit(plain, consumed, mesh)
    return RunData(loader, validation)


def _build_loader(config: Config, sources: Sequence[SequenceSource], split: DataSplit) -> SequenceLoader:
    data = config.data
    return SequenceLoader(sources, split, seed=config.seed, global_batch=data.global_batch, shuffle=data.shuffle)


def _log_data(loader: SequenceLoader, sources: Sequence[SequenceSource], config: Config) -> None:
    total = config.train.steps * config.data.global_batch
    for source, share in zip(sources, loader.mixture.shares, strict=True):
        named = f"{source.name}, {float(share):.4g} of the sequences, " if source.name else ""
        line = source.describe(config.data.shuffle, config.data.seq_len, float(total * share))
        logger.info("data: %s%s", named, line)


def check_shards_fit(loader: SequenceLoader, consumed: int, mesh: ProcessMesh) -> None:
    """Check the first batch: the ranks of an SP group have the same sequences, and their shards fit. Collective.

    A shard's last label must equal the first token of the next shard, which another node may read from its own copy.

    Raises:
        DataError: on every rank; names the first two ranks that differ.
    """
    batch = agree(mesh, lambda: loader.batch(consumed, 0))
    own = batch.sequence_ids, batch.input_ids[:, 0].tolist(), batch.labels[:, -1].tolist()
    everyone = gather(own, mesh.world_size)
    for rank in range(1, mesh.world_size):
        if rank % mesh.sp_size == 0:
            continue
        (before_ids, _, labels), (ids, tokens, _) = everyone[rank - 1], everyone[rank]
        pair = f"ranks {rank - 1} and {rank}, which share sequences,"
        if before_ids != ids:
            problem = f"{pair} have different ones in their first batch, {before_ids} and {ids}"
            raise DataError("data", problem, "start all ranks with the same command line")
        if any(label not in (token, IGNORE_INDEX) for label, token in zip(labels, tokens, strict=True)):
            problem = f"{pair} have different tokens where their shards of {ids} meet, {labels} and {tokens}"
            raise DataError(loader.reader_of(ids[0]).description, problem, "copy the token store to all nodes again")
