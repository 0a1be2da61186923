"""The text about a failed run, made once for the error, the log and the panel. Pure.

It is plain, with weight, or with weight and colour. In a terminal it has colours, as IPython's own tracebacks: of the
sixteen that the terminal chooses itself. In a notebook it has weight alone: no colour can be read on an error's
background in light and in dark (`errors.in_kernel`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nbddp.errors import (
    Cause,
    Frame,
    Left,
    Raised,
    RankState,
    RankStatus,
    RunFailed,
    WorkerFailed,
    inside,
    place,
    spans,
)
from nbddp.launch.topology import rank_words
from nbddp.protocol.position import CalledFrom

OWN = Path(__file__).parents[2].as_posix() + "/"  # so that our own files are shown from nbddp/ on, wherever that is
NO_HOST = "The next cell reports the state of the pool."
STAY = (
    "When a rank leaves, the collectives of the other ranks fail. Make the same calls on every rank before it leaves."
)
DOING = {
    RankStatus.FINISHED: "finished the cell", RankStatus.INTERRUPTED: "running", RankStatus.TERMINATED: "running",
    RankStatus.REPLACED: "still running",
}  # fmt: skip
HOST_GONE = "its host is gone"
UNSET = "wait timeout after"  # how torch begins to say that a store has no such key
WIDEST = 500  # characters of a headline's message
NAMES = 12  # of those that went with a process, so many are listed


# bold in the colour of other text: JupyterLab's bold red cannot be read on the dark red of an error in its dark theme
BOLD, RESET = "\x1b[1m", "\x1b[0m"
# of pygments's tokens, by name; yellow, cyan and white cannot be read on white, so they are not used
IN_COLOUR = {"Keyword": "blue", "Operator.Word": "blue", "String": "magenta"}
IN_WEIGHT = {"Keyword": "**", "Operator.Word": "**"}


class PlainStyle:
    """Text as it is."""

    def headline(self, text: str) -> str:
        """What failed, where and why."""
        return text

    def place(self, text: str) -> str:
        """A file and a line."""
        return text

    def mark(self, text: str) -> str:
        """The arrow and the number of the line that failed."""
        return text

    def quiet(self, text: str) -> str:
        """What few need."""
        return text

    def code(self, lines: Sequence[str]) -> list[str]:
        """Lines of a Python program that follow each other."""
        return list(lines)


class Weighted(PlainStyle):
    """Bold headline, marks and keywords, by ANSI escape sequences."""

    scheme = IN_WEIGHT

    def headline(self, text: str) -> str:
        return f"{BOLD}{text}{RESET}"

    def mark(self, text: str) -> str:
        return f"{BOLD}{text}{RESET}"

    def code(self, lines: Sequence[str]) -> list[str]:
        from pygments import highlight
        from pygments.formatters import TerminalFormatter
        from pygments.lexers import PythonLexer
        from pygments.token import Token, string_to_tokentype

        scheme: dict[Any, tuple[str, str]] = {Token: ("", "")}
        scheme |= {string_to_tokentype(name): (colour, colour) for name, colour in self.scheme.items()}
        lexer = PythonLexer(stripnl=False, ensurenl=False)
        found = highlight("\n".join(lines), lexer, TerminalFormatter(colorscheme=scheme)).split("\n")
        return found if len(found) == len(lines) else list(lines)


class Coloured(Weighted):
    """Colours too."""

    scheme = IN_COLOUR

    def place(self, text: str) -> str:
        return f"\x1b[32m{text}{RESET}"

    def quiet(self, text: str) -> str:
        return f"\x1b[2m{text}{RESET}"


PLAIN, WEIGHTED, COLOURED = PlainStyle(), Weighted(), Coloured()


def headline(cause: Cause) -> str:
    """`rank 2 raised ValueError: bad batch (cell line 9)`; one line, the same in every run."""
    return f"rank {cause.rank} {failing(cause)}"


def failing(cause: Cause) -> str:
    """What a rank did that failed: `raised ValueError: bad batch (cell line 9)`."""
    if cause.kind == "died":
        return ended(cause.code, cause.lost or HOST_GONE)
    if cause.left is not None:
        return f"left: {left_words(cause.left)}"
    place = place_of(cause.chain[-1].frames) if cause.chain else ""
    where = f" ({place})" if place else ""
    if cause.kind == "exit":
        return f"exited with code {cause.code}{where}"
    if not cause.chain:
        return "failed without giving a reason"
    return f"{_verb(cause)} {raised_words(cause.chain[-1])}{where}"


def _verb(cause: Cause) -> str:
    return f"could not {cause.stage} the cell:" if cause.stage else "raised"


def opening(cause: Cause) -> list[str]:
    """The headline of a report. A message of several lines, or a long one, is below it, as are notes."""
    if not cause.chain:
        return [headline(cause)]
    raised, lines = cause.chain[-1], _lines(cause.chain[-1])
    notes = [line for note in raised.notes for line in note.splitlines()]
    if cause.kind == "raised" and (len(lines) > 1 or len("".join(lines)) > WIDEST):
        where = f" ({place})" if (place := place_of(raised.frames)) else ""
        title = headline(cause) if _differs(lines[0]) else f"rank {cause.rank} {_verb(cause)} {raised.type}{where}:"
        return [title, *(f"    {line}" for line in (*lines, *notes))]
    said = lines if lines and _differs(lines[0]) else lines[1:]
    if cause.kind == "exit":  # Python writes all of them to stderr
        said = []
    return [headline(cause), *(f"    {line}" for line in (*said, *notes))]


def _lines(raised: Raised) -> list[str]:
    """Of a message, those that say anything."""
    return [line for line in raised.message.splitlines() if line.strip()]


def _differs(line: str) -> bool:
    """Whether the headline leaves out a part of it."""
    return without_addresses(line) != line


def raised_words(raised: Raised) -> str:
    """`ValueError: bad batch`: the type, and the first line of the message that says anything."""
    lines = _lines(raised)
    said = without_addresses(lines[0]) if lines else ""
    said = f"{said[:WIDEST]} …" if len(said) > WIDEST else said
    return f"{raised.type}: {said}" if said else raised.type


def without_addresses(message: str) -> str:
    """gloo's message of a lost connection without the place in its source, the peer's address and its advice: they
    differ from run to run."""
    found = re.match(r"\[[^]]*\.cc:\d+\] (.*?)(?: This is typically caused by .*)?$", message)
    if not found:
        return message
    return re.sub(r" ?\[[^\] ]*\]:\d+", "", found[1]).rstrip(".")


def left_words(left: Left) -> str:
    """`it destroyed the process group (cell line 7) while rank 0 waited in all_reduce #3 (cell line 5)`."""
    if left.how == "destroyed":
        at = place(left.place.file, left.place.line, left.place.name) if left.place else ""
        how = "it destroyed the process group" + (f" ({at})" if at else "")
    elif left.code is not None and left.code < 0:
        how = f"its process was killed by {signal_name(left.code)}"
    else:
        how = f"its process exited with code {left.code}"
    waiting = left.waiting
    if waiting is None:
        return how
    where = f" ({waiting.place})" if waiting.place else ""
    doing = f"waited in {waiting.call}" if waiting.call else "still needed it"
    return f"{how} while {rank_words(waiting.ranks)} {doing}{where}"


def call_words(call: CalledFrom | None) -> str:
    """`all_reduce #3` or `send to rank 1`, of a call as a worker tells it; empty without one."""
    if call is None:
        return ""
    if call.kind in ("send", "recv"):
        return call.op if call.peer is None else f"{call.op} {'to' if call.kind == 'send' else 'from'} rank {call.peer}"
    if call.kind == "wait":
        return "Work.wait()"
    number = f" #{call.sequence}" if call.sequence else ""
    return f"{call.op}{number}"


def ended(code: int | str | None, lost: str = HOST_GONE) -> str:
    """That a process ended, and how; lost: as `end_words` has it."""
    return f"died: {end_words(code, lost)}"


def end_words(code: int | str | None, lost: str = HOST_GONE) -> str:
    """How a process ended, by its wait status as Python gives it (negative: a signal). lost: of one whose end nobody
    saw."""
    if isinstance(code, int) and code < 0:
        name = signal_name(code)
        hint = "; the usual cause is that the machine ran out of memory" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    if code is None:
        return lost
    return f"its process exited with code {code}"


def signal_name(code: int) -> str:
    """The signal of a negative wait status."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def place_of(frames: Sequence[Frame]) -> str:
    """The user's innermost place, as `place` words it."""
    for frame in reversed(frames):
        if frame.user:
            return place(frame.file, frame.line, frame.name)
    return ""


