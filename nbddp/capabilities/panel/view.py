"""A panel as ipywidgets: controls that pass on what is done to them, and HTML that `page` makes of the state.

A view decides nothing. It keeps the values that it has shown, and sends only those that have changed. So a value from
the model moves a control, and does not count as the user's doing.

The block that scrolls and has the keyboard's focus is a widget of its own. It stays while its text is replaced, so a
reader keeps place and focus while ranks print.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nbddp.capabilities.panel import page
from nbddp.capabilities.panel.output import ALL
from nbddp.capabilities.panel.page import RankBlock
from nbddp.capabilities.panel.plan import PanelPlan
from nbddp.capabilities.panel.session import Session
from nbddp.capabilities.panel.state import State
from nbddp.launch import options

if TYPE_CHECKING:
    from ipywidgets import DOMWidget

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
# the front end's own colours (of VS Code where JupyterLab's are missing); one type scale (its size, and 0.85 of it for
# the secondary); a grid of 8 px; digits of equal width; places of fixed height
STYLE = """<style>
.nbddp-panel {
  --ink: var(--jp-ui-font-color1, var(--vscode-editor-foreground, #1a1a1a));
  --muted: var(--jp-ui-font-color1, var(--vscode-editor-foreground, #595959));
  --paper: var(--jp-layout-color1, var(--vscode-editor-background, #ffffff));
  --frame: var(--jp-layout-color2, var(--vscode-editorWidget-background, #f4f4f4));
  --edge: var(--jp-border-color1, var(--vscode-panel-border, #b0b0b0));
  --brand: var(--jp-brand-color1, var(--vscode-focusBorder, #33608c));
  --code: var(--jp-code-font-family, var(--vscode-editor-font-family, monospace));
  --jp-widgets-font-size: var(--jp-ui-font-size1, 13px);
  color: var(--ink); font-size: var(--jp-ui-font-size1, 13px); line-height: 1.4; overflow: visible;
  font-variant-numeric: tabular-nums; padding: 8px 0;
}
.nbddp-panel .widget-html, .nbddp-panel .widget-html-content { height: auto; line-height: 1.4; color: var(--ink) }
.nbddp-panel .widget-html-content { font-size: inherit; min-width: 0 }
.nbddp-panel small { font-size: 0.85em; color: var(--muted) }
.nbddp-panel b, .nbddp-panel th { font-weight: 600 }
.nbddp-panel .refused { border-left: 3px solid currentColor; padding-left: 8px; margin: 0 0 8px }
.nbddp-panel .nodes, .nbddp-panel .ranks { display: flex; flex-wrap: wrap; gap: 8px; margin-top: 8px }
.nbddp-panel .node { border: 1px solid var(--edge); background: var(--frame); border-radius: 4px; padding: 8px }
.nbddp-panel .rank { border: 1px solid var(--edge); background: var(--paper); border-radius: 4px; padding: 4px 8px }
.nbddp-panel .rank { min-width: 5em; line-height: 1.3 }
.nbddp-panel .line { display: flex; flex-wrap: wrap; gap: 4px 8px; align-items: center; margin-top: 8px }
.nbddp-panel .line label { flex: 0 0 5em }
.nbddp-panel .line input {
  flex: 1 1 32em; min-width: 0; font-family: var(--code); font-size: inherit; color: var(--ink);
  background: var(--frame); border: 1px solid var(--edge); border-radius: 4px; padding: 4px 8px;
}
.nbddp-panel pre {
  white-space: pre-wrap; overflow-wrap: anywhere; word-break: normal; margin: 4px 0; font-size: inherit;
  line-height: 1.4; color: var(--ink); font-family: var(--code);
}
.nbddp-panel ol.stages { display: flex; flex-wrap: wrap; gap: 0 16px; list-style: none; padding: 0; margin: 0 }
.nbddp-panel table.strip { width: 100%; table-layout: fixed; border-collapse: collapse; margin: 0; font-size: inherit }
.nbddp-panel .strip th, .nbddp-panel .strip td {
  text-align: left; height: 24px; padding: 0 8px 0 0; white-space: nowrap; overflow: hidden; text-overflow: ellipsis;
  border-bottom: 1px solid var(--edge); color: var(--ink); background: none;
}
.nbddp-panel .strip th:nth-child(1) { width: 3.5em }
.nbddp-panel .strip th:nth-child(2) { width: 7em }
.nbddp-panel .strip thead th:nth-child(n+4), .nbddp-panel .strip .number { width: 5.5em; text-align: right }
.nbddp-panel .strip.gpus thead th:nth-child(7) { width: 9em }
.nbddp-panel .strip.simulated thead th:nth-child(2) { width: clamp(7em, 18vw, 15em) }
.nbddp-panel .strip.simulated thead th:nth-child(7) { width: 3em }
.nbddp-panel .strip tr.slowest td, .nbddp-panel .strip tr.slowest th { background: var(--frame) }
.nbddp-panel .outputs { display: grid; grid-template-columns: repeat(auto-fit, minmax(15em, 1fr)); gap: 8px }
.nbddp-panel .outputs > * { border: 1px solid var(--edge); border-radius: 4px; padding: 4px 8px; min-width: 0 }
.nbddp-panel .outputs .head { white-space: nowrap; overflow: hidden; text-overflow: ellipsis }
.nbddp-panel .outputs .scrolls { height: 14em; overflow: auto; flex-direction: column-reverse; overflow-anchor: auto }
.nbddp-panel .outputs .scrolls > * { flex: 0 0 auto }
.nbddp-panel mark { background: none; color: inherit; font-weight: 600; text-decoration: underline }
.nbddp-panel .moving { margin: 0 0 8px; overflow: auto }
.nbddp-panel table.bars { border-collapse: collapse; margin: 0; font-family: var(--code); font-size: inherit }
.nbddp-panel .bars th, .nbddp-panel .bars td { text-align: left; padding: 0 8px 0 0; white-space: pre }
.nbddp-panel .bars th, .nbddp-panel .bars td, .nbddp-panel .bars tr { background: none; border: none }
.nbddp-panel svg.curves { width: 100%; max-width: 800px; height: auto; display: block }
.nbddp-panel .curves path, .nbddp-panel .curves polyline { fill: none; stroke: var(--edge) }
.nbddp-panel .curves polyline { stroke: var(--ink); stroke-width: 1.5 }
.nbddp-panel .curves .exposed { stroke: var(--brand); stroke-dasharray: 4 3 }
.nbddp-panel .curves text { fill: var(--ink); font-size: 11px }
.nbddp-panel .nbddp-plot { display: grid; width: 100%; max-width: 800px; min-width: 0 }
.nbddp-panel .nbddp-plot > * { grid-area: 1 / 1; width: auto; margin: 0 }
.nbddp-panel .nbddp-steps { z-index: 1; height: 87.5%; margin-left: 8.75% }
.nbddp-panel .nbddp-steps .slider-container, .nbddp-panel .nbddp-steps .slider { height: 100%; margin: 0 }
.nbddp-panel .nbddp-steps .noUi-target {
  height: 100%; background: none; border: none; box-shadow: none; cursor: crosshair;
}
.nbddp-panel .nbddp-steps :is(.noUi-base, .noUi-connects, .noUi-connect) { background: none !important }
.nbddp-panel .nbddp-steps .noUi-handle {
  width: 2px; height: 100%; top: 0; right: -1px; border: none; border-radius: 0; box-shadow: none; margin: 0;
  background: var(--brand); transform: none;
}
.nbddp-panel .since { padding: 4px 0 }
.nbddp-panel .notice { min-height: 1.4em }
.nbddp-panel :focus-visible { outline: 2px solid var(--brand); outline-offset: 1px }
</style>"""


class View:
    """One panel on a session."""

    def __init__(self, session: Session):
        import ipywidgets as w

        self.session, self._w, self._key = session, w, f"nbddp-panel-{next(_keys)}"
        self._shown: dict[int, str] = {}
        self._step = -1  # the selected step as the number box was told
        self._drawing = 0  # the thread that draws: what it changes is not the user's doing
        self._parts: list[tuple[Any, Callable[[State], str]]] = []
        self._blocks: list[Blocks] = []
        self.controls: dict[str, Any] = {}
        self.buttons: dict[str, Any] = {}
        self.pages = {"Launch": self._launch(), "Ranks": self._ranks(), "Output": self._output(),
                      "Timings": self._timings(), "Debugger": self._debugger()}  # fmt: skip
        self.tabs = w.ToggleButtons(options=list(self.pages), style={"button_width": "auto"})
        self.tabs.observe(lambda change: self._turn(), "value")
        foot = [self._html(page.notice), self._html(page.detail, max_height="24em", overflow="auto")]
        self.widget = w.VBox([w.HTML(STYLE), self._html(page.heading), self.tabs, *self.pages.values(), *foot])
        for shown in self.pages.values():
            shown.layout.margin = "8px 0 0"
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
        self.buttons[label] = button
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
        row = w.Box(buttons, layout=w.Layout(flex_flow="row wrap", grid_gap="8px", overflow="visible"))
        return w.VBox([row, self._html(page.running), self._html(page.strip, max_height="30em", overflow="auto")])

    # -- output --------------------------------------------------------------------------------

    def _output(self) -> Any:
        w = self._w
        self.rank = w.ToggleButtons(options=[("all ranks", ALL)], style={"button_width": "auto"})
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
        drawn = w.VBox([self._html(page.newest), plot, self._html(page.legend)], layout=w.Layout(min_height="220px"))
        return w.VBox([drawn, row, self._html(page.timeline, overflow="auto")])

    def _slid(self, change: Any) -> None:
        if self._drawing != threading.get_ident():
            self.session.select(change["new"])

    def _offer_steps(self, state: State) -> None:
        """The slider reaches from the first to the last step that is drawn, and stands at the selected one."""
        slider, points = self.slider, state.curve.points
        if not state.curve.drawn:
            slider.layout.display = "none"
            return
        first, last = points[0][0], points[-1][0]
        if (slider.min, slider.max) != (first, last):
            with slider.hold_trait_notifications():
                slider.min, slider.max = first, last
        number = state.step.number if state.step is not None else first
        if slider.value != min(max(number, first), last):
            slider.value = number
        if state.step is not None and self._step != number:
            self._step = self.step.value = number
        slider.layout.display = ""

    def _chosen(self) -> list[int] | None:
        return None if self.which.value == ALL else [self.which.value]

    # -- debugger ------------------------------------------------------------------------------

    def _debugger(self) -> Any:
        w, session = self._w, self.session
        self.line = w.Text(placeholder="p loss", description="line", continuous_update=False)
        self.whom = w.Dropdown(options=[("all ranks", ALL)], tooltip="which ranks get the line")
        self.whom.layout.width = "8em"
        send = self._button("Send", "send the line to these ranks", self._send)
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
        sent = w.Box([self.line, self.whom, send], layout=w.Layout(flex_flow="row wrap", grid_gap="8px"))
        return w.VBox([row, sent, self._html(page.no_talk), self._side_by_side(page.talks)])

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
