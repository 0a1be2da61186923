"""Explorers: sliders over a figure and its words. `from nbddp.teach import explore; explore.layout()`.

An explorer ties three things together: a lesson's simulation, its figure, and plain ipywidgets, each with its label and
usable by keyboard. Nothing is computed in a front end, and nothing changes but what the reader changes. A saved
notebook, and a place without widgets, has two still pictures and their words instead.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from nbddp.errors import BadInput
from nbddp.figures import widget_support
from nbddp.figures.figure import DescribedFigure, stills, width_of
from nbddp.figures.html import FOLDED, folded, picture, words_of
from nbddp.figures.page_script import CONTROLS, list_arrow, on_page
from nbddp.protocol.messages import Metadata, MimeBundle

SLIDER_KEYS = "← and → move a slider"
LIST_KEYS = "Space opens a list, ↑, ↓ and Enter choose"  # closed, JupyterLab takes the arrows: they go to another cell
BUTTON_KEYS = "Space presses a button"
KEYS = '<small style="opacity: 0.75">{}</small>'
CLASS = "nbddp-explorer"  # CSS class; its sliders keep their keys in Notebook 7 (figures/labextensions)
TEXT = "nbddp-text"  # of the folded words
HEADER = f".{TEXT} :is(.lm-Widget, .p-Widget) {{color: var(--jp-ui-font-color0, inherit)}}"  # ipywidgets' is too faint
FOCUS = "outline: 2px solid var(--jp-ui-font-color0, #33608c) !important; outline-offset: 1px"
ALL = f".{CLASS}.{CLASS}.{CLASS}"  # the class thrice: ipywidgets' own rules take the ring away from sliders
HANDLE = f"{ALL} .noUi-handle"  # of 16 px; around it, as much again takes the pointer
CONTROLS_STYLE = (
    f"{ALL} :focus-visible {{{FOCUS}}} .{CLASS} :is(button, select) {{min-height: 24px}} "
    f"{HANDLE} {{border: 1px solid var(--jp-ui-font-color2, #595959)}} {HANDLE}::before {{content: ''; display: block; "
    "position: absolute; inset: -6px; width: auto; height: auto; background: none} "
    f"@media (prefers-reduced-motion: reduce) {{.{CLASS} * {{transition: none !important}}}} "
)
PACE = 1000  # milliseconds from a step to the next, when it is played
LETTER, FIELD = 0.58, 22.0  # em: a letter, with something to spare; a slider with its number
LARGER = 1.25  # than a figure's own size, beside controls: text of 6.6 points, the smallest there is, has 11 pixels


def shown_width(png: bytes) -> int:
    """The width of an explorer's picture on a page, in CSS pixels."""
    return round(LARGER * width_of(png))


@dataclass(frozen=True)
class Control:
    """What a reader sets of an explorer. at: where it stands at the beginning, and in the second still."""

    name: str
    label: str
    _: KW_ONLY
    at: tuple[Any, Any]

    def shown(self, value: Any) -> str:
        """What the reader sees for a value."""
        return str(value)


@dataclass(frozen=True)
class Slider(Control):
    """Whole numbers from `low` to `high`, by `step`."""

    low: int
    high: int
    step: int = 1


@dataclass(frozen=True)
class Steps(Slider):
    """The moves of something that goes on by itself: a slider with Play, a button back and a button forward. to_all:
    whether the highest number is as many as there are. moves: of what was simulated, how many there are; past them the
    slider does not go. None: as many as `high`."""

    to_all: bool = False
    moves: Callable[[Any], int] | None = None

    def most(self, simulated: Any) -> int:
        """The highest number that changes anything."""
        return self.high if self.moves is None else max(self.low + 1, min(self.high, self.moves(simulated)))

    def shown(self, value: Any) -> str:
        return "all" if self.to_all and value == self.high else super().shown(value)


@dataclass(frozen=True)
class Choice(Control):
    """One of some values; pairs of (what is shown, value), or values that show themselves."""

    options: Sequence[Any]

    def shown(self, value: Any) -> str:
        names = {v: text for text, v in (o for o in self.options if isinstance(o, tuple))}
        return str(names.get(value, value))


