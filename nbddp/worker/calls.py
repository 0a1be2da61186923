"""Where this rank is: the user's line, the collective, its sequence number, its peers.

Read from outside the main thread, while that is blocked: from its Python frames, and from
torch's flight recorder, which knows what frames do not, above
all the all-reduces that DDP starts in C++ during backward. Where the recorder is off or
missing, the group's own sequence number is used. Plain data out; what it means, across
ranks, is for `run.deadlock` to say.

`mark()` wraps three methods that block in C++ without a Python frame of their own
(`Work.wait`, `Store.get`, `Store.wait`), so that a stack shows them.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from nbddp.worker import check, failure, groups, torch_seams

COLLECTIVES = "torch/distributed/distributed_c10d.py"
OTHERS = (torch_seams.FUNCTIONAL,)
HERE = __file__
CHECK, GROUPS = check.__file__, groups.__file__
INIT, NEW_GROUP, BACKWARD = "init_process_group", "new_group", torch_seams.BACKWARD
TO_PEER, FROM_PEER = ("send", "isend", "send_object_list"), ("recv", "irecv", "recv_object_list")
# system calls by number, x86-64 first, then 64-bit Arm (and POWER, 32-bit): a thread that waits for another ...
FUTEX = ("202", "98", "221", "240", "422")
# ... and one that sleeps, or waits for a descriptor or a child
SLEEPS = ("230", "35", "7", "271", "23", "270", "61", "247", "115", "101", "73", "72", "260")
HISTORY = 64


def mark() -> None:
    """Give `Work.wait`, `Store.get` and `Store.wait` a frame; once, when the worker starts."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    for owner, name in ((dist.Work, "wait"), (dist.Store, "get"), (dist.Store, "wait")):
        original = getattr(owner, name, None)
        if original is not None and getattr(original, "__globals__", None) is not globals():
            setattr(owner, name, _marked(owner.__name__, name, original))


def _marked(owner: str, name: str, original: Any) -> Any:
    if owner == "Work":

        @functools.wraps(original)
        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs)

        return wait

    @functools.wraps(original)
    def store_wait(self: Any, keys: Any = "", *args: Any, **kwargs: Any) -> Any:
        return original(self, keys, *args, **kwargs)

    return store_wait


def position(names: dict[str, str], groups: Any, since_ns: int) -> dict[str, Any]:
    """The main thread's place, as plain data.

    names: file of a cell → `Cell In[n]`. groups: the worker's `Groups`. since_ns: when the
    run began (time.time_ns()); what torch recorded before is not this run's.
    """
    main = threading.main_thread()
    frames = _frames(sys._current_frames().get(main.ident or 0))
    user = next((f for f in frames if failure.is_user(f.f_code.co_filename, names)), None)
    call = _call(frames[: frames.index(user)] if user in frames and user is not None else frames)
    if call is not None and call["kind"] == "store":
        # a key of a store that others can reach may be set from outside the run: nobody can say that it will not
        call = {
            **call,
            "kind": "store" if groups is not None and groups.owns(call["store"]) else "outside",
            "store": None,
        }
    found: dict[str, Any] = {
        "user": user and [*_place(user, names)],
        "call": call,
        "pending": _claimed(frames) or _pending(call, since_ns),
        "waits": _waits(main.native_id),
        "cpu": time.process_time(),
        "inits": groups.inits if groups is not None else 0,
        "groups": group_count(),
        "threads": others_in_torch(),
    }
    del frames, user
    return found


def user_place(frame: FrameType | None, names: dict[str, str]) -> tuple[str, int, str] | None:
    """The user's innermost place at or outside `frame`: file, line, function."""
    user = next((f for f in _frames(frame) if failure.is_user(f.f_code.co_filename, names)), None)
    return _place(user, names) if user is not None else None


