"""Train a model: `torchrun --nproc-per-node N train.py KEY=VALUE …`, or plain `python train.py` on one rank."""

import sys

from zeco_train.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
