"""`%%ddp` and `%ddp`: parse, call, show. The only file that knows IPython's magics.

Nothing is decided here: a cell's line goes to `options`, its work to the pool, and a command to its handler.

`NotebookInterrupts` is for Stop, from the notebook kernel's first look at a cell to its answer. ipykernel answers a
cell whose code was interrupted. ipykernel reads a request before, and writes the answer after. An
interrupt in those moments leaves the cell without an answer, and the notebook waits. So Stop is put off until the code
runs, and is too late when it has run. A cell that is one command of ours hears Stop at the command's own checks
(`agent.stop`), until its result is shown.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.core.magic import Magics, line_cell_magic, magics_class
from traitlets import Bool, TraitError, Unicode, observe, validate

from nbddp.agent import stop
from nbddp.agent.client import AgentClient, Offer
from nbddp.compat import system
from nbddp.errors import CommandStopped, RunFailed, RunStopped
from nbddp.execution import cell_text
from nbddp.execution.values import RankValues
from nbddp.launch import options
from nbddp.launch.options import LaunchSpec
from nbddp.launch.units import lasting
from nbddp.notebook import commands
from nbddp.notebook.history import CellHistory, Ran
from nbddp.notebook.pool_commands import RESTARTED, start_pool
from nbddp.output.screens import Screen, for_shell
from nbddp.pool.change import changed
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.capability import Option
from nbddp.protocol.capability import load as load_target


@magics_class
class DDPMagics(Magics):  # type: ignore[misc]
    """The magics of one shell, and its pool."""

    keep_warm = Unicode(
        "",
        help="default of --keep-warm, such as 10m, 90s, 2h or off; empty: unchanged",
    ).tag(config=True)
    hints = Bool(
        True,
        help="whether a run that trained with DDP may end with one line on a silent mistake, unasked",
    ).tag(config=True)

    def __init__(self, shell: Any, agent: AgentClient | None = None):
        self.pool = WorkerPool(agent=agent)
        super().__init__(shell)
        self.interrupts = NotebookInterrupts(shell)
        self.history = CellHistory()
        self._told_of_system = False

    @validate("keep_warm")  # type: ignore[untyped-decorator]
    def _readable(self, proposal: Any) -> str:
        value = str(proposal.value).strip()
        try:
            lasting(value or "off")
        except ValueError as e:
            raise TraitError(f"DDPMagics.keep_warm: {e}") from None
        return value

    @observe("keep_warm")  # type: ignore[untyped-decorator]
    def _keep(self, change: Any) -> None:
        self.pool.keep(lasting(change.new) if change.new else None)

    @line_cell_magic  # type: ignore[untyped-decorator]
    def ddp(self, line: str, cell: str | None = None) -> Any:
        """Run a cell on every worker (`%%ddp`), or control the pool (`%ddp`; `%ddp --help` lists the subcommands)."""
        try:
            if cell is not None:
                with self._stoppable_cell():
                    return self._cell(line, cell)
            asked = commands.parse_command(line)
            runs = asked.launch.program is not None
            with self._stoppable_cell() if runs else self._stoppable(asked.name):
                found = load_target(asked.command.notebook)(self, asked)
                self._caption(found, asked.name)
                if hasattr(found, "draw"):  # while Stop is heard
                    found.draw()
                return found
        except options.HelpAsked as answer:
            print(answer.text)

    # -- Stop --------------------------------------------------------------------------

    @contextmanager
    def _stoppable(self, command: str) -> Iterator[None]:
        """Stop ends a command with one line about the pool. A command that shows an earlier run keeps that run's own
        report of a stop."""
        before, last = self.pool.snapshot(), self.pool.last_run
        try:
            with stop.heard_at_checks():
                yield
            return
        except RunStopped as e:
            known = last.error() if last is not None else None
            if isinstance(known, RunStopped) and known.report == e.report:
                raise
        except KeyboardInterrupt:
            pass
        became = changed(before, self.pool.snapshot())
        raise CommandStopped(f"%ddp {command} was stopped by the user; {became}") from None

    @contextmanager
    def _stoppable_cell(self) -> Iterator[None]:
        """As `_stoppable`, where Stop comes before or after the run itself."""
        before, last = self.pool.snapshot(), self.pool.last_run
        try:
            with stop.heard_at_checks():
                yield
            return
        except KeyboardInterrupt:
            pass
        when = "before it ran on any rank" if self.pool.last_run is last else "after it had ended on the ranks"
        became = changed(before, self.pool.snapshot())
        raise RunStopped(f"the cell was stopped by the user {when}; {became}") from None

    @contextmanager
    def _cleared(self, screen: Screen) -> Iterator[Screen]:
        """Nothing is left of progress if what it tells of is not finished."""
        try:
            yield screen
        except BaseException:
            screen.finish([])
            raise
        screen.ready()

    # -- %%ddp -----------------------------------------------------------------------

    def _cell(self, line: str, body: str) -> None:
        self.pool.ask_ahead()
        spec = options.parse_cell(line)
        if not cell_text.has_program(body):
            self._change(spec, line)
            return
        number = self.number()
        raw = self.shell.history_manager.input_hist_raw[-1]
        code = cell_text.prepare(line, body, cell_text.rows_above(raw, body))
        cell_text.check(code, f"Cell In[{number}]", self.shell.transform_cell, self._is_automagic)
        ran = Ran(number, line, body, where=self.where())
        try:
            values = self._carry_out(spec, code, number)
        except BaseException:
            self.history.append(replace(ran, ok=False))
            raise
        self.history.append(ran)
        if spec.output:
            self.shell.user_ns[spec.output] = values
        self._ask_front_end(lambda text: cell_text.headed(raw, line, body, text))
        self._show_recorded(spec)

    def _change(self, spec: LaunchSpec, line: str) -> None:
        """A `%%ddp` line without a program: `%ddp start` with its options, if they are all of the pool."""
        if spec.asks_for_run() or not spec.asks_for_pool():
            shown = next((each.later for each in spec.said if each.later), "")
            raise cell_text.refusal(line.strip(), f"{shown} for the cell before" if shown else "")
        replaced = spec.fresh and self.pool.running
        start_pool(self, spec)
        if replaced:
            print(RESTARTED)

    def _is_automagic(self, word: str) -> bool:
        return bool(self.shell.automagic) and self.shell.find_line_magic(word) is not None

    def _carry_out(self, spec: LaunchSpec, code: str, number: int) -> RankValues[Any]:
        """Have the pool that a line asks for, and run what it runs."""
        stood = self.pool.running
        screen = self.ensure(spec)
        if not stood:
            self._tell_of_system()
        try:
            return self.pool.carry_out(spec.as_request(code, number, bool(spec.output)), screen)
        except RunFailed:
            if self.pool.running:  # what led to a failure is worth seeing most of all
                self._show_recorded_of_failed(spec)
            raise

    def _show_recorded(self, spec: LaunchSpec) -> None:
        """What a run has recorded, as its line asks. The last option comes first: those before may raise."""
        for option in reversed(spec.said):
            self._show(option, spec)

    def _show_recorded_of_failed(self, spec: LaunchSpec) -> None:
        """The same of a cell that failed: that is the report, whatever becomes of this."""
        for option in spec.said:
            try:
                if option.of_failed:
                    self._show(option, spec)
            except Exception as e:
                print(f"{option.name} is not available ({type(e).__name__}: {e})")

    def _show(self, option: Option, spec: LaunchSpec) -> None:
        for figure in load_target(option.shows)(self, getattr(spec, option.name)) if option.shows else ():
            self._caption(figure, option.name)
            self._publish(figure)

    def _caption(self, figure: Any, name: str) -> None:
        """Say under a figure what capabilities have to say of it. name: of the command or the option that shows it."""
        if hasattr(figure, "caption"):
            for line in filter(None, [say(name) for say in self.pool.parts.figure_notes]):
                figure.caption(line)

    def _publish(self, figure: Any) -> None:
        """Display it in front of what the magic returns."""
        data, metadata = figure._repr_mimebundle_()
        self.shell.display_pub.publish(data, metadata)

    def _ask_front_end(self, headed: Callable[[str], str]) -> None:
        """What `name?` and `%load` in the cell asked of the front end, as the lowest rank answers it. That is text to
        show, and cells in place of this one or below it, for the ranks too. headed: text → a cell with this one's magic
        line."""
        run = self.pool.last_run
        if run is None or not run.ended:
            return
        outcome = run.ended[min(run.ended)].outcome
        if outcome is None:
            return
        for page in outcome.pages:
            self.shell.display_pub.publish(page if isinstance(page, dict) else {"text/plain": page})
        for text, replace_it in outcome.next_inputs:
            self.shell.set_next_input(headed(text), replace=replace_it)

    # -- what a command may ask (`commands.Asked`) ---------------------------------------

    def run(self, spec: LaunchSpec) -> None:
        """Run a program as a cell runs, and show what it has recorded."""
        self._carry_out(spec, "", self.number())
        self._show_recorded(spec)

    def ensure(self, spec: LaunchSpec) -> Screen:
        """Make the pool match a line. Returns the screen that tells the changes."""
        with self._cleared(for_shell(self.shell)) as screen:
            for note in self.pool.ensure(spec, progress=screen.progress):
                screen.say(note)
        return screen

    def start_workers(self, change: Callable[[Callable[[str], None]], Iterable[str]]) -> None:
        """Start workers by `change`, which gets the place for progress and returns what to say."""
        with self._cleared(for_shell(self.shell)) as screen:
            screen.start()
            for note in change(screen.progress):
                screen.say(note)
        screen.finish([])
        print(self.pool.placed().equation())

    @contextmanager
    def progress(self) -> Iterator[Callable[[str], None]]:
        """Where lines of progress are shown, and gone in the end, however it ends."""
        screen = for_shell(self.shell)

        def progress(text: str) -> None:
            stop.check()
            screen.progress(text)

        try:
            yield progress
        finally:
            screen.finish([])

    def number(self) -> int:
        """The n of this cell's In[n]; `execution_count` is that or one more, as IPython's version has it."""
        return len(self.shell.history_manager.input_hist_parsed) - 1

    def where(self) -> str:
        """The front end's name of the cell that runs; empty where it has none."""
        kernel = getattr(self.shell, "kernel", None)
        parent = kernel.get_parent() if kernel is not None and hasattr(kernel, "get_parent") else {}
        return str((parent or {}).get("metadata", {}).get("cellId", ""))

    def tell_shortcomings(self) -> None:
        self._told_of_system = True
        for line in self.pool.shortcomings():
            print(line)

    def _tell_of_system(self) -> None:
        """What this operating system costs, once: a cell that starts a pool says it, or `%ddp start` before."""
        if system.lost() and not self._told_of_system:
            print(system.lost())
        self._told_of_system = True


