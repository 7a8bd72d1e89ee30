"""matplotlib, imported as every picture here needs it: with the Agg backend, whatever the environment names."""

from __future__ import annotations

import os
import sys


def import_matplotlib() -> None:
    """To be called before the first import of matplotlib or a part of it.

    A notebook sets MPLBACKEND for its children to a backend that may not be installed where they run, and matplotlib
    then fails on import. The variable keeps its value, and a matplotlib that is already there its backend.
    """
    if "matplotlib" in sys.modules:
        return
    named = os.environ.get("MPLBACKEND")
    os.environ["MPLBACKEND"] = "agg"
    try:
        import matplotlib  # noqa: F401
    finally:
        if named is None:
            del os.environ["MPLBACKEND"]
        else:
            os.environ["MPLBACKEND"] = named
