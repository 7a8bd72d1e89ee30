"""Train a model: `torchrun --nproc-per-node N train.py KEY=VALUE …`, or plain `python train.py` on one rank."""

import signal
import sys

from zeco_train.system.packages import explained_if_missing
from zeco_train.system.signals import remember_warning
from zeco_train.system.terminal import show_any_text

# Ctrl-C while torch is being imported ends the process without a traceback; the trainer sets handlers of its own.
signal.signal(signal.SIGINT, signal.SIG_DFL)
remember_warning()
show_any_text()

with explained_if_missing():
    from zeco_train.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
