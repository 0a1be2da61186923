"""Tab and `?` in `%%ddp` cells: rank 0's answers in the notebook's own tooltips.

Options of a line are completed from the grammar; names in the body by asking rank 0 over its control channel, which
answers while a cell runs. Without a pool, or without an answer in time, the notebook's own completion goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from IPython.core import completer as ipython_completer

from nbddp.capabilities.completion.lines import at_cursor, command_of, complete_cell, complete_command
from nbddp.execution.cell_text import Parted, parted
from nbddp.protocol.codec import from_json
from nbddp.protocol.position import Whereabouts
from nbddp.protocol.run_spec import Question

if TYPE_CHECKING:
    from nbddp.pool.pool import WorkerPool
    from nbddp.pool.state import PoolState

COMPLETION: Any = getattr(ipython_completer, "SimpleCompletion", SimpleNamespace)
TYPES = "jupyter_types_experimental"  # the messaging protocol has it with an underscore
WORD = "magic"  # the kind of a subcommand
PATIENCE = 1.0  # seconds; a tooltip that comes later is not wanted


class CompletionPart:
    """Hooks into one shell's completer and its kernel's inspection."""

    def __init__(self, pool: PoolState):
        decorate = getattr(ipython_completer, "context_matcher", None)  # not in IPython 7, which Colab and Kaggle have
        self._matcher = decorate and decorate(identifier="nbddp")(lambda context: self.match(context))
        self._inspect: Any = None
        self._complete: Any = None

    def installed(self, shell: Any, pool: Callable[[], WorkerPool]) -> None:
        self.shell, self.pool = shell, pool
        kernel = getattr(shell, "kernel", None)
        if self._matcher:
            shell.Completer.custom_matchers.append(self._matcher)
        elif kernel is not None:
            self._complete = kernel.do_complete
            kernel.do_complete = self.do_complete
        if kernel is not None:
            self._inspect = kernel.do_inspect
            kernel.do_inspect = self.do_inspect

    def removed(self) -> None:
        if self._matcher and self._matcher in self.shell.Completer.custom_matchers:
            self.shell.Completer.custom_matchers.remove(self._matcher)
        if self._complete is not None:
            self.shell.kernel.do_complete = self._complete
        if self._inspect is not None:
            self.shell.kernel.do_inspect = self._inspect

    def match(self, context: Any) -> Any:
        """IPython's matcher: completions at the cursor; in %ddp and %%ddp lines only nbddp's own."""
        until = context.text_until_cursor
        cell = parted(context.full_text)
        if cell is not None and until.startswith("%%ddp ") and context.cursor_line == cell.top:
            return _words(complete_cell(until[6:]), until)
        if until.lstrip().startswith("%ddp "):
            line = until.lstrip()[5:]
            found = complete_command(line)
            return {"completions": []} if found is None else _words([*found, *self._names(line)], until)
        if cell is not None and context.cursor_line > cell.top:
            return self._on_rank_0(cell, context)
        return {"completions": []}

    def _names(self, line: str) -> list[str]:
        """Names that may come next where a subcommand takes some: the notebook's, or those that rank 0 keeps."""
        command, rest = command_of(line)
        current, taken = at_cursor(rest)
        if command is None or not command.names or line == command.name or current.startswith("-"):
            return []
        if command.names == "notebook":
            known = [name for name in self.shell.user_ns if name not in self.shell.user_ns_hidden]
        else:
            answer = self.pool().ask(0, Question.of("where", names=True), PATIENCE)
            known = [*(from_json(Whereabouts, answer or {}).names or ())]
        return sorted(n for n in known if n.startswith(current) and not n.startswith("_") and n not in taken)

    def _on_rank_0(self, cell: Parted, context: Any) -> Any:
        body = cell.body
        before = body.split("\n")[: context.cursor_line - cell.top - 1]
        cursor = sum(len(row) + 1 for row in before) + len(context.text_until_cursor)
        answer = self.pool().ask(0, Question.of("complete", code=body, cursor_pos=cursor), PATIENCE)
        if not answer or not answer.get("matches"):
            return {"completions": []}
        fragment = body[answer["cursor_start"] : cursor]
        if answer["matches"][0].startswith(".") and "." in fragment:
            # IPython 8 counts from the word's start, and answers from its dot
            fragment = fragment[fragment.rindex(".") :]
        return _result(answer["matches"], fragment, answer["kinds"])

    def do_complete(self, code: str, cursor_pos: int) -> Any:
        """The notebook kernel's complete request, for an IPython whose matchers do not see the whole cell."""
        until = code[:cursor_pos].split("\n")
        found = self.match(SimpleNamespace(full_text=code, text_until_cursor=until[-1], cursor_line=len(until) - 1))
        if not found["completions"]:
            return self._complete(code, cursor_pos)
        start, completions = cursor_pos - len(found["matched_fragment"]), found["completions"]
        typed = [{"start": start, "end": cursor_pos, "text": c.text, "type": c.type or "", "signature": ""}
                 for c in completions]  # fmt: skip
        return {
            "matches": [completion.text for completion in completions],
            "cursor_start": start,
            "cursor_end": cursor_pos,
            "metadata": {f"_{TYPES}": typed},
            "status": "ok",
        }

    def do_inspect(self, code: str, cursor_pos: int, *args: Any, **kwargs: Any) -> Any:
        """The notebook kernel's inspect request: for the body of a `%%ddp` cell, rank 0 answers."""
        cell = parted(code)
        at = -1 if cell is None else cursor_pos - len(code) + len(cell.body)
        if cell is not None and cell.body and at >= 0:
            detail = args[0] if args else kwargs.get("detail_level", 0)
            question = Question.of("inspect", code=cell.body, cursor_pos=at, detail_level=detail)
            answer = self.pool().ask(0, question, PATIENCE)
            if answer and answer.get("found"):
                return answer
        return self._inspect(code, cursor_pos, *args, **kwargs)


def _words(found: list[str], until: str) -> Any:
    current = "" if until.endswith(" ") else until.split()[-1]
    return _result(found, current, ["param" if word.startswith("-") else WORD for word in found])


def _result(found: list[str], fragment: str, kinds: list[str]) -> Any:
    return {
        "completions": [COMPLETION(text=text, type=kind or None) for text, kind in zip(found, kinds, strict=True)],
        "matched_fragment": fragment,
        "suppress": True,
    }
