"""The results of this folder's measurements, as JSON in `lab/results`: where, when and by which code, then rows."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zeco_train.system.environment import installation, query_gpus

RESULTS = Path(__file__).resolve().parents[1] / "results"


def write(path: Path, command: str, machine: str, rows: Sequence[Mapping[str, Any]], **facts: object) -> None:
    """Write rows, a line each.

    Args:
        path: the file; its folder is made.
        command: with which they were measured.
        machine: what measured them, such as "2 CPU ranks" or "2 × H200".
        facts: what else all rows share.
    """
    packages = installation()["packages"]
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": installation()["commit"],
        "command": command,
        "machine": machine,
        "torch": torch.__version__,
        "triton": packages["triton"],
        **facts,
    }
    lines = ",\n".join(json.dumps(dict(row), ensure_ascii=False) for row in rows)
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in about.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n{head},\n"rows": [\n{lines}\n]\n}}\n', encoding="utf-8")


def machine_of(ranks: int) -> str:
    """Of this process's ranks: "2 × H200", or "2 CPU ranks"; torch would initialise CUDA, after which nothing forks."""
    names = query_gpus(["name"])
    if not names:
        return f"{ranks} CPU rank{'s' if ranks > 1 else ''}"
    return f"{ranks} × {names[0]['name'].removeprefix('NVIDIA ')}"


def in_names(machine: str) -> str:
    """Of files: "4 CPU ranks" is 4cpu, "2 × H100 80GB HBM3" 2xh100."""
    count, sign, *card = machine.lower().split()
    return f"{count}x{card[0]}" if sign == "×" else f"{count}cpu"
