"""Checks of a run's settings against the world size and the machine of a rank, before ranks wait for each other."""

from __future__ import annotations

import os
import shutil
import sys
from datetime import timedelta

import torch

from data.config import check_split
from models.spec import spec_of
from zeco_train.config.schema import Config, to_plain
from zeco_train.distributed import unsharded
from zeco_train.distributed.config import count_shards, resolve_sp_size
from zeco_train.distributed.mesh import ProcessMesh, find_device, join_alike, total_memory
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.linear import FIRST_CAPABILITY, PRODUCTS, WIDTH_MULTIPLE, Matmul
from zeco_train.ops.operator import Target
from zeco_train.ops.slow_paths import Call, SlowPath, check_kernels
from zeco_train.sp.exchange import check_softmax
from zeco_train.system.code_cache import use_private_caches
from zeco_train.training.config import Compile
from zeco_train.training.optim import adamw
from zeco_train.training.profiler import check_profile_ranks


def join_ranks(config: Config, launch: Launch) -> ProcessMesh:
    """Check the settings against world size and machine, then join the ranks.

    Raises:
        ConfigError: a setting that the world size, the machine or the schedule does not allow; ranks that differ.
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


def check_machine(config: Config, device: torch.device) -> None:
    """Check memory, compiler and matrix products of this rank's device."""
    if config.train.compile.applies(config.parallel.strategy, on_cuda=device.type == "cuda"):
        use_private_caches()  # before a model is built, which imports parts of torch that set a default of their own
    count = spec_of(config.model).num_parameters
    available, owner = total_memory(device)
    # Before the OOM killer ends this or another process.
    if (needed := count * config.train.dtype.master.itemsize) > available:
        sizes = f"{needed / 1e9:.3g} GB, {owner} has {available / 1e9:.3g} GB"
        raise ConfigError("model", config.model.name, f"{count:,} parameters take {sizes}")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    # `torch.compile` itself would fail only in the first step.
    if config.train.compile is Compile.always and device.type == "cpu" and shutil.which(compiler) is None:
        allowed = f"needs a C++ compiler on CPUs, and {compiler} is not there; take never"
        raise ConfigError("train.compile", "always", allowed)
    _check_matmul(config, device)
    slow_paths(config, Target.of(device))


def slow_paths(config: Config, target: Target) -> list[SlowPath]:
    """Calls of a run that kernels do not serve on a target, which need not be present.

    Raises:
        ConfigError: `train.kernels=require` refuses them.
    """
    return check_kernels("train.kernels", config.train.kernels, kernel_calls(config), target)


def kernel_calls(config: Config) -> list[tuple[str, Call]]:
    """The calls of a run that have kernels on GPUs, with the layers or the part of the run."""
    train = config.train
    calls = spec_of(config.model).calls(train.dtype.compute)
    if train.matmul is Matmul.fp8:
        calls.append(("train.matmul=fp8", Call("fp8 products", PRODUCTS, train.dtype.compute)))
    calls.append(("the optimizer", Call("adamw", adamw.KERNELS, train.dtype.master)))
    return [*calls, ("the gradients", Call("packing", unsharded.KERNELS, train.dtype.compute))]


def _check_matmul(config: Config, device: torch.device) -> None:
    if config.train.matmul is not Matmul.fp8:
        return
    target = Target.of(device)
    if target.kind == "cuda" and target.architecture < FIRST_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(device), FIRST_CAPABILITY
        own = "{}.{}".format(*target.architecture)
        allowed = f"needs compute capability {major}.{minor}, {name} has {own}; take bf16"
        raise ConfigError("train.matmul", "fp8", allowed)
    products = {product for block in spec_of(config.model).blocks.values() for product in block.fp8_products}
    for product in sorted(products):
        if any(width % WIDTH_MULTIPLE for width in product):
            allowed = f"{config.model.name} has a linear layer of {product[0]} inputs and {product[1]} outputs; both"
            raise ConfigError("train.matmul", "fp8", f"{allowed} must be multiples of {WIDTH_MULTIPLE}")
