"""Finds and loads a trained model: from a run's folder, one of its checkpoints, or an export."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from data.tokenizer import BYTES, HuggingFaceTokenizer, Tokenizer, load_tokenizer, tokenizer_files, tokenizer_name
from models.config import LanguageModelConfig
from models.language_model import LanguageModel
from models.spec import spec_of
from zeco_train.checkpoint.files import PROGRESS_FILE, complete_checkpoints, is_hf_folder, read_progress, read_record
from zeco_train.config.composing import stored_class
from zeco_train.config.overrides import as_override, is_of
from zeco_train.config.schema import Config, config_of, defaults_of, load_config, read_config, to_plain
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import Device, ProcessMesh, find_device, host_group, join_alike
from zeco_train.distributed.parallelize import parallelize
from zeco_train.errors import CheckpointError, ConfigError, DataError
from zeco_train.hf.config_json import model_fields
from zeco_train.hf.folder import EXPORT_FORMAT, ORIGIN_FILE, checked_model, tokenizer_info
from zeco_train.hf.weights import load_weights, stored_dtype
from zeco_train.lifecycle.end import Job
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.operator import Target
from zeco_train.ops.slow_paths import Calls, Kernels, check_kernels, warn_of
from zeco_train.system.paths import check_path
from zeco_train.system.terminal import visible
from zeco_train.tracking.run_folder import read_identity
from zeco_train.training.config import Dtype
from zeco_train.version import __version__

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """Location and metadata of a trained model, without its weights."""

    path: Path  # folder of the weights: a checkpoint, or an export
    model: LanguageModelConfig
    # Of the run that trained it, without run_dir, data.cache_dir and checkpoint.load; None if unknown, as for other
    # programs' exports.
    config: Config | None
    step: int | None  # at which it was saved; None if unknown
    tokenizer_info: Mapping[str, str]  # `StoreMeta.tokenizer` of its training data
    folders: tuple[Path, ...] = ()  # searched in order for the tokenizer's files

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded lazily: all but the byte tokenizer import transformers, which is slow.

        Raises:
            DataError: it cannot be found, or differs outside of `folders`.
        """
        name = tokenizer_name(self.tokenizer_info, *self.folders)
        places = ", ".join(str(folder) for folder in self.folders)
        remedy = f"put its files into {self.folders[0]}/tokenizer" if self.folders else ""
        try:
            tokenizer = load_tokenizer(name)
        except DataError as error:
            raise DataError(name or self.path, f"no tokenizer there, nor in {places} ({error})", remedy) from error
        # A stranger's run may name any tokenizer of this machine; an export of the run would publish it.
        is_own = tokenizer_files(*self.folders) is not None or Path(name) in self.folders
        if not is_own and tokenizer.info.get("sha256") != self.tokenizer_info.get("sha256"):
            raise DataError(name, "is not the tokenizer of the training (its SHA-256 differs)", remedy)
        return tokenizer

    def check_ids(self, ids: Iterable[Tensor]) -> None:
        """Raise DataError for an id of the tokenizer that the model does not have."""
        if (largest := max(int(each.max()) for each in ids)) >= self.model.vocab_size:
            problem = f"its tokenizer gives id {largest}, and it has {self.model.vocab_size}"
            raise DataError(self.path, problem, "the tokenizer is of another model")

    def configure(self, overrides: list[str]) -> Config:
        """The run's configuration with overrides in `train.py`'s syntax.

        `sp.size`, `parallel.shard_size`, device and kernels are set to automatic, and `torch_ddp` becomes `ddp`. For a
        model of unknown origin, starts from `configs/train.yaml`.

        Raises:
            ConfigError: see `load_config`; or an override of the model.
        """
        for text in overrides:
            key, _, value = text.lstrip("+").partition("=")
            if is_of(key, "model"):
                raise ConfigError(key, value, f"is decided by the trained model in {self.path}; leave it out")
        base = self.config if self.config is not None else load_config(["name=trained"])
        # Torch's DDP casts no weights to bf16, and has nothing to do without gradients.
        strategy = Strategy.ddp if base.parallel.strategy is Strategy.torch_ddp else base.parallel.strategy
        # Chosen anew: the model may run on another number of ranks than in training.
        base = replace(
            base,
            # For results.json only; a folder's name may have bytes that are no UTF-8.
            run_dir=str(self.path).encode(errors="replace").decode(),
            model=self.model,
            sp=replace(base.sp, size=-1),
            parallel=replace(base.parallel, shard_size=-1, strategy=strategy),
            train=replace(base.train, device=Device.auto, kernels=Kernels.auto),
        )
        if any(text.partition("=")[0] == "data" for text in overrides):
            # A config file of group `data` replaces the whole section; keep the run's sequence length.
            overrides = [f"data.seq_len={base.data.seq_len}", *overrides]
        return load_config(overrides, base)


