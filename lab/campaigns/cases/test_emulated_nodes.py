"""Training over emulated nodes, with one of them cut off; error messages of the script."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from lab import emulated_nodes
from lab.emulated_nodes import EmulatedNodes, Network, main, run_ranks, why_not
from lab.emulated_switch import _receiver
from tests.support.commands import REPOSITORY, SMALL, train_here
from zeco_train.tracking.metrics import read_metrics

pytestmark = pytest.mark.campaign

STEPS, TIMEOUT = 40, 10.0
SETTINGS = ["train.dtype=fp64", f"train.steps={STEPS}", "checkpoint.every=4", "train.device=cpu"]


def test_machine_that_cannot_emulate_nodes_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(emulated_nodes.os, "geteuid", return_value=1000):
        assert main(["--", "train.py"]) == 2
    assert capsys.readouterr().err == "error: --nodes=4: this machine cannot emulate nodes: not root\n"


def test_switch_forwards_packets_of_its_network_only() -> None:
    def packet(version: int, receiver: tuple[int, ...]) -> bytes:
        return bytes([version << 4, *bytes(15), *receiver])

    assert _receiver(packet(4, (10, 77, 0, 3))) == 2
    assert _receiver(packet(6, (10, 77, 0, 3))) is None
    assert _receiver(packet(4, (10, 78, 0, 3))) is None
    assert _receiver(packet(4, (10, 77, 0, 0))) is None
    assert _receiver(b"\x45\x00") is None


# Four ranks and a switch of packets, against the clock: on a busy machine ranks are reported lost that are not.
@pytest.mark.processes
@pytest.mark.skipif(why_not() is not None, reason=f"needs emulated nodes: {why_not()}")
def test_run_over_nodes_names_a_node_cut_off_and_resumes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two nodes of two ranks; the losses are those of one rank."""
    run = tmp_path / "run"
    alone = train_here(*SETTINGS, f"run_dir={tmp_path / 'alone'}")
    assert alone.code == 0, alone
    own = ["sp=zeco", "sp.size=4", f"parallel.timeout_seconds={TIMEOUT}", f"run_dir={run}"]
    command, network = [str(REPOSITORY / "train.py"), *SMALL, *SETTINGS, *own], Network(2, delay_ms=2.0)
    was_cut: list[int] = []
    with EmulatedNodes(network) as nodes:

        def cut() -> None:
            done = len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0
            if done >= 6 and not was_cut:
                was_cut.append(done)
                nodes.cut(1)

        codes = run_ranks(nodes, network, 2, command, cut)
        assert was_cut
        assert was_cut[0] < STEPS
        assert all(codes), codes
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        assert any("rank 2" in line or "rank 3" in line for line in lines), lines
        nodes.join(1)
        assert run_ranks(nodes, network, 2, command) == [0, 0]
    rows, expected = (read_metrics(folder / "metrics.jsonl") for folder in (run, tmp_path / "alone"))
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == [*range(1, STEPS + 1)]
    worst = max(abs(row["loss"] / other["loss"] - 1) for row, other in zip(rows, expected, strict=True))
    assert worst < 1e-9, json.dumps(worst)
