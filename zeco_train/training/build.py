"""Builds the model of a run, its optimizer step, and what replays the step."""

from __future__ import annotations

import logging

import torch

from models.config import LanguageModelConfig
from models.language_model import LanguageModel
from models.projections import set_matmul
from models.spec import spec_of
from zeco_train.config.schema import Config
from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.distributed.parallelize import Strategy, parallelize
from zeco_train.ops.seam import Exchange
from zeco_train.system.code_cache import use_private_caches
from zeco_train.training.config import Compile, CudaGraphs, TrainConfig
from zeco_train.training.graphs import StepGraphs, capture_problem
from zeco_train.training.step import TrainingStep

logger = logging.getLogger(__name__)


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
