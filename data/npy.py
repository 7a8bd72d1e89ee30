"""Arrays in .npy files that may be a stranger's: mapped, never unpickled."""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError

from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from zeco_train.system.small_files import check_regular


def map_array(path: Path) -> NDArray:
    """The array in an .npy file, mapped for reading, of whatever dtype and shape its header says.

    Raises:
        OSError: it is no regular file, or cannot be read.
        ValueError: it is no .npy file of plain numbers, or shorter than its header says.
    """
    check_regular(path)
    try:
        # Not np.load, which would open archives, too.
        return open_memmap(path, mode="r")
    except (TypeError, ArithmeticError, MemoryError, RecursionError, SyntaxError, TokenError) as error:
        # What a made-up header makes numpy and Python's own parser raise.
        raise ValueError(f"not the header of an array ({type(error).__name__})") from error
