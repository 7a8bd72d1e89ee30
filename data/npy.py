"""Memory-maps arrays in untrusted .npy files; never unpickles."""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError

from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from zeco_train.system.small_files import check_regular


def map_array(path: Path) -> NDArray:
    """Memory-map the array in an .npy file, read-only, with the dtype and shape of its header.

    Raises:
        OSError: not a regular file, or cannot be read.
        ValueError: not an .npy file of plain numbers, or shorter than its header requires.
    """
    check_regular(path)
    try:
        # Not np.load, which would also open archives.
        return open_memmap(path, mode="r")
    except (TypeError, ArithmeticError, MemoryError, RecursionError, SyntaxError, TokenError) as error:
        # Raised by numpy and by Python's parser for a malformed header.
        raise ValueError(f"not the header of an array ({type(error).__name__})") from error
