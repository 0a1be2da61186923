"""The pool behind its panels: one session for each pool, which carries out what a view asks for and looks how things
are. It holds no rules: what is shown is decided in `state`.

Commands change the pool in the kernel's main thread alone, as cells do. A front end's click comes there; with
ipykernel's subshells it comes in another thread, and is handed over.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from nbddp.errors import NbddpError, PoolError
from nbddp.panel import state as rules
from nbddp.panel.plan import plan_of
from nbddp.panel.state import Model, State
from nbddp.pool.pool import Pool

EVERY = 0.5  # seconds between two looks
LOG_BYTES = 16_384  # of a log's end


class Session:
    """One for each pool, with all its panels. A thread looks at the pool while there are views, and ends with them."""

    def __init__(self, pool: Pool):
        self._pool = weakref.ref(pool)
        pool.warm_up()
        machine = tuple(pool.machine())
        first = State(plan=plan_of(pool.spec, pool.topology), placed=pool.topology)
        self.model = Model(rules.known(first, machine))
        self._views = 0
        self._end = threading.Event()
        self._lock = threading.Lock()

    @property
    def pool(self) -> Pool:
        """The pool. Raises PoolError if it has been dropped."""
        pool = self._pool()
        if pool is None:
            raise PoolError("the pool of this panel is gone; %ddp panel opens one for the pool that there is")
        return pool

    # -- views ---------------------------------------------------------------------------------

    def open(self, view: Callable[[State, State], None]) -> Callable[[], None]:
        """Have a view told of changes; what ends that."""
        leave = self.model.watch(view)
        with self._lock:
            self._views += 1
            if self._views == 1:
                self._end = threading.Event()
                looking = (weakref.ref(self), self._end)
                threading.Thread(target=_look, args=looking, name="nbddp-panel", daemon=True).start()
        left = threading.Event()

        def close() -> None:
            if not left.is_set():
                left.set()
                leave()
                with self._lock:
                    self._views -= 1
                    if not self._views:
                        self._end.set()

        return close

    def look(self) -> bool:
        """See how things are; False once the pool is gone."""
        pool = self._pool()
        if pool is None:
            return False
        if not self.model.state.machine and (machine := pool.machine()):
            self.model.change(rules.known, machine)
        if self.model.state.stage is None:
            self.model.change(rules.placed, pool.topology if pool.running else None)
        return True

    # -- commands ------------------------------------------------------------------------------

    def move(self, control: str, value: Any) -> None:
        self.model.change(rules.moved, control, value)

    def start(self) -> None:
        """Have the pool that is planned."""
        if self.model.state.may_start:
            self.model.change(rules.began)
            in_main(self._start)

    def _start(self) -> None:
        pool = self.pool
        try:
            notes = pool.ensure(self.model.state.plan.spec(), lambda text: self.model.change(rules.reached, text))
            self.model.change(rules.started, pool.placed(), notes)
        except NbddpError as e:
            self.model.change(rules.failed, str(e), log_of(pool, e))
        except KeyboardInterrupt:
            self.model.change(rules.failed, "the start was stopped by the user", ())
        except BaseException as e:
            self.model.change(rules.failed, f"{type(e).__name__}: {e}", log_of(pool, e))
            raise


_sessions: weakref.WeakKeyDictionary[Pool, Session] = weakref.WeakKeyDictionary()


def session_of(pool: Pool) -> Session:
    """The session of a pool, which all its panels share."""
    if pool not in _sessions:
        _sessions[pool] = Session(pool)
    return _sessions[pool]


def _look(session: weakref.ref[Session], end: threading.Event) -> None:
    """The session's thread, which keeps neither it nor the pool."""
    while not end.wait(EVERY):
        found = session()
        if found is None or not found.look():
            return
        del found


def log_of(pool: Pool, error: BaseException) -> Sequence[str]:
    """The end of the log that says more of a failed start: of the agent, or of the error's own."""
    paths = [getattr(error, "log", ""), pool.agent.log if pool.agent is not None else ""]
    for path in filter(None, paths):
        try:
            with open(path, "rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - LOG_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError as e:
            return [f"{path}: {e.strerror}"]
        if lines:
            return lines
    return ()


def in_main(call: Callable[[], None]) -> None:
    """Call it in the main thread: at once if this is it, else as soon as the kernel is idle."""
    if threading.current_thread() is threading.main_thread():
        call()
        return
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    loop = getattr(getattr(shell, "kernel", None), "io_loop", None)
    if loop is None:
        raise PoolError("a panel's buttons need a Jupyter kernel; in a terminal type %ddp start")
    loop.add_callback(call)
