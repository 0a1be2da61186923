"""Data that travels between notebook and ranks: functions, values, and returned exceptions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp.errors import BadInput, WorkerFailed
from nbddp.execution.values import RankValues
from nbddp.launch.topology import rank_words
from nbddp.protocol import pickling
from nbddp.protocol.outcome import RankExit
from nbddp.protocol.request import Request
from nbddp.protocol.run_spec import CALL


def call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, object] | None,
    ranks: Sequence[int],
    plain: bool,
    **limits: Any,
) -> Request:
    """The request of a call on ranks. Raises BadInput if something cannot be sent."""
    name = getattr(function, "__name__", "the function")
    data = packed((function, tuple(args), dict(kwargs or {})), name)
    return Request(CALL, {"plain": plain, "argv": list(sys.argv)}, [data], f"running {name}", ranks=ranks, **limits)


def answered(ended: Mapping[int, RankExit], read: Callable[[bytes], Any] = pickling.unpack) -> RankValues[Any]:
    """One value from each rank that sent one."""
    return RankValues({r: read(e.buffers[0]) for r, e in ended.items() if e.buffers})


def carried(failed: WorkerFailed, ended: Mapping[int, RankExit]) -> Exception | None:
    """The exception object of the first failing rank, if it travelled."""
    buffers = ended[failed.rank].buffers if failed.cause.kind == "raised" else []
    error = pickling.unpack(buffers[0]) if buffers else None
    return error if isinstance(error, Exception) else None


def pulled(names: Sequence[str], answers: Mapping[int, Sequence[Any]]) -> dict[str, RankValues[Any]]:
    """Name → its values. Raises BadInput if a rank has no such name."""
    found = {}
    for i, name in enumerate(names):
        lacking = [r for r, answer in answers.items() if not answer[i]]
        if lacking:
            raise BadInput(f"{name!r} is not defined on {rank_words(lacking)}; assign it in a %%ddp cell")
        found[name] = RankValues({r: pickling.unpack(answer[i]) for r, answer in answers.items()})
    return found


def packed(value: Any, name: str) -> bytes:
    """Raises BadInput, with the name, for what cannot be sent."""
    try:
        return pickling.pack(value)
    except Exception as e:
        raise BadInput(
            f"{name!r} cannot be sent to the ranks ({pickling.reason(e)}); create it in a %%ddp cell instead"
        ) from None
