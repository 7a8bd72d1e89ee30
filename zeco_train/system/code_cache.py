"""Folders of compiled code, which only this user can write: what lies there is loaded and run.

torch's own default for `torch.compile`, /tmp/torchinductor_USER, has a name that everybody knows: another user of the
machine who makes it first has the code of others run. The default here has a random name on a disk of the node. It is
kept in the user's home, so that the next process finds the kernels that were compiled before.
`python -m zeco_train.system.code_cache` prints it. Whatever folder is used, it is checked.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from zeco_train.errors import ConfigError
from zeco_train.system.arguments import errors_in_a_line

# What Triton, Inductor and CUDA's driver call theirs, and ours in it.
_VARIABLES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "cuda"}
_KEY_FILE = "zeco-train/code_cache"
# What errors call the default one.
KEY = "code cache"


def default_folder() -> Path:
    """A folder of the node for this user; its name is drawn when it is first asked for. The folder is not made.

    Raises:
        ConfigError: there is nowhere to keep the name.
    """
    # Not in $ZECO_CACHE, which users may share.
    path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", _KEY_FILE)
    try:
        path = path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link that leads nowhere is made whole in one go, and by one of the ranks that all come here at once.
        with suppress(FileExistsError):
            path.symlink_to(secrets.token_hex(16))
        key = str(path.readlink())
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        ways = "name a folder of your own: CACHE_DIR for jobs of launch/, TORCHINDUCTOR_CACHE_DIR otherwise"
        raise ConfigError(KEY, path, f"its name cannot be kept there ({_reason(error)}); {ways}") from error
    if not re.fullmatch(r"[0-9a-f]{32}", key):
        raise ConfigError(KEY, path, "must be a link to 32 hexadecimal digits; remove it")
    return Path(tempfile.gettempdir()) / f"zeco-cache-{os.geteuid()}-{key}"


def private_folder(key: str, path: Path) -> Path:
    """Make a folder that only this user can write, unless it is there.

    Args:
        key: the setting that it is of.

    Returns:
        Its path without links, so that nobody can lead it elsewhere later.

    Raises:
        ConfigError: it cannot be made, belongs to somebody else, or others may write or replace it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found, real = path.lstat(), path.resolve(strict=True)
        folder = real.lstat()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise ConfigError(key, path, f"cannot be made ({_reason(error)}); name another folder") from error
    if not stat.S_ISDIR(folder.st_mode):
        raise ConfigError(key, path, "is no folder; name another one")
    for what, owner in (("folder", folder.st_uid), ("link", found.st_uid)):
        if owner != os.geteuid():
            problem = f"the {what} belongs to user {owner}, who could have this process run any code"
            raise ConfigError(key, path, f"{problem}; name a folder of your own")
    if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(folder.st_mode)
        problem = f"others may write there (mode {mode:o}), and so have this process run any code"
        raise ConfigError(key, path, f"{problem}; chmod go-w it, or name another folder")
    for parent in real.parents:
        # In a sticky one, such as /tmp, nobody can rename what belongs to others.
        if (mode := parent.stat().st_mode) & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(key, path, f"anybody may put another folder in its place, in {parent}; name another one")
    return real


def _reason(error: OSError | RuntimeError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def use_private_caches(folder: Path | None = None, key: str = KEY) -> None:
    """Have this process and its children compile into folders of their user alone.

    Variables that name one count, and are checked.

    Args:
        folder: for those that no variable names; without it `torch.compile` gets the default one, and Triton and CUDA
            keep to theirs, in the user's home.
        key: the setting that `folder` is of.

    Raises:
        ConfigError: a folder cannot be made, belongs to somebody else, or others may write there.
    """
    for variable, name in _VARIABLES.items():
        if named := os.environ.get(variable):
            os.environ[variable] = str(private_folder(variable, Path(named)))
        elif folder is not None:
            os.environ[variable] = str(private_folder(key, private_folder(key, folder) / name))
        elif variable == "TORCHINDUCTOR_CACHE_DIR":
            os.environ[variable] = str(private_folder(key, private_folder(key, default_folder()) / name))


@errors_in_a_line
def main() -> int:
    """Print the default folder; returns the exit code."""
    print(default_folder())
    return 0


if __name__ == "__main__":
    sys.exit(main())
