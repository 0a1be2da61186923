"""`%%ddp` and `%ddp`: parse, call, show. The only file that knows IPython's magics.

Nothing is decided here: lines go to `options`, work to the pool, pictures to `draw`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from IPython.core.getipython import get_ipython
from IPython.core.magic import Magics, line_cell_magic, magics_class
from traitlets import TraitError, Unicode, observe, validate

from nbddp.agent import stop
from nbddp.agent.client import AgentClient
from nbddp.capabilities.debugger.command import Debug
from nbddp.capabilities.export import command as export_command
from nbddp.capabilities.export.command import CellHistory, Ran
from nbddp.capabilities.scripts import failures, launch
from nbddp.capabilities.slurm import submit
from nbddp.capabilities.slurm.host_source import offer
from nbddp.capabilities.warm.client import AskedProcess
from nbddp.compat import system
from nbddp.errors import BadInput, CommandStopped, RankStatus, RunFailed, RunStopped
from nbddp.execution import cell_text
from nbddp.execution.values import RankValues
from nbddp.launch import env_options, options
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import rank_words
from nbddp.launch.units import lasting, lasts
from nbddp.notebook import commands
from nbddp.notebook.commands import Command
from nbddp.notebook.completion import Assistant
from nbddp.notebook.interrupts import NotebookInterrupts
from nbddp.output import background
from nbddp.output.screens import Screen, for_shell
from nbddp.pool import snapshot
from nbddp.pool.pool import Pool


@magics_class
class DDPMagics(Magics):  # type: ignore[misc]
    """The magics of one shell, and its pool."""

    keep_warm = Unicode(
        "",
        help="default of --keep-warm, such as 10m, 90s, 2h or off; empty: unchanged",
    ).tag(config=True)

    def __init__(self, shell: Any, agent: AgentClient | None = None):
        self.pool = Pool(agent=agent)
        super().__init__(shell)
        self.assistant = Assistant(shell, lambda: self.pool)
        self.interrupts = NotebookInterrupts(shell)
        self.debug = Debug(shell, lambda: self.pool)
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
            command = commands.parse_command(line)
            if command.launch.program is not None:
                with self._stoppable_cell():
                    return self._run(command)
            with self._stoppable(command):
                found = self.COMMANDS[command.name](self, command)
                if hasattr(found, "draw"):  # while Stop is heard
                    found.draw()
                return found
        except options.HelpAsked as answer:
            print(answer.text)

    # -- Stop --------------------------------------------------------------------------

    @contextmanager
    def _stoppable(self, command: Command) -> Iterator[None]:
        """Stop ends a command with one line, which says what the pool is like."""
        before, run = self.pool.footing(), None
        try:
            with stop.heard_at_checks():
                yield
            return
        except RunStopped as e:
            run = e
        except KeyboardInterrupt:
            pass
        became = snapshot.changed(before, self.pool.footing())
        if command.name == "push" and run is not None:
            done = [s.rank for s in run.states if s.status == RankStatus.FINISHED]
            became = f"the names are set on {rank_words(done) if done else 'no rank'}"
        raise CommandStopped(f"%ddp {command.name} was stopped by the user; {became}") from None

    @contextmanager
    def _stoppable_cell(self) -> Iterator[None]:
        """As `_stoppable`, where Stop comes before or after the run itself."""
        before, last = self.pool.footing(), self.pool.last_run
        try:
            with stop.heard_at_checks():
                yield
            return
        except KeyboardInterrupt:
            pass
        when = "before it ran on any rank" if self.pool.last_run is last else "after it had ended on the ranks"
        became = snapshot.changed(before, self.pool.footing())
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
        number = self._number()
        raw = self.shell.history_manager.input_hist_raw[-1]
        code = cell_text.prepare(line, body, cell_text.rows_above(raw, body))
        cell_text.check(code, f"Cell In[{number}]", self.shell.transform_cell, self._is_automagic)
        ran = Ran(number, line, body, where=self._where())
        try:
            values = self._carry_out(spec, code, number)
        except BaseException:
            self.history.add(replace(ran, ok=False))
            raise
        self.history.add(ran)
        if spec.output:
            self.shell.user_ns[spec.output] = values
        self._ask_front_end(lambda text: cell_text.headed(raw, line, body, text))
        self._show_recorded(spec)

    def _change(self, spec: LaunchSpec, line: str) -> None:
        """A `%%ddp` line without a program: `%ddp start` with its options, if they are all of the pool."""
        if spec.run() != LaunchSpec().run() or not (spec.asks_for_pool() or spec.fresh):
            shown = "%ddp timings" if spec.show_timings else "%ddp memory --timeline" if spec.memory else ""
            raise cell_text.refusal(line.strip(), f"{shown} for the cell before" if shown else "")
        replaced = spec.fresh and self.pool.running
        self._start(Command("start", {}, spec))
        if replaced:
            print(RESTARTED)

    def _is_automagic(self, word: str) -> bool:
        return bool(self.shell.automagic) and self.shell.find_line_magic(word) is not None

    def _carry_out(self, spec: LaunchSpec, code: str, number: int) -> RankValues:
        """Have the pool that a line asks for, and run what it runs."""
        stood = self.pool.running
        with self._cleared(for_shell(self.shell)) as screen:
            self._ensure(spec, screen)
        if not stood:
            self._tell_of_system()
        try:
            return self.pool.carry_out(spec.request(code, number), screen)
        except RunFailed:
            if spec.trace is not None and self.pool.running:  # what led to a failure is worth seeing most of all
                self._trace_if_possible(spec.trace)
            raise

    def _show_recorded(self, spec: LaunchSpec) -> None:
        """What a run has recorded, as its line asks."""
        if spec.trace is not None:
            self._trace(spec.trace)
        if spec.memory:
            self._publish(self._figure_of_allocations(None))
        if spec.show_timings:
            self._publish(self._figure_of_timings(None))

    def _publish(self, figure: Any) -> None:
        """Display it in front of what the magic returns."""
        data, metadata = figure._repr_mimebundle_()
        self.shell.display_pub.publish(data, metadata)

    def _trace_if_possible(self, name: str) -> None:
        """As `_trace`, for a cell that failed: that is the report, whatever becomes of the trace."""
        try:
            self._trace(name)
        except Exception as e:
            print(f"there is no trace: {type(e).__name__}: {e}")

    def _trace(self, name: str) -> None:
        """Write the merged trace of the cell that has just run, say where it is, and show what it shows."""
        from nbddp.capabilities.collectives.figure import draw_program
        from nbddp.capabilities.collectives.program import program
        from nbddp.capabilities.trace.written import written

        try:
            with self._progress() as progress:
                progress("collecting and merging the ranks' traces")
                merged = self.pool.trace()
                progress(f"writing {name}")
                found = written(merged, Path(name))
                progress("looking for what the trace shows")
                shown = draw_program(program(merged.data["traceEvents"]))
        except BadInput as e:
            print(e)
            return
        for each in (found, shown):
            self._publish(each)

    def _number(self) -> int:
        """The n of this cell's In[n]; `execution_count` is that or one more, as IPython's version has it."""
        return len(self.shell.history_manager.input_hist_parsed) - 1

    def _ensure(self, spec: LaunchSpec, screen: Screen) -> None:
        for note in self.pool.ensure(spec, progress=screen.progress):
            screen.say(note)

    def _ask_front_end(self, headed: Callable[[str], str]) -> None:
        """What `name?` and `%load` in the cell asked of the front end, as the lowest rank answers it: text to show, and
        a cell in place of this one or below it, for the ranks too. headed: text → a cell with this one's magic line."""
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

    # -- %ddp run --------------------------------------------------------------------

    def _run(self, command: Command) -> None:
        spec, said = launch.made_ready(command.launch, self._is_elsewhere(command.launch))
        print(*(line + "\n" for line in (*command.notes, *said)), sep="", end="", flush=True)
        self._carry_out(spec, "", self._number())
        self._show_recorded(spec)

    def _is_elsewhere(self, spec: LaunchSpec) -> bool:
        """Whether workers have other files than this machine's."""
        return spec.elsewhere or (self.pool.running and self.pool.spec.elsewhere)

    def _errors(self, command: Command) -> Any:
        run = self.pool.last_run
        if run is None:
            raise BadInput("nothing has run yet; start with %ddp run or a %%ddp cell")
        program = run.request.program
        name = program.name if program is not None else f"Cell In[{run.request.cell}]"
        if not command.args["torchrun"]:
            return failures.Failures(name, run.failures)
        print(failures.summary(name, run.failures) if run.failures else f"no rank failed in {name}")
        return None

    # -- %ddp ------------------------------------------------------------------------

    def _help(self, command: Command) -> None:
        print(commands.overview())
        if command.args["options"]:
            print()
            options.parse_cell("--help")

    def _start(self, command: Command) -> None:
        with self._cleared(for_shell(self.shell)) as screen:
            screen.start()
            self._ensure(command.launch, screen)
        screen.finish([])
        assert self.pool.topology is not None
        print(self.pool.topology.equation())
        if offer() and not self.pool.spec.elsewhere:
            print(offer())
        self._tell_shortcomings()

    def _tell_shortcomings(self) -> None:
        self._told_of_system = True
        for line in self.pool.shortcomings():
            print(line)

    def _tell_of_system(self) -> None:
        """What this operating system costs, once: a cell that starts a pool says it, or `%ddp start` before."""
        if system.lost() and not self._told_of_system:
            print(system.lost())
        self._told_of_system = True

    def _stop(self, command: Command) -> None:
        held = [f"{words}: released" for words in self.pool.elsewhere.given_back()]
        if not self.pool.running:
            self.pool.elsewhere.release()
            print(*(held or ["there is no pool to stop"]), sep="\n")
            return
        size, cluster = self.pool.world_size, self.pool.spec.cluster
        self.pool.stop()
        what = (
            f"its workers are engines of cluster {cluster} again and keep their names"
            if cluster
            else ("names on its workers are gone")
        )
        print(*[f"pool of {size} stopped; {what}", *held], sep="\n")

    def _attach(self, command: Command) -> None:
        with self._cleared(for_shell(self.shell)) as screen:
            screen.start()
            for note in self.pool.attach(command.args["job"], screen.progress):
                screen.say(note)
        screen.finish([])
        print(self.pool.placed().equation())

    def _scale(self, command: Command) -> None:
        with self._progress() as progress:
            notes = self.pool.scale(command.args["nodes"], progress)
        print(*notes, sep="\n")

    def _restart(self, command: Command) -> None:
        if command.launch.asks_for_pool():
            with self._cleared(for_shell(self.shell)) as screen:
                self._ensure(_fresh(command.launch), screen)
            print(RESTARTED)
            return
        for note in self.pool.restart(command.args["ranks"]):
            print(note)

    def _sync(self, command: Command) -> None:
        with self._progress() as progress:
            lines = self.pool.sync(progress)
        print("\n".join(lines))

    def _status(self, command: Command) -> Any:
        from nbddp.notebook.status import status_table

        answer = self.pool.status()
        print(*self.pool.elsewhere.words(), sep="\n", end="\n" * bool(self.pool.elsewhere.allocations))
        if self.pool.group.variables:
            print(f"workers have {env_options.words(sorted(self.pool.group.variables), self.pool.group.variables)}")
        if answer["keep"]:
            print(f"the warm process stays for {lasts(answer['keep'])} after this kernel ends (--keep-warm)")
        self._tell_shortcomings()
        return status_table(answer)

    def _panel(self, command: Command) -> Any:
        from nbddp.capabilities.panel.command import Panel

        return Panel(self.pool)

    def _debug(self, command: Command) -> None:
        self.debug.last()

    def _topology(self, command: Command) -> Any:
        from nbddp.capabilities.topology.figure import draw_topology

        return draw_topology(commands.planned_layout(command) or self.pool.placed())

    def _timings(self, command: Command) -> Any:
        if command.args["collectives"] and command.args["step"] is not None:
            raise BadInput("--step selects a DDP step, but --collectives shows no steps; leave out one of them")
        if command.args["collectives"]:
            return self._figure_of_collectives()
        return self._figure_of_timings(command.args["step"])

    def _figure_of_collectives(self) -> Any:
        from nbddp.capabilities.collectives.figure import draw_program

        return draw_program(self.pool.collectives())

    def _figure_of_timings(self, asked: int | None) -> Any:
        """Step `asked` of the last run that trained, or the median one; the last collectives where none trained."""
        from nbddp.analysis.wait_time import typical
        from nbddp.capabilities.timings.figure import draw_timings

        try:
            recording = self.pool.timings()
        except BadInput as no_step:
            try:
                if asked is None and self.pool.running:
                    return self._figure_of_collectives()
            except BadInput:
                pass  # neither is there: DDP is what most will have wanted
            raise no_step from None
        number = typical(recording) if asked is None else asked
        if number is None or number not in recording.numbers():
            have = recording.numbers()
            steps = (
                f"steps {have[0]} to {have[-1]} are recorded on every rank"
                if have
                else "no step was recorded on every rank"
            )
            raise BadInput(f"there is no step {number}; {steps}")
        return draw_timings(recording, number)

    def _memory(self, command: Command) -> Any:
        what, args = commands.memory_of(command), command.args
        if what == "names":
            return self.pool.sizes(*args["names"], ranks=args["ranks"])
        if what == "timeline":
            return self._figure_of_allocations(args["step"])
        from nbddp.capabilities.memory.figure import draw_memory

        return draw_memory(self.pool.memory())

    def _figure_of_allocations(self, asked: int | str | None) -> Any:
        """Step `asked`, `all` of the cell, or the step with the highest peak."""
        from nbddp.capabilities.memory.figure_timeline import draw_allocations

        step = asked if isinstance(asked, int) else None
        return draw_allocations(self.pool.allocations(step, whole=asked == "all"))

    def _compare(self, command: Command) -> Any:
        return self.pool.compare(*command.args["names"], ranks=command.args["ranks"])

    def _forecast(self, command: Command) -> Any:
        from nbddp.capabilities.forecast.figure import draw_forecast

        with self._progress() as progress:
            found = self.pool.forecast(**command.args, progress=progress)
        return draw_forecast(found)

    def _bench(self, command: Command) -> Any:
        from nbddp.capabilities.bench.command import sizes
        from nbddp.capabilities.bench.figure import draw_bench

        asked = command.args
        with self._progress() as progress:
            found = self.pool.bench(
                asked["collectives"] or ["all_reduce"], sizes(asked["smallest"], asked["largest"], asked["factor"]),
                repeat=asked["repeat"], warmup=asked["warmup"], progress=progress,
            )  # fmt: skip
        return draw_bench(found)

    @contextmanager
    def _progress(self) -> Iterator[Callable[[str], None]]:
        """Where lines of progress are shown, and gone in the end, however it ends."""
        screen = for_shell(self.shell)

        def progress(text: str) -> None:
            stop.check()
            screen.progress(text)

        try:
            yield progress
        finally:
            screen.finish([])

    def _stacks(self, command: Command) -> Any:
        from nbddp.capabilities.stacks import command as stacks_command

        run = self.pool.last_run
        if run is not None and run.error() is not None and run.positions:
            return stacks_command.of_run(run.positions, run.facts)
        if not self.pool.running:
            raise BadInput("there is no pool, so there are no stacks; a %%ddp cell or %ddp start starts one")
        assert self.pool.agent is not None
        return stacks_command.live(self.pool.agent)

    def _doctor(self, command: Command) -> Any:
        from nbddp.capabilities.doctor.examination import examine
        from nbddp.capabilities.doctor.findings import Together

        with self._progress() as progress:
            progress("checking what nbddp uses of torch, ipykernel, IPython and ipyparallel")
            found = examine(self.pool)
            hosts = self.pool.checkup(progress)
        return found if hosts is None else Together([hosts, found])

    def _push(self, command: Command) -> None:
        names = command.args["names"]
        unknown = [n for n in names if n not in self.shell.user_ns]
        if unknown:
            raise BadInput(f"{unknown[0]!r} is not defined in the notebook; assign it in a cell without %%ddp first")
        pushed = {n: self.shell.user_ns[n] for n in names}
        self.pool.push(pushed, command.args["ranks"])
        self.history.add(Ran(self._number(), None, pushed=pushed, ranks=command.args["ranks"], where=self._where()))

    def _pull(self, command: Command) -> None:
        self.shell.user_ns.update(self.pool.pull(command.args["names"], command.args["ranks"]))

    def _where(self) -> str:
        """The front end's name of the cell that runs; empty where it has none."""
        kernel = getattr(self.shell, "kernel", None)
        parent = kernel.get_parent() if kernel is not None and hasattr(kernel, "get_parent") else {}
        return str((parent or {}).get("metadata", {}).get("cellId", ""))

    def _export(self, command: Command) -> None:
        topology, args = self.pool.topology, command.args
        shape: dict[str, Any] = {}
        if topology is not None:
            spec, first = self.pool.spec, topology.workers[0]
            shape = {
                "nnodes": spec.elastic or topology.nnodes, "nproc": first.local_world_size,
                "gpus_per_proc": len(first.devices), "env": self.pool.group.variables,
            }  # fmt: skip
            shape |= {"visible": spec.visible} if spec.visible else {}
        print(*export_command.carry_out(args, shape, self.history, args["argv"]), sep="\n")

    def _submit(self, command: Command) -> None:
        args = command.args
        if (args["script"] is None) == (args["follow"] is None):
            raise BadInput("%ddp submit needs a batch script, or --follow and a job's number; name one of the two")
        job = args["follow"] or submit.submit(args["script"], args["words"])
        if args["script"] is not None:
            print(f"Slurm job {job} submitted", flush=True)
        if args["detach"]:
            print(f"%ddp submit --follow {job} follows it; !scancel {job} cancels it")
            return
        screen = for_shell(self.shell)
        try:
            cancels = args["on_stop"] == "cancel"
            print(submit.follow(job, lambda text: print(text, end="", flush=True), screen.progress, cancels))
        finally:
            screen.finish([])

    def _log(self, command: Command) -> None:
        run = self.pool.last_run
        if run is None:
            raise BadInput("no cell has run yet; run a %%ddp cell first")
        rank = command.args["rank"]
        if rank is None:
            for r, out in run.outputs.items():
                found = [str(path) for path in (out.log, *background.later_files(out.log)) if path.exists()]
                print(f"rank {r}: {', '.join(found) or 'no output'}; process: {self.pool.log_of(r)}")
            return
        if rank not in run.outputs:
            raise BadInput(f"rank {rank} took no part in the last run, which ran on {rank_words(run.outputs)}")
        text = background.whole_log(run.outputs[rank].log, run.earlier.get(rank, []))
        print(text or f"rank {rank} printed nothing", end="")

    COMMANDS: ClassVar[dict[str, Callable[[DDPMagics, Command], Any]]] = {
        "help": _help,
        "start": _start,
        "stop": _stop,
        "attach": _attach,
        "scale": _scale,
        "restart": _restart,
        "sync": _sync,
        "panel": _panel,
        "debug": _debug,
        "status": _status,
        "topology": _topology,
        "timings": _timings,
        "memory": _memory,
        "compare": _compare,
        "forecast": _forecast,
        "bench": _bench,
        "stacks": _stacks,
        "doctor": _doctor,
        "push": _push,
        "pull": _pull,
        "log": _log,
        "run": _run,
        "torchrun": _run,
        "launch": _run,
        "errors": _errors,
        "export": _export,
        "submit": _submit,
    }


