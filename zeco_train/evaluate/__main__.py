"""`python -m zeco_train.evaluate`."""

import sys

from zeco_train.evaluate.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
