"""`python -m zeco_train.generate`."""

import sys

from zeco_train.generate.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
