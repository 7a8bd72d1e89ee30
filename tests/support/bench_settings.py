"""Fast settings of the benchmarks' case `model`, a case on ranks, and the error line of any command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch

from zeco_train.bench import __main__ as command
from zeco_train.bench.session import Session
from zeco_train.lifecycle.join import Launch

TINY = ["model=gla_tiny", "model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=32", "heads=[2]"]
QUICK = [*TINY, "device=cpu", "tokens=[32]", "steps=5", "warmup=1", "check_tokens=32", "timeout_seconds=60"]


def measure(rank: int, world_size: int, case: str, *arguments: str) -> None:
    """A case, on a rank of `run_distributed`."""
    config = command.CASES[case].config.load(arguments)
    session = Session.open(config, Launch(rank, world_size, rank, world_size))
    command.CASES[case].measure(config, session)
    session.drain()


def error_line(
    arguments: Sequence[str],
    capsys: pytest.CaptureFixture[str],
    main: Callable[[list[str]], int] = command.main,
    code: int | None = None,
) -> str:
    """The one line that a command, by default the benchmarks', prints for arguments that it refuses with this code."""
    with mock.patch("os._exit", side_effect=SystemExit):
        try:
            ended = main([*arguments])
        except SystemExit:
            ended = 1
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    assert ended == code if code is not None else ended != 0
    out, err = capsys.readouterr()
    # A case may have noted what it does not measure.
    assert main is command.main or out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err
