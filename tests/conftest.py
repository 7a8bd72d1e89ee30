"""Suite-wide pytest hooks: test selection and order, GPU serialisation, and CPU-time limits."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.support.places  # noqa: F401 - before others, which look for homes and caches
from tests.support import server
from tests.support.few import mark_others
from tests.support.loaded import settings_of_imports
from zeco_train.system.signals import STOP_SIGNALS

# Applies to this process and its children. By default a process that wakes another one may be preempted by it. A gloo
# rank that sends wakes its peer while it holds the connection's lock, and its own event loop then spins until the rank
# runs again: nearly half of the CPU time of tests with more ranks than cores. Some sandboxes do not allow this policy.
with contextlib.suppress(OSError):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Tests outlive no power cut, and a disk may take 10 ms for each of thousands of files.
os.fsync = lambda file: os.fstat(file if isinstance(file, int) else file.fileno()) and None  # fails where it would

# CPU seconds of a test without the mark `slow`, including fixtures and child processes: wall time depends on the load
# of the machine. GPU tests may have to compile kernels first.
LIMIT = 10.0
# CPU time of the same test varies by nearly this much between runs on shared machines, even with warm kernel caches.
MARGIN = 1.5
# CPU time of `slowness` on the idle machine on which LIMIT was set: two threads of a Xeon.
_REFERENCE_SECONDS = 0.1
_SECONDS = pytest.StashKey[float]()


@pytest.fixture(scope="session", autouse=True)
def _in_an_empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Relative paths, such as the default `runs/NAME`, are not those of the user's working directory."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("empty"))
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def _signal_handlers_stay() -> Iterator[None]:
    """Give the next test the handlers that this one found: a job that ends in a test ignores signals from then on."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _settings_of_imports_stay() -> Iterator[None]:
    """Take back variables that a library sets where a test first uses it: no later command could be a fork."""
    before = settings_of_imports(os.environ)
    yield
    for name in settings_of_imports(os.environ).keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


class _OneServer:
    """Of pytest-xdist's controller: its workers share the processes that ranks are forked from."""

    def __init__(self) -> None:
        self._places = {interpreted: server.place_of_server(interpreted) for interpreted in (False, True)}

    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["servers"] = [*self._places.items()]


def pytest_configure(config: pytest.Config) -> None:
    """Start, or use, servers that are shared."""
    if hasattr(config, "workerinput"):
        server.shared.update(config.workerinput["servers"])
    elif config.getoption("numprocesses", None) and not config.option.collectonly:
        config.pluginmanager.register(_OneServer())
        # The controller collects nothing.
        gc.enable()


# The first compilation of a process takes 4 s: one worker has them all.
COMPILING = {"models/test_layer_parts", "ops/test_gated_norm_kernel", "ops/test_loss"}
COMPILING |= {"ops/test_selection", "ops/test_opcheck", "system/test_code_cache", "training/test_compile"}
COMPILING |= {f"plan/test_{name}" for name in ("plan", "measured", "sharding", "hybrid_plans", "steps")}
TOGETHER = dict.fromkeys(COMPILING, "compiling")
# Importing fla's models takes a worker 5 s once, and transformers 1 s; the files of hf share what they export, too.
IMPORTING = {f"hf/{path.stem}" for path in Path(__file__).parent.glob("hf/test_*.py")}
IMPORTING |= {"checkpoint/test_earlier_versions", *(f"data/test_{name}" for name in ("prepare", "tokenizer"))}
IMPORTING.add("attach/test_command")
TOGETHER |= dict.fromkeys({*IMPORTING, "data/test_tokenizer_files", "generate/test_text"}, "transformers")
# As parsing all sources does.
TOGETHER |= dict.fromkeys({"test_rooms", "test_size"}, "sources")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute the tests by file, and files that `TOGETHER` gives one name as if they were one."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return TOGETHER.get(path.removeprefix("tests/").removesuffix(".py"), path)

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def has_gpu() -> bool:
    # pytest-xdist's controller, which does not ask, starts the workers a second earlier without it.
    import torch

    return torch.cuda.is_available()


# Before pytest's own hook selects by marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply the mark `few`, put files with waiting tests first, and skip tests marked `gpu` without a CUDA device."""
    for item in items:
        mark_others(item)
    # At the end of the run they would leave the cores idle, with no other tests to overlap them.
    waiting = {item.path for item in items if "processes" in item.keywords}
    items.sort(key=lambda item: item.path not in waiting)
    if has_gpu():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs CUDA devices"))


def pytest_collection_finish() -> None:
    """Let collections of garbage skip the objects of modules and tests, which stay."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(*server.GARBAGE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run one GPU test at a time over all pytest-xdist workers: it fills GPU memory, and may measure time."""
    with contextlib.ExitStack() as stack:
        if "gpu" in item.keywords and has_gpu():
            path = Path(tempfile.gettempdir(), f"zeco-test-gpu-{os.getuid()}.lock")
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        return (yield)


def cpu_seconds() -> float:
    """CPU time of this process, its ended children, and all ranks so far."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + server.cpu_seconds


def slowness() -> float:
    """Slowdown of a fixed workload relative to the machine on which LIMIT was set; at least 1.

    CPU time is not comparable: on an older core, or one shared by two busy threads, the same work takes more of it.
    """
    began = time.thread_time()
    sum(number * number for number in range(2_700_000))
    return max(1.0, (time.thread_time() - began) / _REFERENCE_SECONDS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Start the test's timer."""
    item.stash[_SECONDS] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Fail a test that passed but exceeded the time limit of its marks."""
    report = yield
    # pytest-xdist cannot send lone surrogates, as of file names that are no UTF-8.
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    if call.when == "call" and report.passed:
        seconds = cpu_seconds() - item.stash[_SECONDS]
        item.user_properties.append(("cpu", seconds))
        is_limited = seconds > LIMIT and not {"slow", "gpu"} & set(item.keywords)
        if is_limited and seconds > (limit := LIMIT * MARGIN * slowness()):
            report.outcome = "failed"
            allowed = f"more than {LIMIT:g} ({limit:.1f} on this machine, now)"
            report.longrepr = f"{seconds:.1f} s of CPU time, {allowed}: make it cheaper, or mark it `slow`"
    return report