def traceback_text(chain: Sequence[Raised], paint: PlainStyle = PLAIN, *, told: bool = True) -> str:
    """The remote traceback under its headline: user frames with their source, runs of library frames in one line each.
    told: the last exception of the chain is, in the headline, and is not repeated."""
    parts = []
    for raised in chain:
        if raised.relation:
            joint = {
                "direct cause": "The above exception was the direct cause of the following exception:",
                "while handling": "During handling of the above exception, another exception occurred:",
            }[raised.relation]
            parts.append(f"\n{joint}\n")
        if raised.older:
            parts.append(f"… {raised.older:,} earlier exceptions omitted\n")
        parts += frames_text(raised.frames, paint)
        if raised is not chain[-1] or not told:
            parts += said_text(raised)
        parts += group_text(raised, paint)
    return "\n".join(parts)


def said_text(raised: Raised) -> list[str]:
    return [f"{raised.type}: {raised.message}" if raised.message else raised.type, *raised.notes]


def group_text(raised: Raised, paint: PlainStyle = PLAIN) -> list[str]:
    """The exceptions in an ExceptionGroup as Python shows them: one below the other, each with its own traceback."""
    if not raised.group and not raised.more:
        return []
    parts = [traceback_text(chain, paint, told=False) for chain in raised.group]
    if raised.more:
        parts.append(f"and {raised.more} more exception{'s' if raised.more > 1 else ''}")
    lines = []
    for i, part in enumerate(parts):
        title = "..." if raised.more and i == len(parts) - 1 else str(i + 1)
        lines.append(f"  {'+-+' if not i else '  +'}---------------- {title} ----------------")
        lines += [f"    | {line}" for line in part.splitlines()]
    return [*lines, f"    +{'-' * 36}"]


