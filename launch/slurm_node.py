"""torchrun on one node of a Slurm job: `srun python launch/slurm_node.py --nodes N --ranks R --output DIR -- train.py`.

What differs from torchrun: SIGUSR1 does not end it, the store may listen on one interface only, compiled kernels go to
the node's own disk, a rank's output goes to a file named by its global rank (rank 0: to the job's output), and the exit
code is the reason why the ranks ended. srun reports the largest code of all nodes, so codes are ordered by priority:

    0     the ranks have finished
    70    a rank failed or was killed: the run can resume from its last checkpoint
    75    the ranks received a stop signal, and have saved
    100+n a rank's exit code n: a permanent error (a wrong setting, data, a loss that is not finite)

The rendezvous is torch's static one: Slurm numbers the nodes, and the agents exchange JSON through a TCPStore on the
first. torchrun's default, `c10d`, stores a pickle there, which can run any code when another agent reads it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zeco_train.system.command import quick_imports

with quick_imports():
    from torch.distributed import DistError, DistNetworkError, TCPStore
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    from zeco_train.errors import CheckpointError, ConfigError, DataError, NonFiniteError, OutOfMemoryError
    from zeco_train.system.code_cache import use_private_caches
    from zeco_train.system.environment import address_on

FAILED, SAVED, FINAL = 70, 75, 100
_FINAL_CODES = {error.exit_code for error in (ConfigError, DataError, CheckpointError, NonFiniteError)}
# Exit codes that are not a root cause: the rank lost a peer, was ended by its launcher, or has saved.
_CONSEQUENCES = {6, SAVED, -signal.SIGTERM, 128 + signal.SIGTERM}
# Exit codes whose cause one rank reports in a line; when a single rank fails, its peers exit with the same code.
_REPORTED = {*_FINAL_CODES, OutOfMemoryError.exit_code}
_TAIL_LINES = 20
# Longer than the time that ranks give rank 0 to report an error before all ranks have joined.
_SECONDS_FOR_OTHERS = 30.0


class _RankFiles(DefaultLogsSpecs):
    """Ranks print to `rank_0012.out` and `.err` in a folder, by global rank; rank 0 to the job's output."""

    def __init__(self, folder: Path, console: int) -> None:
        super().__init__()
        self._folder, self._console = folder, console

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The streams of each rank."""
        streams = super().reify(envs)
        for local, rank in ((local, int(env["RANK"])) for local, env in envs.items()):
            # For torchrun "" is its own stream; its stderr has been redirected, so name the job's stderr.
            streams.stdouts[local] = str(_file(self._folder, rank, "out")) if rank else ""
            streams.stderrs[local] = str(_file(self._folder, rank, "err")) if rank else f"/dev/fd/{self._console}"
        return streams


def _file(folder: Path, rank: int, kind: str) -> Path:
    return folder / f"rank_{rank:04d}.{kind}"


def _listen(address: str, port: int) -> TCPStore:
    # TCPStore has no listen address, but takes a socket that listens already. As long as this store is kept, others of
    # this process with its port share its server, as the rendezvous' server.
    try:
        handle = socket.create_server((address, port)).detach()
    except OSError as error:
        raise DistNetworkError(str(error)) from error
    return TCPStore(address, port, None, True, multi_tenant=True, master_listen_fd=handle)


def _launch(nodes: int, ranks: int, output: Path, command: list[str], address: str | None) -> int:
    node = int(os.environ["SLURM_PROCID"])
    # Slurm sends it to every process of a step; ranks inherit this setting, and install their own handlers.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # torchrun's own log, and its C++ code's, goes to a file; errors to the job's output.
    console = os.dup(2)
    with (output / f"node_{node:04d}.log").open("ab") as log:
        os.dup2(log.fileno(), 2)
    host, port = os.environ["HEAD_ADDRESS"], int(os.environ["HEAD_PORT"])
    # No restarts here: the batch script starts all nodes again, after new checks.
    arguments = [f"--nnodes={nodes}", f"--nproc-per-node={ranks}", f"--node-rank={node}", "--max-restarts=0"]
    arguments += [f"--rdzv-id={os.environ['RENDEZVOUS_ID']}", f"--rdzv-endpoint={host}:{port}"]
    arguments += ["--rdzv-backend=static", "--rdzv-conf=timeout=600", f"--log-dir={os.devnull}"]
    arguments += [] if address is None else [f"--local-addr={address}"]
    config, entrypoint, entry_arguments = config_from_args(get_args_parser().parse_args([*arguments, *command]))
    files = config.logs_specs = _RankFiles(output, console)
    ended = output / f"node_{node:04d}.ended"
    lines: list[str] = []
    code = 0
    try:
        # Kept to the end. Without an address the rendezvous' own store listens, on all interfaces.
        _store = _listen(address, port) if node == 0 and address is not None else None
        elastic_launch(config, entrypoint)(*entry_arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        lines, code = _explain(rank, failure.exitcode, range(node * ranks, (node + 1) * ranks), output)
        ended.touch()
        if node == 0:
            # Wait inside the handler: `error` keeps the agent and its store alive. Without it the other ranks could
            # not find out which rank failed and whether it has been reported, and torchrun on other nodes would kill
            # ranks that are exiting.
            deadline = time.monotonic() + _SECONDS_FOR_OTHERS
            while len(list(output.glob("node_*.ended"))) < nodes and time.monotonic() < deadline:
                time.sleep(0.2)
    except SignalException as error:
        lines, code = [f"{error.sigval.name}: the ranks of node {node} were told to stop"], SAVED
    except (DistError, ValueError) as error:  # ValueError: another program wrote something else than JSON
        problem, code = str(error).partition("\n")[0], FAILED
        lines = [f"node {node} has no connection to the first one at {host}:{port}: {problem}"]
    finally:
        shutil.rmtree(files.root_log_dir, ignore_errors=True)
        ended.touch()
    os.write(console, "".join(f"{line}\n" for line in lines).encode())
    return code


def _explain(rank: int, code: int, ranks: range, folder: Path) -> tuple[list[str], int]:
    # Lines about the failure of the node's ranks, in addition to rank 0's own output, and the exit code.
    if code == SAVED:
        return [], SAVED
    # Rank 0's are in the job's output already.
    files = {other: _file(folder, other, "err") for other in ranks if other > 0}
    written = {other: file.read_text(errors="replace").splitlines() for other, file in files.items() if file.exists()}
    lines = [line for each in written.values() for line in each if line.startswith("error: ")]
    # Without a line it was reported by rank 0, or on another node.
    if code not in _CONSEQUENCES and (lines or code not in _REPORTED):
        # An unexpected exception: show the traceback.
        lines = lines or written.get(rank, [])[-_TAIL_LINES:]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines.append(f"rank {rank} on {os.environ.get('SLURMD_NODENAME')} {how}; its output is in {folder}")
    return lines, FINAL + code if code in _FINAL_CODES else FAILED


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
        address = address_on("CLUSTER_INTERFACE")
    except ConfigError as error:
        print(f"{error.line} (on {os.environ.get('SLURMD_NODENAME')})", file=sys.stderr)
        return FINAL + error.exit_code
    return _launch(options.nodes, options.ranks, options.output, options.command, address)


if __name__ == "__main__":
    sys.exit(main())
