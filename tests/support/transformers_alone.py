"""transformers in a process that cannot import fla, whose kernels it would take and which need a GPU.

One process serves all tests of this one, since importing transformers takes seconds.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading

_SERVE = """
import contextlib, io, json, sys, traceback
sys.modules["fla"] = None
for line in sys.stdin:
    program, *sys.argv[1:] = json.loads(line)
    out, failure = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(out):
            exec(program, {"__name__": "__main__"})
    except BaseException:
        failure = traceback.format_exc()
    print(json.dumps([out.getvalue(), failure]), flush=True)
"""


def in_transformers(program: str, *arguments: str) -> str:
    """Run a program whose arguments are in `sys.argv`, and return what it prints.

    Raises:
        AssertionError: it raised an exception, or took more than 300 s.
    """
    process = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    watchdog = threading.Timer(300.0, process.kill)
    watchdog.start()
    try:
        process.stdin.write(json.dumps([program, *arguments]) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    finally:
        watchdog.cancel()
    assert answer, f"ended with exit code {process.wait()}"
    out, failure = json.loads(answer)
    assert not failure, failure
    return str(out)


@functools.cache
def _process() -> subprocess.Popen[str]:
    # It ends with this process, at the end of its input.
    return subprocess.Popen([sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
