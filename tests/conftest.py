"""Suite-wide pytest hooks: which tests run, which one by one, and how much CPU time one may take."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import distributed

# Seconds of CPU time of a test without the mark `slow`, its fixtures and child processes included: the time of the
# wall clock depends on what else the machine does. Kernels of GPU tests may have to be compiled first.
LIMIT = 10.0
# The same test's CPU time differs by nearly this much from run to run on shared machines, caches of kernels aside.
MARGIN = 1.5
# CPU time that `slowness` takes on the machine of LIMIT when it has nothing else to do: two threads of a Xeon.
_REFERENCE_SECONDS = 0.1
_SECONDS = pytest.StashKey[float]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files whose tests wait first, and skip tests marked `gpu` where there is no CUDA device."""
    # At the end of the run they would leave the cores idle: what waits then has nothing beside it.
    waiting = {item.path for item in items if "processes" in item.keywords}
    items.sort(key=lambda item: item.path not in waiting)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs CUDA devices"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Of all workers of pytest-xdist, one at a time has a test of GPUs: it fills their memory, and may measure time."""
    with contextlib.ExitStack() as stack:
        if torch.cuda.is_available() and "gpu" in item.keywords:
            path = Path(tempfile.gettempdir(), f"zeco-test-gpu-{os.getuid()}.lock")
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        return (yield)


def cpu_seconds() -> float:
    """CPU time of this process, of its children that have ended, and of all ranks so far."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + distributed.cpu_seconds


def slowness() -> float:
    """How many times longer the same work takes than on the machine of LIMIT; at least 1.

    CPU time is not all one: a core that two busy threads share, or an older one, takes more of it for the same.
    """
    began = time.thread_time()
    sum(number * number for number in range(2_700_000))
    return max(1.0, (time.thread_time() - began) / _REFERENCE_SECONDS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Start the test's clock."""
    item.stash[_SECONDS] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Fail a test that passed, but took longer than its marks allow."""
    report = yield
    if call.when == "call" and report.passed:
        seconds = cpu_seconds() - item.stash[_SECONDS]
        item.user_properties.append(("cpu", seconds))
        is_limited = seconds > LIMIT and not {"slow", "gpu"} & set(item.keywords)
        if is_limited and seconds > (limit := LIMIT * MARGIN * slowness()):
            report.outcome = "failed"
            allowed = f"more than {LIMIT:g} ({limit:.1f} on this machine, now)"
            report.longrepr = f"{seconds:.1f} s of CPU time, {allowed}: make it cheaper, or mark it `slow`"
    return report
