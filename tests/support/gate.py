"""A place where the ranks of a launcher meet before a command begins."""

from __future__ import annotations

import os
import time
from pathlib import Path


def meet() -> None:
    """Wait until all ranks have come here, in the same working directory.

    Ranks of a busy machine import torch seconds apart, which a short bound of waits for a peer does not allow for.
    """
    launch = os.environ["TORCHELASTIC_RUN_ID"]
    files = [Path(f"here_{launch}_{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
    files[int(os.environ["RANK"])].touch()
    while not all(file.exists() for file in files):
        time.sleep(0.05)
