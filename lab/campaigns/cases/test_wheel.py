"""All commands of an installed wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_wheel import (
    _run,
    home,
    site,
)
from zeco_train.__main__ import COMMANDS

pytestmark = pytest.mark.campaign
# Fixtures.
__all__ = ["home", "site"]


def test_every_command_of_wheel_prints_help(site: Path, home: Path) -> None:
    for name in COMMANDS:
        done = _run(home, site, name, "--help", command=site / "bin" / "zeco-train")
        assert done.returncode == 0, (name, done.stderr)
        assert "usage" in done.stdout or "torchrun" in done.stdout, name
    # A subcommand's module can be run directly, too.
    done = _run(home, site, "-m", "zeco_train.plan", "model=gla_1b")
    assert done.returncode == 0, done.stderr
    assert "1,159,766,528 parameters" in done.stdout
