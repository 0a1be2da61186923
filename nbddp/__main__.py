"""`python -m nbddp`."""

import sys

from nbddp.front.cli import main

if __name__ == "__main__":
    sys.exit(main())
