"""`python -m zeco_train.evaluate`."""

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("zeco_train.evaluate.command")
