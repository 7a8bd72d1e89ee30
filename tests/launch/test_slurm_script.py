"""`launch/slurm_256gpu.sh` with stubs of Slurm: choice of nodes, rendezvous address, restarts, refused settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY
from tests.support.waiting import ENOUGH

SCONTROL = """#!/bin/bash
case "$1 $2" in
"show hostnames") printf '%s\\n' n0 n1 n2 ;;
"show node") echo "   NodeAddr=address-of-$3 NodeHostName=$3" ;;
esac
"""
# The checks find a fault on each node of BAD; the judge is the real one. Each word of ENDS is a start that fails, later
# starts succeed; with the word "saved" the start writes a new checkpoint before it fails.
SRUN = """#!/bin/bash
[[ "$*" != *" address" ]] || exec "${@: -3}"
echo "srun at $HEAD_ADDRESS $*"
if [[ "$*" = */slurm_checks.py* ]]; then
  for node in $BAD; do printf "$node\\terror\\ta fault\\t\\n"; done
  printf '%s\\tend\\t\\t\\n' n0 n1 n2
  exit
fi
echo "$HEAD_PORT $RENDEZVOUS_ID" >>meetings
echo >>starts
start=$(wc -l <starts) ends=($ENDS)
[ "${ends[start - 1]:-}" != saved ] || mkdir -p "$RUN_DIR/checkpoints/step_0000000$start"
[ "$start" -gt ${#ends[@]} ] || exit 70
"""


def submit(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with the environment of a Slurm job on three nodes."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment |= {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "zeco",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "n[0-2]",
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "PYTHON": sys.executable,
        "RUN_DIR": str(folder / "a run"),
        "XDG_CACHE_HOME": str(folder / "home"),
        "RANKS_PER_NODE": "1",
        "BAD": "n0",
        "ENDS": "failed",
        **variables,
    }
    command = ["bash", str(REPOSITORY / "launch" / "slurm_256gpu.sh"), "--", "train.steps=3"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=ENOUGH)


def steps(output: str) -> list[tuple[str, str, str | None]]:
    """Per job step: head address, number of nodes, and excluded nodes."""
    lines = re.findall(r"^srun at (\S+) --nodes=(\d) .*", output, re.M)
    excluded = [re.search(r"--exclude=(\S+)", line) for line in output.splitlines() if line.startswith("srun at ")]
    return [(*line, match and match[1]) for line, match in zip(lines, excluded, strict=True)]


@pytest.mark.processes
def test_spare_node_replaces_faulty_first_node(tmp_path: Path) -> None:
    """The rendezvous is on the first training node; each start checks all nodes again."""
    job = submit(tmp_path, TRAIN_NODES="2")
    assert job.returncode == 0, job.stderr
    start = [("address-of-n0", "3", None), ("address-of-n1", "2", "n0")]
    assert steps(job.stdout) == start * 2
    assert "starting again from the start, 1 of 3 without a new checkpoint" in job.stdout


@pytest.mark.processes
def test_head_address_variable_sets_rendezvous_address(tmp_path: Path) -> None:
    job = submit(tmp_path, TRAIN_NODES="2", HEAD_ADDRESS="10.0.0.1", CHECKS="off")
    assert steps(job.stdout) == [("10.0.0.1", "2", None)] * 2


@pytest.mark.processes
def test_each_start_has_unique_rendezvous_id(tmp_path: Path) -> None:
    """Ports and names do not depend on the job number, which is the same in both jobs."""
    for _ in range(2):
        assert submit(tmp_path, CHECKS="off").returncode == 0
        (tmp_path / "starts").unlink()
    meetings = [line.split() for line in (tmp_path / "meetings").read_text().splitlines()]
    assert len(meetings) == 4
    ports, names = zip(*meetings, strict=True)
    # Four random ports of about 6,000 are practically never all equal.
    assert len(set(ports)) > 1
    assert all(20000 <= int(port) < 32200 and int(port) % 2 == 0 for port in ports)
    assert len({*names}) == 4
    assert {len(name) for name in names} == {32}
    submit(tmp_path, ENDS="failed", CHECKS="off", PORT="4000")
    assert [line.split()[0] for line in (tmp_path / "meetings").read_text().splitlines()[4:]] == ["4000", "4002"]


@pytest.mark.processes
@pytest.mark.slow
def test_cluster_interface_sets_head_address(tmp_path: Path) -> None:
    """The address comes from the real `slurm_checks.py` on this machine."""
    job = submit(tmp_path, BAD="", ENDS="", CLUSTER_INTERFACE="lo", CHECKS="off")
    assert steps(job.stdout) == [("127.0.0.1", "3", None)]
    job = submit(tmp_path, BAD="", ENDS="", CLUSTER_INTERFACE="none0", CHECKS="off")
    line = "error: CLUSTER_INTERFACE=none0: no interface with an IPv4 address on this node (No such device)"
    assert (job.returncode, job.stderr.strip(), steps(job.stdout)) == (2, line, [])


@pytest.mark.processes
def test_warn_mode_keeps_faulty_nodes_if_too_few_are_sound(tmp_path: Path) -> None:
    job = submit(tmp_path, TRAIN_NODES="2", BAD="n0 n1", CHECKS="warn", ENDS="")
    assert job.returncode == 0, job.stderr
    assert steps(job.stdout) == [("address-of-n0", nodes, None) for nodes in "32"]


@pytest.mark.processes
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("restarts", "ends", "starts", "code"),
    [
        ("0", "failed", 1, 2),
        ("0", "saved saved", 3, 0),
        ("0", "saved failed", 2, 2),
        ("1", "failed", 2, 0),
        ("1", "failed failed", 2, 2),
        ("1", "failed saved failed", 4, 0),
        ("1", "saved failed failed", 3, 2),
    ],
)
def test_only_failures_without_new_checkpoint_count_as_restarts(
    restarts: str, ends: str, starts: int, code: int, tmp_path: Path
) -> None:
    job = submit(tmp_path, RESTARTS=restarts, ENDS=ends, CHECKS="off")
    assert (len(steps(job.stdout)), job.returncode) == (starts, code), job.stderr
    if code:
        many = int(restarts) + 1
        assert f"error: {many} starts in a row failed without a new checkpoint, the last with code 70" in job.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("PORT", "ssh", "error: PORT=ssh: must be a number"),
        ("PORT", "99999", "error: PORT=99999: must be 1024 to 65400"),
        ("PORT", "08", "error: PORT=08: must be a number"),
        ("TRAIN_NODES", "4", "error: TRAIN_NODES=4: must be 1 to 3, the nodes of the job"),
        ("CHECKS", "no", "error: CHECKS=no: must be stop, warn or off"),
    ],
)
def test_invalid_variables_are_refused(name: str, value: str, line: str, tmp_path: Path) -> None:
    job = submit(tmp_path, **{name: value})
    assert (job.returncode, job.stderr.strip()) == (2, line)
