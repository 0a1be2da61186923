"""How a question is put to a learner, and when the prediction is compared with the result.

The answer is chosen or typed in a widget, or given to the call: `predict.local_rank(0)`. It may be changed until the
next cell has run. Then what was predicted is shown below that cell's output, beside what came, and where the question
is shown; a saved notebook keeps both. An explorer's answer has yet to be looked for: there a button shows it. Without a
prediction nothing is shown below the cell; the question reports that, can still be answered, and shows the result on
request. After a cell that failed, and not on purpose, no answer is shown: the question stays
open until the corrected cell has run.
"""

from __future__ import annotations

from html import escape
from typing import Any, TypedDict
from uuid import uuid4

from nbddp.errors import BadInput
from nbddp.figures import widget_support
from nbddp.figures.html import words_of
from nbddp.figures.page_script import CONTROLS, on_page
from nbddp.figures.table import Table
from nbddp.lessons.framework.question import Question
from nbddp.protocol.messages import Metadata, MimeBundle

CLASS = "nbddp-question"
COMPARE = "Compare with what came"
REVEAL = "Show what came"
OPEN = "The cell has run, and you predicted nothing. You can still answer, or show what came."
FAILED = "The cell failed, so the answer is not shown yet. Correct the cell and run it again."


class Change(TypedDict):
    """A widget's report of its new value, as far as it is read."""

    new: str | None


class AskedQuestion:
    """A question that was asked in this notebook kernel, and its answer."""

    def __init__(self, question: Question):
        self.question = question
        self.answer = ""
        self.over = False  # the next cell has run
        self.late = False  # it was answered, or shown, after that
        self._field: Any = None
        self._said: Any = None
        self._reveal: Any = None
        self._output: Any = None  # where it is shown: publisher and display

    def keep(self, answer: object) -> None:
        """Keep an answer. Raises BadInput for one that cannot be meant."""
        self.answer = self.question.read(answer)
        if self.over:
            self.late = True
        self._redraw()

    def reveal(self) -> None:
        """Show what came to a reader who predicted nothing."""
        self.late = True
        self._redraw()

    @property
    def settled(self) -> bool:
        """Whether nothing can be answered any more."""
        return self.over and bool(self.answer or self.late)

    def _redraw(self) -> None:
        """Have the widgets and the saved question say how it stands."""
        if self._field is not None:
            self._field.disabled = self.settled
            self._reveal.layout.display = "" if self.over and not self.settled else "none"
            self._said.value = _lines(self.status())
        if self.over and self._output is not None:
            publisher, ident = self._output
            publisher.publish(*self._repr_mimebundle_(), transient={"display_id": ident}, update=True)

    def end(self) -> None:
        """The next cell has run: what is shown of the question says what was predicted and what came."""
        self.over = True
        self._redraw()

    def status(self) -> str:
        """How it stands."""
        if self.over and not self.answer:
            return self.question.shown() if self.late else OPEN
        if self.over and (self.late or not self.question.explored):
            return self.question.verdict(self.answer, late=self.late)
        if self.over:
            return f"You predicted: {self.answer}"
        if self.answer:
            return f"You predicted: {self.answer}. Now run the next cell."
        return ""

    def compared(self) -> str:
        """What was predicted beside what came."""
        return self.question.compared(self.answer, late=self.late)

    def entry(self) -> str:
        """The answer as the summary has it: one that came after the cell is no prediction."""
        return f"{self.answer} (after the cell)" if self.answer and self.late else self.answer or "–"

    def describe(self) -> str:
        """The question, what can be answered, and how it stands."""
        name = self.question.name
        typed = "" if self.answer or self.settled else f"To answer: predict.{name}(…)"
        typed += f"; to show what came: predict.{name}.compare()" if typed and self.over else ""
        return "\n".join(filter(None, [self.question.describe(), self.status(), typed]))

    __repr__ = describe

    def widget(self) -> Any:
        """The same as widgets. Raises ImportError without ipywidgets."""
        import ipywidgets as w

        asks, self._said = w.HTML(f"<b>Predict:</b> {escape(self.question.asks)}"), w.HTML(_lines(self.status()))
        common: dict[str, Any] = {"value": self.answer or None, "disabled": self.settled}
        if self.question.options:
            room = w.Layout(width="auto", max_width="60em")
            self._field = w.RadioButtons(options=list(self.question.options), layout=room, **common)
        else:
            what = "a number" if self.question.numeric else "a word"
            common |= {"value": self.answer, "placeholder": f"{what}, then Enter"}
            self._field = w.Text(continuous_update=False, layout=w.Layout(width="20em"), **common)
        self._field.observe(self._chosen, "value")
        self._reveal = w.Button(description=REVEAL, layout=w.Layout(width="auto", align_self="flex-start"))
        self._reveal.layout.display = "" if self.over and not self.settled else "none"
        self._reveal.on_click(lambda _: self.reveal())
        asks.add_class("nbddp-asks")
        named = w.HTML(on_page(f".{CLASS}", CONTROLS))
        whole = w.VBox([named, asks, self._field, self._reveal, self._said])
        whole.add_class(CLASS)
        return whole

    def _chosen(self, change: Change) -> None:
        """Keep what was chosen or typed; other text gets a list of the expected answers."""
        if not change["new"]:
            return
        try:
            self.keep(change["new"])
        except BadInput:
            self._said.value = _lines("\n".join(filter(None, [f"{self.question.expects()}.", self.status()])))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[MimeBundle, Metadata]:
        bundle: MimeBundle = {"text/plain": self.describe(), "text/html": words_of(self.describe())}
        if widget_support.may_be_shown():
            bundle |= widget_support.view_of(self.widget())
        return bundle, {}

    def show(self) -> None:
        """Show it in the cell that runs; outside a notebook as words."""
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if shell is None:
            print(self.describe())
            return
        ident = uuid4().hex
        shell.display_pub.publish(*self._repr_mimebundle_(), transient={"display_id": ident})
        self._output = shell.display_pub, ident


