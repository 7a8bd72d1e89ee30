"""What the planner's command needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.commands import REPOSITORY
from tests.support.waiting import ENOUGH

pytestmark = pytest.mark.campaign


@pytest.mark.processes
def test_command_needs_no_gpu_packages_or_process_group() -> None:
    """The planner has to run on a laptop without GPU packages."""
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('triton', 'fla', 'transformers', 'wandb')))\n"
        "from zeco_train.plan.__main__ import main\n"
        "assert main(['+experiment=gla_1b_8m']) == 0\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=ENOUGH
    )
    assert done.returncode == 0, done.stderr
    assert "gla_1b: 1,159,766,528 parameters" in done.stdout
