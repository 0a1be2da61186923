"""Where torch's own checks wait, under debug level DETAIL.

There every group is wrapped. Before a collective its ranks meet in a `monitored_barrier` of a second gloo group, the
helper. Then they compare their calls. A rank that waits there has called nothing yet, so no recorder has an entry, and
of DDP's all-reduces Python sees nothing. But the helper counts what it sends and receives. In one check rank 0 receives
from all others, sends to all others and gathers twice; another rank sends once, receives once and gathers twice. So its
count says whether it waits in the barrier, and all members of the group have to come there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nbddp.compat import torch
from nbddp.deadlock.on_rank import call_log
from nbddp.deadlock.on_rank.call_log import CALLS, UNKNOWN

GATHERS = 2  # of a check, behind the barrier


class DetailBarrier(NamedTuple):
    """The barrier before collective number `sequence` of a group (`key`, as in `call_log`)."""

    group: Any
    key: str
    sequence: int


class DetailHelpers:
    """The helpers of this process's groups, by torch's name of the group; held until that group is ended."""

    def __init__(self) -> None:
        self._helpers: dict[str, Any] = {}
        self._keys: set[str] = set()

    def install(self) -> None:
        """Have each helper noted when it is made; once, when the worker starts."""
        torch.wrap_checks(self._note)

    def _note(self, name: str, helper: Any) -> None:
        self._helpers[name] = helper
        self._keys = {key for key in self._keys if CALLS.is_recent(key)}

    def let_go(self) -> None:
        """Groups have been ended: their helpers may end too."""
        living = call_log.groups()
        self._helpers = {name: helper for name, helper in self._helpers.items() if name in living}

    def counted(self, called: dict[str, int]) -> dict[str, int]:
        """Of `called` (group → its number of collectives) the groups that are checked, also ended ones: each call there
        is counted."""
        self._keys |= {CALLS.key(group) for group, _ in self._checked()}
        return {key: called[key] for key in self._keys & called.keys() if called[key] != UNKNOWN}

    def meeting(self) -> DetailBarrier | None:
        """The barrier in which this process waits; None where it waits in none, or in several."""
        found = [group for group, helper in self._checked() if waits(helper)]
        if len(found) != 1:
            return None
        key = CALLS.key(found[0])
        sequence = CALLS.sequence(found[0], key)
        return None if sequence == UNKNOWN else DetailBarrier(found[0], key, sequence + 1)

    def _checked(self) -> list[tuple[Any, Any]]:
        return [(group, self._helpers[name]) for name, group in call_log.groups().items() if name in self._helpers]


def waits(helper: Any) -> bool:
    """Whether the helper's count is one of the barrier's: of all that it sends and receives, what comes before the
    wait."""
    others = helper.size() - 1
    waits, all_of_it = (others, 2 * others) if helper.rank() == 0 else (2, 2)
    return bool(others) and torch.sequence(helper) % (all_of_it + GATHERS) == waits


CHECKS = DetailHelpers()
