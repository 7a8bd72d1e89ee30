"""Builds the parts of a run; cheap checks come first, on every rank alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from data.config import check_split
from data.loader import DataSplit, PrefetchingLoader, SequenceLoader
from data.loader.batches import OpenedData, SequenceSource
from data.loader.masking import for_task
from data.loader.opening import open_data
from models.config import LanguageModelConfig
from models.language_model import LanguageModel
from models.parameters import parameter_rules
from models.projections import set_matmul
from models.spec import spec_of
from zeco_train.checkpoint.checkpointer import Checkpointer
from zeco_train.checkpoint.files import Progress, complete_checkpoints, find_weights, is_hf_folder
from zeco_train.config.document_rules import check_documents
from zeco_train.config.execution import Compile, CudaGraphs
from zeco_train.config.schema import Config, TrainConfig, to_plain
from zeco_train.distributed.agreement import join_alike
from zeco_train.distributed.device import Device, find_device
from zeco_train.distributed.mesh import (
    Launch,
    ProcessMesh,
    agree,
    main_first,
    resolve_sp_size,
)
from zeco_train.distributed.parallelize import Strategy, count_shards, parallelize
from zeco_train.hf.continuing import check_continuation, other_tokenizer
from zeco_train.hf.weights import load_weights
from zeco_train.hf.writer import stored_dtype
from zeco_train.lifecycle.logs import setup_logging
from zeco_train.lifecycle.watchdog import Watchdog
from zeco_train.ops.operator import Target
from zeco_train.ops.seam import Exchange
from zeco_train.ops.slow_paths import warn_of
from zeco_train.sp.exposed import ExposedMeter
from zeco_train.system.code_cache import use_private_caches
from zeco_train.system.environment import environment
from zeco_train.tracking.loggers import build_logger
from zeco_train.tracking.recorder import Recorder, check_records
from zeco_train.tracking.run_folder import RunFolder, begun_with, check_shared, other_model
from zeco_train.training.connect import check_softmax, connect_model
from zeco_train.training.first_batch import check_shards_fit
from zeco_train.training.graphs import StepGraphs, capture_problem
from zeco_train.training.kernels_ahead import kernels_ahead
from zeco_train.training.machine import check_machine, slow_paths
from zeco_train.training.optim.registry import build_optimizer
from zeco_train.training.profiler import StepProfiler, check_profile_ranks
from zeco_train.training.seen_data import SeenData, check_alike, check_seen
from zeco_train.training.step import TrainingStep
from zeco_train.training.validation import Validation

logger = logging.getLogger(__name__)


@dataclass
class Parts:
    """The parts of a run that the trainer uses."""

    mesh: ProcessMesh
    watchdog: Watchdog
    exchange: Exchange
    meter: ExposedMeter
    step: TrainingStep
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    split: DataSplit
    loader: PrefetchingLoader
    validation: Validation
    checkpointer: Checkpointer
    recorder: Recorder
    profiler: StepProfiler
    progress: Progress


@dataclass(frozen=True)
class OpenedRun:
    """The data and the folder of a run.

    Attributes:
        config: with the rule of labels that the run has begun with.
        data: the stores.
        path: the folder; `folder` holds it on rank 0.
        log: this rank's log file in it.
    """

    config: Config
    data: OpenedData
    path: Path
    folder: RunFolder | None
    log: Path

    def release(self) -> None:
        """Release the lock on the run's folder."""
        if self.folder is not None:
            self.folder.release()


