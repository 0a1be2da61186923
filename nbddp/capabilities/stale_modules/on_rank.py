"""Modules of the user's own that a worker has imported, and whose files are others now: an import reads them once."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from nbddp.compat.extra import ipykernel as ipykernel_extra
from nbddp.deadlock.on_rank import frames
from nbddp.protocol.outcome import Outcome
from nbddp.protocol.run_spec import RunSpec
from nbddp.worker.parts import RankWorker

Mark = tuple[int, int]  # when a file was written (ns), and its size


class StaleModules:
    """The worker's part: (name, "changed" or "moved") of modules that are not what their files are now."""

    def __init__(self, worker: RankWorker):
        self._modules = Modules(lambda file: frames.is_user(file, {}), worker.shell)
        self._others: list[tuple[str, str]] = []

    def begin(self, spec: RunSpec) -> None:
        self._others = self._modules.others() if spec.is_program else []

    def end(self, outcome: Outcome, error: BaseException | None) -> None:
        others, self._others = self._others, []
        if found := self._modules.note(others):
            outcome.parts["stale_modules"] = found


class Modules:
    """is_user: whether a file is neither the standard library's nor an installed package's. shell: IPython's, of which
    `%autoreload` may read modules anew, or patch what has changed in them."""

    def __init__(self, is_user: Callable[[str], bool], shell: Any = None):
        self._is_user, self._shell = is_user, shell
        # times of files that `%autoreload` keeps, and what those of changed files were before the run
        self._times: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._known: dict[str, tuple[str, Mark | None]] = {}
        self._read: dict[str, Any] = {}  # by which spec each was read: a reload makes a new one
        self._newest = next(reversed(sys.modules))  # none of what was imported so far is the user's
        self._newest_read = _spec(self._newest)

    def note(self, told: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """After a run: what its imports, and reloads, have read. Of what `others` has told, what they have not."""
        anew = self._anew()
        return [(name, how) for name, how in told if not self._was_read(name, anew)]

    def _anew(self) -> set[str]:
        anew = set()
        names = [*self._known, *self._imported()]
        self._newest = next(reversed(sys.modules))
        self._newest_read = _spec(self._newest)
        for name in names:
            module = sys.modules.get(name)
            read = _spec(name)
            if name not in self._read or self._read[name] is not read:
                self._read[name] = read
                anew.add(name)
                file = getattr(module, "__file__", None)
                if isinstance(file, str) and file.endswith(".py") and name != "__main__" and self._is_user(file):
                    self._known[name] = (os.path.abspath(file), _mark(file))
        return anew

    def _imported(self) -> list[str]:
        """What was imported since the last look. Only these are touched: to look at each of 3000 modules is to copy
        10 MB that a forked worker shares with the others."""
        if self._newest not in sys.modules or _spec(self._newest) is not self._newest_read:
            return list(sys.modules)  # it was taken out, and perhaps read again
        return list(takewhile(lambda name: name != self._newest, reversed(sys.modules)))

    def others(self) -> list[tuple[str, str]]:
        """Before a run: (module, "changed" or "moved") since they were imported; each change is reported once."""
        found = []
        for name, (file, mark) in list(self._known.items()):
            if name not in sys.modules:
                del self._known[name], self._read[name]
                continue
            now, there = _mark(file), _found(name)
            if there is not None and there != file:
                found.append((name, "moved"))
                self._known[name] = (there, _mark(there))
            elif now is not None and now != mark:
                found.append((name, "changed"))
                self._known[name] = (file, now)
        self._times = ipykernel_extra.autoreload(self._shell)[0] if found else {}
        self._seen = {name: self._times[name] for name, _ in found if name in self._times}
        return found

    def _was_read(self, name: str, anew: set[str]) -> bool:
        """Whether a module was read anew since `others`. A file that `%autoreload` sees at first it does not read (when
        it is loaded, also again); where it cannot read one, the module has a new spec and its old content."""
        times, failed = ipykernel_extra.autoreload(self._shell)
        seen = times.get(name)
        if seen is not None and failed.get(self._known[name][0]) == seen:
            return False
        return name in anew or (times is self._times and name in self._seen and seen != self._seen[name])


def _spec(name: str) -> Any:
    return getattr(sys.modules.get(name), "__spec__", None)


def _mark(file: str) -> Mark | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _found(name: str) -> str | None:
    """The file that an import of a top-level module would read now."""
    if "." in name:
        return None
    spec: Any = importlib.machinery.PathFinder.find_spec(name)
    origin = None if spec is None else spec.origin
    return os.path.abspath(origin) if isinstance(origin, str) and os.path.exists(origin) else None