def came_from(tb: TracebackType | None, names: dict[str, str], since_ns: int) -> dict[str, Any] | None:
    """The call of torch's that an exception came out of: op, kind, peer; for a collective also its group and sequence
    number. None if it came from none."""
    frames: list[FrameType] = []  # innermost first, inside the user's
    while tb is not None:
        frames = [] if failure.is_user(tb.tb_frame.f_code.co_filename, names) else [tb.tb_frame, *frames]
        tb = tb.tb_next
    call = _call(frames)
    if call is None:
        return None
    found = {k: call[k] for k in ("op", "kind", "peer") if k in call}
    last = collectives(since_ns)[-1:] if call["kind"] == "collective" else []
    return found | {k: c[k] for c in last for k in ("group", "sequence")}


def history(since_ns: int) -> dict[str, list[list[Any]]]:
    """Group name → the last collectives this rank has called in it: [sequence, op, what]."""
    found: dict[str, list[list[Any]]] = {}
    for entry in _recorded(active=False):
        if entry["time_created_ns"] >= since_ns and not entry["is_p2p"]:
            group = found.setdefault(entry["process_group"][0], [])
            group.append([entry["collective_seq_id"], _op(entry), _what(entry)])
    return {name: calls[-HISTORY:] for name, calls in found.items()}


def stack(names: dict[str, str]) -> list[list[Any]]:
    """The main thread's frames from the user's first, outermost first: [file, line, function, is it the user's]."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    rows: list[list[Any]] = []
    for f in reversed(_frames(frame)):
        file = f.f_code.co_filename
        if file == HERE:
            continue  # our mark around torch's call
        rows.append([*_place(f, names), failure.is_user(file, names)])
    first = next((i for i, row in enumerate(rows) if row[3]), 0)
    return rows[first:]


def _claimed(frames: list[FrameType]) -> dict[str, Any] | None:
    """What a rank that waits for the others' fingerprints under `--check` is about to call."""
    for frame in frames:
        if frame.f_code.co_filename == CHECK and frame.f_code.co_name == "agree":
            claim = frame.f_locals["claim"]
            return dict(claim) if claim["sequence"] else None
    return None


def _place(frame: FrameType, names: dict[str, str]) -> tuple[str, int, str]:
    file = frame.f_code.co_filename
    return names.get(file, file), frame.f_lineno, frame.f_code.co_name


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Innermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _call(frames: list[FrameType]) -> dict[str, Any] | None:
    """The outermost call of torch's that blocks, among the frames inside the user's."""
    inner = ""
    for frame in reversed(frames):
        file, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        if file == GROUPS and name == "drop":
            return {"op": "destroy_process_group of an earlier cell's group", "kind": "drop"}
        if file == HERE and name in ("wait", "store_wait"):
            return _described(name, frame)
        if file.endswith(COLLECTIVES) and name != "wrapper" and not name.startswith("_"):
            return _described(name, frame)
        if file.endswith(OTHERS) and not name.startswith("_"):
            return {"op": name, "kind": "collective"}
        if name == BACKWARD:
            inner = "backward"
    return {"op": inner, "kind": "backward"} if inner else None


def _described(name: str, frame: FrameType) -> dict[str, Any]:
    if name == "wait":
        return {"op": "wait", "kind": "wait"}
    if name == "store_wait":
        keys = frame.f_locals.get("keys", "")
        held = frame.f_locals
        return {"op": f"store.{held['original'].__name__}({keys!r})", "kind": "store", "store": held.get("self")}
    if name == INIT:
        return {"op": name, "kind": "init"}
    if name.startswith(NEW_GROUP) or name in ("new_subgroups", "split_group"):
        return {"op": NEW_GROUP, "kind": "new_group"}
    if name in TO_PEER or name in FROM_PEER:
        held = frame.f_locals
        sends = name in TO_PEER
        peer = held.get("dst" if sends else "src")
        if peer is None:
            peer = held.get("group_dst" if sends else "group_src")
        return {"op": name, "kind": "send" if sends else "recv", "peer": peer, "tag": held.get("tag", 0)}
    return {"op": name, "kind": "collective"}


