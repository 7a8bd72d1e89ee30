"""Lower bounds of settings."""

from __future__ import annotations

from zeco_train.errors import ConfigError


def check_least(settings: object, section: str = "", /, **least: float) -> None:
    """Check lower bounds of fields of `settings`; messages name them SECTION.NAME, or NAME without a section.

    Raises:
        ConfigError: for the first field below its bound.
    """
    for name, smallest in least.items():
        if (value := getattr(settings, name)) < smallest:
            raise ConfigError(f"{section}.{name}" if section else name, value, f"must be ≥ {smallest}")