class Explorer:
    """An idea under controls, whose values `simulate` takes by name; `draw` makes a figure with words of the result.

    If `simulate` raises BadInput, its sentence is shown instead. settings: the values of the first still and those of
    the second; begins: where the controls do not stand as in the first still when a page shows them. So every control
    changes something there, and no question of the lesson is answered.
    """

    def __init__(
        self,
        about: str | None,
        simulate: Callable[..., Any],
        draw: Callable[[Any], DescribedFigure],
        *controls: Slider | Choice,
        begins: Mapping[str, object] | None = None,
    ):
        self.__doc__ = about
        self.simulate, self.draw, self.controls = simulate, draw, controls
        self.settings = tuple({c.name: c.at[still] for c in controls} for still in range(2))
        self.begins = {**self.settings[0], **(begins or {})}

    def __call__(self) -> Explorer:
        return self

    def show(self, **chosen: Any) -> DescribedFigure:
        """The figure for some values of the controls."""
        return self.draw(self.simulate(**chosen))

    def caption(self, setting: Mapping[str, object]) -> str:
        """`nodes: 2 · GPUs per node: 4`."""
        return " · ".join(f"{c.label}: {c.shown(setting[c.name])}" for c in self.controls)

    def describe(self) -> str:
        """The text of the two settings, each under its caption."""
        return self._words([self.show(**s) for s in self.settings])

    __repr__ = describe

    def _words(self, figures: Sequence[DescribedFigure]) -> str:
        return "\n\n".join(f"{self.caption(s)}\n{f.words}" for s, f in zip(self.settings, figures, strict=True))

    def keys(self) -> str:
        """How the controls are moved without a mouse, in a sentence."""
        kinds = {Slider: SLIDER_KEYS, Steps: BUTTON_KEYS, Choice: LIST_KEYS}
        ways = [text for kind, text in kinds.items() if any(isinstance(c, kind) for c in self.controls)]
        return "; ".join(["Keys: Tab goes from control to control", *ways])

    def stills(self) -> bytes:
        """PNG of the two settings."""
        return self._stills([self.show(**s) for s in self.settings])

    def _stills(self, figures: Sequence[DescribedFigure]) -> bytes:
        return stills(figures, [self.caption(s) for s in self.settings])

    def widget(self) -> Any:
        """The controls over the figure and its words, which are folded. Raises ImportError without ipywidgets."""
        import ipywidgets as w

        label = max(12.0, *(LETTER * len(c.label) for c in self.controls))  # em; all controls begin on one line
        made = {c.name: _control(w, c, self.begins[c.name], label) for c in self.controls}
        rows = [_with_buttons(w, made[c.name]) if isinstance(c, Steps) else made[c.name] for c in self.controls]
        style = f"<style>{HEADER}{CONTROLS_STYLE}{list_arrow(f'.{CLASS}')}</style>"
        drawn, refusal, words = w.HTML(), w.HTML(), w.HTML()
        keys = w.HTML(style + KEYS.format(self.keys()) + on_page(f".{CLASS}", CONTROLS))
        text = w.Accordion(children=[words], selected_index=None)  # closed
        text.set_title(0, FOLDED)  # ipywidgets 7 has no `titles`
        text.add_class(TEXT)
        drawn.layout.margin = "6px 0 0 0"

        def draw(change: Any = None) -> None:
            chosen = {name: control.value for name, control in made.items()}
            try:
                found = self.simulate(**chosen)
            except BadInput as refused:
                refusal.value = words_of(str(refused))
                drawn.layout.display = text.layout.display = "none"
                return
            self._limit(made, found)
            if chosen != {name: control.value for name, control in made.items()}:
                return  # a slider has moved with its end, and that is drawn
            shown = self.draw(found)
            data = shown.png()
            drawn.value = picture(data, shown_width(data), shown.words.partition("\n")[0], "widget-image")
            refusal.value, words.value = "", words_of(shown.words)
            drawn.layout.display = text.layout.display = ""

        for control in made.values():
            control.observe(draw, "value")
        draw()
        whole = w.VBox([*rows, drawn, refusal, text, keys])
        whole.add_class(CLASS)
        return whole

    def _limit(self, made: Mapping[str, Any], simulated: Any) -> None:
        """Have sliders end at the last move that there is; one that stood at the end stays there."""
        for control in self.controls:
            if isinstance(control, Steps) and made[control.name].max != (most := control.most(simulated)):
                slider = made[control.name]
                was_last, slider.max = slider.value == slider.max, most
                if was_last and control.to_all:
                    slider.value = most

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[MimeBundle, Metadata]:
        figures = [self.show(**s) for s in self.settings]
        words, data = self._words(figures), self._stills(figures)
        html = picture(data, width_of(data), words.partition("\n")[0]) + folded(words)
        bundle: MimeBundle = {"text/html": html, "text/plain": words, "image/png": b64encode(data).decode()}
        if widget_support.may_be_shown():
            bundle |= widget_support.view_of(self.widget())
        return bundle, {"image/png": {"alt": words, "width": width_of(data)}}


def _control(w: Any, control: Slider | Choice, value: Any, label: float) -> Any:
    """The widget of a control whose label has `label` em of room."""
    common = {"value": value, "description": control.label}
    common |= {
        "style": {"description_width": f"{label}em"},
        "layout": w.Layout(width=f"{label + FIELD}em", max_width="100%"),
    }
    if "tooltip" in w.Dropdown.class_trait_names():  # ipywidgets 8 would give the label the tooltip "null"; 7 its text
        common["tooltip"] = control.label
    if isinstance(control, Choice):
        longest = max(len(o[0] if isinstance(o, tuple) else str(o)) for o in control.options)
        common["layout"].width = f"{label + max(FIELD, LETTER * longest + 3)}em"  # 3: the arrow
        return w.Dropdown(options=list(control.options), **common)
    bounds = {"min": control.low, "max": control.high, "step": control.step}
    return w.IntSlider(**bounds, continuous_update=False, **common)


def _with_buttons(w: Any, slider: Any) -> Any:
    """The slider, and beside it what plays it, a button that takes a step back and one that takes the next. Both can
    always be pressed: one that is switched off at the end would drop the keyboard's focus."""

    def button(text: str, by: int) -> Any:
        made = w.Button(description=text, tooltip=f"{slider.description}: {text}", layout=w.Layout(width="5em"))

        def press(_: Any) -> None:
            slider.value = min(max(slider.value + by * slider.step, slider.min), slider.max)

        made.on_click(press)
        return made

    play = w.Play(min=slider.min, max=slider.max, step=slider.step, value=slider.value, interval=PACE)
    play.show_repeat = False
    w.jslink((slider, "max"), (play, "max"))
    w.jslink((play, "value"), (slider, "value"))  # in the front end, so that it plays while the notebook kernel draws
    presses = w.HBox([play, button("back", -1), button("next", 1)], layout=w.Layout(flex="0 0 auto"))
    row = w.HBox(
        [slider, presses], layout=w.Layout(flex_flow="row wrap")
    )  # in a narrow column they are below, together
    row.add_class("nbddp-steps-row")
    return row