def frames_text(frames: Iterable[Frame], paint: PlainStyle = PLAIN) -> list[str]:
    lines: list[str] = []
    folded: list[Frame] = []
    for frame in frames:
        if not frame.user:
            folded.append(frame)
            if frame.left_out:
                lines += [*_folded(folded, paint), *map(paint.quiet, omitted_words(frame.of, frame.left_out))]
                folded = []
            continue
        lines += _folded(folded, paint)
        folded = []
        lines.append(f"{paint.place(frame.file)}, line {frame.line}{inside(frame.name)}")
        code = paint.code([text for _, text in frame.context])
        for (number, _), text in zip(frame.context, code, strict=True):
            head = paint.mark(f"----> {number:>4}") if number == frame.line else f"      {number:>4}"
            lines.append(f"{head} {text}")
        lines += map(paint.quiet, omitted_words(frame.of, frame.left_out))
    return lines + _folded(folded, paint)


def omitted_words(of: Sequence[str], count: int = 0) -> list[str]:
    """That frames are not shown: those of a recursion. of: their functions."""
    count = count or len(of)
    return [f"  … {count:,} frame{'s' if count > 1 else ''} omitted, of {_some([*dict.fromkeys(of)])}"] if count else []


def note(error: WorkerFailed) -> str:
    """`raised on rank 1 of 4 (train.py line 8, in step)`, for an exception that goes on as itself."""
    place = place_of(error.cause.chain[-1].frames)
    return f"raised on rank {error.rank} of {len(error.states)}" + (f" ({place})" if place else "")


def with_parts(chain: Sequence[Raised]) -> Iterator[Raised]:
    """Exceptions of a chain, and those in groups behind their group."""
    for raised in chain:
        yield raised
        for part in raised.group:
            yield from with_parts(part)


def _folded(frames: list[Frame], paint: PlainStyle) -> list[str]:
    if not frames:
        return []
    last = frames[-1]
    where = last.file.replace("\\", "/").removeprefix(OWN).split("site-packages/")[-1].split("lib/")[-1]
    count = f"{len(frames)} frames, the last" if len(frames) > 1 else "1 frame"
    return [paint.quiet(f"  … {count} in {where}, {last.name}")]


def states_text(states: Sequence[RankState]) -> list[str]:
    """One line per group of ranks in the same state, in rank order."""
    groups: dict[str, list[int]] = {}
    for state in states:
        groups.setdefault(state_words(state), []).append(state.rank)
    return [f"  {rank_words(ranks)}: {words}" for words, ranks in groups.items()]


def state_words(state: RankState) -> str:
    """`cell line 9, waiting in all_reduce #14 for rank 1; unblocked, variables are kept`."""
    doing = ", ".join(w for w in (state.where, state.doing or "still running") if w)
    words = {
        **_cell_words(state, doing), **(_script_words(state, doing) if state.script else {}),
    }[state.status]  # fmt: skip
    if not state.detail:
        return words
    return f"also {state.detail}" if state.status == RankStatus.FAILED else f"{words}: {state.detail}"


