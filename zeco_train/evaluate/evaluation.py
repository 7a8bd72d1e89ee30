"""Context of an evaluation: the trained model on the ranks, its configuration, and output to the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from zeco_train.config.overrides import as_override, set_keys
from zeco_train.config.schema import Config, group_options, to_plain, unmet_need
from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.errors import ConfigError
from zeco_train.hf.trained import Trained, load_trained
from zeco_train.ops.seam import Exchange
from zeco_train.sp.exchange import connect_model
from zeco_train.system.stored_values import flatten
from zeco_train.system.terminal import visible
from zeco_train.training.forward import SequenceForward

# Parts of a run's configuration that an evaluation reads; overrides of others are rejected.
READ = ("data", "sp", "parallel", "train.dtype", "train.device", "train.kernels", "train.segments")
_NOT_READ = ("data.global_batch", "data.shuffle", "data.verify")
# Keys that a config file of group `data` is expected to set.
_WHICH_TEXT = ("data.kind", "data.path", "data.stores")


@dataclass(frozen=True)
class Evaluation:
    """Context of an evaluation, shared by its tasks."""

    trained: Trained
    config: Config  # of the run, with the command line's overrides and resolved parallelism
    mesh: ProcessMesh
    enter: Callable[[str], None]  # sets the name of this rank's current phase, for error messages
    standard: Sequence[str] = ()  # names of the requested lm_eval tasks

    @cached_property
    def exchange(self) -> Exchange:
        """What connects the ranks of a sequence. The first use is collective."""
        config = self.config
        sequences = config.data.seq_len, config.train.dtype.compute
        return connect_model(config.sp, config.model, self.mesh, *sequences)

    @cached_property
    def forward(self) -> SequenceForward:
        """The model. The first use is collective, and raises CheckpointError if its weights are damaged."""
        self.enter("loading the weights")
        dtype, parallel = self.config.train.dtype, self.config.parallel
        model = load_trained(
            self.trained, self.mesh, dtype=dtype, strategy=parallel.strategy, shard_size=parallel.shard_size
        )
        return SequenceForward(model, self.exchange, self.mesh)

    @property
    def title(self) -> str:
        trained = self.trained
        name = trained.config.name if trained.config is not None else trained.path.name
        return name if trained.step is None else f"{name}, step {trained.step}"

    @property
    def train_len(self) -> int | None:
        return self.trained.config.data.seq_len if self.trained.config is not None else None

    def note(self, text: str) -> None:
        if self.mesh.is_main:
            print(visible(text), flush=True)


def check_read(overrides: Sequence[str]) -> None:
    """Reject overrides of settings that an evaluation does not read. Raises ConfigError."""
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if key == "experiment":
            raise ConfigError("+experiment", value, "is of a training; set single keys")
        if key in _NOT_READ or not any(key == name or key.startswith(f"{name}.") for name in READ):
            allowed = f"an evaluation does not read it, but {', '.join(READ)} and a task's own keys"
            raise ConfigError(key, value, allowed)


def replaced(before: Config, config: Config, overrides: Sequence[str]) -> str | None:
    """Describe the settings of a run, other than the text, that a config file of group `data` changes; or None.

    Keys that `overrides`, of the command line, set themselves are left out.
    """
    files = [text for text in overrides if text.startswith("data=")]
    own, now = (dict(flatten(to_plain(each.data), "data")) for each in (before, config))
    silent = {*_NOT_READ, *set_keys(overrides, group_options())}
    changes = [
        f"{key}={as_override(value)} ({as_override(own.get(key))} in the run)"
        for key, value in now.items()
        if value != own.get(key)
        and key not in silent
        and not key.startswith(_WHICH_TEXT)
        and unmet_need(key, config) is None
    ]
    if not files or not changes:
        return None
    return f"{files[-1]} sets {', '.join(changes)}; name those that are to be as in the run"
