"""A job of `launch/slurm_256gpu.sh` in a Slurm cluster of this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.slurm_cluster import SlurmCluster
from tests.support.commands import REPOSITORY
from tests.support.waiting import ENOUGH
from zeco_train.system.files import METRICS_FILE

SCRIPT = REPOSITORY / "launch" / "slurm_256gpu.sh"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


class SlurmJob:
    """A submitted job, by default of four nodes, and its output files; `variables` are the script's."""

    def __init__(
        self,
        cluster: SlurmCluster,
        folder: Path,
        *options: str,
        settings: list[str],
        patience: float = ENOUGH,
        **variables: str,
    ) -> None:
        self.cluster, self.folder, self._patience = cluster, folder, patience
        variables = {"RANKS_PER_NODE": "1", "CACHE_DIR": str(folder / "cache"), **variables}
        exported = ",".join(f"{name}={value}" for name, value in variables.items())
        sizes = ["--nodes=4", "--gpus-per-node=0", f"--export=ALL,{exported}", *options]
        self.number = cluster.submit(*sizes, str(SCRIPT), "--", *settings, cwd=folder)
        self.run_dir = folder / "runs" / f"zeco-{self.number}"

    @property
    def output(self) -> str:
        path = self.folder / f"zeco-{self.number}.out"
        return path.read_text() if path.exists() else ""

    @property
    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    def lines(self) -> list[dict[str, Any]]:
        """All rows of metrics, including those of repeated steps."""
        path = self.run_dir / METRICS_FILE
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_step(self, step: int, start: str) -> None:
        """Wait until a start, `REQUEUES.ATTEMPT`, has finished a step."""

        def reached() -> bool:
            assert self.state not in ENDED, self.output
            after = self.output.partition(f"start {start}:")[2]
            return any(int(number) >= step for number in re.findall(r"^step +(\d+)/", after, re.M))

        self.wait(reached, f"step {step} in start {start}")

    def wait(self, condition: Callable[[], object], what: str) -> None:
        try:
            self.cluster.wait(condition, what, self._patience)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None

    def finish(self) -> str:
        self.wait(lambda: self.state in ENDED, "end of the job")
        return self.output


def resumed_at(output: str) -> list[int]:
    """The steps from which the starts of a job resumed."""
    return [int(step or 0) for step in re.findall(r"from (?:the start|step (\d+))$", output, re.M)]
