"""`python -m nbddp`."""

import sys

from nbddp.protocol.capability import load, rows

if __name__ == "__main__":
    main = next((row.main for row in rows() if row.main), "")
    if not main:
        sys.exit("python -m nbddp needs the capability `terminal`, which this copy of nbddp lacks; a notebook has %ddp")
    sys.exit(load(main)())