def find_trained(path: str, field: str = "RUN") -> Trained:
    """Find a trained model: a run's newest checkpoint, a given checkpoint, or an export. Reads no weights.

    Names and shapes of the stored weights are compared with the configuration. `field` is what messages call the path.

    Raises:
        ZecoError: there is none, or its files are damaged or unsupported.
    """
    check_path(field, path)
    folder = Path(path)
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "no such folder"
        raise ConfigError(field, path, f"{problem}; name a run's folder, a step_… folder of one, or an export")
    if (folder / PROGRESS_FILE).is_file():
        # Resolved, since `latest` may be relinked at any moment.
        return _of_checkpoint(folder.resolve())
    if is_hf_folder(folder):
        return _of_export(folder)
    if (folder / "config.yaml").is_file():
        checkpoints = complete_checkpoints(folder)
        if not checkpoints:
            raise ConfigError(field, path, "is a run without a complete checkpoint; let it go on until it has one")
        return _of_checkpoint(checkpoints[-1])
    raise ConfigError(field, path, "holds no model; name a run's folder, a step_… folder of one, or an export")


def load_trained(
    trained: Trained, mesh: ProcessMesh, *, dtype: Dtype, strategy: Strategy | None, shard_size: int = -1
) -> LanguageModel:
    """Load the model for inference, sharded over the ranks. Collective.

    The number of ranks and the strategy may differ from training. The weights are in the compute dtype. With strategy
    None they are plain tensors, replicated on every rank, as `LanguageModel.step` needs them.

    Raises:
        CheckpointError: the weights are damaged or of another model.
        ConfigError: the ranks found different checkpoints.
    """
    model = spec_of(trained.model).allocate(dtype.compute, mesh.device)
    if strategy is not None:
        parallelize(model, model.sharding_units(), strategy, dtype.compute, mesh, shard_size)
    load_weights(trained.path, model, mesh, host_group(mesh) if mesh.world_size > 1 else None)
    return model.eval().requires_grad_(False)


def join_to_use(
    config: Config, job: Job, sp_size: int, calls: Calls, more: Mapping[str, Any] | None = None
) -> ProcessMesh:
    """Check device and kernels of a command that uses a trained model, then join the ranks. Collective.

    `calls` are those of the model; `more`: JSON values that must be the same on all ranks, besides the configuration.

    Raises:
        ConfigError: a setting that this machine does not allow; ranks that differ.
    """
    device = find_device(config.train.device, job.launch, "train.device")
    slow = check_kernels("train.kernels", config.train.kernels, calls, Target.of(device))
    timeout = timedelta(seconds=config.parallel.timeout_seconds)
    with job.joining(timeout):
        mesh = join_alike(to_plain(config), job.launch, sp_size, device, timeout, more)
    if mesh.is_main:
        warn_of(slow)
    return mesh


def _of_checkpoint(path: Path) -> Trained:
    step, run = read_progress(path).step, path.parent.parent
    if not (run / "config.yaml").is_file():
        problem = f"is a checkpoint, but {run} has no config.yaml of its run; leave it in the run's folder"
        raise ConfigError("RUN", path, problem)
    config = _without_places(read_config(run / "config.yaml"))
    # Before anything is built: the configuration may ask for any number of layers, of any width.
    stored_dtype(path, config.model)
    info = read_identity(run).get("data.tokenizer")
    return Trained(path, config.model, config, step, info or {}, (run,))


