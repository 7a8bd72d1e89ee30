"""Folders in which a script keeps its runs, to be started again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeco_train.errors import ConfigError, DataError, system_errors
from zeco_train.system.files import write_durably
from zeco_train.system.small_files import read_json


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder whose path would be interpreted within the quotes around run_dir in the settings.

    Raises:
        ConfigError: names the option.
    """
    if sign := re.search(r"['\\]|\$\{", str(folder)):
        raise ConfigError(option, folder, f"must have no {sign[0]} in its path; name another folder")


def keep_record(option: str, folder: Path, file: str, own: Mapping[str, Any], script: str) -> None:
    """Store the settings of a folder's runs at the first start, and check at later ones that they are these.

    Args:
        option: that names the folder.
        folder: of the runs; is made.
        file: name of the record in it.
        own: settings by option, without the dashes, or `settings`.
        script: that keeps the record.

    Raises:
        ConfigError: the folder cannot be made, or its runs have other settings.
        DataError: the record is not readable.
    """
    path = folder / file
    with system_errors(lambda reason: ConfigError(option, folder, f"cannot be made ({reason})")):
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_durably(path, json.dumps(own, indent=2))
            return
    try:
        stored = dict(read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(path, f"is not what {script} has left", f"name another {option}") from error
    if name := next((name for name in own if stored.get(name) != own[name]), None):
        allowed = f"the runs in {folder} have {stored.get(name)}; name another {option}"
        raise ConfigError(f"--{name}" if name != "settings" else name, own[name], allowed)
