"""What an evaluation works with: a trained model, laid over the ranks, and where its results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from zeco_train.config.overrides import as_override, check_overrides
from zeco_train.config.schema import Config, group_options, to_plain, unmet_need
from zeco_train.distributed.agreement import flat
from zeco_train.distributed.mesh import ProcessMesh
from zeco_train.errors import ConfigError
from zeco_train.hf.trained import Trained, load_trained
from zeco_train.sp.backend import ScanBackend
from zeco_train.sp.registry import build_scan
from zeco_train.system.terminal import visible
from zeco_train.training.forward import SequenceForward

# Of a run's configuration, what an evaluation reads; all else would be set in vain.
READ = ("data", "sp", "parallel", "train.dtype", "train.device", "train.segments")
_NOT_READ = ("data.global_batch", "data.shuffle", "data.verify", "data.verify_changed")
# What a file of the group `data` is named for.
_WHICH_TEXT = ("data.kind", "data.path", "data.stores")


@dataclass(frozen=True)
class Evaluation:
    """Attributes:
    trained: what is evaluated.
    config: of the run, with the command line's overrides; its split is resolved.
    mesh: the ranks.
    enter: says what this rank is doing now, for messages about it.
    standard: names of lm_eval's tasks that are asked for.
    """

    trained: Trained
    config: Config
    mesh: ProcessMesh
    enter: Callable[[str], None]
    standard: Sequence[str] = ()

    @cached_property
    def scan(self) -> ScanBackend:
        """Joins the shards of a sequence. Its first use is collective."""
        return build_scan(self.config.sp, self.mesh.scan_groups, self.mesh.timeout, self.mesh.device)

    @cached_property
    def forward(self) -> SequenceForward:
        """The model, loaded at the first use, which is collective.

        Raises:
            CheckpointError: its weights are damaged.
        """
        self.enter("loading the weights")
        config = self.config
        model = load_trained(self.trained, self.mesh, dtype=config.train.dtype, strategy=config.parallel.strategy)
        return SequenceForward(model, self.scan, self.mesh)

    @property
    def title(self) -> str:
        """What pictures call the model."""
        trained = self.trained
        name = trained.config.name if trained.config is not None else trained.path.name
        return name if trained.step is None else f"{name}, step {trained.step}"

    @property
    def train_len(self) -> int | None:
        """Tokens of the sequences that the model was trained on, if that is known."""
        return self.trained.config.data.seq_len if self.trained.config is not None else None

    def note(self, text: str) -> None:
        """Show a line to the user, once."""
        if self.mesh.is_main:
            print(visible(text), flush=True)


def check_read(overrides: Sequence[str]) -> None:
    """Refuse an override of what no evaluation reads. Raises ConfigError."""
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if key == "experiment":
            raise ConfigError("+experiment", value, "is of a training; set single keys")
        if key in _NOT_READ or not any(key == name or key.startswith(f"{name}.") for name in READ):
            allowed = f"an evaluation does not read it, but {', '.join(READ)} and a task's own keys"
            raise ConfigError(key, value, allowed)


def replaced(before: Config, config: Config, overrides: Sequence[str]) -> str | None:
    """What a file of the group `data` has put in place of the run's own settings, beside other text, in a line.

    Args:
        before: the run's configuration.
        config: with the overrides.
    """
    files = [text for text in overrides if text.startswith("data=")]
    own, now = (dict(flat(to_plain(each.data), "data")) for each in (before, config))
    silent = {*_NOT_READ, *check_overrides(overrides, Config, group_options())}
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