def _cell_words(state: RankState, doing: str) -> dict[RankStatus, str]:
    return {
        RankStatus.FINISHED: "finished the cell",
        RankStatus.ENDED: "exited with code 0; its variables are lost",
        RankStatus.FAILED: "also failed",
        RankStatus.INTERRUPTED: f"{doing}; {'unblocked' if state.doing else 'interrupted'}, variables are kept",
        RankStatus.REPLACED: f"{doing}; {state.why}, so it is {state.fate}; {lost_words(state.lost, state.imports)}",
        RankStatus.DIED: "died",
        RankStatus.RUNNING: doing,
    }


def _script_words(state: RankState, doing: str) -> dict[RankStatus, str]:
    """Names are of no interest: they end with the script."""
    return {
        RankStatus.FINISHED: "finished",
        RankStatus.ENDED: "finished",
        RankStatus.INTERRUPTED: f"{doing}; stopped",
        RankStatus.TERMINATED: f"{doing}; stopped",
        RankStatus.REPLACED: f"{doing}; {state.why.replace('unblocked', 'stopped')}, so it was killed",
    }


def broken_words(said: str) -> str:
    """Why a process whose CUDA context is broken cannot go on."""
    return f"its CUDA context is broken ({said.removeprefix('CUDA error: ')})"


def lost_words(names: Sequence[str], imports: Sequence[str] = ()) -> str:
    """Which names went with a process: `lost: model, opt and 2 imports (np, torch)`."""
    if not names and not imports:
        return "its variables are lost"
    imported = f"{len(imports)} import{'s' if len(imports) > 1 else ''} ({_some(imports)})" if imports else ""
    return f"lost: {' and '.join(w for w in (_some(names), imported) if w)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more


def died_words(cause: Cause) -> list[str]:
    """What is known of a process that ended by itself: its memory, its last output, where its log is."""
    if cause.code is None:
        return [f"{cause.last_words or 'nbddp did not see how it exited'}.", NO_HOST]
    lines = [f"{cause.taken}."] if cause.taken else []
    facts = [f"ran on {cause.device}"] if cause.device else []
    facts += [f"held at most {cause.peak_kib / 1024:.0f} MiB"] if cause.peak_kib else []
    if facts:
        lines.append(f"It {' and '.join(facts)}.")
    words = cause.last_words
    if words:
        lines += ["Its last output:", *(f"    {line}" for line in words.splitlines())]
    if "gloo" in words:
        lines.append(
            "gloo aborts a process whose peer called the collective with a different shape or dtype. "
            "Run the cell with %%ddp --check to see the rank and the difference."
        )
    if cause.log:
        lines.append(f"Log: {cause.log}. The next cell starts a new worker for this rank; its variables are lost.")
    return lines


def failure_text(
    cause: Cause, others: Sequence[RankState], *, dropped: bool, paint: PlainStyle = PLAIN, left: Sequence[int] = ()
) -> str:
    """The report of a failed run: the headline, a line for every other state of ranks, the traceback, then what to
    type. left: ranks that had ended well before the failure."""
    title, *rest = opening(cause)
    lines = [paint.headline(title), *rest]
    if cause.kind == "died":
        lines += died_words(cause)
    if cause.left is not None:
        lines.append(STAY)
    lines += _unset_words(cause, left)
    if cause.stage:
        lines.append(f"%ddp restart --ranks {cause.rank} starts a new process for it.")
    more = [f"%ddp log --rank {cause.rank} prints its full output; %ddp stacks shows where every rank was."]
    traced = ["", traceback_text(cause.chain, paint), ""] if cause.chain else []
    last = [*_ending(dropped), *(more if dropped else []), *([cause.advice] if cause.advice else [])]
    return "\n".join([*lines, *states_text(others), *traced, *last]).rstrip()


def _unset_words(cause: Cause, left: Sequence[int]) -> list[str]:
    """Of a rank whose wait for a key of a store came to its time limit: which ranks had left, and set it no more."""
    raised = cause.chain[-1] if cause.chain else None
    if not left or raised is None or raised.type != "DistStoreError" or not raised.message.startswith(UNSET):
        return []
    have = "has" if len(left) == 1 else "have"
    return [f"No rank set the key in time; {rank_words(left)} {have} left the cell without setting it."]


