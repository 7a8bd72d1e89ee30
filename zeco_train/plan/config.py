"""The planner's command line: its own keys, in addition to train.py's overrides."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from zeco_train.config.help import describe_groups, describe_settings
from zeco_train.config.overrides import load_settings
from zeco_train.config.schema import Config, group_options, load_given
from zeco_train.errors import ConfigError
from zeco_train.plan.devices import Gpu
from zeco_train.system.paths import check_output_file


@dataclass
class PlanSettings:
    """The planner's own settings.

    Attributes:
        world_size: ranks; null is sp.size if that is a number, else 1.
        gpu: the device of each rank; null is cpu with train.device=cpu, else h200.
        gpus_per_node: GPUs with peer access to each other; others are reached over the network.
        memory_gb: of a device (of the machine, for cpu), in 10^9 bytes, instead of the named one's.
        headroom: fraction of the memory that stays free, for fragmentation.
        matmul_tflops: achieved by matrix products, instead of the assumption for the device.
        bandwidth_gbps: achieved memory bandwidth of a device, GB/s.
        link_gbps: achieved bandwidth between devices of a node; GB/s per device and direction.
        node_gbps: achieved bandwidth between devices of different nodes; GB/s per device and direction.
        scan_alpha_us: α of the scan's messages in a node, in µs; instead of the measured value.
        scan_gbps: 1/β of these messages, in GB/s; instead of the measured value.
        scan_node_alpha_us: α of the scan's messages between nodes, in µs; instead of the assumed value.
        scan_node_gbps: 1/β of these messages, in GB/s; instead of the assumed value.
        token_budget: tokens of a whole training run, to estimate its hours; null is train.steps.
        dry_run: also build a rank of the run without its peers; by torch's fake process group. It runs a step for
            shapes, on a CPU with few tokens.
        longest: also find the longest sequence that fits, by `parallel=` and `train.recompute`.
        rank: of the dry run.
        json: output file for the plan.
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
    scan_node_alpha_us: float | None = None
    scan_node_gbps: float | None = None
    token_budget: float | None = None
    dry_run: bool = False
    longest: bool = False
    rank: int = 0
    json: str | None = None

    def validate(self) -> None:
        for name in ("world_size", "gpus_per_node"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST_RANKS:
                raise ConfigError(name, value, f"must be ≥ 1 and ≤ {_MOST_RANKS}")
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if entry.type == "float | None" and value is not None and not 0 < value <= _LARGEST:
                raise ConfigError(entry.name, value, f"must be > 0 and ≤ {_LARGEST:g}")
        if not 0 <= self.rank < _MOST_RANKS:
            raise ConfigError("rank", self.rank, f"must be ≥ 0 and < {_MOST_RANKS}")
        if self.rank and not self.dry_run:
            raise ConfigError("rank", self.rank, "would be ignored; it needs dry_run=true")
        if not 0 <= self.headroom < 1:
            raise ConfigError("headroom", self.headroom, "must be ≥ 0 and < 1")
        if self.json is not None:
            check_output_file("json", self.json)


_MOST_RANKS, _LARGEST = 1 << 20, 1e18


@dataclass(frozen=True)
class Request:
    """The planner's settings, the run's configuration, and its keys that the command line sets, without groups."""

    settings: PlanSettings
    config: Config
    given: frozenset[str]


def parse(arguments: Sequence[str]) -> Request:
    """Separate the planner's keys from train.py's, and parse both.

    Raises:
        ConfigError: an unknown key, or an invalid value.
    """
    names = [entry.name for entry in dataclasses.fields(PlanSettings)]
    known = {*group_options(), *(entry.name for entry in dataclasses.fields(Config))}
    keys = {text: text.partition("=")[0].lstrip("+~") for text in arguments}
    settings = load_settings(PlanSettings, [text for text in arguments if keys[text] in names])
    overrides = [text for text in arguments if keys[text] not in names]
    for text in overrides:
        # A misspelt key of the planner would otherwise be looked up among train.py's only.
        key = keys[text]
        if "." not in key and key not in known and (close := difflib.get_close_matches(key, [*known, *names], n=1)):
            raise ConfigError(key, text.partition("=")[2], f"unknown key; did you mean {close[0]}?")
    config, given = load_given(overrides)
    return Request(settings, config, frozenset(given))


def describe() -> str:
    """The text of `--help`."""
    return (
        "usage: python -m zeco_train.plan [KEY=VALUE ...]\n\n"
        "Says what a run of train.py with the same overrides would take of memory, wire and time; starts nothing.\n"
        "With dry_run=true it also builds one rank without its peers and runs a step of it for shapes.\n"
        "The exit code is 0 also where the run does not fit: the plan says so, and what would.\n"
        "  python -m zeco_train.plan +experiment=gla_1b_16k\n"
        "  python -m zeco_train.plan +experiment=gla_1b_16k sp.size=256 data.seq_len=4194304 token_budget=100e9\n"
        "data.seq_len is the whole sequence: 16k tokens a GPU on 256 GPUs are 256 times 16384.\n"
        "Keys of train.py (all of them: python train.py --help), with these groups:\n"
        f"{describe_groups(group_options())}\n\nThe planner's own keys:\n\n{describe_settings(PlanSettings)}"
    )
