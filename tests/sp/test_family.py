"""Every mixer trains alike on one rank and on several: every scan, documents, segments, recompute, strategies.

`python -m lab.exactness_matrix` has each scan with and without documents besides.
"""

from __future__ import annotations

import pytest

from lab.exactness_matrix import compare, reference
from models.mixer_registry import MIXERS
from tests.support.distributed import run_distributed
from tests.support.steps import worst, write_documents

pytestmark = pytest.mark.numeric

# Mixers with states, parameters or messages that the others have not.
SPECIAL = [name for name, mixer in MIXERS.items() if mixer.needs_halo or mixer.shared is not None]
# The gate trains one; test_uneven.py has more in its fast set, and tests/models/test_mixers.py others on two ranks.
QUICK = ("kda",)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_documents(tmp_path_factory.mktemp("family") / "store"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.campaign) for name in SPECIAL]
)
def test_mixer_trains_alike_on_two_ranks(name: str, store: str) -> None:
    compare([name], 2, store, cases=2)


@pytest.mark.slow
def test_documents_change_losses(store: str) -> None:
    found = run_distributed(reference, 1, store, ["gla"])[0]
    assert worst(found["gla", True], found["gla", False])["losses"] > 1e-3