def unworded_text(error: BaseException, facts: Sequence[str]) -> str:
    """What stands in the place of a report that could not be worded: what is known, as it is, and why."""
    told = [fact if len(fact) <= WIDEST * 8 else f"{fact[: WIDEST * 8]} …" for fact in facts]
    return "\n".join([*told, f"(the report could not be written because of {type(error).__name__}: {error})"])


def terminal_text(error: RunFailed, signalled: str = "") -> str:
    """A run that did not end well, for a terminal that has shown what the ranks wrote, tracebacks included. signalled:
    the signal that has ended it, if one has."""
    if not isinstance(error, WorkerFailed):
        head = f"{signalled} stopped the run" if signalled else str(error)
        return "\n".join([head, *positions_table(error.states)] if error.states else [head])
    cause = error.cause
    notes = [f"    {line}" for note in (cause.chain[-1].notes if cause.chain else ()) for line in note.splitlines()]
    lines = [headline(cause), *notes, *(died_words(cause) if cause.kind == "died" else [])]
    others = [s for s in error.states if s.rank != cause.rank]
    last = [*attempts_lines(error.attempts), *([cause.advice] if cause.advice else [])]
    return "\n".join([*lines, *states_text(others), *last])


def stopped_text(
    states: Sequence[RankState], *, dropped: bool, paint: PlainStyle = PLAIN, head: str = "stopped by the user"
) -> str:
    """The report of a run that the user stopped."""
    return "\n".join([paint.headline(head), *states_text(states), *_ending(dropped)])


def restarted_words(ranks: Sequence[int], others: Sequence[int]) -> str:
    """`rank 2 was restarted by you; ranks 0–1, 3 were stopped`."""
    was = ("was", "were")
    words = [f"{rank_words(ranks)} {was[len(ranks) > 1]} restarted by you"]
    words += [f"{rank_words(others)} {was[len(others) > 1]} stopped"] if others else []
    return "; ".join(words)


def hung_text(
    head: str,
    words: Sequence[str],
    advice: str,
    states: Sequence[RankState],
    *,
    dropped: bool,
    paint: PlainStyle = PLAIN,
) -> str:
    """The report of a run whose ranks waited for each other, or that took too long: sentences, then a table."""
    lines = [paint.headline(f"{head}: {words[0]}" if words else head), *words[1:], "", *positions_table(states), ""]
    if advice:
        lines.append(advice)
    return "\n".join([*lines, *_ending(dropped), "%ddp stacks shows the stack of every rank."])


def attempt_words(attempt: int, most: int, why: str) -> str:
    """Said between two attempts of `--max-restarts`."""
    return f"attempt {attempt} of {most}: {why}; restarting all workers"


def attempts_text(attempts: Sequence[str], text: str) -> str:
    """The last attempt's report, and a line for each attempt."""
    return "\n".join([text, "", *attempts_lines(attempts)])


def attempts_lines(attempts: Sequence[str]) -> list[str]:
    return [f"attempt {i} of {len(attempts)}: {why}" for i, why in enumerate(attempts, 1)]


def positions_table(states: Sequence[RankState]) -> list[str]:
    """ranks │ where │ what they waited in │ what became of them; ranks with the same row share it."""
    fates = {RankStatus.INTERRUPTED: "unblocked, variables are kept", RankStatus.TERMINATED: "stopped"}
    found: dict[tuple[str, str, str], list[int]] = {}
    for s in states:
        doing = s.doing or ("finished" if s.script and s.status == RankStatus.FINISHED else _doing(s.status))
        is_new = s.status == RankStatus.REPLACED
        fate = f"{s.fate}; {lost_words(s.lost, s.imports)}" if is_new else fates.get(s.status, "")
        fate = ("killed" if is_new else fate and "stopped") if s.script else fate
        found.setdefault((s.where or "–", doing, fate), []).append(s.rank)
    rows = [(spans(ranks), *row) for row, ranks in found.items()]
    return aligned([("ranks" if len(found) < len(states) else "rank", "line", "state", ""), *rows])


def _doing(status: RankStatus) -> str:
    return DOING.get(status, str(status))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text in columns; the first column to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].rjust(widths[0]), *(c.ljust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]


def _ending(dropped: bool) -> list[str]:
    if not dropped:
        return []
    return ["nbddp closed the process group. Call init_process_group() again before you use torch.distributed."]
