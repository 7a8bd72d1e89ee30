"""Connections of many ranks: the limit of open files, and gloo's requests to the store."""

from __future__ import annotations

import os
import resource

import pytest

from tests.support.distributed import on_ranks
from zeco_train.lifecycle import join

MOST = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.mark.skipif(MOST < 4096, reason="a hard limit of few files")
@on_ranks(1)
def test_many_ranks_may_open_more_files(rank: int, world_size: int) -> None:
    # Six groups of 255 peers were counted (lab/many_ranks.py).
    for ranks, least, largest in ((2, 1024, 1024), (256, 6 * 255 + 256 + 1, MOST)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, MOST))
        join.prepare_for_peers(ranks)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert least <= soft <= largest
        assert hard == MOST
    assert os.environ["GLOO_ENABLE_STORE_V2_API"] == "1"


@on_ranks(1)
def test_too_low_a_limit_is_a_warning_and_a_variable_is_kept(rank: int, world_size: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, 700))
    os.environ["GLOO_ENABLE_STORE_V2_API"] = "0"
    said: list[str] = []
    join.logger.warning = lambda text, *values: said.append(text % values)  # type: ignore[assignment, misc]
    join.prepare_for_peers(2)
    join.prepare_for_peers(256)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (700, 700)
    assert said == ["ulimit -n: 700 open files may be too few for 256 ranks; allow 3072"]
    assert os.environ["GLOO_ENABLE_STORE_V2_API"] == "0"
