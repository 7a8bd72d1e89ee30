"""Opens what a run reads and writes, on every rank alike: its data and their batches, its folder, log and records."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from data.config import DataKind
from data.loader.batches import DataSplit, OpenedData, SequenceSource
from data.loader.loader import SequenceLoader
from data.loader.opening import open_data
from data.loader.sequences import for_task
from models.spec import spec_of
from zeco_train.checkpoint.files import Progress, complete_checkpoints, find_weights, is_hf_folder
from zeco_train.config.schema import Config, check_documents, to_plain
from zeco_train.distributed.mesh import Device, ProcessMesh, agree, from_main, gather, main_first
from zeco_train.errors import DataError
from zeco_train.hf.trained import check_continuation, other_tokenizer
from zeco_train.hf.weights import stored_dtype
from zeco_train.lifecycle.logs import setup_logging
from zeco_train.ops.operator import Target
from zeco_train.ops.slow_paths import warn_of
from zeco_train.system.environment import environment
from zeco_train.system.numbers import IGNORE_INDEX
from zeco_train.tracking.loggers import build_logger
from zeco_train.tracking.recorder import Recorder, check_records
from zeco_train.tracking.run_folder import RunFolder, begun_with, check_shared, other_model
from zeco_train.training.checks import slow_paths
from zeco_train.training.forward import Validation
from zeco_train.training.seen_data import SeenData, check_alike, check_seen

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedRun:
    """The data and the folder of a run; `folder` holds the lock on `path`, on rank 0; `log` is this rank's log file."""

    config: Config
    data: OpenedData
    path: Path
    folder: RunFolder | None
    log: Path

    def release(self) -> None:
        if self.folder is not None:
            self.folder.release()


def open_run(config: Config, arguments: list[str], mesh: ProcessMesh) -> OpenedRun:
    """Open the data, then the run's folder, and direct logging to it.

    Raises:
        ZecoError: on every rank: data, folder, or a run that cannot be resumed with these settings.
    """
    config = _with_rule_of_labels(config, mesh)
    data = main_first(mesh, lambda: _open_data(config, mesh))
    check_alike(data, mesh.world_size)
    identity = config.identity() | data.identity()
    path = Path(config.run_dir)
    load = config.checkpoint.load
    if load is not None:
        # Before the folder is created: an error here should not leave one behind.
        agree(mesh, lambda: _check_load(load, config) if not complete_checkpoints(path) else None)
    folder = agree(mesh, lambda: RunFolder(path, identity) if mesh.is_main else None)
    try:
        # Each rank writes its part of a checkpoint into the folder.
        mark = [folder.mark if folder is not None else ""]
        dist.broadcast_object_list(mark, src=0)
        agree(mesh, lambda: check_shared(path, mark[0], mesh.rank))
        agree(mesh, lambda: check_records(path) if folder else None)
        seen = check_seen(data, config.data, path, folder is not None and folder.has_begun, mesh)
        agree(mesh, lambda: _begin(folder, data, seen, config, arguments, mesh) if folder else None)
        log = agree(mesh, lambda: setup_logging(path, mesh.rank))
    except BaseException:
        if folder is not None:
            folder.release()
        raise
    for message in seen.messages:
        logger.info("%s", message)
    if folder is not None:
        _warn(config, data, folder)
        warn_of(slow_paths(config, Target.of(mesh.device)))
    return OpenedRun(config, data, path, folder, log)


def _with_rule_of_labels(config: Config, mesh: ProcessMesh) -> Config:
    # `data.labels_across_documents=null` of a run that goes on is the rule that it began with.
    path, key = Path(config.run_dir), "data.labels_across_documents"
    begun = from_main(mesh, lambda: begun_with(path, key))
    rule = config.data.labels_across_documents
    if rule is None:
        rule = begun if isinstance(begun, bool) else config.data.has_labels_across
    return replace(config, data=replace(config.data, labels_across_documents=rule))


