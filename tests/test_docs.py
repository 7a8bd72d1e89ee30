"""Markdown files: every relative link and anchor resolves, and every module, script and path in their code exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from data import prepare
from lab import emulated_nodes, family
from lab.delays.config import DelaysConfig
from launch import sweep
from tests.support.commands import REPOSITORY, SMALL
from tests.support.documented import PAGES, Documented, checkout, commands_of, run
from zeco_train import compare
from zeco_train.attach.__main__ import ProofSettings
from zeco_train.bench import __main__ as bench
from zeco_train.config.overrides import load_settings
from zeco_train.config.schema import describe, load_config
from zeco_train.errors import ZecoError
from zeco_train.evaluate import __main__ as evaluate_command
from zeco_train.export import ExportSettings
from zeco_train.generate import __main__ as generate_options
from zeco_train.plan import config as plan_config
from zeco_train.plan.case import build_case
from zeco_train.report import __main__ as report
from zeco_train.verify.config import VerifyConfig

_FENCE = re.compile(r"^ *(```+|~~~+)")
_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HTML_LINK = re.compile(r"\b(?:href|src)=\"([^\"]+)\"")
_CODE_SPAN = re.compile(r"(`+).+?\1", re.S)
_EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:", re.I)
_MODULE = re.compile(r"(?<!\S)-m ((?:zeco_train|data|lab|models|tests)(?:\.\w+)*)(?![\w.…])")
# File names, delimited by a blank, a quote or punctuation.
_FOLDERS = "configs|data|docs|lab|launch|models|tests|zeco_train"
_PATH = re.compile(rf"(?<![\w/.*{{-])(?:\./)?((?:{_FOLDERS})/[\w./-]*[\w/]|train\.py)(?![\w*{{])")
_EXPERIMENT = re.compile(r"(?<!\S)\+experiment=(\w+)")


def parts(text: str) -> tuple[str, str]:
    """The prose of a Markdown text, without its code, and its code: fenced blocks and spans."""
    prose, code, fence = [], [], ""
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence):
                fence = ""
            else:
                code.append(line)
        elif mark:
            fence = mark[1]
        else:
            prose.append(line)
    without_blocks = "\n".join(prose)
    code += [found[0].strip("`") for found in _CODE_SPAN.finditer(without_blocks)]
    return _CODE_SPAN.sub("`…`", without_blocks), "\n".join(code)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading: lower case, punctuation dropped, a hyphen for each blank."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    text = re.sub(r"(?<!\w)[*_]+|[*_]+(?!\w)", "", text)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


@cache
def anchors(path: Path) -> frozenset[str]:
    """All anchors of a Markdown file; equal headings are numbered."""
    seen: Counter[str] = Counter()
    found, in_block = set(), ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if mark := _FENCE.match(line):
            in_block = "" if in_block and mark[1].startswith(in_block) else in_block or mark[1]
        elif not in_block and (heading := re.match(r" {0,3}#{1,6}\s+(.+?)\s*#*$", line)):
            name = slug(heading[1])
            found.add(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
        elif not in_block:
            found.update(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", line))
    return frozenset(found)


def broken_links(path: Path, root: Path) -> Iterator[str]:
    """Links of a Markdown file to missing files or headings of the repository."""
    prose, _ = parts(path.read_text(encoding="utf-8"))
    for link in [*_LINK.findall(prose), *_HTML_LINK.findall(prose)]:
        if _EXTERNAL.match(link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.is_relative_to(root) or not target.exists():
            yield f"{path.relative_to(root)}: {link}: no such file"
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
            yield f"{path.relative_to(root)}: {link}: no such heading"


def missing_commands(path: Path, root: Path) -> Iterator[str]:
    """Modules, scripts and configurations named by the code of a Markdown file that do not exist."""
    _, code = parts(path.read_text(encoding="utf-8"))
    for module in _MODULE.findall(code):
        folder = root.joinpath(*module.split("."))
        if not (folder.with_suffix(".py").is_file() or (folder / "__main__.py").is_file()):
            yield f"{path.relative_to(root)}: python -m {module}: no such module"
    for name in _PATH.findall(code):
        if "NAME" not in name and not ((root / name).exists() or (path.parent / name).exists()):
            yield f"{path.relative_to(root)}: {name}: no such file"
    for name in _EXPERIMENT.findall(code):
        if not (root / "configs" / "experiment" / f"{name}.yaml").is_file():
            yield f"{path.relative_to(root)}: +experiment={name}: no such file"


def problems(path: Path, root: Path) -> list[str]:
    """All problems of a file. A change log, and a campaign's results, may name commands and files of other versions."""
    is_history = path.name in ("CHANGELOG.md", "upgrading.md") or path.parent == root / "lab" / "campaigns" / "results"
    return [*broken_links(path, root), *([] if is_history else missing_commands(path, root))]


