"""A real Slurm on this machine: munged, slurmctld and a slurmd for each node, all in one temporary folder.

Fully isolated from a Slurm installation of the machine: own ports, keys and sockets, own configuration through
`SLURM_CONF`. Everything runs as the current user, and ends with the `with` block, jobs included.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.waiting import ENOUGH

_PR_SET_PDEATHSIG = 1
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
# Debian installs daemons outside of a user's PATH.
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))

_CONFIGURATION = """
ClusterName=zeco-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it starts again.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
# How soon a node that is gone is given up; Slurm asks every third of it.
SlurmdTimeout=15
KillWait=20
BatchStartTimeout=60
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Counted, with no device behind: what the scripts ask of real ones is asked of these.
GresTypes=gpu
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs={cpus} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why a Slurm cluster cannot be started here; None if it can."""
    missing = [program for program in _PROGRAMS if shutil.which(program, path=_PATH) is None]
    return f"no {', '.join(missing)} (Debian and Ubuntu: apt install slurm-wlm munge)" if missing else None


class SlurmCluster:
    """Nodes n0, n1, …, whose CPUs may exceed the machine's and whose GPUs are only counted."""

    def __init__(self, nodes: int = 4, cpus: int = 2, gpus: int = 2) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="zeco-slurm-"))
        self.nodes = [f"n{number}" for number in range(nodes)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._cpus, self._gpus = cpus, gpus
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH", "SRUN", "TORCHINDUCTOR", "TRITON", "CUDA_CACHE"))
        } | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._end_jobs()
        # Stop Slurm's daemons before munged, which authenticates them.
        for name in reversed(list(self._daemons)):
            self._end(name)
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command: str, cwd: Path | None = None, timeout: float = ENOUGH) -> str:
        """Run a Slurm client; returns its stdout."""
        done = subprocess.run(
            command, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str, cwd: Path) -> str:
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd)

    def job(self, number: str) -> dict[str, str]:
        """Fields of `scontrol show job`, `JobState` for example; empty once Slurm has forgotten the job."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, condition: Callable[[], object], what: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {timeout:g} s\n{self.logs()}"
            time.sleep(0.2)

    def processes(self) -> list[int]:
        """All processes of this cluster, daemons too, identified by the configuration in their environment."""
        mark = f"SLURM_CONF={self.folder}/".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    environment = (entry / "environ").read_bytes()
                    if mark in environment and int(entry.name) != os.getpid():
                        found.append(int(entry.name))
        return found

    def processes_of_jobs(self) -> list[int]:
        """All processes started by jobs that are still running."""
        return [process for process in self.processes() if _variable(process, "SLURM_JOB_ID") is not None]

    def ranks(self, job: str) -> dict[int, int]:
        """Process ids of a job's ranks."""
        found = {}
        for process in self.processes():
            rank = _variable(process, "RANK")
            if rank is not None and _variable(process, "SLURM_JOB_ID") == job:
                found[int(rank)] = process
        return found

    def logs(self) -> str:
        ends = [f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}" for path in self.folder.glob("*.out.log")]
        return "\n".join(ends)

    def _start(self) -> None:
        self.folder.chmod(0o711)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        (self.folder / "state").mkdir()
        with _free_ports(1 + len(self.nodes)) as ports:
            (self.folder / "slurm.conf").write_text(self._configuration(ports))
            for number in range(self._gpus):
                (self.folder / f"gpu{number}").touch()
            (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{self._gpus - 1}]\n")
        files = ("socket", "key-file", "pid-file", "seed-file", "log-file")
        options = [f"--{name}={self.folder}/munge.{name.removesuffix('-file')}" for name in files]
        self._daemon("munged", "munged", "--foreground", *options)
        self.wait((self.folder / "munge.socket").exists, "munge's socket", 20)
        self._daemon("slurmctld", "slurmctld", "-D")
        for node in self.nodes:
            self._daemon(f"slurmd {node}", "slurmd", "-D", "-N", node)
        self.wait(lambda: self._states() == ["idle"] * len(self.nodes), "idle nodes", 60)

    def _configuration(self, ports: list[int]) -> str:
        names = f"n[0-{len(self.nodes) - 1}]"
        user = subprocess.check_output(["id", "-un"], text=True).strip()
        return _CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            controller_port=ports[0],
            user=user,
            folder=self.folder,
            nodes=names,
            ports=f"[{','.join(map(str, ports[1:]))}]",
            cpus=self._cpus,
            gpus=self._gpus,
        )

    def _states(self) -> list[str]:
        with contextlib.suppress(AssertionError):
            return self.run("sinfo", "--noheader", "--Node", "--format=%T").split()
        return []

    def _daemon(self, name: str, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=_PATH)
        assert path is not None
        output = (self.folder / f"{name.replace(' ', '-')}.out.log").open("ab")
        with output:
            self._daemons[name] = subprocess.Popen(
                [path, *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=output,
                preexec_fn=_die_with_parent,
            )

    def _end_jobs(self) -> None:
        if (self.folder / "slurm.conf").exists() and "slurmctld" in self._daemons:
            self.run("scancel", "--state=PENDING", f"--user={os.getuid()}")
            self.run("scancel", "--signal=KILL", "--full", f"--user={os.getuid()}")
            deadline = time.monotonic() + 10
            while self.run("squeue", "--noheader") and time.monotonic() < deadline:
                time.sleep(0.2)

    def _end(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _variable(process: int, name: str) -> str | None:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            if entry.startswith(f"{name}=".encode()):
                return entry.partition(b"=")[2].decode()
    return None


@contextlib.contextmanager
def _free_ports(count: int) -> Iterator[list[int]]:
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            held = stack.enter_context(socket.socket())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            ports.append(held.getsockname()[1])
        yield ports


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
