"""torchrun on one node of a Slurm job.

Usage: `srun python launch/slurm_node.py --nodes N --ranks R --output DIR -- train.py`

This is torchrun with c10d rendezvous, and the following changes for batch scripts: the rendezvous is signed (see
slurm_rendezvous.py), SIGUSR1 does not end it, compiled kernels go to the node's own disk, a rank's output goes to a
file named by its global rank (rank 0: to the job's output), and the exit code is the reason why the ranks ended. srun
reports the largest code of all nodes, so the codes are ordered by priority:

    0     the ranks have finished
    70    a rank failed or was killed: the run can resume from its last checkpoint
    75    the ranks received a stop signal, and have saved
    100+n a rank's exit code n: a permanent error (a wrong setting, data, a loss that is not finite)
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from signal import SIGUSR1

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zeco_train.system.packages import quick_imports

with quick_imports():
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.elastic.rendezvous import RendezvousError, rendezvous_handler_registry
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    from launch.slurm_network import no_interface, own_address
    from launch.slurm_rendezvous import BACKEND, create_handler
    from zeco_train.errors import CheckpointError, ConfigError, DataError, NonFiniteError, OutOfMemoryError
    from zeco_train.system.code_cache import use_private_caches

FAILED, SAVED, FINAL = 70, 75, 100
_FINAL_CODES = {error.exit_code for error in (ConfigError, DataError, CheckpointError, NonFiniteError)}
# Exit codes that are not a root cause: the rank lost a peer, was ended by its launcher, or has saved.
_CONSEQUENCES = {6, SAVED, -signal.SIGTERM, 128 + signal.SIGTERM}
# Exit codes whose cause one rank reports in a line; when a single rank fails, its peers exit with the same code.
_TOLD = {*_FINAL_CODES, OutOfMemoryError.exit_code}
_TAIL_LINES = 20
# Longer than the time that ranks give rank 0 to report an error before all ranks have joined.
_SECONDS_FOR_OTHERS = 30.0


class RankFiles(DefaultLogsSpecs):
    """Output of the ranks: `rank_0012.out` and `.err` in the folder, by global rank; rank 0 uses the job's output."""

    def __init__(self, folder: Path, console: int) -> None:
        super().__init__(log_dir=tempfile.mkdtemp(prefix="zeco-torchrun-"))
        self.folder, self._console = folder, console
        self.ranks: list[int] = []

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See `LogsSpecs.reify`."""
        destinations = super().reify(envs)
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        self.ranks = sorted(ranks.values())
        # For torchrun "" is its own stream; its stderr has been redirected, so name the job's stderr.
        out = {local: self._path(rank, "out") if rank else "" for local, rank in ranks.items()}
        err = {local: self._path(rank, "err") if rank else f"/dev/fd/{self._console}" for local, rank in ranks.items()}
        return dataclasses.replace(destinations, stdouts=out, stderrs=err)

    def _path(self, rank: int, kind: str) -> str:
        return str(self.folder / f"rank_{rank:04d}.{kind}")

    def errors(self) -> list[str]:
        """The error lines written by ranks other than 0."""
        lines = (line for rank in filter(None, self.ranks) for line in self._read(rank))
        return [line for line in lines if line.startswith("error: ")]

    def tail(self, rank: int) -> list[str]:
        """The last lines of a rank's stderr."""
        return self._read(rank)[-_TAIL_LINES:]

    def _read(self, rank: int) -> list[str]:
        path = Path(self._path(rank, "err"))
        return path.read_text(errors="replace").splitlines() if path.exists() else []


