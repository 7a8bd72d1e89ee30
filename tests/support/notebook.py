"""Executes a notebook's code cells in order in one fresh interpreter, without Jupyter.

python -m tests.support.notebook docs/from_python.ipynb    # and stores what they print
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.commands import REPOSITORY

_MARK = "\x1enext cell\x1e"


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(path: Path, folder: Path) -> list[str]:
    """What each code cell prints, run in `folder`; AssertionError: a cell failed."""
    cells = ["".join(cell["source"]) for cell in code_cells(json.loads(path.read_text(encoding="utf-8")))]
    script = f"for cell in {cells!r}:\n    exec(compile(cell, 'cell', 'exec'), globals())\n    print({_MARK!r})\n"
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(REPOSITORY))}
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [part.removeprefix("\n") for part in done.stdout.split(_MARK)[:-1]]


def store(path: Path) -> None:
    """Execute a notebook, and write the outputs into it."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = execute(path, Path(folder))
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, (cell, text) in enumerate(zip(code_cells(notebook), outputs, strict=True), 1):
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    store(Path(sys.argv[1]))
