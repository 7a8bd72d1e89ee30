"""`plan … dry_run=true`: a rank of a run without its peers, by torch's fake process group."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.distributed import run_distributed
from tests.support.planning import SMALL, command, make_case
from zeco_train.errors import ConfigError
from zeco_train.plan import dry_run as module
from zeco_train.plan.dry_run import DryRun, dry_run
from zeco_train.plan.traffic import count_scans

CPU = ["train.device=cpu", "gpu=h200", "train.compile=never"]


def _alone(rank: int, world_size: int, arguments: list[str], of_rank: int) -> tuple[DryRun, list[str]]:
    """A dry run and its log, in a process of its own, as the command has one."""
    dist.destroy_process_group()
    messages = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeco_train").addHandler(handler)
    logging.getLogger("zeco_train").setLevel(logging.INFO)
    found = dry_run(make_case(*arguments), of_rank)
    assert not dist.is_initialized()
    return found, messages


def run(*arguments: str, rank: int = 0) -> tuple[DryRun, list[str]]:
    found: tuple[DryRun, list[str]] = run_distributed(_alone, 1, [*CPU, *arguments], rank)[0]
    return found


@pytest.mark.slow
def test_rank_0_of_256_has_the_planned_shards() -> None:
    check_rank_0(["parallel=zero2", "sp.size=256", "data.seq_len=262144", "data.global_batch=1"])


def check_rank_0(arguments: list[str]) -> None:
    """Rank 0's shards are the largest, to the byte; and as many scans as planned for a micro-batch."""
    case = make_case(*SMALL, *CPU, "world_size=256", *arguments)
    found, _ = run(*SMALL, "world_size=256", *arguments)
    assert (found.dp_size, found.sp_size) == (case.dp_size, case.sp_size)
    assert (found.dp_rank, found.sp_rank, found.rank, found.world_size) == (0, 0, 0, 256)
    built = {name: getattr(found, name) for name in ("parameters", "gradients", "optimizer")}
    if "optim=muon" in arguments:
        # Muon's momenta are whole matrices on one rank each; the plan has the rank with most.
        assert 0 < built.pop("optimizer") <= found.planned["optimizer"]
    assert built == {name: found.planned[name] for name in built}
    scans = count_scans(case)
    assert found.scans == (scans.forward // case.micro_steps, scans.backward // case.micro_steps)
    assert found.peak is None


@pytest.mark.slow
def test_any_rank_has_its_place_and_its_nodes() -> None:
    sizes = ["world_size=64", "sp.size=32", "data.seq_len=32768", "data.global_batch=2", "gpus_per_node=8"]
    (first, _), (last, messages) = (run(*SMALL, *sizes, rank=rank) for rank in (0, 63))
    assert (last.dp_rank, last.sp_rank, last.topology) == (1, 31, "4 nodes of 8 ranks")
    # The last ranks have no rows of weights with fewer rows than ranks.
    assert last.parameters < first.parameters
    # Only the main rank logs.
    assert not messages
    _, messages = run(*SMALL, *sizes, "sp.all_scan.algorithm=lane")
    assert messages[0] == "ranks of a sequence: 4 nodes of 8 ranks"
    assert any(text.endswith("over 32 ranks: lane by gloo") for text in messages), messages


def _command(rank: int, world_size: int, arguments: list[str]) -> tuple[int, str, str]:
    dist.destroy_process_group()
    return command(*arguments)


@pytest.mark.slow
def test_command_appends_the_dry_run(tmp_path: Path) -> None:
    arguments = ["world_size=16", "data.seq_len=16384", "data.global_batch=1", "dry_run=true", "rank=15"]
    stored = tmp_path / "plan.json"
    code, out, err = run_distributed(_command, 1, [*SMALL, *CPU, *arguments, f"json={stored}"])[0]
    assert (code, err) == (0, "")
    assert "dry run: rank 15 of 16, without its peers" in out
    assert "on a CPU the step is short" in out
    values: dict[str, Any] = json.loads(stored.read_text())["dry_run"]
    assert (values["sp_rank"], values["topology"]) == (15, "2 nodes of 8 ranks")


def test_a_start_by_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError) as refused:
        dry_run(make_case(*SMALL, *CPU, "world_size=4"), 0)
    assert refused.value.field == "dry_run"


def test_failed_dry_run_leaves_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(module, "_step", fail)
    with pytest.raises(RuntimeError, match="broken"):
        dry_run(make_case(*SMALL, *CPU, "world_size=4"), 0)
    assert not dist.is_initialized()