def launch(nodes: int, ranks: int, output: Path, command: list[str], address: str | None = None) -> int:
    """Run the node's ranks to their end; returns the exit code.

    Args:
        nodes: of the training.
        ranks: on this node.
        output: folder for torchrun's log and the ranks' output.
        command: train.py and its settings.
        address: the only address of this node on which the stores listen; None for all interfaces.
    """
    node = int(os.environ["SLURM_PROCID"])
    # Ranks do not need it, and some programs print their environment.
    key = os.environ.pop("RENDEZVOUS_KEY")
    # Slurm sends it to every process of a step; ranks inherit this setting, and install their own handlers.
    signal.signal(SIGUSR1, signal.SIG_IGN)
    console = _redirect_stderr(output / f"node_{node:04d}.log")
    endpoint = f"{os.environ['HEAD_ADDRESS']}:{os.environ['HEAD_PORT']}"
    # No restarts here: the batch script starts all nodes again, after new checks.
    arguments = [f"--nnodes={nodes}", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    arguments += [f"--rdzv-backend={BACKEND}", f"--rdzv-id={os.environ['RENDEZVOUS_ID']}"]
    arguments += [f"--rdzv-endpoint={endpoint}", *([f"--local-addr={address}"] if address is not None else [])]
    arguments += [f"--rdzv-conf=is_host={str(node == 0).lower()},read_timeout=300,join_timeout=600"]
    rendezvous_handler_registry.register(BACKEND, partial(create_handler, key.encode()))
    config, entrypoint, entry_arguments = config_from_args(get_args_parser().parse_args([*arguments, *command]))
    files = config.logs_specs = RankFiles(output, console)
    try:
        elastic_launch(config, entrypoint)(*entry_arguments)
        lines: list[str] = []
        code = 0
    except ChildFailedError as error:
        lines, code = _explain(*error.get_first_failure(), files)
        _note_end(output, node)
        if node == 0 or 0 in files.ranks:
            # Wait inside the handler: `error` keeps the agent and its stores alive, the rendezvous store on the first
            # node and the ranks' store on rank 0's node. Without them the other ranks could not find out which rank
            # failed and whether it has been reported, and torchrun on other nodes would kill ranks that are exiting.
            _wait_for_others(output, nodes)
    except SignalException as error:
        lines, code = [f"{error.sigval.name}: the ranks of node {node} were told to stop"], SAVED
    except (RendezvousError, dist.DistError) as error:
        lines, code = [f"node {node} has no connection to the first one at {endpoint}: {error}".splitlines()[0]], FAILED
    finally:
        shutil.rmtree(files.root_log_dir, ignore_errors=True)
        _note_end(output, node)
    os.write(console, "".join(f"{line}\n" for line in lines).encode())
    return code


def _explain(rank: int, failure: ProcessFailure, files: RankFiles) -> tuple[list[str], int]:
    """Lines about the failure of the node's ranks, in addition to rank 0's own output, and the exit code."""
    code = failure.exitcode
    if code == SAVED:
        return [], SAVED
    lines = files.errors()
    # Reported by rank 0, whose lines are already in the job's output, or on another node.
    told_elsewhere = code in _TOLD and not lines
    if code not in _CONSEQUENCES and not told_elsewhere:
        if not lines and rank:
            # An unexpected exception: show the traceback.
            lines = files.tail(rank)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines.append(f"rank {rank} on {os.environ.get('SLURMD_NODENAME')} {how}; its output is in {files.folder}")
    return lines, FINAL + code if code in _FINAL_CODES else FAILED


def _note_end(output: Path, node: int) -> None:
    (output / f"node_{node:04d}.ended").touch()


def _wait_for_others(output: Path, nodes: int) -> None:
    deadline = time.monotonic() + _SECONDS_FOR_OTHERS
    while len(list(output.glob("node_*.ended"))) < nodes and time.monotonic() < deadline:
        time.sleep(0.2)


def _redirect_stderr(path: Path) -> int:
    """Redirect the logs of torchrun and its C++ code to a file; returns a descriptor of the original stderr."""
    console = os.dup(2)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 2)
    return console


def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description="torchrun on one node of a Slurm job")
    parser.add_argument("--nodes", type=int, required=True, help="of the training")
    parser.add_argument("--ranks", type=int, required=True, help="on each node")
    parser.add_argument("--output", type=Path, required=True, help="folder for what ranks print")
    parser.add_argument("command", nargs="+", help="train.py and its settings")
    options = parser.parse_args()
    try:
        # On this node's disk: on a shared disk, hundreds of compiling ranks wait for each other.
        use_private_caches(Path(os.environ["CACHE_DIR"]), "CACHE_DIR")
    except ConfigError as error:
        print(f"{error.line} (on {os.environ.get('SLURMD_NODENAME')})", file=sys.stderr)
        return FINAL + error.exit_code
    try:
        address = own_address()
    except OSError as error:
        print(no_interface(error), file=sys.stderr)
        return FINAL + ConfigError.exit_code
    return launch(options.nodes, options.ranks, options.output, options.command, address)


if __name__ == "__main__":
    sys.exit(main())
