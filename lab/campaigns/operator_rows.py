"""Runs one version's gla operator repeatedly: a row with the seconds of each call, see `same_speed`.

usage: operator_rows.py FILE [heads=H] [key_dim=K] [value_dim=V] [tokens=T] [dtype=bfloat16] [device=cuda]

A call is forward and backward pass, on a GPU replayed from a graph: launched one by one they would time the host. It is
timed on the host, with the device synchronised before and after.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# From whichever version is first on the path.
from zeco_train.ops.mix import mix

_DEFAULTS = {"heads": "16", "key_dim": "64", "value_dim": "128", "tokens": "16384", "dtype": "bfloat16"}
_CALLS_A_ROW = 20


def _one_rank(tokens: int) -> Any:
    """The position of the tokens of one rank, which holds what connects it; in 0.2 a scan."""
    try:
        module = importlib.import_module("zeco_train.ops.position")
    except ModuleNotFoundError:
        shard = importlib.import_module("zeco_train.ops.seam").SequenceShard
        return shard(importlib.import_module("zeco_train.sp.dp").LocalScan(), 0, tokens)
    local_exchange = importlib.import_module("zeco_train.sp.exchange").local_exchange
    return module.SequencePosition((0, tokens), exchange=local_exchange())


def main() -> None:
    """Write rows until this process is ended."""
    settings = _DEFAULTS | {"device": "cuda"} | dict(argument.split("=") for argument in sys.argv[2:])
    heads, key_dim, value_dim, tokens = (int(settings[name]) for name in ("heads", "key_dim", "value_dim", "tokens"))
    options: dict[str, Any] = {"device": settings["device"], "dtype": getattr(torch, settings["dtype"])}
    q, k, g = (torch.randn(1, tokens, heads, key_dim, **options) for _ in range(3))
    v, do = (torch.randn(1, tokens, heads, value_dim, **options) for _ in range(2))
    g = torch.nn.functional.logsigmoid(g.float()) / 16
    operands = [x.requires_grad_() for x in (q, k, v, g)]
    position = _one_rank(tokens)

    def call() -> None:
        torch.autograd.grad(mix("gla", operands, position)[0], operands, do)

    wait: Callable[[], None] = lambda: None  # noqa: E731
    if settings["device"] == "cuda":
        call()
        wait, graph = torch.cuda.synchronize, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    with Path(sys.argv[1]).open("a", buffering=1) as file:
        while True:
            wait()
            began = time.perf_counter()
            for _ in range(_CALLS_A_ROW):
                call()
            wait()
            file.write(json.dumps({"step_seconds": (time.perf_counter() - began) / _CALLS_A_ROW}) + "\n")


if __name__ == "__main__":
    main()