# -- Stop around cells -------------------------------------------------------------------------------

PUT_OFF, TIMES = 0.01, 20  # seconds, and how often: a callback of a widget is no cell, and must be stopped too
COMMAND = re.compile(r"\s*(#[^\n]*\n\s*)*(%%ddp\b|%ddp\b[^\n]*\Z)")  # a cell that is one command, under comments


class NotebookInterrupts:
    """Hooks into one shell's events and its kernel's."""

    def __init__(self, shell: Any):
        self.shell = shell
        self._request = 0
        self._depth = 0  # cells whose code runs, each in the one before: %run and others run cells
        self._ended = False
        self._times = 0
        self._hook: Any = None
        self._is_ipykernels = False
        self._events = {
            "pre_run_cell": self._before,
            "post_run_cell": self._after,
            "post_execute": self._end,
        }

    def install(self) -> None:
        for name, call in self._events.items():
            self.shell.events.register(name, call)
        self._depth = 1  # that which loads the extension
        self._run_code = self.shell.run_code
        self.shell.run_code = self._running
        kernel = getattr(self.shell, "kernel", None)
        self._hook = getattr(kernel, "pre_handler_hook", None)
        own = getattr(sys.modules.get("ipykernel.kernelbase"), "Kernel", None)
        self._is_ipykernels = own is not None and getattr(self._hook, "__func__", None) is own.pre_handler_hook
        if kernel is not None and self._hook is not None:
            kernel.pre_handler_hook = self._before_request

    def remove(self) -> None:
        for name, call in self._events.items():
            self.shell.events.unregister(name, call)
        self.shell.run_code = self._run_code
        if self._hook is not None:
            self.shell.kernel.pre_handler_hook = self._hook
            self._hook = None

    def _before_request(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._hook()
            return
        self._request, self._times, self._depth, self._ended = self._request + 1, 0, 0, False
        if not self._is_ipykernels:
            self._hook()
            signal.signal(signal.SIGINT, self._hear)
        else:  # the hook would set Python's handler first, and an interrupt in that moment ends the notebook kernel
            self.shell.kernel.saved_sigint_handler = signal.signal(signal.SIGINT, self._hear)

    def _hear(self, number: int, frame: Any) -> None:
        if self._depth or self._times >= TIMES:
            signal.default_int_handler(number, frame)
        if not self._ended:
            self._times += 1
            threading.Timer(PUT_OFF, self._again, (self._request,)).start()

    def _again(self, request: int) -> None:
        if request == self._request and not self._ended:
            os.kill(os.getpid(), signal.SIGINT)

    async def _running(self, *args: Any, **kwargs: Any) -> Any:
        """IPython's `run_code`: its caller answers an interrupt of it, but not one that comes after."""
        if threading.current_thread() is not threading.main_thread():
            return await self._run_code(*args, **kwargs)
        try:
            self._depth += 1
            self._handle(self._hear, signal.default_int_handler)  # which has no frame that a traceback would show
            return await self._run_code(*args, **kwargs)
        finally:
            self._depth -= 1
            self._put_off()

    def _end(self) -> None:
        self._ended = not self._depth
        self._put_off()

    def _put_off(self) -> None:
        if self._hook is not None and not self._depth:
            self._handle(signal.default_int_handler, self._hear)

    def _handle(self, now: Any, then: Any) -> None:
        """Change the handler, where it is not one of the program's."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == now:
            signal.signal(signal.SIGINT, then)

    def _before(self, info: Any) -> None:
        if COMMAND.match((info.raw_cell or "").rstrip()):
            stop.begin(pressed=self._times > 0)

    def _after(self, result: Any) -> None:
        stop.end()
        self._put_off()


# -- the magics of a shell ---------------------------------------------------------------------------

IS_MAGIC = re.compile(r"%%ddp(\s|$)")
_loaded: dict[int, DDPMagics] = {}


def uncommented(lines: list[str]) -> list[str]:
    """For IPython, which takes a cell magic in the first line of a cell alone: without the comments above `%%ddp`."""
    for top, row in enumerate(lines):
        if IS_MAGIC.match(row):
            return lines[top:]
        if row.strip() and not row.lstrip().startswith("#"):
            break
    return lines


def bodied(lines: list[str]) -> list[str]:
    """For IPython, which refuses a cell magic without a body: with an empty row below a `%%ddp` line that is alone."""
    return [f"{lines[0].rstrip()}\n", "\n"] if len(lines) == 1 and IS_MAGIC.match(lines[0]) else lines


bodied.has_side_effects = True  # type: ignore[attr-defined]  # a terminal asks with the others whether a cell is whole

TRANSFORMS = (uncommented, bodied)  # of a shell's cells, before it looks for a magic


def load(shell: Any, asked: Offer | None = None) -> None:
    """Register the magics and start warming up: the agent imports torch in its own process, and a
    thread imports ipyparallel here.

    asked: a process that may become the agent.
    """
    unload(shell)
    magics = DDPMagics(shell, AgentClient.launch(os.environ, asked))
    _loaded[id(shell)] = magics
    shell.register_magics(magics)
    for transform in TRANSFORMS:
        shell.input_transformers_cleanup.append(transform)
    magics.interrupts.install()
    parts = magics.pool.parts
    parts.on("shell")
    for installed in parts.installed:
        installed(shell, lambda: magics.pool)
    threading.Thread(target=_import_ahead, name="nbddp-import", daemon=True).start()


def unload(shell: Any) -> None:
    """End the pool and the agent, and remove the hooks."""
    magics = _loaded.pop(id(shell), None)
    if magics is None:
        return
    for transform in TRANSFORMS:
        if transform in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.remove(transform)
    magics.interrupts.remove()
    for removed in magics.pool.parts.removed:
        removed()
    magics.pool.close()
    if magics in shell.configurables:  # `%config` would show it
        shell.configurables.remove(magics)
    for table in (shell.magics_manager.magics["line"], shell.magics_manager.magics["cell"]):
        table.pop("ddp", None)


def standing_pool() -> WorkerPool | None:
    """The pool of the running shell, started or not; None if `%load_ext nbddp` has not run."""
    magics = _loaded.get(id(get_ipython()))
    return None if magics is None else magics.pool


def standing_history() -> CellHistory:
    """The `%%ddp` cells of the running shell; none if `%load_ext nbddp` has not run."""
    magics = _loaded.get(id(get_ipython()))
    return CellHistory() if magics is None else magics.history


def _import_ahead() -> None:
    import nbddp.pool.launcher
    import nbddp.pool.rpc  # noqa: F401
