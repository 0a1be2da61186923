"""`--start-method` on a node's agent: how a worker starts there."""

from __future__ import annotations

from nbddp.protocol.codec import Json

SPAWN = "spawn"


def spawns(request: Json) -> bool:
    """Whether a pool wants this worker spawned."""
    return bool(request.get("options", {}).get("start_method") == SPAWN)
