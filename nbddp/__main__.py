"""`python -m nbddp`."""

import sys

from nbddp.protocol.capability import load, terminal_row

if __name__ == "__main__":
    row = terminal_row()
    if row is None:
        sys.exit("python -m nbddp needs the capability `terminal`, which this copy of nbddp lacks; a notebook has %ddp")
    sys.exit(load(row.main)())