def _fresh(spec: LaunchSpec) -> LaunchSpec:
    return replace(spec, fresh=True)


RESTARTED = "all workers restarted; names on them are gone"
TRANSFORMS = (cell_text.uncommented, cell_text.bodied)  # of a shell's cells, before it looks for a magic
_loaded: dict[int, DDPMagics] = {}


def load(shell: Any, asked: AskedProcess | None = None) -> None:
    """Register the magics and start warming up: the agent imports torch in its own process, and a
    thread imports ipyparallel here.

    asked: a waiting warm process that may become the agent.
    """
    unload(shell)
    magics = DDPMagics(shell, AgentClient.launch(os.environ, asked))
    _loaded[id(shell)] = magics
    shell.register_magics(magics)
    magics.assistant.install()
    for transform in TRANSFORMS:
        shell.input_transformers_cleanup.append(transform)
    magics.interrupts.install()
    magics.debug.install()
    threading.Thread(target=_import_ahead, name="nbddp-import", daemon=True).start()


def unload(shell: Any) -> None:
    """End the pool and the agent, and remove the hooks."""
    magics = _loaded.pop(id(shell), None)
    if magics is None:
        return
    magics.assistant.remove()
    for transform in TRANSFORMS:
        if transform in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.remove(transform)
    magics.interrupts.remove()
    magics.debug.remove()
    magics.pool.close()
    if magics in shell.configurables:  # `%config` would show it
        shell.configurables.remove(magics)
    for table in (shell.magics_manager.magics["line"], shell.magics_manager.magics["cell"]):
        table.pop("ddp", None)


def standing_pool() -> Pool | None:
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
