"""pytest's option `--zeco-verify`, and the fixture `zeco_verify`: is a project's own model exact over ranks?

    def test_my_model(zeco_verify):
        zeco_verify(make_my_model, ranks=3)

pytest loads this file in every session: it imports nothing of torch, nor of this project, before the fixture is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--zeco-verify`."""
    text = "run the tests that compare models over ranks with one device (fixture zeco_verify)"
    parser.addoption("--zeco-verify", action="store_true", help=text)


@pytest.fixture
def zeco_verify(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Fail unless a model is exact over ranks; arguments as of `zeco_train.attach.proof.prove`. Skips by default."""
    if not request.config.getoption("--zeco-verify"):
        pytest.skip("needs --zeco-verify")
    from zeco_train.attach.proof import prove

    def check(make: Callable[[], Any], **settings: Any) -> None:
        for proof in prove(make, **settings):
            if not proof.is_exact:
                pytest.fail("\n".join([*proof.problems, proof.table()]), pytrace=False)

    return check
