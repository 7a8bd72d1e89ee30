"""Makes the trainer of an opened run: builds model, optimizer and step, and loads where the run goes on."""

from __future__ import annotations

import torch

from models.parameters import parameter_rules
from zeco_train.checkpoint.checkpointer import Checkpointer
from zeco_train.checkpoint.files import Progress, find_weights
from zeco_train.distributed.mesh import ProcessMesh, agree
from zeco_train.hf.weights import load_weights
from zeco_train.lifecycle.watch import Watchdog
from zeco_train.sp.for_model import connect_model
from zeco_train.training.batches import read_batches, split_of
from zeco_train.training.build import build_model, build_step
from zeco_train.training.kernels_ahead import kernels_ahead
from zeco_train.training.opening import OpenedRun, start_recorder
from zeco_train.training.optim.registry import build_optimizer
from zeco_train.training.trainer import Trainer


def load_trainer(run: OpenedRun, mesh: ProcessMesh, watchdog: Watchdog) -> Trainer:
    """Build the trainer, and restore the newest checkpoint of the run, if there is one. Collective.

    Raises:
        ZecoError: on every rank.
    """
    config, train = run.config, run.config.train
    torch.manual_seed(config.seed)
    checkpointer = Checkpointer(run.path, config.checkpoint, mesh)
    latest = checkpointer.latest_sound()

    split, documents = split_of(config, mesh), config.data.reset_state_at_document
    shape = config.data.micro_batch, split.position(0).num_tokens
    parallel = config.parallel
    with kernels_ahead(config.model, train, shape, documents, mesh.device):
        model = build_model(config.model, train, parallel.strategy, mesh, config.seed, parallel.shard_size)
    optimizer = build_optimizer(parameter_rules(model), config.optim, train.dtype.compute)

    progress = Progress()
    if latest is not None:
        progress = checkpointer.load(latest, model, optimizer)
    elif (load := config.checkpoint.load) is not None:
        weights = agree(mesh, lambda: find_weights(load))
        load_weights(weights, model, mesh, checkpointer.group)

    recorder = start_recorder(run, progress, mesh)
    data = read_batches(config, run.data, split, progress.sequences, mesh)
    exchange = connect_model(
        config.sp, config.model, mesh, config.data.seq_len, train.dtype.compute, deterministic=train.deterministic
    )
    step = build_step(config, model, optimizer, exchange, mesh)
    return Trainer(config, step, data, checkpointer, recorder, progress, watchdog)
