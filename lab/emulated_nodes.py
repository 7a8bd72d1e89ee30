"""Question: does a run over nodes have one rank's losses, and does it survive the loss of a node?
Command: python -m lab.emulated_nodes --nodes 4 --ranks 2 --cut 2 --cut-after 60 -- train.py sp=zeco sp.size=8 …
Date: 2026-11-23, 2 CPU cores
Answer: yes; the loss is named, all ranks ended 31 s later with parallel.timeout_seconds=10, and the same command goes
    on.

A node is a network namespace behind `lab/emulated_switch.py`, on which torchrun starts `--ranks` processes. Cores and
links are not a cluster's: compare ratios only. Needs root, /dev/net/tun and iproute2.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from lab.emulated_switch import address
from zeco_train.errors import ConfigError
from zeco_train.system.command import Parser, docstring, errors_in_a_line
from zeco_train.system.terminal import show_any_text

_SWITCH = Path(__file__).resolve().parent / "emulated_switch.py"
_TUN = Path("/dev/net/tun")
# Packets are large, since each costs the switch the same time.
_MTU = 60_000
_MOST_NODES = 64
_POLL_SECONDS = 0.1
# For nodes to end after another has failed, and after they are asked to; a run then saves a checkpoint.
_SECONDS_TO_END = 30.0


def why_not() -> str | None:
    """Why this machine cannot emulate nodes; None if it can."""
    if os.geteuid() != 0:
        return "not root"
    if not _TUN.exists():
        return f"no {_TUN}"
    if missing := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        return f"no {' and '.join(missing)}"
    # A container's root may have no right to them.
    probe = ["name", f"zp{os.getpid()}", "mode", "tun"]
    for command in (
        ["unshare", "--net", "--uts", "--mount", "true"],
        ["ip", "tuntap", "add", *probe],
        ["ip", "tuntap", "del", *probe],
    ):
        if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode:
            return f"no right to {' '.join(command[:3])}"
    return None


@dataclass(frozen=True)
class Network:
    """Shape of the emulated network.

    Attributes:
        nodes: number of them.
        delay_ms: from one node to another.
        rate_mb: 10^6 bytes per second that a node sends.
    """

    nodes: int
    delay_ms: float = 0.2
    rate_mb: float = 500.0


class EmulatedNodes:
    """Nodes as network namespaces, which exist inside `with`.

    Raises:
        ConfigError: this machine cannot emulate nodes, or not this network.
    """

    def __init__(self, network: Network) -> None:
        if (reason := why_not()) is not None:
            raise ConfigError("--nodes", network.nodes, f"this machine cannot emulate nodes: {reason}")
        if not 1 <= network.nodes <= _MOST_NODES:
            raise ConfigError("--nodes", network.nodes, f"must be from 1 to {_MOST_NODES}")
        for name in ("delay_ms", "rate_mb"):
            if not 0 < getattr(network, name) < 1e6:
                raise ConfigError(f"--{name.replace('_', '-')}", getattr(network, name), "must be > 0 and < 10^6")
        self._network = network
        # Names of namespaces, and of devices (of at most 15 characters), that no other process has.
        self._names = [f"zeco-{os.getpid()}-{node}" for node in range(network.nodes)]
        self._devices = [f"zt{os.getpid()}n{node}" for node in range(network.nodes)]
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._switch is not None:
            assert self._switch.stdin is not None
            # Its input's end; the devices end with it.
            self._switch.stdin.close()
            self._switch.wait()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """The command that runs another one on a node."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"node{node}", *command]
        return ["ip", "netns", "exec", self._names[node], *named]

    def cut(self, node: int) -> None:
        """Take a node off the network."""
        self._tell(f"cut {node}")

    def join(self, node: int) -> None:
        """Connect it again."""
        self._tell(f"join {node}")

    def _start(self) -> None:
        network = self._network
        options = ["--delay-ms", str(network.delay_ms), "--rate-mb", str(network.rate_mb)]
        self._switch = subprocess.Popen(
            [sys.executable, str(_SWITCH), *self._devices, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A Ctrl-C is for the command; the switch must outlive it.
            start_new_session=True,
        )
        self._answer("ready")
        for node, (name, device) in enumerate(zip(self._names, self._devices, strict=True)):
            _ip("netns", "add", name)
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", device, "name", "eth0")
            _ip("-n", name, "link", "set", "eth0", "mtu", str(_MTU), "up")
            _ip("-n", name, "addr", "add", f"{address(node)}/24", "dev", "eth0")

    def _tell(self, line: str) -> None:
        assert self._switch is not None
        assert self._switch.stdin is not None
        print(line, file=self._switch.stdin, flush=True)
        self._answer(line)

    def _answer(self, expected: str) -> None:
        assert self._switch is not None
        assert self._switch.stdout is not None
        if self._switch.stdout.readline().strip() != expected:
            raise ConfigError("--nodes", self._network.nodes, f"{_TUN} makes no devices here; see the lines above")


def _ip(*arguments: str) -> None:
    found = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if found.returncode:
        reason = found.stderr.strip() or f"exit code {found.returncode}"
        raise ConfigError("--nodes", " ".join(arguments), f"ip refuses it here ({reason})")


def run_ranks(
    nodes: EmulatedNodes,
    network: Network,
    ranks: int,
    command: Sequence[str],
    meanwhile: Callable[[], None] = lambda: None,
    port: int = 29500,
    quiet: bool = False,
) -> list[int]:
    """Run a Python command on `ranks` processes of each node by torchrun; returns the exit code of each node.

    Args:
        nodes: running.
        network: their shape.
        ranks: processes per node.
        command: script and arguments, or `-m` and a module.
        meanwhile: called several times a second.
        port: of the rendezvous, on the first node.
        quiet: the output of nodes but the first is dropped.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={network.nodes}", f"--nproc-per-node={ranks}"]
    launcher += [f"--master-addr={address(0)}", f"--master-port={port}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for node in range(network.nodes):
            of_node = [*launcher, f"--node-rank={node}", f"--local-addr={address(node)}", *command]
            output = subprocess.DEVNULL if quiet and node else None
            here = nodes.command(node, of_node)
            started.append(
                subprocess.Popen(here, env=environment, stdout=output, stderr=output, start_new_session=True)
            )
        while any(process.poll() is None for process in started):
            meanwhile()
            time.sleep(_POLL_SECONDS)
            if any(process.poll() for process in started):
                # As a cluster's scheduler: torchrun on a node that is cut off would wait for its store for minutes.
                _wait(started)
                break
    finally:
        _end(started)
    return [process.returncode for process in started]


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended, for a bounded time."""
    deadline = time.monotonic() + _SECONDS_TO_END
    for process in started:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask all to end, and kill those that do not."""
    for way in (signal.SIGTERM, signal.SIGKILL):
        running = [process for process in started if process.poll() is None]
        for process in running:
            # The whole session: torchrun, if killed, leaves its ranks.
            os.killpg(process.pid, way)
        _wait(running)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        prog="python -m lab.emulated_nodes",
        description=docstring(sys.modules[__name__]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=4, metavar="N", help="default 4")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="of each node; default 2")
    parser.add_argument("--delay-ms", type=float, default=0.2, metavar="X", help="between nodes; default 0.2")
    parser.add_argument("--rate-mb", type=float, default=500.0, metavar="X", help="MB/s that a node sends; default 500")
    parser.add_argument("--cut", type=int, metavar="NODE", help="take this node off the network, counted from 0")
    parser.add_argument("--cut-after", type=float, default=30.0, metavar="S", help="seconds before --cut; default 30")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="a Python script and its arguments; after --")
    return parser.parse_args(arguments)


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code: of the first node that failed."""
    options = parse(arguments)
    if options.ranks < 1:
        raise ConfigError("--ranks", options.ranks, "must be ≥ 1")
    if options.cut is not None and not 0 <= options.cut < options.nodes:
        raise ConfigError("--cut", options.cut, f"must be from 0 to {options.nodes - 1}")
    network = Network(options.nodes, options.delay_ms, options.rate_mb)
    started, is_cut = time.monotonic(), False
    with EmulatedNodes(network) as nodes:

        def cut() -> None:
            nonlocal is_cut
            if options.cut is not None and not is_cut and time.monotonic() - started > options.cut_after:
                is_cut = True
                nodes.cut(options.cut)
                print(f"== node {options.cut} is cut off", flush=True)

        try:
            codes = run_ranks(nodes, network, options.ranks, options.command, cut)
        except KeyboardInterrupt:
            return 130
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    show_any_text()
    sys.exit(main(sys.argv[1:]))
