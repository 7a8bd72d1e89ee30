"""Makes the trainer of an opened run: builds model, optimizer and step, and loads where the run goes on."""

from __future__ import annotations

import importlib
import logging
from concurrent.futures import ThreadPoolExecutor

import torch

from models.config import LanguageModelConfig
from models.language_model import LanguageModel
from models.parameters import parameter_rules
from models.projections import set_matmul
from models.spec import spec_of
from zeco_train.checkpoint.checkpointer import Checkpointer
from zeco_train.checkpoint.files import Progress, find_weights
from zeco_train.config.schema import Config
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import ProcessMesh, agree
from zeco_train.distributed.parallelize import parallelize
from zeco_train.hf.weights import load_weights
from zeco_train.lifecycle.watch import Watchdog
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.seam import Exchange
from zeco_train.sp.exchange import connect_model
from zeco_train.system.code_cache import use_private_caches
from zeco_train.system.command import quick_imports
from zeco_train.training.config import CudaGraphs, TrainConfig
from zeco_train.training.forward import split_of
from zeco_train.training.graphs import StepGraphs, capture_problem
from zeco_train.training.kernels_ahead import kernels_ahead
from zeco_train.training.opening import OpenedRun, read_batches, start_recorder
from zeco_train.training.optim.optimizer_registry import build_optimizer
from zeco_train.training.step import TrainingStep
from zeco_train.training.trainer import Trainer

logger = logging.getLogger(__name__)


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
    options = {"deterministic": train.deterministic, "replayed": train.recompute is Recompute.full}
    exchange = connect_model(config.sp, config.model, mesh, config.data.seq_len, train.dtype.compute, **options)
    step = build_step(config, model, optimizer, exchange, mesh)
    return Trainer(config, step, data, checkpointer, recorder, progress, watchdog)


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
    """The graphs that replay a configuration's steps; None, and the reason logged, where they cannot be captured."""
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
    """Build the model, initialise it from its seed and shard it, with recomputation and compilation as configured."""
    compiled = config.compile.applies(strategy, on_cuda=mesh.device.type == "cuda")
    if compiled:
        use_private_caches()  # before parts of torch read its default at import
    model = spec_of(model_config).allocate(config.dtype.master, mesh.device)
    with ThreadPoolExecutor(1) as pool:
        # Initialise the whole model, then shard: initialising shards would depend on the number of ranks.
        drawn = pool.submit(model.init_weights, seed)
        if compiled:
            _open_compiler(mesh.device)
        drawn.result()
    parallelize(model, model.sharding_units(), strategy, config.dtype.compute, mesh, shard_size)
    model.set_recompute(config.recompute)
    set_matmul(model, config.matmul)
    if compiled:
        # Inductor measures some sums anew in each process, and takes whichever was faster: noise decides how they are
        # rounded (pytorch issue 189121).
        model.compile_parts(**({"options": {"deterministic": True}} if config.deterministic else {}))
    return model


def _open_compiler(device: torch.device) -> None:
    # The first step would wait for these three seconds, and for the process that compiles, which starts as slowly.
    with quick_imports():
        importlib.import_module("torch._inductor.compile_fx")
    if device.type == "cuda":
        importlib.import_module("torch._inductor.async_compile").AsyncCompile.warm_pool()
