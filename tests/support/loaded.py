"""Starts `python SCRIPT` and `python -m MODULE` as forks of a process that has imported torch and the trainer once.

A start under torchrun otherwise imports them in the launcher and in each rank, for seconds of CPU time. A forked
process is a child of the process that requested it, as with `subprocess.Popen`: the parent can wait for it, its CPU
time counts as that of the parent's children, and a rank dies with its launcher. So there are two kinds of loaded
processes:

- a process of tests has one, from its first start to its end;
- a launcher has a copy of that one, which it asks for its ranks. It cannot fork them itself: it has threads.

What a fork does not repeat: imports and what they print, the seed of hashes, and the end of the interpreter, in which
modules are torn down. Claims about these need a fresh process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.support.waiting import ENOUGH

REPOSITORY = Path(__file__).resolve().parents[2]
# Is read by libraries when they are loaded, or by Python when it starts.
_READ_AT_START = ("PYTHON", "LANG", "LC_", "LD_", "MALLOC_", "OMP_", "MKL_", "KMP_", "TORCH", "TRITON", "CUDA_", "HF_")
# The trainer and torch set these after imports, so also in a process of tests that has run a command itself.
_READ_LATER = {
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "CUDA_CACHE_PATH",
}
# First variable of a loaded process; the memory of its text is where a rank says its number, see `_show`.
_PLACE = "ZECO_PLACE"
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Start:
    """A process to start.

    Attributes:
        command: as of `subprocess.Popen`: Python's path, perhaps `-u`, and a script or `-m` and a module.
        folder: its working directory.
        environment: all variables.
        ignored: signals that it ignores.
        session: whether it leads a session.
        launches: whether it is torchrun, whose ranks are forks as well.
    """

    command: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    ignored: Sequence[int]
    session: bool = False
    launches: bool = False


class Forked:
    """A child process, with the methods of `subprocess.Popen` that tests and torchrun need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, the negative number of the signal that ended it, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Loaded:
    """A loaded process, as seen by the one that may ask it for children."""

    def __init__(self, channel: socket.socket, process: Forked | subprocess.Popen[bytes]) -> None:
        self._channel, self._process, self._lock = channel, process, threading.Lock()
        # The start of a new process includes the imports.
        channel.settimeout(ENOUGH)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, start: Start, out: int, err: int) -> Forked:
        """Start a child of this process, with two files as stdout and stderr."""
        with self._lock, _adopting():
            socket.send_fds(self._channel, [pickle.dumps(start)], [out, err])
            answer = self._channel.recv(64)
        if not answer:
            raise RuntimeError("the loaded process has ended")
        return Forked(int(answer))

    def close(self) -> None:
        self._channel.close()
        self._process.wait()


def python_path() -> str:
    """PYTHONPATH with which commands find this repository, in any folder."""
    return os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))


_loaded: Loaded | None = None
# Before a test sets a variable for itself. One thread, as all commands of tests: OpenMP could not be told later.
_LOADED_WITH = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}


def loaded() -> Loaded:
    """This process's loaded process, which ends with it."""
    global _loaded
    if _loaded is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = f"from tests.support import loaded; loaded.main({theirs.fileno()})"
            process = subprocess.Popen(
                # Unbuffered, as torchrun starts ranks.
                [sys.executable, "-u", "-c", program],
                cwd=REPOSITORY,
                # `_PLACE` is the first one, so at a known address; as long as any `RANK=…`.
                env={_PLACE: " " * 16, **_LOADED_WITH},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        _loaded = Loaded(ours, process)
        atexit.register(_loaded.close)
    return _loaded


def can_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a fork runs a command as a new process does: Python's, and with the same settings of imports."""
    if command[0] != sys.executable or (command[1].startswith("-") and command[1] != "-m"):
        return False
    return settings_of_imports(environment) == settings_of_imports(_LOADED_WITH)


def settings_of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a fork cannot take over, since they were read when libraries were loaded."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and name not in _READ_LATER
    }


