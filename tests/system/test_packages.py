"""Imports of commands; tests/config/test_mistakes_launch.py has the message about a missing package."""

import contextlib
import gc
import subprocess
import sys

import pytest

from tests.support.commands import REPOSITORY
from tests.support.waiting import ENOUGH
from zeco_train.system.packages import quick_imports


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
        from zeco_train.system.packages import quick_imports
        with quick_imports():
            import json.decoder
        assert gc.isenabled() == {not disabled}
        assert not any(found is vars(json.decoder) for found in gc.get_objects())
        assert gc.get_freeze_count() > 0
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=ENOUGH)
    assert (done.returncode, done.stderr) == (0, "")