def init(config: Config, launch: Launch) -> ProcessMesh:
    """Check the settings against world size and machine, then join the ranks, see `join_alike`.

    Raises:
        ConfigError: a split that the world size, or a setting that the machine, does not allow; ranks that differ; a
            schedule whose warm-up and decay overlap.
    """
    # Not a check of each stored configuration: runs that trained with an overlap are still evaluated and exported.
    config.sched.check_steps(config.train.steps)
    sp_size = resolve_sp_size(config.sp.size, launch.world_size, config.sp.backend.value)
    count_shards(config.parallel.strategy, config.parallel.shard_size, launch.world_size, sp_size)
    check_split(config.data, sp_size, launch.world_size // sp_size, config.train.segments)
    check_softmax(config.sp, config.model, sp_size)
    check_profile_ranks(config.train.profile_ranks, launch.world_size)
    device = find_device(config.train.device, launch, "train.device")
    check_machine(config, device)
    return join_alike(to_plain(config), launch, sp_size, device, timedelta(seconds=config.parallel.timeout_seconds))


def open_run(config: Config, arguments: list[str], mesh: ProcessMesh) -> OpenedRun:
    """Open the data, then the run's folder, and direct logging to it.

    Raises:
        ZecoError: on every rank, the first rank's error: data, folder, or a run that cannot be resumed with these
            settings.
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
        _check_shared_folder(path, folder, mesh)
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
    """With `data.labels_across_documents` for null: a run goes on with the rule that it began with."""
    path, key = Path(config.run_dir), "data.labels_across_documents"
    begun = [agree(mesh, lambda: begun_with(path, key) if mesh.is_main else None)]
    dist.broadcast_object_list(begun, src=0)
    rule = config.data.labels_across_documents
    if rule is None:
        rule = begun[0] if isinstance(begun[0], bool) else config.data.has_labels_across
    return replace(config, data=replace(config.data, labels_across_documents=rule))


def resolve(config: Config, mesh: ProcessMesh) -> Config:
    """The configuration with `sp.size` and `train.device` resolved for this world size and machine."""
    sp = replace(config.sp, size=mesh.sp_size)
    return replace(config, sp=sp, train=replace(config.train, device=Device(mesh.device.type)))


def _check_load(load: str, config: Config) -> None:
    """Check the target of `checkpoint.load` without reading its tensors."""
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


def _check_shared_folder(path: Path, folder: RunFolder | None, mesh: ProcessMesh) -> None:
    """Check that all ranks see the same run folder, since each writes its part of a checkpoint into it."""
    mark = [folder.mark if folder is not None else ""]
    dist.broadcast_object_list(mark, src=0)
    agree(mesh, lambda: check_shared(path, mark[0], mesh.rank))


def _warn(config: Config, data: OpenedData, folder: RunFolder) -> None:
    """Log warnings about the setup, on rank 0."""
    load = config.checkpoint.load
    if load is not None and not complete_checkpoints(folder.path):
        path, own = find_weights(load), config.identity() | data.identity()
        is_hf = is_hf_folder(path)
        problem = other_tokenizer(path, own["data.tokenizer"]) if is_hf else other_model(path.parent.parent, own)
        if problem is not None:
            logger.warning("checkpoint.load=%s: %s", load, problem)
    if folder.lock_problem is not None:
        logger.warning(
            "run_dir=%s: this file system has no locks (%s), so a second start of the run would not be noticed",
            folder.path,
            folder.lock_problem,
        )
    rules = {name: store.meta.control_strings for name, store in data.stores().items()}
    if len(set(rules.values())) > 1:
        text = ", ".join(f"{name}: {rule}" for name, rule in rules.items())
        logger.warning("the data's stores differ in what control strings of their texts became (%s)", text)
    if data.unvalidated:
        of = f" of {', '.join(data.unvalidated)}" if len(data.train) > 1 else ""
        logger.warning(
            "no validation loss%s: too little is held out for a sequence of data.seq_len=%d", of, config.data.seq_len
        )


def _log_data(loader: SequenceLoader, sources: Sequence[SequenceSource], config: Config) -> None:
    total = config.train.steps * config.data.global_batch
    for source, share in zip(sources, loader.mixture.shares, strict=True):
        named = f"{source.name}, {float(share):.4g} of the sequences, " if source.name else ""
        line = source.describe(config.data.shuffle, config.data.seq_len, float(total * share))
        logger.info("data: %s%s", named, line)


def build(run: OpenedRun, mesh: ProcessMesh, watchdog: Watchdog) -> Parts:
    """Build model, optimizer and data, and restore the newest checkpoint of this run, if there is one.

    Raises:
        ZecoError: on every rank; see `open_run`, and the checkpoint's errors.
    """
    config = run.config
    torch.manual_seed(config.seed)
    checkpointer = Checkpointer(run.path, config.checkpoint, mesh)
    latest = checkpointer.latest_sound()

    data, train, parallel = config.data, config.train, config.parallel
    split = mesh.split(
        data.seq_len,
        data.micro_batch,
        documents=data.reset_state_at_document,
        segments=train.segments,
        labels_across_documents=data.has_labels_across,
    )
    shape = data.micro_batch, split.position(0).num_tokens
    with kernels_ahead(config.model, train, shape, data.reset_state_at_document, mesh.device):
        model = build_model(config.model, train, parallel.strategy, mesh, config.seed, parallel.shard_size)
    optimizer = build_optimizer(parameter_rules(model), config.optim, config.train.dtype.compute)

    progress = Progress()
    if latest is not None:
        progress = checkpointer.load(latest, model, optimizer)
    elif config.checkpoint.load is not None:
        load = config.checkpoint.load
        load_weights(agree(mesh, lambda: find_weights(load)), model, mesh, checkpointer.group)

    recorder = _build_recorder(config, run.path, mesh)
    facts = environment(mesh.device) if mesh.is_main else {}
    progress.logger_run_id = agree(mesh, lambda: recorder.start(progress, to_plain(resolve(config, mesh)), facts))
    if run.folder is not None and progress.step < train.steps:
        for change in run.folder.changes:
            recorder.note(f"from step {progress.step + 1} on: {change}")
    sources, held_out = (
        for_task(some, config.task, config.model.vocab_size) for some in (run.data.train, run.data.validation)
    )
    loader = _build_loader(config, sources, split)
    _log_data(loader, sources, config)
    validation = Validation(held_out, split, train.eval_sequences)
    for line in validation.coverage():
        logger.info("validation: %s", line)
    if mesh.is_main:
        for description in validation.unlabelled:
            logger.warning("no validation loss of %s: no label in its held-out sequences counts", description)
    # With all labels: shards meet where the label of the last token is the first token of the next shard.
    plain = _build_loader(config, run.data.train, replace(split, labels_across_documents=True))
    check_shards_fit(plain, progress.sequences, mesh)
    exchange = connect_model(
        config.sp, config.model, mesh, data.seq_len, train.dtype.compute, deterministic=train.deterministic
    )
    step = build_step(config, model, optimizer, exchange, mesh)
    return Parts(
        mesh=mesh,
        watchdog=watchdog,
        exchange=exchange,
        meter=ExposedMeter(),
        step=step,
        model=model,
        optimizer=optimizer,
        split=split,
        loader=PrefetchingLoader(loader, progress.sequences, ahead=train.segments),
        validation=validation,
        checkpointer=checkpointer,
        recorder=recorder,
        profiler=agree(
            mesh, lambda: StepProfiler(train.profile, train.profile_ranks, run.path, mesh.rank, mesh.device)
        ),
        progress=progress,
    )


def _build_loader(config: Config, sources: Sequence[SequenceSource], split: DataSplit) -> SequenceLoader:
    data = config.data
    return SequenceLoader(sources, split, seed=config.seed, global_batch=data.global_batch, shuffle=data.shuffle)


def _build_recorder(config: Config, path: Path, mesh: ProcessMesh) -> Recorder:
    train = config.train
    spec, seq_len = spec_of(config.model), config.data.seq_len
    flops = spec.flops_per_token(seq_len)
    return Recorder(
        path,
        mesh,
        build_logger(config.logger, path, mesh.rank),
        total_steps=train.steps,
        tokens_per_step=config.data.global_batch * config.data.seq_len,
        flops_per_token=flops.total,
        hardware_flops_per_token=(
            flops + spec.recomputed_flops_per_token(seq_len, train.recompute, train.segments)
        ).total,
        dtype=train.dtype.compute,
    )


def build_step(
    config: Config, model: LanguageModel, optimizer: torch.optim.Optimizer, exchange: Exchange, mesh: ProcessMesh
) -> TrainingStep:
    """The optimizer step of the configuration."""
    return TrainingStep(
        model,
        optimizer,
        exchange,
        mesh,
        strategy=config.parallel.strategy,
        grad_clip=config.optim.grad_clip,
        tokens_per_step=config.data.global_batch * config.data.seq_len,
        graphs=build_graphs(config, model, mesh.device),
    )


def build_graphs(config: Config, model: LanguageModel, device: torch.device) -> StepGraphs | None:
    """What replays the steps of a configuration; None, with the reason in the log, where they cannot be captured."""
    if config.train.cuda_graphs is CudaGraphs.off or device.type != "cuda":
        return None
    if (problem := capture_problem(config)) is not None:
        logger.warning("train.cuda_graphs: steps run without graphs, which do not support %s", problem)
        return None
    return StepGraphs(model, device)


def build_model(
    model_config: LanguageModelConfig,
    config: TrainConfig,
    strategy: Strategy,
    mesh: ProcessMesh,
    seed: int,
    shard_size: int = -1,
) -> LanguageModel:
    """Build the model, initialise it from its seed and shard it, with recomputation and compilation as configured.

    Raises:
        ConfigError: no private folder for compiled code.
    """
    compiled = config.compile is Compile.always or (config.compile is Compile.auto and mesh.device.type == "cuda")
    if compiled:
        use_private_caches()  # before parts of torch read its default at import
    with torch.device("meta"):  # skips torch's own initialisation, which is slow and would be overwritten
        model = spec_of(model_config).build().to(config.dtype.master)
    model.to_empty(device=mesh.device)
    # Initialise the whole model, then shard: initialising shards would depend on the number of ranks.
    model.init_weights(seed)
    parallelize(model, model.sharding_units(), strategy, config.dtype.compute, mesh, shard_size)
    model.set_recompute(config.recompute)
    set_matmul(model, config.matmul)
    if compiled:
        # Inductor measures some sums anew in each process, and takes whichever was faster: noise decides how they are
        # rounded (pytorch issue 189121).
        model.compile_parts(**({"options": {"deterministic": True}} if config.deterministic else {}))
    return model


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
