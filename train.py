"""Train a model: `torchrun --nproc-per-node N train.py KEY=VALUE …`, or plain `python train.py` on one rank."""

import signal
import sys

from zeco_train.system.command import choose_variables, explained_if_missing, quick_imports
from zeco_train.system.signals import remember_warning
from zeco_train.system.terminal import show_any_text

# Ctrl-C during the import of torch exits without a traceback; the trainer installs its own handlers later.
signal.signal(signal.SIGINT, signal.SIG_DFL)
remember_warning()
show_any_text()
choose_variables()

with explained_if_missing(), quick_imports():
    from zeco_train.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
