"""Cache folders of compiled code that only this user can write, since their contents are loaded and executed.

torch's default for `torch.compile`, /tmp/torchinductor_USER, has a predictable name: another user of the machine who
creates it first can have others execute any code. The default here has a random name on a disk of the node, which is
stored in the user's home for later processes, and printed by `python -m zeco_train.system.code_cache`.
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
from zeco_train.system.command import errors_in_a_line

# The variables of Triton, Inductor and the CUDA driver, and the subfolder for each.
_VARIABLES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "cuda"}
_KEY_FILE = "zeco-train/code_cache"
# The default folder's name in error messages.
KEY = "code cache"


def default_folder() -> Path:
    """This user's folder on the node, not created; the first call draws its random name, ConfigError if it cannot."""
    # Not in $ZECO_CACHE, which users may share.
    path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", _KEY_FILE)
    try:
        path = path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        # A dangling symlink is created atomically, by exactly one of the ranks that call this concurrently.
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
    """Create a folder that only this user can write, or check an existing one; errors name the setting `key`.

    Returns its path with links resolved, so that no one can redirect it later. Raises ConfigError if it cannot be
    created, belongs to another user, or others can write or replace it.
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
    # The owner of a link could point it to another folder.
    for what, owner in (("folder", folder.st_uid), ("link", found.st_uid)):
        if owner != os.geteuid():
            problem = f"the {what} belongs to user {owner}, who could have this process run any code"
            raise ConfigError(key, path, f"{problem}; name a folder of your own")
    if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(folder.st_mode)
        problem = f"others may write there (mode {mode:o}), and so have this process run any code"
        raise ConfigError(key, path, f"{problem}; chmod go-w it, or name another folder")
    for parent in real.parents:
        # In a sticky folder, such as /tmp, users can rename only their own files.
        if (mode := parent.stat().st_mode) & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(key, path, f"others may replace it, in {parent}; name another folder")
    return real


def _reason(error: OSError | RuntimeError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def use_private_caches(folder: Path | None = None, key: str = KEY) -> None:
    """Set the compile caches of this process and its children to private folders; the environment's are checked.

    `folder` (of the setting `key`) is for caches that no variable names; without it `torch.compile` gets the default
    one, and Triton and CUDA keep their own defaults in the user's home. Raises as `private_folder`.
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
    """Print the default folder."""
    print(default_folder())
    return 0


if __name__ == "__main__":
    sys.exit(main())
