"""Question: do the cases pass that the gate leaves out, since another case stands for their mechanism?
Command: python -m lab.campaigns.matrices [PYTEST_ARGUMENT ...]
Date: not yet run whole
Answer: results/matrices.txt, which a run without arguments writes: outcome and seconds of each test marked `campaign`
    of tests/ and cases/.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
FOLDERS = ["tests", "lab/campaigns/cases"]
TABLE = Path(__file__).with_name("results") / "matrices.txt"


def table(report: Path) -> str:
    """A line for each case of a JUnit report."""
    lines = []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        name = f"{case.get('classname')}::{case.get('name')}"
        lines.append(f"{outcome:8} {float(case.get('time', 0)):7.1f} s  {name}\n")
    return "".join(lines)


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "campaign",
            f"--junitxml={report}",
            *(arguments or ["tests", "lab/campaigns/cases"]),
        ]
        code = subprocess.run(command, cwd=ROOT).returncode
        if report.exists():
            print(found := table(report))
            if not arguments:
                TABLE.write_text(found)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