class Prediction:
    """A question as `predict` has it: `predict.local_rank()` asks it, `predict.local_rank(0)` answers it as well."""

    def __init__(self, question: Question, asked: Asks):
        self.question, self._asked = question, asked
        self.__name__, self.__doc__ = question.name, question.describe()

    def __call__(self, answer: object = None) -> None:
        """Show the question. Raises BadInput for an answer that is none of the options."""
        made = AskedQuestion(self.question)
        if answer is not None:
            made.keep(answer)
        self._asked.add(made)
        made.show()

    def compare(self) -> None:
        """Show what was predicted beside what came; what came alone if the cell has run without a prediction. Raises
        BadInput before that."""
        asked = self._asked.of.get(self.question.name)
        if asked is None or not (asked.answer or asked.over):
            raise BadInput(f"nothing was predicted yet: predict.{self.question.name}() asks for it")
        if not asked.answer:
            asked.reveal()
        print(asked.compared())

    def __repr__(self) -> str:
        return f"predict.{self.question.name}(): {self.question.asks}"


class Asks:
    """All that were asked in this notebook kernel. Hears when a cell has run."""

    def __init__(self) -> None:
        self.of: dict[str, AskedQuestion] = {}
        self._new: list[str] = []  # asked in the cell that runs
        self._open: list[str] = []  # asked in cells before; the next cell ends them
        self._hooked: Any = None

    def add(self, asked: AskedQuestion) -> None:
        name = asked.question.name
        self.of[name] = asked
        self._new = [*(n for n in self._new if n != name), name]
        self._open = [n for n in self._open if n != name]
        self._hook()

    def _hook(self) -> None:
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if shell is not None and shell is not self._hooked:
            shell.events.register("post_run_cell", self.after_cell)
            self._hooked = shell

    def after_cell(self, result: Any) -> None:
        """A cell has run. One that asks shows nothing yet; one that failed ends only questions about that failure."""
        if self._new:
            self._open, self._new = self._open + self._new, []
            return
        failure = getattr(result, "error_before_exec", None) or getattr(result, "error_in_exec", None)
        waiting = [self.of[name] for name in self._open]
        ended = [asked for asked in waiting if asked.question.meant(failure)]
        self._open = [asked.question.name for asked in waiting if asked not in ended]
        for asked in ended:
            asked.end()
            if asked.answer:
                _show(asked)
        if any(self.of[name].answer for name in self._open):
            print(FAILED)

    def table(self) -> Table:
        """What was predicted, and what came, of all questions whose cell has run."""
        rows = [
            (a.question.asks, a.entry(), a.question.came, "✓" if a.question.met(a.answer) and not a.late else "✗")
            for a in self.of.values()
            if a.over
        ]
        return Table(("question", "you predicted", "what came", ""), rows)


def _show(asked: AskedQuestion) -> None:
    """Below a cell's output: what was predicted and what came, or the button for it."""
    from IPython.display import display

    if not asked.question.explored:
        print(asked.compared())
    elif widget_support.may_be_shown():
        display(_Later(asked))
    else:
        print(_Later(asked))


def _lines(text: str) -> str:
    """Lines as HTML, in the page's own letters."""
    return f'<div style="line-height: 1.5">{escape(text).replace(chr(10), "<br>")}</div>' if text else ""


class _Later:
    """A button that shows what came."""

    def __init__(self, asked: AskedQuestion):
        self.asked = asked

    def __repr__(self) -> str:
        return f"When you have found the answer: predict.{self.asked.question.name}.compare()"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> MimeBundle:
        import ipywidgets as w

        said = w.HTML()
        button = w.Button(description=COMPARE, layout=w.Layout(width="auto", align_self="flex-start"))
        button.tooltip = f"{COMPARE}: {self.asked.question.asks}"
        button.on_click(lambda _: setattr(said, "value", _lines(self.asked.compared())))
        return {"text/plain": repr(self), **widget_support.view_of(w.VBox([button, said]))}
