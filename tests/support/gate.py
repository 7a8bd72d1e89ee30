"""A barrier for the ranks of a launcher before a command begins."""

from __future__ import annotations

import os
import time
from pathlib import Path


def meet() -> None:
    """Wait until all ranks have called this in the same working directory.

    On a busy machine ranks import torch seconds apart, longer than a short peer timeout allows.
    """
    launch = os.environ["TORCHELASTIC_RUN_ID"]
    files = [Path(f"here_{launch}_{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
    files[int(os.environ["RANK"])].touch()
    while not all(file.exists() for file in files):
        time.sleep(0.05)
