"""Runs one version's operator repeatedly: a row with the seconds of each call, see tests/same_speed.py.

usage: operator_rows.py FILE [heads=H] [key_dim=K] [value_dim=V] [tokens=T] [dtype=bf16] [device=cuda]

A call is forward and backward pass. It is timed on the host, with the device synchronised before and after.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

# From whichever version is first on the path; `bench operator` uses the same two.
from zeco_train.bench import operator

_DEFAULTS = {"heads": "16", "key_dim": "64", "value_dim": "128", "tokens": "16384", "dtype": "bf16", "device": "cuda"}
_CALLS_A_ROW = 20


def main() -> None:
    """Write rows until this process is ended."""
    settings = _DEFAULTS | dict(argument.split("=") for argument in sys.argv[2:])
    shape = operator.Shape(*(int(settings[name]) for name in ("heads", "key_dim", "value_dim", "tokens")))
    device = torch.device(settings["device"])
    inputs = operator.Inputs.random(shape, operator.Dtype[settings["dtype"]], 0, device)
    attention = operator._attention("dp", shape, None)  # type: ignore[arg-type]
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with Path(sys.argv[1]).open("a", buffering=1) as file:
        while True:
            wait()
            began = time.perf_counter()
            for _ in range(_CALLS_A_ROW):
                inputs.results(attention)
            wait()
            file.write(json.dumps({"step_seconds": (time.perf_counter() - began) / _CALLS_A_ROW}) + "\n")


if __name__ == "__main__":
    main()
