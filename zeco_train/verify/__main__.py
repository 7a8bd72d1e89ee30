"""`python -m zeco_train.verify`."""

import sys

from zeco_train.verify.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
