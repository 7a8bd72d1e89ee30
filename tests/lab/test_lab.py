"""All of lab is imported, its commands print their help, and open with question, command, date and answer."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import all_scan_protocol, huge
from lab.campaigns import scan_shapes
from tests.support.commands import REPOSITORY, Command

PATHS = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path
    for path in sorted((REPOSITORY / "lab").rglob("*.py"))
    if path.name != "__init__.py"
}
# Processes of `lab.emulated_nodes` and of `lab.campaigns.same_speed`.
OTHERS = ("lab.emulated_switch", "lab.campaigns.operator_rows")
COMMANDS = [name for name, path in PATHS.items() if "__name__ ==" in path.read_text() and name not in OTHERS]
OPENING = ["Question", "Command", "Date", "Answer"]
# Their arguments are names only.
WITHOUT_HELP = ("lab.fault_table", "lab.peers.tuned")


def test_every_module_is_imported() -> None:
    for name in PATHS:
        if name != "lab.delays.spin_kernel":
            import_module(name)


def test_experiments_open_with_question_command_date_and_answer() -> None:
    for path in [*(PATHS[name] for name in COMMANDS), *(REPOSITORY / "lab").rglob("*.sh")]:
        text = path.read_text()
        header = ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else text.replace("# ", "")
        words = [line.partition(":")[0] for line in header.splitlines()]
        assert [word for word in words if word in OPENING] == OPENING, path


@pytest.mark.processes
@pytest.mark.few(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in WITHOUT_HELP])
def test_commands_print_their_help(name: str, tmp_path: Path) -> None:
    with Command([sys.executable, "-m", name.removesuffix(".__main__"), "--help"], tmp_path) as command:
        ended = command.wait()
    assert ended.code == 0, ended
    assert not any(tmp_path.iterdir())


def test_all_scan_protocol_is_correct_and_needs_its_rules() -> None:
    for seed in range(5):
        for is_lost in (False, True):
            all_scan_protocol.run(seed, [*all_scan_protocol.RULES], is_lost=is_lost)
    for algorithm, (rule, *_) in all_scan_protocol.RULES.items():
        assert all_scan_protocol.fails_without(algorithm, rule)
        assert all_scan_protocol.fails_without(algorithm, (all_scan_protocol.AFTER_FAILURE,), is_lost=True)


def test_scans_of_a_random_shape_are_right() -> None:
    assert scan_shapes.by_messages(0, 0.1) > 0


def test_huge_detects_error_in_last_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge, "_TOKENS", 128)
    sequence = huge.huge_sequence(torch.float32, 0, value_dim=4, elements=128 * 4 * 4)
    assert (sequence.heads, sequence.key_dim) == (5, 64)
    sound = huge.huge_deviations(sequence, torch.device("cpu"))
    assert all(deviation.error < 1e-5 for deviation in sound.values())
    run = huge.run_on_ranks

    def overflowing(*args: Any) -> dict[str, Tensor]:
        results = run(*args)
        results["dv"][:, -1, -1] = 0
        return results

    monkeypatch.setattr(huge, "run_on_ranks", overflowing)
    assert huge.huge_deviations(sequence, torch.device("cpu"))["dv"].error > 1e-2
