"""What commands have in common: imports, help texts, and encodings that cannot represent everything they print.

tests/config/test_mistakes_launch.py has the message about a missing package.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY
from tests.support.waiting import ENOUGH
from zeco_train.plan.config import describe
from zeco_train.system import command
from zeco_train.system.command import docstring, quick_imports
from zeco_train.system.signals import run_command
from zeco_train.tracking.loggers import LoggerConfig


@pytest.mark.parametrize("error", [None, ModuleNotFoundError])
def test_garbage_collector_works_again_after_imports(error: type[Exception] | None) -> None:
    with contextlib.suppress(ModuleNotFoundError), quick_imports():
        assert not gc.isenabled()
        if error is not None:
            raise error
    assert gc.isenabled()


@pytest.mark.parametrize("disabled", [False, True])
def test_imported_modules_are_exempt_from_collection(disabled: bool) -> None:
    """And leave a collector off that was off before."""
    code = f"""if True:
        import gc
        {"gc.disable()" if disabled else ""}
        from zeco_train.system.command import quick_imports
        with quick_imports():
            import colorsys
        assert gc.isenabled() == {not disabled}
        assert not any(found is vars(colorsys) for found in gc.get_objects())
        assert gc.get_freeze_count() > 0
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=ENOUGH)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.processes
@pytest.mark.slow
def test_package_data_of_the_user_hides_no_command(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("print('not of this project')")
    (tmp_path / "text.txt").write_text("some text")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=ENOUGH)

    done = run("-m", "zeco_train.prepare", "text.txt", "--out", "store", "--workers", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "store: 1 documents, 10 tokens" in done.stdout
    assert "not of this" not in done.stdout
    done = run("-c", "import data; from zeco_train.system.signals import run_command; run_command('data.prepare')")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: package=data: {tmp_path / 'data.py'} hides this project's; ")
    assert done.stderr.count("\n") == 1


def test_help_texts_stay_without_docstrings() -> None:
    """`python -OO` drops docstrings, and a dataclass without one gets its signature."""
    lines = [
        "from zeco_train.system import command",
        "from zeco_train.tracking.loggers import LoggerConfig",
        "print([command.docstring(of) for of in (command, LoggerConfig, command.docstring)])",
    ]
    python = [sys.executable, "-OO", "-c", "\n".join(lines)]
    printed = subprocess.run(python, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
    expected = [docstring(of) for of in (command, LoggerConfig, docstring)]
    assert all(expected)
    assert printed == f"{expected}\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_limited_encodings_do_not_end_command(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", stdout := io.TextIOWrapper(shown, encoding))
    monkeypatch.setattr(sys, "argv", ["plan", "--help"])
    with pytest.raises(SystemExit) as end:
        run_command("zeco_train.plan.__main__")
    stdout.flush()
    assert not end.value.code
    assert shown.getvalue() == f"{describe()}\n".encode(encoding, "replace")


def test_every_command_enables_encoding_fallback() -> None:
    """All commands that README and docs/ name, except on upgrading.md, which lists commands that are gone."""
    pages = [REPOSITORY / "README.md", *set((REPOSITORY / "docs").glob("*.md")) - {REPOSITORY / "docs/upgrading.md"}]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = re.findall(r"(?:python|torchrun)[^|\n]* ((?:launch/)?\w+\.py)\b", text)
    # Not the programs that a page shows whole.
    paths = {REPOSITORY / name for name in {*named} - {*re.findall(r"^```python\n# (\w+\.py)$", text, re.M)}}
    for name in re.findall(r" -m ((?:zeco_train|data)\.[\w.]+\w)", text):
        path = REPOSITORY / name.replace(".", "/")
        paths.add(path / "__main__.py" if path.is_dir() else path.with_suffix(".py"))
    assert len(paths) > 10
    for path in paths:
        source = path.read_text(encoding="utf-8")
        assert re.search(r"^ *(show_any_text\(\)|run_command\()", source, re.M), path
