"""`python -m nbddp`."""

import sys

from nbddp.notebook.terminal import main

if __name__ == "__main__":
    sys.exit(main())