def resolve(config: Config, mesh: ProcessMesh) -> Config:
    """The configuration with `sp.size` and `train.device` resolved for this world size and machine."""
    sp = replace(config.sp, size=mesh.sp_size)
    return replace(config, sp=sp, train=replace(config.train, device=Device(mesh.device.type)))


def _check_load(load: str, config: Config) -> None:
    path = find_weights(load)
    if is_hf_folder(path):
        check_continuation(path, config.model)
    else:
        stored_dtype(path, config.model)


def _begin(
    folder: RunFolder, data: OpenedData, seen: SeenData, config: Config, arguments: list[str], mesh: ProcessMesh
) -> None:
    folder.begin(to_plain(resolve(config, mesh)), arguments)
    if data.stores():
        seen.write(folder.path)
    folder.keep_tokenizer(data.tokenizer_files())


def _warn(config: Config, data: OpenedData, folder: RunFolder) -> None:
    load = config.checkpoint.load
    if load is not None and not complete_checkpoints(folder.path):
        path, own = find_weights(load), config.identity() | data.identity()
        is_hf = is_hf_folder(path)
        problem = other_tokenizer(path, own["data.tokenizer"]) if is_hf else other_model(path.parent.parent, own)
        if problem is not None:
            logger.warning("checkpoint.load=%s: %s", load, problem)
    if folder.lock_problem is not None:
        line = "run_dir=%s: this file system has no locks (%s), so a second start of the run would not be noticed"
        logger.warning(line, folder.path, folder.lock_problem)
    rules = {name: store.meta.control_strings for name, store in data.stores().items()}
    if len(set(rules.values())) > 1:
        text = ", ".join(f"{name}: {rule}" for name, rule in rules.items())
        logger.warning("the data's stores differ in what control strings of their texts became (%s)", text)
    if data.unvalidated:
        of = f" of {', '.join(data.unvalidated)}" if len(data.train) > 1 else ""
        is_embedded = config.data.kind is DataKind.embedded
        larger = "data.validation_fraction" if is_embedded else "--validation-fraction of prepare"
        line = "no validation loss%s: too little is held out for a sequence of data.seq_len=%d; a larger %s helps"
        logger.warning(line, of, config.data.seq_len, larger)


def _open_data(config: Config, mesh: ProcessMesh) -> OpenedData:
    data = open_data(
        config.data,
        vocab_size=config.model.vocab_size,
        sp_size=mesh.sp_size,
        segments=config.train.segments,
        validate=config.train.eval_sequences > 0,
    )
    check_documents(config.model, config.data, config.data.seq_len, data.stores().values())
    # For its errors, before the folder is created.
    for_task(data.train, config.task, config.model.vocab_size)
    return data


class RunData(NamedTuple):
    """Batches of any step, and the held-out sequences."""

    loader: SequenceLoader
    validation: Validation


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


def start_recorder(run: OpenedRun, progress: Progress, mesh: ProcessMesh) -> Recorder:
    """The recorder of a run, which goes on after `progress`.

    Raises:
        ZecoError: on every rank; a file of the run's folder, or the tracker.
    """
    config, train = run.config, run.config.train
    spec, seq_len = spec_of(config.model), config.data.seq_len
    flops = spec.flops_per_token(seq_len)
    recomputed = spec.recomputed_flops_per_token(seq_len, train.recompute, train.segments)
    recorder = Recorder(
        run.path,
        mesh,
        build_logger(config.logger, run.path, mesh.rank),
        total_steps=train.steps,
        tokens_per_step=config.data.global_batch * seq_len,
        flops_per_token=flops.total,
        hardware_flops_per_token=(flops + recomputed).total,
        dtype=train.dtype.compute,
    )
    facts = environment(mesh.device) if mesh.is_main else {}
    progress.logger_run_id = agree(mesh, lambda: recorder.start(progress, to_plain(resolve(config, mesh)), facts))
    if run.folder is not None and progress.step < train.steps:
        for change in run.folder.changes:
            recorder.note(f"from step {progress.step + 1} on: {change}")
    return recorder
