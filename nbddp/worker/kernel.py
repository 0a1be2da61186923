"""The engine's kernel: an ipyparallel kernel that runs nbddp's requests.

A request is a message of a type of our own whose metadata hold `nbddp`. They say what to do (`cell`, `call`, `push`,
`pull`), for which run, with which variables. Its outcome is published on iopub after all output of the run, as one
message (`protocol.outcome`). So a client that has the outcome has everything, and there is no reply. Questions about a
busy worker (`where`, `stack`, …) come over the control channel, which has its own thread; so does the wish to be
released from a blocked call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import ipykernel
import ipyparallel
import IPython
from ipyparallel.engine.kernel import IPythonParallelKernel
from IPython.core.error import StdinNotImplementedError

from nbddp.compat import ipykernel as ipykernel_compat
from nbddp.compat.clock import clock
from nbddp.deadlock.on_rank import position, runnable
from nbddp.protocol import messages, pickling
from nbddp.protocol.codec import Json, from_json, shown, to_json
from nbddp.protocol.messages import JupyterHeader, JupyterMessage
from nbddp.protocol.outcome import END, INTERRUPT, LostContext, Outcome
from nbddp.protocol.run_spec import CALL, CELL, END_GROUP, Question, Reply, RunSpec
from nbddp.worker import exit_info, failure, gpus, requests
from nbddp.worker.cell_end import Exits, Forked, Leftovers, StartedProcesses
from nbddp.worker.output import PrintedOutput
from nbddp.worker.parts import WorkerParts
from nbddp.worker.process_groups import Groups
from nbddp.worker.program import CellFiles, CellText, OwnImports, WorkerInterrupts
from nbddp.worker.release import Release, Reserve

NO_KEYBOARD = (
    "input() does not work on a rank. Ask in a cell without %%ddp and send the answer with %ddp push, or pass it as "
    "an argument: %%ddp -- VALUE"
)
NO_PROMPT = (
    "a debugger prompt cannot open on a rank here. In a terminal, a console, a notebook that supports input(), or "
    "%ddp panel, breakpoint() opens one for all ranks. Elsewhere let the cell fail, and run %ddp debug in a cell "
    "without %%ddp: it prints each frame with its variables"
)
RUNNERS = ("core/interactiveshell.py", "core/magics/execution.py")  # of IPython: they run a program, or a part of one
UNTOLD = 70  # exit code of a rank that cannot say how a run has ended; EX_SOFTWARE of sysexits.h
REPEATED = 64 << 20  # bytes of an outcome's buffers that are kept until the next run, to be sent again


_write, _exit = os.write, os._exit  # whatever a program puts in their place


def _short(error: BaseException, *args: Any, **kwargs: Any) -> Json:
    """An exception as the history of a worker keeps it."""
    return {"ename": type(error).__name__, "evalue": "", "traceback": []}


def _error_of(result: Any) -> BaseException | None:
    """What a cell raised, by IPython's account of it."""
    if result is None:
        return None
    error: BaseException | None = result.error_before_exec
    return result.error_in_exec if error is None else error


NO_PARENT: JupyterMessage = {"header": {}, "parent_header": {}, "metadata": {}, "content": {}, "buffers": ()}


class _NoShellThread:
    """Stands where ipykernel 7 expects its shell thread, which an engine does not have; without it a
    cell with a top-level await runs but is never answered."""

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