def documents() -> list[Path]:
    """The tracked Markdown files; without git, all but those in hidden folders."""
    listed = subprocess.run(["git", "-C", str(REPOSITORY), "ls-files", "*.md"], capture_output=True, text=True)
    found = [REPOSITORY / name for name in listed.stdout.splitlines()] if listed.returncode == 0 else []
    return found or [
        path
        for path in REPOSITORY.rglob("*.md")
        if not any(part.startswith(".") or part == "runs" for part in path.relative_to(REPOSITORY).parts)
    ]


def test_links_and_commands_resolve() -> None:
    paths = documents()
    assert {"README.md", "CONTRIBUTING.md"} <= {path.name for path in paths}
    assert not [problem for path in paths for problem in problems(path, REPOSITORY)]


def test_readme_links_every_page() -> None:
    links = _LINK.findall((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    assert {f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")} <= set(links)


_QUOTED = re.compile(r"^\| `(.+?)` \|", re.M)
_SEAM = re.compile(r'"\s*\n\s*f?"')
_VALUE = re.compile(r"%[\d.]*[sdgf]|\{[^{}]*\}")


@cache
def printed() -> str:
    """The source text of the product, its adjacent strings joined, and a NUL in place of each value that they show."""
    found = [path for room in ("zeco_train", "data", "models") for path in (REPOSITORY / room).rglob("*.py")]
    return "\0".join(_VALUE.sub("\0", _SEAM.sub("", path.read_text(encoding="utf-8"))) for path in found)


def not_printed(line: str) -> list[str]:
    """The parts of a quoted line, of two words or more and between its ellipses, that are in no source file."""
    parts = [part.strip() for part in re.split(r"…|; |: |=", line)]
    kept = [part for part in parts if " " in part]
    assert kept or len(max(parts, key=len)) >= 8, f"{line}: nothing to look for"
    return [part for part in kept or [max(parts, key=len)] if part not in printed()]


@pytest.mark.slow
def test_names_on_the_pages_about_the_code_are_in_it() -> None:
    files = (path for folder in _FOLDERS.split("|") for path in (REPOSITORY / folder).rglob("*.py*"))
    read = [path for path in files if path.suffix in (".py", ".pyi")]
    known = set(re.findall(r"\w+", " ".join(path.read_text() for path in read))) | {path.stem for path in read}
    for page in ("architecture", "extending"):
        spans = re.findall(r"`(_?[a-zA-Z][\w.]*[_.]\w+)(?:\(.*?\))?`", (REPOSITORY / f"docs/{page}.md").read_text())
        names = {name for span in spans if not span.startswith("adam") for name in span.split(".")}
        assert not names - known - {"py", "md", "yaml"}, page


def test_lines_of_the_page_of_failures_are_those_of_the_code() -> None:
    lines = _QUOTED.findall((REPOSITORY / "docs/failures.md").read_text(encoding="utf-8"))
    assert len(lines) > 60
    assert not [(line, missing) for line in lines if (missing := not_printed(line))]
    assert not_printed("error: run_dir=…: another process trains; end it first") == ["another process trains"]


def arguments(command: Documented) -> list[str]:
    """The words of a command without python and launcher."""
    words = command.words()
    if words[0] in ("python", "torchrun"):
        words = words[1:]
        while words[0] in ("--standalone", "--nproc-per-node", "-m") or words[0].isdigit():
            words = words[1:]
    return words


# What reads the arguments of a command; what it then does is tested in the command's own room.
_READERS: dict[str, Callable[[list[str]], object]] = {
    "train.py": lambda arguments: (describe if "--help" in arguments else load_config)(
        [word for word in arguments if word not in ("--help", "$settings")]
    ),
    "zeco_train.plan": lambda arguments: build_case(plan_config.parse(arguments)),
    "zeco_train.verify": lambda arguments: load_settings(VerifyConfig, arguments),
    "zeco_train.attach": lambda arguments: load_settings(ProofSettings, arguments[2:]),
    "zeco_train.bench": lambda arguments: bench.CASES[arguments[0]].config.load(arguments[1:]),
    "zeco_train.evaluate": evaluate_command.parse,
    "zeco_train.generate": generate_options.parse,
    "zeco_train.export": lambda arguments: load_settings(ExportSettings, arguments[2:]),
    "zeco_train.compare": compare._parse,
    "zeco_train.report": report._parse,
    "data.prepare": prepare._parse,
    "launch/sweep.py": sweep.parse,
    "lab.delays": DelaysConfig.load,
    "lab.family": family.parse,
    "lab.emulated_nodes": emulated_nodes.parse,
}


@pytest.mark.parametrize(
    "page",
    [PAGES[0], *(pytest.param(page, marks=pytest.mark.slow) for page in PAGES[1:])],
    ids=lambda page: page.stem,
)
def test_arguments_of_every_command_are_accepted(page: Path) -> None:
    for command in commands_of(page):
        name, *given = arguments(command)
        if name in _READERS:
            try:
                _READERS[name](given)
            except (ZecoError, SystemExit) as error:
                pytest.fail(f"{page.name}: {command.text}: {error}")


_WRITTEN = re.compile(r"(?:--out |zeco_train\.export \S+ |\.save\(')([\w./-]+)")


def test_documented_runs_have_names_of_their_own_and_outputs_are_ignored_by_git() -> None:
    commands = [command for page in PAGES for command in commands_of(page)]
    trained = [command for command in commands if arguments(command)[0] == "train.py" and "--help" not in command.text]
    named = Counter(
        next(
            (word for key in ("name=", "+experiment=") for word in command.words() if word.startswith(key)),
            command.text,
        )
        for command in trained
    )
    assert not [name for name, count in named.items() if count > 1 or not name.startswith(("name=", "+experiment="))]
    written = {name for command in commands for name in _WRITTEN.findall(command.text)}
    assert {"store", "own.json", "out"} <= written
    asked = ["git", "-C", str(REPOSITORY), "check-ignore", *(f"{name}/x" for name in written)]
    ignored = subprocess.run(asked, capture_output=True, text=True)
    assert ignored.returncode == 128 or {line.removesuffix("/x") for line in ignored.stdout.split()} == written


def test_needs_of_every_command_are_known() -> None:
    assert not [(c.page.name, c.text, c.unknown) for page in PAGES for c in commands_of(page) if c.unknown]


def test_needs_stand_behind_a_command_or_above_its_paragraph(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marked = "a 1 # words; needs: root, 3 minutes; words\nx=1\n\n# needs: 2 GPUs\nb $x \\\n  2\nc '#'  # words\n\nd\n"
    page.write_text(f"```bash\n{marked}```\n")
    found = [(command.words(tmp_path), command.needs, command.minutes) for command in commands_of(page)]
    assert found == [
        (["a", "1"], ("root", "3 minutes"), None),
        (["b", "1", "2"], ("2 GPUs",), None),
        (["c", "#"], ("2 GPUs",), None),
        (["d"], (), 0),
    ]


@pytest.mark.parametrize("need", ["GPUs", "two GPUs", "3 min", "an account", ""])
def test_unknown_needs_are_found(need: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```bash\na  # needs: 2 GPUs, {need}\n```\n")
    assert [command.unknown for command in commands_of(page)] == [[need]]


@pytest.fixture(scope="session")
def presumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("checkout"), *SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.stem == "README" else pytest.mark.campaign)
        for page in PAGES
        if not all(command.needs for command in commands_of(page))
    ],
    ids=lambda page: page.stem,
)
def test_commands_without_needs_run(page: Path, presumed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(presumed, tmp_path / "checkout", symlinks=True)
    for command in commands_of(page):
        if not command.needs:
            outcome = run(command, folder)
            assert outcome.code == 0, (command.text, outcome)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one page and the files that it may name."""
    for name in ("launch/test.sh", "configs/experiment/small.yaml", "zeco_train/bench/__main__.py", "tests/ends.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "other.md").write_text("# A `title`, here\n\n## Same\n\n## Same\n\n```\n# none\n```\n")
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "[page](docs/other.md) [heading](docs/other.md#a-title-here) [second](docs/other.md#same-1)",
        "# One & two\n\n[here](#one--two) [web](https://example.org/none.md#x)",
        "`[no](link.md)`\n\n```\n[no](link.md)\n```\n",
        "```bash\n./launch/test.sh --all\npython -m zeco_train.bench x\npython -m tests.ends\n```\n",
        "`configs/experiment/` `configs/model/NAME.yaml` `zeco_train/bench/*.json` `-m zeco_train.…` +experiment=none",
    ],
)
def test_valid_pages_have_no_problems(text: str, tree: Path) -> None:
    page = tree / "page.md"
    page.write_text(text)
    assert not problems(page, tree)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[x](docs/none.md)", "page.md: docs/none.md: no such file"),
        ('<img src="none.png">', "page.md: none.png: no such file"),
        ("[x](../outside.md)", "page.md: ../outside.md: no such file"),
        ("[x](docs/other.md#none)", "page.md: docs/other.md#none: no such heading"),
        ("[x](#none)", "page.md: #none: no such heading"),
        ("```\npython -m zeco_train.none\n```", "page.md: python -m zeco_train.none: no such module"),
        ("```\n./launch/none.sh\n```", "page.md: launch/none.sh: no such file"),
        ("`configs/none.yaml`", "page.md: configs/none.yaml: no such file"),
        ("```\npython x +experiment=none\n```", "page.md: +experiment=none: no such file"),
    ],
)
def test_broken_links_and_commands_are_reported(text: str, problem: str, tree: Path) -> None:
    page = tree / "page.md"
    page.write_text(text)
    assert problems(page, tree) == [problem]
