"""The commands of README.md and docs/*.md, what each needs, and a checkout in which they run.

A comment `# needs: NEED, …` says what a command needs beyond two CPU cores and a few seconds. Behind a command it is
for that one; on a line of its own it is for all commands below it, up to an empty line.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.data.test_tokenizer import byte_pairs, folder_of
from tests.support.commands import REPOSITORY, TORCHRUN, Command, Outcome
from tests.support.waiting import ENOUGH

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.S | re.M)
_COMMENT = re.compile(r"(?:^|\s)# (.*)")
_NEEDS = re.compile(r"\bneeds: ([^;]+)")
_MINUTES = re.compile(r"(\d+) minutes?")
# All that a command may need. Minutes are of two CPU cores.
_KNOWN = re.compile(
    rf"{_MINUTES.pattern}|a GPU|\d GPUs|the network|the quickstart|Slurm|root|a W&B account|your data|"
    r"a (?:run|model) of yours"
)
_ASSIGNMENT = re.compile(r"\w+=\S")
_RUN = "name=quickstart data=tokens data.path=held train.steps=2"


@dataclass(frozen=True)
class Documented:
    """A command of a page.

    Attributes:
        page: README.md, or a page of docs/.
        text: as it stands there, without its comment, on one line.
        settings: assignments of variables that precede it in its block.
        needs: of its comment.
    """

    page: Path
    text: str
    settings: str
    needs: tuple[str, ...]

    @property
    def unknown(self) -> list[str]:
        """Needs that are no words of the vocabulary."""
        return [need for need in self.needs if not _KNOWN.fullmatch(need)]

    @property
    def minutes(self) -> int | None:
        """Minutes on two CPU cores, 0 without a mark; None if it needs anything but time."""
        found = [_MINUTES.fullmatch(need) for need in self.needs]
        return None if None in found else sum(int(match[1]) for match in found if match)

    def words(self, folder: Path = REPOSITORY) -> list[str]:
        """Its words, with variables and patterns of file names replaced as the shell does in a folder."""
        if not set(self.text) & set("$*?`~{}<>|&;()\\"):
            return shlex.split(self.text)
        script = f"{self.settings}\nprintf '%s\\0' {self.text}"
        done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.split("\0")[:-1]


def commands_of(page: Path) -> Iterator[Documented]:
    """The commands of a page's blocks, in order."""
    for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        settings = ""
        of_all: tuple[str, ...] = ()
        for line in block.replace("\\\n", " ").splitlines():
            comment = _COMMENT.search(line)
            text = " ".join((line[: comment.start()] if comment else line).split())
            found = _NEEDS.search(comment[1]) if comment else None
            needs = tuple(need.strip() for need in found[1].split(",")) if found else ()
            if _ASSIGNMENT.match(text):
                settings += text + "\n"
            elif text:
                yield Documented(page, text, settings, of_all + needs)
            elif comment is None or needs:
                of_all = needs


def checkout(folder: Path, *settings: str) -> Path:
    """A folder with the files of the repository, and small ones for what pages presume: a user's texts and runs.

    Args:
        folder: an empty one.
        settings: of the runs, of two steps.
    """
    for name in ("configs", "lab", "launch", "tests", "train.py", "zeco_train", "pyproject.toml"):
        (folder / name).symlink_to(REPOSITORY / name)
    manual = (REPOSITORY / "docs/training.md").read_text(encoding="utf-8")
    texts = [manual[start : start + 2000] for start in range(0, 20_000, 100)]
    (folder / "my_texts").mkdir()
    for number, text in enumerate(texts):
        (folder / "my_texts" / f"{number:03}.txt").write_text(text, encoding="utf-8")
    (folder / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts), encoding="utf-8")
    folder_of(byte_pairs(), folder / "path/to/hf_tokenizer")
    make = [
        "python -m data.prepare my_texts/ --out held --validation-fraction 0.1",
        f"python train.py {shlex.join(settings)} {_RUN}",
    ]
    for text in make:
        outcome = run(Documented(REPOSITORY, text, "", ()), folder)
        assert outcome.code == 0, outcome
    for name in ("a", "b"):
        shutil.copytree(folder / "runs/quickstart", folder / "runs" / name)
    for name in ("web", "books"):
        shutil.copytree(folder / "held", folder / "stores" / name)
    return folder


def run(command: Documented, folder: Path, *more: str, timeout: float = ENOUGH) -> Outcome:
    """Run a command in a checkout, with further arguments.

    Raises:
        AssertionError: it still runs after `timeout` seconds.
    """
    words = [*command.words(folder), *more]
    if words[0] in ("python", "torchrun"):
        words[:1] = [sys.executable] if words[0] == "python" else TORCHRUN
    with Command(words, folder, fresh="pytest" in words) as process:
        return process.wait(timeout)
