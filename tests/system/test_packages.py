"""Imports of commands; tests/config/test_mistakes_launch.py has the message about a missing package."""

import contextlib
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY
from tests.support.waiting import ENOUGH
from zeco_train.system.command import quick_imports


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
