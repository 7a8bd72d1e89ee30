"""A preparation that SIGKILL ends at any moment; tests/data/test_resume.py has stops at every part."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.prepare import PrepareOptions, main, prepare_store
from data.store import TokenStore
from tests.data.test_resume import write_corpus
from tests.support.commands import REPOSITORY, snapshot
from tests.support.stores import verify

pytestmark = pytest.mark.campaign

# ZECO_PREPARE_KILLS=20 for more kills.
KILLS = int(os.environ.get("ZECO_PREPARE_KILLS", "1"))


def test_preparation_killed_at_random_equals_unbroken_one(tmp_path: Path) -> None:
    """SIGKILL of a real process with its workers, once or repeatedly; then a run to the end."""
    corpus = write_corpus(tmp_path / "corpus", 4_000)  # 4 MB, and as much compressed
    prepare_store(PrepareOptions((corpus,), tmp_path / "unbroken", validation_fraction=0.02, shard_tokens=1_000_000))
    flags = ["--validation-fraction", "0.02", "--shard-tokens", "1000000", "--save-seconds", "0"]
    store, state = tmp_path / "store", tmp_path / ".store.preparing" / "state.json"
    command = [sys.executable, "-m", "data.prepare", str(corpus), *flags, "--out", str(store)]
    generator = random.Random(1)
    killed = 0

    def has_saved() -> bool:
        return state.exists() and json.loads(state.read_text())["state"]["unit"] > 0

    while killed < KILLS and not store.exists():
        with subprocess.Popen([*command, "--workers", "2"], cwd=REPOSITORY, stdout=subprocess.DEVNULL) as process:
            # The first kill waits for work to resume; later ones come at any moment, also at startup.
            while not killed and not has_saved() and process.poll() is None:
                time.sleep(0.002)
            time.sleep(generator.uniform(0.0, 0.6) if killed else 0.0)
            process.kill()
            killed += 1
        assert killed > 1 or has_saved()
    if not store.exists():  # no kill came after the last rename
        assert main([*command[3:], "--workers", "2"]) == 0
    assert snapshot(store) == snapshot(tmp_path / "unbroken")
    verify(TokenStore.open(store))
