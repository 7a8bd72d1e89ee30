"""`python -m zeco_train.generate`."""

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("zeco_train.generate.command")
