"""The part of a worker that records under `--sanitize`: it wraps what training calls, only while such a program runs.

No collective is called, no generator is drawn from, and no tensor of the program is changed. What is recorded stays on
this rank until the notebook asks.
"""

from __future__ import annotations

import functools
import linecache
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from nbddp.capabilities.sanitizer.on_rank_digest import numbers
from nbddp.capabilities.sanitizer.recording import MOST, NOWHERE, Place, RankRecord
from nbddp.deadlock.on_rank import frames
from nbddp.protocol.capability import load
from nbddp.protocol.outcome import Outcome
from nbddp.protocol.run_spec import RunSpec
from nbddp.worker import gpus
from nbddp.worker.parts import RankWorker

TORCH = f"{Path(torch.__file__).parent}/"
MACHINERY = ("", "torch", "ipykernel", "IPython")  # packages whose lines are never shown; empty: of none
WATCHERS = (
    "models:Models", "modules:ModuleWatcher", "steps:Steps", "data:Data", "calls:CollectiveCalls", "reads:HostReads",
    "losses:Losses", "noise:NoiseWatcher", "mesh:MeshInputs",
)  # fmt: skip
FRAMES = 80  # that are looked through for the program's line


class SanitizerRecorder:
    """What a rank records. `on` while a program runs under the option; every wrapper looks at it first."""

    def __init__(self, worker: RankWorker) -> None:
        self.worker = worker
        self.on = False
        self.clock = 0
        self.record = RankRecord(0, 0)
        self.pending: list[tuple[Any, str, Any]] = []  # an object, its field, the tensor that it gets the value of
        self._undo: list[Callable[[], None]] = []
        self._places: dict[tuple[CodeType, int, str], int] = {}
        self._libraries: dict[str, str | None] = {}
        self.thread = threading.get_ident()  # that runs the program
        self.watchers: list[Any] = []

    # -- the part's methods ----------------------------------------------------------------

    def begin(self, spec: RunSpec) -> None:
        env = {} if spec.rendezvous is None else spec.rendezvous.env
        self.clock, self.pending, self._places = 0, [], {}
        self.thread = threading.get_ident()
        self.record = RankRecord(int(env.get("RANK", 0)), spec.run, spec.cell, socket.gethostname())
        self.watchers = [load(f"nbddp.capabilities.sanitizer.on_rank_{target}")(self) for target in WATCHERS]
        self.models, self.modules, self.steps, self.data, self.calls, self.reads, self.losses, self.noise, _ = (
            self.watchers
        )
        self.on = True
        for watcher in self.watchers:
            watcher.install()

    def ended(self, error: BaseException | None) -> None:
        """The program has ended: look at what stays, and take the wrappers off."""
        self.on, was_on = False, self.on
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        if error is not None:
            self.record.ended = type(error).__name__
        if error is not None and gpus.at_work():
            self.record.lost = "a GPU was busy when the program ended, so digests on it were not read"
            self.pending = []
            return
        for watcher in self.watchers if was_on else ():
            watcher.close()
        self._settle()

    def end(self, outcome: Outcome, error: BaseException | None) -> None:
        if self._undo:  # the program's end was not heard
            self.ended(error)
        self.watchers = []

    # -- for the watchers ------------------------------------------------------------------

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any], graphs: bool = False) -> None:
        """Replace an attribute until the program ends. graphs: compiled programs call it within a graph."""
        own = name in vars(owner)
        original = vars(owner)[name] if own else getattr(owner, name)
        bound = original.__func__ if isinstance(original, (staticmethod, classmethod)) else original
        made: Any = functools.wraps(bound)(make(bound))
        if not graphs:
            made = torch.compiler.disable(made, recursive=False)
        if isinstance(original, (staticmethod, classmethod)):
            made = type(original)(made)
        setattr(owner, name, made)
        self._undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))

    def undo(self, call: Callable[[], None]) -> None:
        self._undo.append(call)

    def give_up(self, error: Exception) -> None:
        """Recording has failed: what there is so far is kept, and the program goes on unwatched."""
        self.on = False
        self.record.lost = f"recording stopped because of {type(error).__name__}: {error}"
        self.worker.to_log(f"sanitizer: {''.join(traceback.format_exception(error))}")

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def keep(self, facts: list[Any], fact: Any, most: int = MOST) -> bool:
        """Add a fact, if there is room. What is left out is counted."""
        if len(facts) < most:
            facts.append(fact)
            return True
        name = type(fact).__name__
        self.record.dropped[name] = self.record.dropped.get(name, 0) + 1
        return False

    def later(self, owner: Any, name: str, value: Any) -> None:
        """Have a field get the value of a tensor, once the program has ended."""
        self.pending.append((owner, name, value))

    def _settle(self) -> None:
        values = numbers([value for _, _, value in self.pending])
        for (owner, name, _), value in zip(self.pending, values, strict=True):
            if isinstance(owner, list):
                owner.extend(value) if name == "extend" else owner.append(value)
            else:
                setattr(owner, name, value)
        self.pending = []

    def place(self, skip: int = 1) -> int:
        """The program's line that led here; a library's, where no line of the program did."""
        try:
            frame: Any = sys._getframe(skip + 1)
        except ValueError:
            return 0
        number = self._place_in(frame)
        if not number and threading.get_ident() != self.thread:
            # a GPU's gradients are computed on a thread of its own, while the program waits in backward()
            return self._place_in(sys._current_frames().get(self.thread))
        return number

    def _place_in(self, frame: Any) -> int:
        found: Any = None
        through = ""
        for _ in range(FRAMES):
            if frame is None:
                break
            library = self._library(frame.f_code.co_filename)
            if library == "":
                found = frame
                break
            if library and found is None:
                found, through = frame, library
            frame = frame.f_back
        return 0 if found is None else self._known(found.f_code, found.f_lineno, through)

    def is_programs(self, file: str) -> bool:
        return self._library(file) == ""

    def _library(self, file: str) -> str | None:
        """The library that a file is of: empty for the program's own, None for torch's, Python's and ours."""
        if file not in self._libraries:
            is_users = not file.startswith(TORCH) and frames.is_user(file, self.worker.files.shown)
            library = "" if is_users else frames.package(file)
            self._libraries[file] = library if is_users or library not in MACHINERY else None
        return self._libraries[file]

    def _known(self, code: CodeType, line: int, through: str) -> int:
        key = (code, line, through)
        number = self._places.get(key)
        if number is None:
            file = code.co_filename
            name = "" if code.co_name == "<module>" else code.co_name
            shown = self.worker.files.shown.get(file, file)
            place = Place(shown, line, name, linecache.getline(file, line).strip(), through)
            if len(self.record.places) >= 4 * MOST:
                return self.record.places.index(NOWHERE)
            self.record.places.append(place)
            number = self._places[key] = len(self.record.places) - 1
        return number
