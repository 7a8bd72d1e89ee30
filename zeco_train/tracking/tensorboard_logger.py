"""`logger=tensorboard`: event files in `run_dir/tensorboard`, on rank 0; `tensorboard --logdir runs` shows them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeco_train.system.files import write_errors
from zeco_train.tracking.starts import Start

logger = logging.getLogger(__name__)

FOLDER = "tensorboard"


class TensorBoardLogger:
    """One event file per start of a run; each purges repeated steps from the earlier files."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER
        self._writer: Any = None

    def begin(self, config: Mapping[str, Any], start: Start, run_id: str | None) -> str | None:
        """As `ExperimentLogger.begin`; TensorBoard has no ids, so `run_id` is returned unchanged.

        Raises:
            DataError: the folder cannot be written.
        """
        from torch.utils.tensorboard import SummaryWriter

        with write_errors(self.folder):
            # Events of earlier files from `purge_step` on are discarded.
            self._writer = SummaryWriter(str(self.folder), purge_step=start.step + 1)
        for name, value in (("config", config), ("layout", start.layout.as_dict()), ("environment", start.environment)):
            self._writer.add_text(name, _as_markdown(value), start.step)
        return run_id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a step's numbers. A failure is logged, and disables the logger."""
        if self._writer is None:
            return
        try:
            for name, value in metrics.items():
                if isinstance(value, int | float) and name != "step":
                    self._writer.add_scalar(name, value, step)
            # Flush every row, so that a kill loses none that metrics.jsonl has; rows are seconds apart.
            self._writer.flush()
        except Exception as error:
            self._give_up(f"did not record step {step}", error)

    def finish(self, exit_code: int = 0) -> None:
        """End the event file. A failure is logged; may be called again."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except Exception as error:
            self._give_up("did not finish", error)

    def _give_up(self, what: str, error: Exception) -> None:
        # The writer's thread has ended: further events would be lost silently.
        self._writer = None
        logger.warning(
            "TensorBoard %s: %s: %s; the run goes on without it, all metrics are in metrics.jsonl",
            what,
            type(error).__name__,
            error,
        )


def _as_markdown(value: Mapping[str, Any]) -> str:
    return "\n".join(f"    {line}" for line in json.dumps(value, indent=2, default=str).splitlines())
