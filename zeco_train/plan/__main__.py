"""Entry point of `python -m zeco_train.plan`."""

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("zeco_train.plan.command")