def ignored_signals() -> list[int]:
    """Signals that this process ignores, and so its children after `exec`."""
    return [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Orphans among this process's descendants become its children."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def main(channel: int) -> NoReturn:
    """Of the loaded process: import, and fork what is asked for until the other end is closed."""
    # Ctrl-C in a terminal reaches this process, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    import torch.distributed.run

    from zeco_train.system.figures import new_figure, render

    # A run draws its losses at its end, and the first picture takes two seconds.
    figure = new_figure("title", (2, 2), dpi=50, title_size=5)
    figure.subplots().plot([0, 1])
    render(figure, io.BytesIO())
    # Without a cache of fonts, one has just ended.
    for thread in threading.enumerate()[1:]:
        thread.join()
    # Freezes the objects of all imports.
    import tests.support.preloaded  # noqa: F401
    import zeco_train.cli  # noqa: F401

    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads do not survive a fork"
    torch.set_num_threads(1)
    _serve(socket.socket(fileno=channel))


def _serve(channel: socket.socket) -> NoReturn:
    owner = os.getppid()
    while True:
        message, files, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 2)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                # Leaves its child an orphan, which `owner` adopts.
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            if os.getppid() != owner:
                os._exit(1)
            _become(pickle.loads(message), files, channel)
        os.waitpid(between, 0)
        for file in files:
            os.close(file)


def _become(start: Start, files: list[int], channel: socket.socket) -> NoReturn:
    """Be the process to start, from here to its end."""
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.environment)
    if start.session:
        os.setsid()
    copy = _copy(channel) if start.launches else None
    _reset_signals(start.ignored)
    _reseed()
    gc.enable()
    _show(start)
    channel.send(str(os.getpid()).encode())
    channel.close()
    code = _run(list(start.command))
    if copy is not None:
        copy.close()
    os._exit(code)


def _copy(channel: socket.socket) -> Loaded:
    """Fork a loaded process of this one's own, and have torchrun ask it for ranks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        channel.close()
        ours.close()
        _serve(theirs)
    theirs.close()
    copy = Loaded(ours, Forked(pid))
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    whole = SubprocessHandler._popen

    def popen(handler: Any, command: tuple[str, ...], environment: dict[str, str]) -> Any:
        if command[0] != sys.executable:
            return whole(handler, command, environment)
        start = Start(command, str(Path.cwd()), environment, ignored_signals(), session=True)
        out, err = (file.fileno() if file else number for number, file in ((1, handler._stdout), (2, handler._stderr)))
        return copy.start(start, out, err)

    SubprocessHandler._popen = popen  # type: ignore[method-assign, assignment]
    return copy


def _reset_signals(ignored: Sequence[int]) -> None:
    """Set what a new Python finds and sets."""
    ignored = [*ignored, signal.SIGPIPE, signal.SIGXFSZ]
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
        else:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _reseed() -> None:
    """Python reseeds `random` itself, and torch's seed is a constant."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _show(start: Start) -> None:
    """Write `RANK=…` where /proc/PID/environ is read from, the memory of the variables that `exec` was given.

    `os.environ` is no longer there, since its variables were replaced. And torchrun by its own name, `-m
    torch.distributed.run`, in place of this process's arguments: its ranks look whether it has started them.
    """
    arguments, end, variables = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:48])
    if start.launches and start.command[1] == "-m":
        text = "\0".join(start.command[:3]).encode()
        ctypes.memmove(arguments, text.ljust(end - arguments, b"\0"), end - arguments)
    if (rank := os.environ.get("RANK")) is not None:
        assert ctypes.string_at(variables, len(_PLACE)) == _PLACE.encode()
        ctypes.memmove(variables, f"RANK={rank}\0".encode(), len(rank) + 6)


def _run(command: list[str]) -> int:
    """Run a script or module as `python` does; returns the exit code."""
    sys.orig_argv = command
    arguments = [argument for argument in command[1:2] if argument != "-u"] + command[2:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[0] = ["-m", *arguments[2:]], str(Path.cwd())
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        else:
            script = arguments[0]
            sys.argv, sys.path[0] = arguments, str(Path(script).resolve().parent)
            main.__file__ = script
            with io.open_code(str(Path(script).absolute())) as file:
                code = compile(file.read(), script, "exec")
            exec(code, vars(main))
        status = 0
    except SystemExit as end:
        status = _status(end.code)
    except BaseException as error:
        # Without the frame of this function, so as a new process prints it.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    # The end of the interpreter up to the tear-down of modules, which would copy all memory that is shared.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1
