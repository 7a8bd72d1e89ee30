"""`python -m zeco_train.plan`."""

import sys

from zeco_train.plan.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
