"""The lines of code in an export's model card."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def snippet(export: Path) -> str:
    """The card's Python lines, with the export's path in place."""
    (lines,) = re.findall(r"```python\n(.*?)```", (export / "README.md").read_text(), re.S)
    return str(lines).replace("PATH", str(export))


def run_snippet(export: Path) -> str:
    """Run these lines in a process of their own, as a user would, and return what they print."""
    done = subprocess.run([sys.executable, "-c", snippet(export)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
