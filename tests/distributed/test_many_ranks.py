"""Connections of many ranks: the limit of open files, and gloo's requests to the store."""

from __future__ import annotations

import os
import resource

import pytest

from tests.support.distributed import run_distributed
from zeco_train.lifecycle import join


def _limits(rank: int, world_size: int) -> list[tuple[int, int]]:
    """The limits of open files before and after, for few and for many ranks."""
    found, (_, most) = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    for ranks in (2, 256):
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
        join.prepare_for_peers(ranks)
        found.append(resource.getrlimit(resource.RLIMIT_NOFILE))
    assert os.environ["GLOO_ENABLE_STORE_V2_API"] == "1"
    return found


def test_many_ranks_may_open_more_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most < 4096:
        pytest.skip("a hard limit of few files")
    few, many = run_distributed(_limits, 1)[0]
    assert few == (1024, most)
    # Six groups of 255 peers were counted (lab/many_ranks.py).
    assert 6 * 255 + 256 < many[0] <= most


def _warnings(rank: int, world_size: int) -> tuple[list[str], str]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, 700))
    os.environ["GLOO_ENABLE_STORE_V2_API"] = "0"
    said: list[str] = []
    join.logger.warning = lambda text, *values: said.append(text % values)  # type: ignore[assignment, misc]
    join.prepare_for_peers(2)
    join.prepare_for_peers(256)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (700, 700)
    return said, os.environ["GLOO_ENABLE_STORE_V2_API"]


def test_too_low_a_limit_is_a_warning_and_a_variable_is_kept() -> None:
    said, variable = run_distributed(_warnings, 1)[0]
    assert said == ["ulimit -n: 700 open files may be too few for 256 ranks; allow 3072"]
    assert variable == "0"
