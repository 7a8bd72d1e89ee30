"""`python -m zeco_train.prepare`: `data.prepare` by a name that another package `data` cannot hide."""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("data.prepare")
