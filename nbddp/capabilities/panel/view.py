"""A panel as ipywidgets: controls that pass on what is done to them, and HTML that `page` makes of the state.

A view decides nothing. It keeps the values that it has shown, and sends only those that have changed. So a value from
the model moves a control, and does not count as the user's doing.

The block that scrolls and has the keyboard's focus is a widget of its own. It stays while its text is replaced, so a
reader keeps place and focus while ranks print.
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbddp.capabilities.panel import page
from nbddp.capabilities.panel.output import ALL
from nbddp.capabilities.panel.page import RankBlock
from nbddp.capabilities.panel.plan import PanelPlan
from nbddp.capabilities.panel.session import Session
from nbddp.capabilities.panel.state import PAGES, State, start_label, why_off
from nbddp.figures import terminal_colours
from nbddp.figures.document.page import inline_rules
from nbddp.figures.page_script import CONTROLS, list_arrow, on_page
from nbddp.launch import options

if TYPE_CHECKING:
    from ipywidgets import DOMWidget

SCRIPT = Path(__file__).with_name("panel.js")
LABEL, CONTROL = "11em", "22em"
LAUNCH = (  # field of a Plan, label, tooltip, and what kind of control
    ("nproc", "workers per node", "processes on each node", int),
    ("nnodes", "nodes", "without hosts the nodes are simulated on this machine", int),
    ("hosts", "hosts", "reached by ssh, such as nodea,nodeb; empty for this machine", str),
    ("gpus_per_proc", "GPUs per process", "consecutive GPUs of each worker", int),
    ("device", "device", "auto uses GPUs where there are any", ("auto", "cpu", "cuda")),
    ("simulate_gpus", "simulated GPUs", "simulated GPUs per node, such as 4 or 4xA100-80GB; empty for none", str),
    (
        "visible",
        "visible GPUs",
        "all (LOCAL_RANK selects, as under torchrun) or own (only the worker's)",
        ("all", "own"),
    ),
    ("oversubscribe", "share devices", "start more workers than there are GPUs, or than the memory allows", bool),
    ("hang_after", "deadlock after (s)", "seconds before a cell's deadlock is reported, or never", str),
    ("timeout", "cell timeout (s)", "seconds before a cell is stopped; empty for never", str),
    ("max_restarts", "restarts", "how many times a cell is restarted after a failure", int),
)
_keys = itertools.count()
OWN_RULES = Path(__file__).with_name("panel.css").read_text(encoding="utf-8")
STYLE = f"<style>{inline_rules()}{terminal_colours.rules()}{OWN_RULES}{list_arrow('.nbddp-panel')}</style>"


class View:
    """One panel on a session."""

    def __init__(self, session: Session):
        import ipywidgets as w

        self.session, self._w, self._key = session, w, f"nbddp-panel-{next(_keys)}"
        self._shown: dict[int, str] = {}
        self._step = -1  # the selected step as the number box has it
        self._drawing = 0  # the thread that draws: what it changes is not the user's doing
        self._parts: list[tuple[Any, Callable[[State], str]]] = []
        self._blocks: list[Blocks] = []
        self.controls: dict[str, Any] = {}
        self.buttons: dict[str, Any] = {}
        self._tooltips: dict[str, str] = {}
        made = self._launch(), self._ranks(), self._output(), self._timings(), self._debugger()
        self.pages = dict(zip(PAGES, made, strict=True))
        self.tabs = w.ToggleButtons(options=list(self.pages), style={"button_width": "auto"})
        self.tabs.add_class("nbddp-pages")
        self.tabs.observe(lambda change: self._turn(), "value")
        head = w.Box(
            [self._html(page.heading, flex="1 1 auto"), w.HTML(page.dock())], layout=w.Layout(grid_gap="8px")
        )  # fmt: skip
        scripted = w.HTML(STYLE + on_page(".nbddp-panel", CONTROLS, SCRIPT))
        self.widget = w.VBox([scripted, head, self.tabs, *self.pages.values(), self._answer()])
        for shown in self.pages.values():
            shown.layout.margin = "8px 0 0"
            shown.add_class("nbddp-page")
        self._turn()
        self.widget.add_class("nbddp-panel")
        self._close = session.open(self._changed)
        with session.model.together():  # nobody else draws meanwhile
            self._draw(session.model.state)

    def close(self) -> None:
        """Let go of the session, and of every widget."""
        self._close()
        close(self.widget)

    # -- drawing -------------------------------------------------------------------------------

    def _changed(self, before: State, now: State) -> None:
        self._draw(now)

    def _draw(self, state: State) -> None:
        for widget, words in self._parts:
            text = words(state)
            if self._shown.get(id(widget)) != text:
                self._shown[id(widget)] = text
                widget.value = text
        for blocks in self._blocks:
            blocks.draw(state)
        self._drawing = threading.get_ident()
        try:
            self._offer(state)
            self._offer_steps(state)
            self._switch(state)
            self._set(self.controls, state.plan)
            self._set(self.shown, state.showing)
        finally:
            self._drawing = 0

    def _set(self, controls: dict[str, DOMWidget], values: Any) -> None:
        for name, control in controls.items():
            if control.value != getattr(values, name):
                control.value = getattr(values, name)

    def _offer(self, state: State) -> None:
        """The ranks that there are, to choose from; a choice that is still offered is kept."""
        for choice in (self.which, self.whom):
            _choose_from(choice, [row.rank for row in state.ranks])
        _choose_from(self.rank, [out.rank for out in state.outputs])

    def _turn(self) -> None:
        """Show one page and hide the others."""
        for name, shown in self.pages.items():
            shown.layout.display = "" if name == self.tabs.value else "none"
        if self._shown:  # answers belong to a page
            with self.session.model.together():
                self._draw(self.session.model.state)

    def _answer(self) -> Any:
        """What the last command has said, on the page that it belongs to, until it is closed."""

        def here(words: Callable[[State], str]) -> Callable[[State], str]:
            return lambda state: words(state if state.page in ("", self.tabs.value) else State())

        self.close_answer = self._button("Close", "take this answer away", self.session.dismiss, flex="0 0 auto")
        said = [self._html(here(page.notice), flex="1 1 auto"), self.close_answer]
        row = self._w.Box(said, layout=self._w.Layout(grid_gap="8px", margin="8px 0 0", overflow="visible"))
        return self._w.VBox([row, self._html(here(page.detail), max_height="24em", overflow="auto")])

    def _switch(self, state: State) -> None:
        """Name Start by what it will do, and show which buttons do nothing now."""
        off = why_off(state)
        for label, button in self.buttons.items():
            why = off.get(label, "")
            (button.add_class if why else button.remove_class)("nbddp-off")
            _set(button, "tooltip", why or self._tooltips[label])
        _set(self.start, "description", start_label(state))
        has = state.page in ("", self.tabs.value) and bool(state.notice or state.detail)
        _set(self.close_answer.layout, "display", "" if has else "none")

    def _html(self, words: Callable[[State], str], **layout: Any) -> Any:
        """A place for what `words` makes of the state."""
        widget = self._w.HTML(layout=self._w.Layout(**layout))
        self._parts.append((widget, words))
        return widget

    def _side_by_side(self, blocks: Callable[[State], Sequence[page.RankBlock]]) -> Any:
        """A place for a block of each rank."""
        made = Blocks(self._w, blocks)
        self._blocks.append(made)
        return made.widget

    def _button(self, label: str, tooltip: str, press: Callable[[], None], **layout: Any) -> Any:
        button = self._w.Button(description=label, tooltip=tooltip, layout=self._w.Layout(width="auto", **layout))
        button.on_click(lambda _: press())
        self.buttons[label], self._tooltips[label] = button, tooltip
        return button

    # -- ranks ---------------------------------------------------------------------------------

    def _ranks(self) -> Any:
        w, session = self._w, self.session
        self.which = w.Dropdown(
            options=[("all ranks", ALL)], layout=w.Layout(width="8em"), tooltip="which ranks Restart restarts"
        )
        buttons = [
            self._button("Stop", "stop the running cell, as the notebook's Stop button does", session.stop),
            self._button("Free", "unblock ranks: the blocked collectives raise an error", session.free),
            self._button("Stacks", "show where every rank is", session.stacks),
            self.which,
            self._button("Restart", "new processes for these ranks", lambda: session.restart(self._chosen())),
            self._button("Shut down", "stop all workers", session.shut_down),
        ]
        buttons[0].add_class("nbddp-stop")
        row = w.Box(buttons, layout=w.Layout(flex_flow="row wrap", grid_gap="8px", overflow="visible"))
        return w.VBox([row, self._html(page.running), self._html(page.strip, max_height="30em", overflow="auto")])

    # -- output --------------------------------------------------------------------------------

    def _output(self) -> Any:
        w = self._w
        self.rank = w.ToggleButtons(options=[("all ranks", ALL)], style={"button_width": "auto"})
        if "tooltip" in w.ToggleButtons.class_trait_names():  # ipywidgets 8
            self.rank.tooltip = "whose output is shown"
        search = w.Text(placeholder="search", description="search", continuous_update=True)
        differ = w.Checkbox(description="only differences", indent=False)
        self.shown = {"rank": self.rank, "search": search, "differences": differ}
        for name, control in self.shown.items():
            control.observe(lambda change, name=name: self._shows(name, change["new"]), "value")
        row = w.Box([self.rank, search, differ], layout=w.Layout(flex_flow="row wrap", grid_gap="8px"))
        return w.VBox([row, self._html(page.moving), self._html(page.no_output), self._side_by_side(page.output)])

    def _shows(self, name: str, value: Any) -> None:
        if self._drawing != threading.get_ident() and value is not None:
            self.session.show(name, value)

    # -- timings -------------------------------------------------------------------------------

    def _timings(self) -> Any:
        """The curve lies under a slider as large as it is: a click there, or an arrow key, selects a step."""
        w = self._w
        self.step = w.BoundedIntText(min=0, max=10**9, description="step")
        show = self._button("Show", "the timeline of this step", lambda: self.session.select(self.step.value))
        row = w.Box([self.step, show], layout=w.Layout(flex_flow="row wrap", grid_gap="8px", overflow="visible"))
        self.slider = w.IntSlider(min=0, max=1, readout=False, continuous_update=False, layout=w.Layout(display="none"))
        self.slider.add_class("nbddp-steps")
        self.slider.observe(self._slid, "value")
        plot = w.Box([self._html(page.curves), self.slider], layout=w.Layout(overflow="visible"))
        plot.add_class("nbddp-plot")
        self._room = w.VBox([self._html(page.newest), plot, self._html(page.legend)])
        more = [self._html(page.meters), self._html(page.past, overflow="auto")]
        return w.VBox([self._room, *more, row, self._html(page.timeline, overflow="auto")])

    def _slid(self, change: Any) -> None:
        if self._drawing != threading.get_ident():
            self.session.select(change["new"])

    def _offer_steps(self, state: State) -> None:
        """The slider reaches from the first to the last step that is drawn, and stands at the selected one."""
        slider = self.slider
        may_come = bool(state.program) or state.curve.drawn  # what is below does not move when the first step comes
        self._room.layout.min_height = "250px" if may_come else None
        if not state.curve.drawn:
            slider.layout.display = "none"
            return
        first, last = state.curve.first, state.curve.last
        bounds = (("max", last), ("min", first))  # without holding notifications: that would hold a reader's move too
        for name, value in bounds if last >= slider.min else bounds[::-1]:
            _set(slider, name, value)
        number = state.wanted if state.wanted >= 0 else first  # not the one that is drawn: keys are faster
        if slider.value != min(max(number, first), last):
            slider.value = number
        if state.wanted >= 0 and self._step != number:
            self._step = self.step.value = number
        slider.layout.display = ""

    def _chosen(self) -> list[int] | None:
        return None if self.which.value == ALL else [self.which.value]

    # -- debugger ------------------------------------------------------------------------------

    def _debugger(self) -> Any:
        w, session = self._w, self.session
        self.line = w.Text(placeholder="p loss", description="line", continuous_update=False)
        self.line.add_class("nbddp-line")
        self._ask, self._told = w.Text(continuous_update=False), w.HTML()
        self._ask.add_class("nbddp-ask")
        self._ask.observe(lambda change: self._complete(change["new"]), "value")
        self.whom = w.Dropdown(options=[("all ranks", ALL)], tooltip="which ranks get the line")
        self.whom.layout.width = "8em"
        send = self._button("Send", "send the line to these ranks", self._send)
        send.add_class("nbddp-send")
        steps = [
            self._button(label, tooltip, functools.partial(session.debug, command))
            for label, tooltip, command in (
                ("Next", "all ranks: the next line", "next"), ("Step in", "all ranks: into a call", "step"),
                ("Out", "all ranks: to the end of the function", "return"),
                ("Continue", "all ranks: continue", "continue"),
            )
        ]  # fmt: skip
        after = self._button("Post-mortem", "variables of the rank that failed first", session.post_mortem)
        row = w.Box([*steps, after], layout=w.Layout(flex_flow="row wrap", grid_gap="8px", overflow="visible"))
        wraps = w.Layout(flex_flow="row wrap", grid_gap="8px", overflow="visible")
        sent = w.Box([self.line, self.whom, send, self._ask, self._told], layout=wraps)
        keys = w.HTML(page.LINE_KEYS)
        talks = self._side_by_side(page.talks)
        talks.add_class("talks")
        return w.VBox([row, sent, keys, self._html(page.no_talk), talks])

    def _complete(self, asked: str) -> None:
        """Answer what the page asks for: a number, a colon, and the line that is being typed."""
        number, _, line = asked.partition(":")
        whom = None if self.whom.value == ALL else self.whom.value

        def told(names: list[str]) -> None:
            answer = json.dumps({"asked": int(number), "line": line, "names": names})
            self._told.value = f'<div class="nbddp-told" hidden>{escape(answer)}</div>'

        if number.isdecimal():
            self.session.complete(line, whom, told)

    def _send(self) -> None:
        if self.line.value.strip():
            whom = None if self.whom.value == ALL else self.whom.value
            self.session.debug(self.line.value.strip(), whom)
            self.line.value = ""

    # -- launch --------------------------------------------------------------------------------

    def _launch(self) -> Any:
        w = self._w
        rows = [part for row in LAUNCH if row[0] in options.known() for part in self._row(*row)]
        left = w.VBox(rows, layout=w.Layout(flex=f"0 0 {CONTROL}", overflow="visible"))
        right = w.VBox(
            [
                self._html(lambda s: page.layout(s.considered)),
                self._html(self._lines),
            ],
            layout=w.Layout(flex=f"1 1 {CONTROL}", min_width="0", overflow="visible"),
        )
        self.start = self._button("Start", "start the planned workers", self.session.start)
        self.start.button_style = "primary"
        grid = w.Box([left, right], layout=w.Layout(flex_flow="row wrap", grid_gap="16px", overflow="visible"))
        foot = w.HBox([self.start, self._html(page.start, flex="1 1 auto")], layout=w.Layout(grid_gap="16px"))
        return w.VBox([grid, foot])

    def _lines(self, state: State) -> str:
        return page.lines(state.considered, self._key)

    def _row(self, name: str, label: str, tooltip: str, kind: Any) -> tuple[Any, Any]:
        """A control, and below it why the plan is impossible, if it is the cause."""
        control = self.controls[name] = self._control(name, label, tooltip, kind)

        def move(change: Any) -> None:
            if self._drawing != threading.get_ident():
                self.session.move(name, change["new"])

        control.observe(move, "value")
        return control, self._html(lambda s: page.refusal(s.considered, name), margin="0 0 0 8px")

    def _control(self, name: str, label: str, tooltip: str, kind: Any) -> Any:
        w = self._w
        common: dict[str, Any] = {
            "value": getattr(PanelPlan(), name), "description": label, "style": {"description_width": LABEL},
            "layout": w.Layout(width=CONTROL),
        }  # fmt: skip
        if "tooltip" in w.Dropdown.class_trait_names():  # ipywidgets 8
            common["tooltip"] = tooltip
        if kind is int:
            return w.BoundedIntText(min=0 if name == "max_restarts" else 1, max=4096, **common)
        if kind is bool:
            return w.Checkbox(indent=True, **common)
        if kind is str:
            return w.Text(continuous_update=False, **common)
        return w.Dropdown(options=list(kind), **common)


def _set(widget: Any, name: str, value: Any) -> None:
    """Set a trait if it has another value: each assignment of a new one is a message."""
    if getattr(widget, name) != value:
        setattr(widget, name, value)


def _choose_from(choice: Any, ranks: Sequence[int]) -> None:
    """Offer all ranks and each of them, if something else is offered."""
    options = (("all ranks", ALL), *((f"rank {rank}", rank) for rank in ranks))
    if tuple(choice.options) != options:
        before = choice.value
        choice.options = options
        if before in ranks:
            choice.value = before


# -- what ranks say, side by side ------------------------------------------------------------------


class Blocks:
    """A block for each rank of which `blocks` has something to say; `widget` has them all."""

    def __init__(self, w: Any, blocks: Callable[[State], Sequence[RankBlock]]):
        self._w, self._of = w, blocks
        self._made: dict[int, Any] = {}  # rank → its widgets: all, the head, the text
        self.widget = w.Box()
        self.widget.add_class("outputs")

    def draw(self, state: State) -> None:
        wanted = self._of(state)
        for block in wanted:
            made = self._made.get(block.rank) or self._make()
            self._made[block.rank] = made
            for widget, text in ((made[1], block.head), (made[2], block.text)):
                if widget.value != text:
                    widget.value = text
        ranks = [block.rank for block in wanted]
        gone = [self._made.pop(rank)[0] for rank in sorted(self._made.keys() - ranks)]
        shown = tuple(self._made[rank][0] for rank in ranks)
        if self.widget.children != shown:
            self.widget.children = shown
        for block in gone:
            close(block)

    def _make(self) -> tuple[Any, Any, Any]:
        w = self._w
        head, text = w.HTML(), w.HTML()
        keys = {"tabbable": True} if "tabbable" in w.Box.class_trait_names() else {}  # ipywidgets 8
        scrolls = w.Box([text], **keys)  # with a tooltip it would have no view: the front end looks for a description
        scrolls.add_class("scrolls")
        return w.VBox([head, scrolls]), head, text


def close(widget: Any) -> None:
    """Let go of a widget and of all in it."""
    for child in getattr(widget, "children", ()):
        close(child)
    widget.close()