def _pending(call: dict[str, Any] | None, since_ns: int) -> dict[str, Any] | None:
    """The collective that is not done: the call's own, or the oldest one that a wait may be for."""
    active = [e for e in _recorded(active=True) if e["time_created_ns"] >= since_ns and not e["retired"]]
    if active:
        entry = active[-1] if call is not None and call["kind"] == "collective" else active[0]
        name = entry["process_group"][0]
        ranks, backend = _members(name)
        return {
            "group": name, "ranks": ranks, "backend": backend, "sequence": entry["collective_seq_id"],
            "op": _op(entry), "what": _what(entry),
        }  # fmt: skip
    if call is None or call["kind"] != "collective" or torch_seams.flight_recorder() is not None:
        return None
    ranks, backend = _members("0")
    return {"group": "0", "ranks": ranks, "backend": backend, "sequence": _sequence(), "op": call["op"], "what": ""}


def _recorded(active: bool) -> list[dict[str, Any]]:
    """The flight recorder's entries of collectives, oldest first."""
    dump = torch_seams.flight_recorder()
    if dump is None:
        return []
    entries: list[dict[str, Any]] = json.loads(dump(includeCollectives=True, onlyActive=active)).get("entries", [])
    return entries


def collectives(since: int) -> list[dict[str, Any]]:
    """Collectives that were called since then (nanoseconds since 1970), oldest first, with their groups' ranks."""
    members: dict[str, list[int]] = {}
    found = []
    for entry in _recorded(active=False):
        if entry["time_created_ns"] < since or not entry["collective_seq_id"] or entry["is_p2p"]:
            continue
        name = entry["process_group"][0]
        if name not in members:
            members[name] = _members(name)[0]
        found.append(
            {"op": entry["profiling_name"], "group": name, "ranks": tuple(members[name]), "what": _what(entry),
             "sequence": entry["collective_seq_id"], "created": entry["time_created_ns"]}
        )  # fmt: skip
    return found


def _op(entry: dict[str, Any]) -> str:
    """`gloo:all_reduce` → `all_reduce`."""
    return str(entry["profiling_name"]).split(":", 1)[-1].lstrip("_")


def _what(entry: dict[str, Any]) -> str:
    """`Float[4, 2]`, several joined by commas."""
    pairs = zip(entry.get("input_dtypes", ()), entry.get("input_sizes", ()), strict=False)
    return ", ".join(f"{dtype.lower()}{sizes}" for dtype, sizes in pairs)


def _members(name: str) -> tuple[list[int], str]:
    """Global ranks and backend of the group of this name."""
    return torch_seams.members(name)


def group_count() -> int:
    world = torch_seams.world()
    return int(world.group_count) if world is not None else 0


def _sequence() -> int:
    dist = sys.modules["torch.distributed"]
    if not dist.is_initialized():
        return 0
    return torch_seams.sequence(torch_seams.default_group())


def _waits(thread: int | None) -> str:
    """The kernel's word on the main thread: "futex", "sleep", "busy", or "" where it does not say."""
    try:
        with open(f"/proc/self/task/{thread}/syscall") as file:
            number = file.read().split()[0]
    except (OSError, IndexError):
        return ""
    if number in FUTEX:
        return "futex"
    return "sleep" if number in SLEEPS else "busy"


def others_in_torch() -> bool:
    """Whether another thread is inside torch.distributed: then what the main thread does is not all."""
    asking = (threading.main_thread().ident, threading.get_ident())
    for thread, frame in sys._current_frames().items():
        if thread not in asking:
            for f in _frames(frame):
                if f.f_code.co_filename.replace("\\", "/").endswith(COLLECTIVES) or f.f_code.co_filename == HERE:
                    return True
    return False
