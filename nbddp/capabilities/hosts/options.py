"""What the options of other hosts come to: what was typed, by names → values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbddp.capabilities.hosts.via import via_of
from nbddp.errors import BadInput


def via(typed: Mapping[str, Any]) -> str:
    if not typed.get("hosts"):
        raise BadInput(f"--via {typed['via']} needs --hosts; name the hosts, as in --hosts nodea,nodeb")
    return via_of(typed["via"])


def keep_alive(typed: Mapping[str, Any]) -> float:
    """In seconds."""
    if "slurm" not in typed and not typed.get("hosts"):
        raise BadInput("--keep-alive needs --hosts or --slurm; add one of them, or use --keep-warm")
    seconds: float = typed["keep_alive"]
    return seconds
