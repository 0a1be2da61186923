"""`--check`: before each collective the ranks compare their next calls.

Each rank writes a fingerprint (operation, shape, dtype, reduce operation, root) into the group's store, and waits for
those of the others. If they differ, every rank raises CollectiveMismatch before gloo is called. gloo would hang, end
the process, or go on with wrong numbers. Every collective that Python calls on a process group is compared (also those
under the object collectives, FSDP2's and a comm hook's); not compared are those that torch starts in C++: DDP's own,
and functional collectives. A `recv` is compared with its `send`.

The methods of torch's ProcessGroup are wrapped only while a checked run lasts.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from nbddp.compat import torch
from nbddp.deadlock.on_rank import position
from nbddp.deadlock.on_rank.call_log import CALLS, COLLECTIVES, groups, ranks_of
from nbddp.deadlock.on_rank.frames import SeenFrame
from nbddp.protocol.outcome import Outcome
from nbddp.protocol.position import PastCall, PendingCollective
from nbddp.protocol.run_spec import RunSpec
from nbddp.worker.parts import RankWorker


class CollectiveMismatch(RuntimeError):
    """Ranks were about to call different collectives, or the same one with what does not fit together."""


class Checker:
    """Compares collectives while a checked run lasts; one per worker."""

    def __init__(self, worker: RankWorker) -> None:
        self._originals: dict[str, Any] = {}
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._messages: dict[tuple[str, int, int, int], int] = {}
        self._inside = False
        self._run = 0
        self._called: dict[str, list[PastCall]] = {}

    def begin(self, spec: RunSpec) -> None:
        """Wrap ProcessGroup's methods, if the run is a checked one."""
        if not spec.options.get("check"):
            return
        import torch.distributed as dist

        self._run, self._counts, self._messages, self._called = spec.run, WeakKeyDictionary(), {}, {}
        for name in (*COLLECTIVES, "send", "recv"):
            if name in vars(dist.ProcessGroup):
                self._originals[name] = vars(dist.ProcessGroup)[name]  # as it stands there; getattr would unbind it
                wrap = self._peer if name in ("send", "recv") else self._collective
                setattr(dist.ProcessGroup, name, wrap(name, getattr(dist.ProcessGroup, name)))

    def end(self, outcome: Outcome, error: BaseException | None) -> None:
        """Take the wraps off."""
        if self._originals:
            import torch.distributed as dist

            for name, original in self._originals.items():
                setattr(dist.ProcessGroup, name, original)
            self._originals, self._called = {}, {}

    def called(self) -> dict[str, list[PastCall]]:
        """What was compared has a history of its own, in each living group."""
        return {**{name_of(group): [] for group in groups().values()}, **self._called}

    def claim(self, its: list[SeenFrame]) -> PendingCollective | None:
        """What a rank that waits for the others' fingerprints is about to call."""
        for frame in its:
            if frame.file == __file__ and frame.name == "agree":
                claim: PendingCollective | None = frame.get("claim")[0]
                return claim
        return None

    def _collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def checked(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._inside and group.size() > 1:
                self._inside = True
                try:
                    self._compare(group, fingerprint(name, [*args, *kwargs.values()]))
                finally:
                    self._inside = False
            return original(group, *args, **kwargs)

        return checked

    def _compare(self, group: Any, mine: list[str]) -> None:
        number = self._counts[group] = self._counts.get(group, 0) + 1
        me, size, ranks = group.rank(), group.size(), ranks_of(group)
        where = name_of(group)
        op, what_of = mine[0], ", ".join(w for w in mine[1:] if w)
        claim = position.collective(where, group.group_name, group.group_desc, number, op, seen=True)
        claim = replace(claim, what=what_of, backend="store", epoch=(CALLS.epoch.run, CALLS.epoch.init))
        self._called.setdefault(where, []).append((number, op, what_of, None))
        store, prefix = store_of(group), f"nbddp/check/{self._run}/{number}"
        store.set(f"{prefix}/{me}", json.dumps(mine))
        others = [r for r in range(size) if r != me]
        found = agree(store, [f"{prefix}/{r}" for r in others], claim)
        if any(other != mine for other in found):
            found.insert(me, mine)
            raise CollectiveMismatch(difference(ranks, found))

    def _peer(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def checked(group: Any, tensors: Sequence[Any], peer: int, tag: int = 0) -> Any:
            if self._inside:
                return original(group, tensors, peer, tag)
            me = group.rank()
            ends = (me, peer, tag) if name == "send" else (peer, me, tag)
            key = (group.group_name, *ends)
            number = self._messages[key] = self._messages.get(key, 0) + 1
            where = f"nbddp/check/{self._run}/p2p/{'/'.join(map(str, ends))}/{number}"
            if name == "send":
                store_of(group).set(where, json.dumps(what(tensors)))
            elif _called_from_recv(sys._getframe(1)):  # irecv does not wait, so it cannot be compared here
                sent = agree(store_of(group), [where])[0]
                if sent != what(tensors):
                    ranks = ranks_of(group)
                    raise CollectiveMismatch(
                        f"recv from rank {ranks[peer]} expects {what(tensors)}, and rank {ranks[peer]} sends {sent}"
                    )
            return original(group, tensors, peer, tag)

        return checked


def _called_from_recv(frame: FrameType | None) -> bool:
    """Whether torch's `recv` is among the four frames from `frame` outwards: it calls `irecv` and waits."""
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code.co_name == "recv":
            return True
        frame = frame.f_back
    return False


def agree(store: Any, keys: list[str], claim: PendingCollective | None = None) -> list[Any]:
    """Wait for these keys; their values. A rank that waits here is seen by `Checker.claim`."""
    found = [store.get(keys[0])] if len(keys) == 1 or not store.has_extended_api() else store.multi_get(keys)
    found += [store.get(key) for key in keys[len(found) :]]
    return [json.loads(value) for value in found]


def fingerprint(method: str, args: Sequence[Any]) -> list[str]:
    """[operation, tensors, reduce operation, root] of a call of a ProcessGroup method."""
    op, position, uniform = COLLECTIVES[method]
    tensors = args[position] if 0 <= position < len(args) else ()
    options = args[-1] if args else None
    reduce_op, root = getattr(options, "reduceOp", None), getattr(options, "rootRank", -1)
    return [
        op,
        what(tensors) if uniform else ",".join(sorted({w.split("[")[0] for w in what(tensors).split(", ")})),
        "" if reduce_op is None else reduce_name(reduce_op),
        f"root {root}" if op in ("broadcast", "reduce", "gather", "scatter") else "",
    ]


def what(tensors: Any) -> str:
    """`float32[4, 2]`, several joined by commas."""
    if hasattr(tensors, "dtype"):
        return f"{str(tensors.dtype).removeprefix('torch.')}{list(tensors.shape)}"
    return ", ".join(what(t) for t in tensors) if isinstance(tensors, (list, tuple)) else ""


def reduce_name(reduce_op: Any) -> str:
    """`SUM`, `MAX`, ..."""
    kind = getattr(reduce_op, "op", reduce_op)
    return str(getattr(kind, "name", kind)).rsplit(".", 1)[-1]


def difference(ranks: Sequence[int], found: Sequence[Sequence[str]]) -> str:
    """`all_reduce differs between ranks, with float32[4] on ranks 0, 2; float64[4] on rank 1`."""
    fields = [i for i in range(4) if len({f[i] for f in found}) > 1]
    same_op = 0 not in fields
    by_words: dict[str, list[int]] = {}
    for rank, f in zip(ranks, found, strict=True):
        words = ", ".join(f[i] or "none" for i in fields) if same_op else " ".join(w for w in f[:2] if w)
        by_words.setdefault(words, []).append(rank)
    each = "; ".join(f"{words} on {_ranks(some)}" for words, some in by_words.items())
    return f"{found[0][0]} differs between ranks, with {each}" if same_op else f"different collectives, with {each}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def name_of(group: Any) -> str:
    """Under which name what is compared in a group is noted: that of its collectives, and more."""
    return f"{CALLS.key(group)} checked"


def store_of(group: Any) -> Any:
    """The store where a group's members met."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return torch.world().pg_map[group][1]