class WorkerKernel(IPythonParallelKernel):  # type: ignore[misc]
    """Runs one request at a time in the main thread; answers questions in the control thread."""

    msg_types = [*IPythonParallelKernel.msg_types, messages.RUN]
    control_msg_types = [*IPythonParallelKernel.control_msg_types, messages.QUESTION]
    _supports_kernel_subshells = False
    log_file: int | None = None  # descriptor of the worker's log
    log_path = ""  # of it, where an agent has started the worker
    pool_options: Mapping[str, Any] = {}  # that an agent of ours got
    awaited: asyncio.Future[Any] | None = None  # the code of a cell that awaits something, as a task

    def __init__(self, **kwargs: Any) -> None:
        with ipykernel_compat.unlisted_modules():
            super().__init__(**kwargs)
        self.begin_work()

    def begin_work(self) -> None:
        """What a worker's kernel has beyond an engine's."""
        if getattr(self, "shell_channel_thread", False) is None:
            _NoShellThread.parent_thread = threading.main_thread()
            self.shell_channel_thread = _NoShellThread()
        self.session.pack = shown(self.session.pack)
        self.groups = Groups()
        self.interrupts, self.reserve = WorkerInterrupts(self._say_interrupted), Reserve()
        self.release = Release(self.groups.sockets, self.log_file, self.reserve)
        self.departures = exit_info.GroupExits(
            lambda: self.files.shown, lambda: self.groups.dropping, lambda: self.groups.inits
        )
        self.began = (0, 0, 0)
        self.known: position.KnownEntries | None = None  # what the flight recorders held when this rank was last asked
        self.text = CellText()
        self.spec: RunSpec | None = None
        self.outcome = Outcome(0)
        self._parent = NO_PARENT
        self._result: Any = None
        self._spoilt = False  # whether what IPython says of the cell is an error that it has met with `_shown`
        self._shown: BaseException | None = None  # what a magic that runs code (%run) has caught, and only shows
        self.printed: PrintedOutput  # from `engine.hook` on
        self.streams: tuple[Any, ...] = ()  # stdout and stderr as they are at first; a program may put others there
        self.told: dict[int, requests.Sent] = {}  # run → its outcome
        self.begun = 0  # the newest run, whether it has an outcome or not
        self._has_run, self._placed = False, ("", "")  # rank and size of the world, as they were placed last
        own = os.path.dirname(os.path.dirname(__file__))
        self._machinery = (*(os.path.dirname(m.__file__) for m in (IPython, ipykernel, ipyparallel)), own)
        self.leavings = Leftovers(self._machinery)
        self.leaves = False
        self.files, self.imports = CellFiles(), OwnImports()
        self.children, self.forked = StartedProcesses(), Forked(self._machinery)
        self.exits = Exits(lambda: self.spec is not None)
        self.parts = WorkerParts(self, self.to_log)
        self.groups.tell = self.parts.tell
        self.requests, self.questions = requests.known_requests(), requests.known_questions()
        self._set_up_shell()

    def _set_up_shell(self) -> None:
        shell = self.shell
        shell.Completer.use_jedi = False  # seconds on torch; names of live objects are known without it
        warnings.filterwarnings("ignore", message="To exit: use")  # a script may end by sys.exit()
        self.text.install(shell)
        ipykernel_compat.sign_once(shell)
        self.files.install(shell)
        shell.user_ns["exit"] = shell.user_ns["quit"] = sys.exit
        shell.user_ns.pop("open", None)  # IPython's own refuses descriptors of a terminal, and a rank has none
        shell.events.register("post_execute", lambda: self.forked.end(self._shown))
        shell.events.register("post_run_cell", self._keep_result)
        self._show_traceback = shell.showtraceback
        shell.showtraceback = self._showtraceback
        # IPython 9 words every exception once more for its history, at a second or more in torch's large files
        ipykernel_compat.word_history_by(shell, _short)

    @functools.cached_property
    def own_topic(self) -> bytes:
        """Under what messages of ours are published."""
        return ipykernel_compat.topic(self, "nbddp")

    def raw_input(self, prompt: str = "") -> str:
        """What input() and debuggers ask for. Raises, with what to do instead."""
        asks_debugger = any(f.f_globals.get("__name__") in ("pdb", "bdb") for f, _ in traceback.walk_stack(None))
        raise StdinNotImplementedError(NO_PROMPT if asks_debugger else NO_KEYBOARD)

    def getpass(self, prompt: str = "", stream: Any = None) -> str:
        raise StdinNotImplementedError(NO_KEYBOARD)

    # -- requests ------------------------------------------------------------------

    async def nbddp_run(self, stream: Any, ident: Any, parent: JupyterMessage) -> None:
        """Shell channel: carry out a request; its outcome is its only answer."""
        spec = from_json(RunSpec, parent["metadata"][messages.SPEC])
        self.spec, self._parent = spec, parent
        try:
            then = await self._surely(spec, parent["content"]["code"])
            if then is not None:
                self.spec = then
                self.release.let_through()  # this rank may have left by the interrupt alone, and a peer still reads
                await self._surely(then, "", unasked=True)
        finally:
            self.spec = None
            self.groups.let_go()
            if self.leaves:
                self.leaves = False
                self.leavings.hold(self.shell.last_execution_result)
                self.shell.last_execution_result = None
                self.leavings.let_go()

    async def _surely(self, spec: RunSpec, code: str, unasked: bool = False) -> RunSpec | None:
        """As `_carry_out`. A rank that cannot even say that it has ended a run ends itself, which others see."""
        try:
            return await self._carry_out(spec, code, unasked)
        except BaseException as e:
            self.to_log(f"the end of a run cannot be reported ({type(e).__name__}: {e})")
            _exit(UNTOLD)

    def _publish_status(self, status: str, channel: str, *args: Any, **kwargs: Any) -> None:
        """`busy` and `idle` are not said for what is ours: nobody waits for them, and every message costs time."""
        if self.get_parent(channel).get("header", {}).get("msg_type") not in (messages.RUN, messages.QUESTION):
            super()._publish_status(status, channel, *args, **kwargs)

    async def _carry_out(self, spec: RunSpec, code: str, unasked: bool = False) -> RunSpec | None:
        """One request, up to its outcome; what is to be carried out next, `unasked`, since the rank had to be freed."""
        if not unasked:
            self.told = {}
        self.begun = spec.run
        self.outcome = outcome = Outcome(spec.run, END, "begin")
        self._error_bytes: bytes | None = None
        buffers, error = list[bytes](), None
        try:
            try:
                self.interrupts.begin()
                self._begin(spec)
                outcome.stage = ""
                if spec.op == CELL:
                    error = await self._run_cell(spec, code, outcome, buffers)
                else:
                    buffers += self.requests[spec.op](self, self._parent["buffers"], **spec.fields)
            finally:
                self._programs_end()
        except BaseException as raised:
            error = raised if error is None else error
        self.forked.end(error)
        outcome.ended_ns = clock.time_ns()
        error = self._end(outcome, error)
        if error is not None:
            try:
                self._failed(outcome, error)
            except Exception as e:
                left = exit_info.unworded(outcome, error, e)
                outcome = replace(left, parts=outcome.parts, part_errors=outcome.part_errors)
                self._error_bytes = None
        then = self.release.then if self.groups.touched and outcome.failed else None
        if then is not None:
            outcome.next_run = then.run
        self._publish(outcome, buffers, error)
        if error is not None:
            self.leaves = True
            self.leavings.hold(error)
        return then

    def _programs_end(self) -> None:
        """Nothing of the program's runs any more in the main thread."""
        try:
            self.imports.end()
        except BaseException:  # an interrupt may come amid that
            self.imports.end()
            raise
        finally:
            self.interrupts.end()

    def pre_handler_hook(self) -> None:
        """ipykernel sets Python's handler of SIGINT here, where an interrupt would leave the event loop and end the
        process. Of ours nothing takes one until the program runs (`interrupts`)."""
        if self.get_parent("shell").get("header", {}).get("msg_type") == messages.RUN:
            self.saved_sigint_handler = signal.getsignal(signal.SIGINT)
        else:  # a widget's callback, or an ordinary task of an engine that is one again
            super().pre_handler_hook()

    @contextlib.contextmanager
    def _cancel_on_sigint(self, future: asyncio.Future[Any]) -> Iterator[None]:
        """An interrupt ends a cell with a top-level await, also while it waits: then it is cancelled. ipykernel's
        own way needs an event loop that engines do not set."""
        loop = asyncio.get_running_loop()

        def interrupt(*args: Any) -> None:
            if asyncio.current_task(loop) is future:  # the cell's own code is running; IPython catches it there
                raise KeyboardInterrupt
            loop.call_soon_threadsafe(future.cancel)

        before, self.awaited = signal.signal(signal.SIGINT, interrupt), future
        try:
            yield
        finally:
            self.awaited = None
            signal.signal(signal.SIGINT, before)

    def _begin(self, spec: RunSpec) -> None:
        self.began, self.known = (clock.time_ns(), clock.perf_counter_ns(), clock.thread_time_ns()), None
        self.text.begin(self._parent["content"]["code"], spec.as_python)
        here = spec.rendezvous
        if not self._has_run:
            self._has_run = True
            runnable.before_first_run()
        self.reserve.begin()
        self.release.begin(goes_on=spec.op == END_GROUP)
        for stream in self.streams:
            if stream not in (sys.stdout, sys.stderr):  # behind one of the program's own: ipykernel does not see it
                stream.set_parent(self._parent)
        if here is not None:
            self._place(here.env)
            self.groups.begin(spec.run, here)
        self.groups.cut = False
        self.groups.shares_gpus = here is not None and here.shares_gpus
        self.departures.seen = []
        self.children.begin()
        if spec.cell is not None:
            self.shell.execution_count = self.execution_count = spec.cell
        self.parts.begin(spec)
        self.imports.begin()

    def _place(self, env: Mapping[str, str]) -> None:
        """torchrun's variables of a run."""
        # to set a variable takes 5 µs, and most stay as they are
        os.environ.update({name: value for name, value in env.items() if os.environ.get(name) != value})
        if (place := (env["RANK"], env["WORLD_SIZE"])) != self._placed:
            position.place(env)
            self._placed = place
        folder = os.path.dirname(env.get("TORCHELASTIC_ERROR_FILE", ""))
        if folder and not os.path.isdir(folder):  # another rank may have made it, and to try takes ten times as long
            os.makedirs(folder, exist_ok=True)  # @record does not

    def _have_streams(self) -> None:
        """A cell that has closed stdout, or put None there, has not done so for all cells to come."""
        for name, first in zip(("stdout", "stderr"), self.streams, strict=False):
            stream = getattr(sys, name)
            if stream is None or getattr(stream, "closed", False):
                setattr(sys, name, first)

    def _end(self, outcome: Outcome, error: BaseException | None) -> BaseException | None:
        """Nothing of the run goes on. The run's error, or one that this has met."""
        self.reserve.free()
        try:
            self._have_streams()
            if self.release.end():
                self.groups.released()
            if error is not None and exit_info.how(error).exit_code != 0:
                self.children.end()
        except Exception as e:
            if error is None:
                outcome.stage, error = "end", e
            else:
                self.to_log(f"at the end of the run ({type(e).__name__}: {e})")
        self.parts.end(outcome, error)
        return error

    async def _run_cell(self, spec: RunSpec, code: str, outcome: Outcome, buffers: list[bytes]) -> BaseException | None:
        """Run a cell; what it raised."""
        sys.argv = list(spec.argv)
        self._result, self._shown, self._spoilt = None, None, False
        self.files.begin()
        met: BaseException | None = None
        reply: dict[str, Any] = {}
        try:
            executed = super().do_execute(code, False)
            reply = await executed if inspect.isawaitable(executed) else executed
        except BaseException as e:  # an interrupt, or ipykernel's own words for an exception whose __str__ raises
            met = e
        self.imports.end()
        result, self._result = self._result, None
        error: BaseException | None = _error_of(result)
        shown, self._shown = self._shown, None
        error = shown if self._spoilt else next((e for e in (error, met, shown) if e is not None), None)
        self.parts.ended(error)
        if error is None and spec.want_value:
            buffers.append(pickling.pack_or_words(result.result))
        asked = reply.get("payload", [])
        outcome.pages = tuple([p["data"] for p in asked if p.get("source") in ("page", "page_raw")])
        outcome.next_inputs = tuple([(p["text"], p["replace"]) for p in asked if p.get("source") == "set_next_input"])
        return error

    # -- outcome -------------------------------------------------------------------

    def _failed(self, outcome: Outcome, error: BaseException) -> None:
        names, how = self.files.shown, exit_info.how(error)
        outcome.left, outcome.exit_code, outcome.exit_text = how.left, how.exit_code, how.exit_text
        if outcome.exit_code == 0:
            return
        if outcome.exit_text is not None:
            print(outcome.exit_text, file=sys.stderr)
        # of a rank that the client has freed nobody is shown the source
        values = None if self.release.started else self.parts.of("values")
        outcome.chain = failure.chain(error, names, self._machinery, values, self.parts.of("note"))
        outcome.error_file = exit_info.error_file()
        outcome.call = exit_info.call_of(error, names, self.began[0], self.known)
        self.known = None
        broken = gpus.broken_context(error)
        if broken:
            outcome.lost_context = LostContext(broken, *map(tuple, requests.user_names(self.shell)))
        called = self.spec is not None and self.spec.op == CALL and not self.spec.fields.get("writes")
        if called and outcome.left != INTERRUPT:
            self._error_bytes = pickling.pack_or_words(error)
        gpus.let_go_of_memory(error)

    def _publish(self, outcome: Outcome, buffers: list[bytes], error: BaseException | None) -> None:
        """Send the outcome, after all output. A run waits for it, so something is always sent."""
        self._send_text()
        try:
            outcome.group = self.groups.facts(self.release.aborted)
            outcome.group_exits = tuple(self.departures.seen)
            outcome.at_exit = len(self.exits)
            outcome.nccl_handling = self.groups.handling
            if self._error_bytes is not None:
                buffers[:] = [self._error_bytes]
            self._send(outcome, buffers)
        except Exception as e:
            self._send(exit_info.unworded(outcome, error, e), [])

    def _send_text(self) -> None:
        """What was printed goes out before the outcome does."""
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream not in self.streams and hasattr(stream, "flush"):  # one of the program's own
                    stream.flush()
            except Exception as e:  # it may have `write` alone, or be closed
                self.to_log(f"the output could not be flushed ({type(e).__name__}: {e})")
        try:
            self.printed.finish()
        except Exception as e:
            self.to_log(f"the output could not be sent ({type(e).__name__}: {e})")

    def to_log(self, text: str) -> None:
        """What concerns no cell."""
        if self.log_file is not None:
            _write(self.log_file, f"{text}\n".encode("utf-8", "replace"))

    def _send(self, outcome: Outcome, buffers: list[bytes]) -> None:
        kept = buffers if sum(map(len, buffers)) <= REPEATED else None
        self.told[outcome.run] = outcome, kept, self._parent
        self.send_outcome(outcome, buffers, self._parent)

    def send_outcome(self, outcome: Outcome, buffers: list[bytes], parent: JupyterMessage) -> None:
        self.session.send(
            self.iopub_socket,
            messages.OUTCOME,
            to_json(outcome),
            parent=parent,
            ident=self.own_topic,
            buffers=buffers,
        )

    def publish(self, kind: str, content: Json) -> None:
        """A message of the run that is carried out."""
        self.session.send(self.iopub_socket, kind, content, parent=self._parent, ident=self.own_topic)

    def _say_interrupted(self) -> None:
        """Note what the program had started when it had an interrupt, and publish that it had one; whatever the main
        thread was doing, another one sends it. In a signal's handler, where nothing may be raised but what the program
        is to have."""
        try:
            self.children.note()
            sends, ident = self.streams[0].pub_thread, self.own_topic
            said = functools.partial(self.session.send, content={}, parent=self._parent, ident=ident)
            sends.schedule(lambda: said(sends.socket, messages.INTERRUPTED))
        except Exception as e:
            self.to_log(f"an interrupt could not be reported ({type(e).__name__}: {e})")

    def _keep_result(self, result: Any) -> None:
        self._result = result

    def _showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """IPython's traceback is not sent: the outcome carries it, and the client words it. Of an exception that ends
        nothing (a repr that raises; the program shows it by itself) a plain one is printed."""
        if self.spec is None:
            self._show_traceback(exc_tuple, *args, **kwargs)
            return
        ipykernel_compat.no_traceback(self.shell)
        error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        caller = sys._getframe(1).f_code
        if caller.co_filename.endswith(RUNNERS):
            if self._shown is None or not ipykernel_compat.is_outermost(caller):
                self._shown = error
            else:  # after the cell's own error, which is shown: IPython has asked it whether it is true, say
                self._spoilt = True
        elif error is not None:
            print("".join(traceback.format_exception(error)), end="", file=sys.stderr)

    # -- questions -----------------------------------------------------------------

    def nbddp_request(self, stream: Any, ident: Any, parent: JupyterMessage) -> None:
        """Control channel: a row of `questions`, answered while the main thread works."""
        question = from_json(Question, parent["content"])
        try:
            reply = Reply(self.questions[question.op](self, **question.fields))
        except Exception as e:
            reply = Reply(failed=f"{type(e).__name__}: {e}")
        if question.answers:
            self.session.send(stream, messages.REPLY, to_json(reply), parent=parent, ident=ident)

    def running(self) -> JupyterHeader | None:
        """The header of the request that is carried out."""
        return None if self.spec is None else self._parent["header"]

    def cell(self) -> int | None:
        """The number of the cell that is run."""
        return None if self.spec is None else self.spec.cell

    @property
    def at_work(self) -> bool:
        """Whether a request is being carried out."""
        return self.spec is not None
