"""The planner's command line: its own keys, beside the overrides that train.py takes."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from zeco_train.config.overrides import check_overrides, describe_settings, load_settings
from zeco_train.config.schema import Config, group_options, load_config
from zeco_train.errors import ConfigError
from zeco_train.plan.devices import Gpu
from zeco_train.system.paths import check_output_file


@dataclass
class PlanSettings:
    """Attributes:
    world_size: ranks; null is sp.size where that is a number, else 1.
    gpu: the device of each rank; null is cpu with train.device=cpu, else h200.
    gpus_per_node: that reach each other's memory; beyond them is the network.
    memory_gb: of a device (of the machine, for cpu), in 10^9 bytes, in place of the named one's.
    headroom: part of the memory that stays free, for what an allocator cannot use.
    matmul_tflops: achieved by matrix products, in place of what is assumed for the device.
    bandwidth_gbps: of a device's memory, achieved, GB/s.
    link_gbps, node_gbps: between devices of a node, and of different nodes, achieved, GB/s a device and direction.
    scan_alpha_us, scan_gbps: of the scan's messages: α in µs, and 1/β in GB/s, in place of the measured ones.
    token_budget: tokens of a whole training run, for its hours; null is train.steps.
    json: a file for the plan.
    """

    world_size: int | None = None
    gpu: Gpu | None = None
    gpus_per_node: int = 8
    memory_gb: float | None = None
    headroom: float = 0.05
    matmul_tflops: float | None = None
    bandwidth_gbps: float | None = None
    link_gbps: float | None = None
    node_gbps: float | None = None
    scan_alpha_us: float | None = None
    scan_gbps: float | None = None
    token_budget: float | None = None
    json: str | None = None

    def validate(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        for name in ("world_size", "gpus_per_node"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST_RANKS:
                raise ConfigError(name, value, f"must be ≥ 1 and ≤ {_MOST_RANKS}")
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if entry.type == "float | None" and value is not None and not 0 < value <= _LARGEST:
                raise ConfigError(entry.name, value, f"must be > 0 and ≤ {_LARGEST:g}")
        if not 0 <= self.headroom < 1:
            raise ConfigError("headroom", self.headroom, "must be ≥ 0 and < 1")
        if self.json is not None:
            check_output_file("json", self.json)


_MOST_RANKS, _LARGEST = 1 << 20, 1e18


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        settings: the planner's own.
        config: the run's.
        given: keys of the run that the command line sets, groups aside.
    """

    settings: PlanSettings
    config: Config
    given: frozenset[str]


def parse(arguments: Sequence[str]) -> Request:
    """Tell the planner's keys from those of train.py, and read both.

    Raises:
        ConfigError: as of `load_settings` and `load_config`.
    """
    names = [entry.name for entry in dataclasses.fields(PlanSettings)]
    own = [text for text in arguments if _key(text) in names]
    overrides = [text for text in arguments if _key(text) not in names]
    settings = load_settings(PlanSettings, own)
    for text in overrides:
        _check_near_miss(text, names)
    given = check_overrides(overrides, Config, group_options())
    return Request(settings, load_config(overrides), frozenset(given))


def _key(text: str) -> str:
    return text.partition("=")[0].lstrip("+~")


def _check_near_miss(text: str, names: list[str]) -> None:
    """A misspelt key of the planner would be looked for among those of train.py only."""
    key = _key(text)
    known = {*group_options(), *(entry.name for entry in dataclasses.fields(Config))}
    if "." not in key and key not in known and (close := difflib.get_close_matches(key, [*known, *names], n=1)):
        raise ConfigError(key, text.partition("=")[2], f"unknown key; did you mean {close[0]}?")


def describe() -> str:
    """The text of `--help`."""
    groups = "\n".join(f"  {name}={'|'.join(options)}" for name, options in group_options().items())
    return (
        "usage: python -m zeco_train.plan [KEY=VALUE ...]\n\n"
        "Says what a run of train.py with the same overrides would take of memory, wire and time; starts nothing.\n"
        "The exit code is 0 also where the run does not fit: the plan says so, and what would.\n"
        "  python -m zeco_train.plan +experiment=gla_1b_16k\n"
        "  python -m zeco_train.plan +experiment=gla_1b_16k sp.size=256 data.seq_len=4194304 token_budget=100e9\n"
        "data.seq_len is the whole sequence: 16k tokens a GPU on 256 GPUs are 256 times 16384.\n"
        "Keys of train.py (all of them: python train.py --help), with these groups:\n"
        f"{groups}\n\nThe planner's own keys:\n\n{describe_settings(PlanSettings)}"
    )
