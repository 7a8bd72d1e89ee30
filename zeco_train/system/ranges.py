"""Settings that have a least value."""

from __future__ import annotations

from zeco_train.errors import ConfigError


def check_least(settings: object, section: str = "", /, **least: float) -> None:
    """Check fields of `settings`, which messages call SECTION.NAME, or NAME without a section.

    Raises:
        ConfigError: the first one that is below its least value.
    """
    for name, smallest in least.items():
        if (value := getattr(settings, name)) < smallest:
            raise ConfigError(f"{section}.{name}" if section else name, value, f"must be ≥ {smallest}")
