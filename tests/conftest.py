"""Suite-wide pytest hooks: which tests run, and how much CPU time one may take."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
import torch

from tests.support import distributed

# Seconds of CPU time of a test without the mark `slow`, its fixtures and child processes included: the time of the
# wall clock depends on what else the machine does.
LIMIT = 10.0
_SECONDS = pytest.StashKey[float]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs CUDA devices"))


def cpu_seconds() -> float:
    """CPU time of this process, of its children that have ended, and of all ranks so far."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + distributed.cpu_seconds


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
        report.user_properties.append(("cpu", seconds))
        if seconds > LIMIT and "slow" not in item.keywords:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {seconds:.1f} s of CPU time, the limit is {LIMIT:g}: "
                "make it smaller, share its ranks or fixtures, or mark it `slow`"
            )
    return report