def _of_export(path: Path) -> Trained:
    model = checked_model(path).model
    info = tokenizer_info(path) or {}
    if not (path / ORIGIN_FILE).is_file():
        return Trained(path, model, None, None, info, (path,))
    origin = read_record(path / ORIGIN_FILE)
    if (number := origin.get("format", EXPORT_FORMAT)) != EXPORT_FORMAT:
        known = f"version {__version__} reads format {EXPORT_FORMAT}: take the one that wrote it"
        raise CheckpointError(f"{path}: has format {number!s:.40}; {known}")
    try:
        plain = origin["config"]
        if origin.get("version") != __version__ and isinstance(plain, dict):
            plain, unknown = _known(plain, defaults_of(stored_class(plain)))
            if unknown and Launch.from_environment().rank == 0:
                names = visible(", ".join(unknown))
                logger.warning("%s: settings that version %s does not have, left out: %.500s", path, __version__, names)
        config, step = _without_places(config_of(plain)), int(origin["step"])
    except (KeyError, TypeError, ValueError, OverflowError, ConfigError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path / ORIGIN_FILE}: cannot be read: {reason}") from error
    return Trained(path, replace(model, name=config.model.name), config, step, info, (path,))


# Without keys that only the version of the export had, and these; its model is that of config.json in any case.
def _known(plain: dict[str, Any], schema: DictConfig, prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    known, unknown = {}, []
    for key, value in plain.items():
        # Not `in schema`, which leaves out keys without a value.
        if key not in list(schema.keys()):
            unknown.append(f"{prefix}{key}")
            continue
        node = schema._get_node(key)
        if isinstance(value, dict) and isinstance(node, DictConfig):
            value, inner = _known(value, node, f"{prefix}{key}.")
            unknown += inner
        known[key] = value
    return known, unknown


# Without the folders that the training wrote to and the weights that it began with: a stranger may have named them. The
# stores of `data` stay: of a store nothing but its tokens is read, and nothing is written there.
def _without_places(config: Config) -> Config:
    data, checkpoint = replace(config.data, cache_dir=None), replace(config.checkpoint, load=None)
    return replace(config, run_dir="", data=data, checkpoint=checkpoint)


def check_continuation(folder: Path, model: LanguageModelConfig) -> None:
    """Check that the model in `folder` matches the configured one of a run that begins with it.

    Raises:
        ConfigError: it differs; the message names the overrides that it needs.
        CheckpointError: its files cannot be read, or do not match its own configuration.
    """
    found = checked_model(folder).model
    # Keys of `found`: a model with another mixer has other ones, and `mixer` is the first.
    theirs, own = _trained_fields(found), _trained_fields(model.canonical())
    different = [key for key, value in theirs.items() if key not in own or own[key] != value]
    if different:
        overrides = " ".join(f"model.{key}={as_override(theirs[key])}" for key in different)
        value = as_override(_trained_fields(model).get(different[0]))
        allowed = f"the model in {folder} is another one; it takes: {overrides}"
        raise ConfigError(f"model.{different[0]}", value, allowed)


def _trained_fields(model: LanguageModelConfig) -> dict[str, Any]:
    # Its initialisation is not part of a trained model.
    return {key: value for key, value in model_fields(model).items() if key != "initializer_range"}


def other_tokenizer(folder: Path, of_data: Mapping[str, str]) -> str | None:
    """A warning if the data's tokenizer is not, or may not be, the model's; None if they match."""
    info = tokenizer_info(folder)
    if info is None:
        return f"{folder} has no tokenizer, so its vocabulary could not be compared with the data's"
    is_bytes, of_bytes = (one.get("kind") == BYTES for one in (info, of_data))
    try:
        same = is_bytes == of_bytes
        if same and not is_bytes:
            same = HuggingFaceTokenizer(str(folder)).info["sha256"] == of_data.get("sha256")
    except DataError as error:
        return f"the tokenizer in {folder} could not be compared with the data's: {error}"
    if same:
        return None
    return f"the tokenizer in {folder} is not the data's, so the model may read its ids as other tokens"
