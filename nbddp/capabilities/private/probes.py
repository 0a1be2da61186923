"""Test of the store's gate, as those of other private APIs in `capabilities.doctor`."""

from __future__ import annotations

import os

from nbddp.capabilities.private import sock_owner
from nbddp.compat.extra.probes import Untried, expect


def store_out_of_reach() -> None:
    from nbddp.capabilities.private.store_guard import open_store

    why = sock_owner.unavailable()
    if why:
        raise Untried(why)
    served = open_store(os.getpid())
    served.close()
    expect(not served.unguarded, served.unguarded)
