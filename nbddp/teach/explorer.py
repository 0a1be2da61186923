"""Explorers: sliders over a figure and its words. `from nbddp.teach import explore; explore.layout()`.

An explorer ties three things together: a pure function of `nbddp.teach`, its figure in `nbddp.draw`, and plain
ipywidgets, each with its label and usable by keyboard. Nothing is computed in a front end, nothing changes but what
the reader changes. A saved notebook, and a place without widgets, has a still picture and the words of two
settings instead.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nbddp.draw.shown import Shown, width
from nbddp.draw.stills import stills
from nbddp.errors import BadInput

WIDGET = "application/vnd.jupyter.widget-view+json"
WORDS = '<pre style="white-space: pre-wrap; line-height: 1.35; margin: 4px 0">{}</pre>'


@dataclass(frozen=True)
class Slider:
    """Whole numbers from `low` to `high`, by `step`."""

    name: str
    label: str
    low: int
    high: int
    step: int = 1

    def shown(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True)
class Choice:
    """One of some values; pairs of (what is shown, value), or values that show themselves."""

    name: str
    label: str
    options: Sequence[Any]

    def shown(self, value: Any) -> str:
        """What the reader sees for a value."""
        names = {v: text for text, v in (o for o in self.options if isinstance(o, tuple))}
        return str(names.get(value, value))


class Explorer:
    """show: the controls' values, by name → the figure with its words; it may raise BadInput, whose sentence is
    shown instead. settings: two sets of values; the first is where the controls stand at the beginning."""

    def __init__(
        self, show: Callable[..., Shown], controls: Sequence[Slider | Choice], settings: Sequence[Mapping[str, Any]]
    ):
        self.show, self.controls, self.settings = show, tuple(controls), tuple(dict(s) for s in settings)

    def caption(self, setting: Mapping[str, Any]) -> str:
        """`nodes: 2 · GPUs per node: 4`."""
        return " · ".join(f"{c.label}: {c.shown(setting[c.name])}" for c in self.controls)

    def words(self) -> str:
        """The words of the two settings, each under its caption."""
        return "\n\n".join(f"{self.caption(s)}\n{self.show(**s).words}" for s in self.settings)

    __repr__ = words

    def stills(self) -> bytes:
        """PNG of the two settings."""
        return stills([self.show(**s) for s in self.settings], [self.caption(s) for s in self.settings])

    def widget(self) -> Any:
        """The controls over the figure and its words, as an ipywidgets box."""
        import ipywidgets as w

        style, wide = {"description_width": "12em"}, w.Layout(width="30em")
        made = {c.name: _control(w, c, self.settings[0][c.name], style, wide) for c in self.controls}
        picture, words = w.Image(format="png"), w.HTML()

        def draw(change: Any = None) -> None:
            try:
                shown = self.show(**{name: control.value for name, control in made.items()})
            except BadInput as refused:
                words.value, picture.layout.display = WORDS.format(escape(str(refused))), "none"
                return
            data = shown.png()
            picture.value, picture.layout.display = data, ""
            picture.layout.width = f"{width(data)}px"
            words.value = WORDS.format(escape(shown.words))

        draw()
        for control in made.values():
            control.observe(draw, "value")
        return w.VBox([*made.values(), picture, words])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        words, data = self.words(), self.stills()
        bundle: dict[str, Any] = {"text/plain": words, "image/png": b64encode(data).decode()}
        if _in_a_kernel():
            bundle[WIDGET] = self.widget()._repr_mimebundle_()[WIDGET]
        return bundle, {"image/png": {"alt": words, "width": width(data)}}


def _control(w: Any, control: Slider | Choice, value: Any, style: Any, wide: Any) -> Any:
    if isinstance(control, Choice):
        return w.Dropdown(
            options=list(control.options), value=value, description=control.label, style=style, layout=wide
        )
    return w.IntSlider(
        value=value, min=control.low, max=control.high, step=control.step, description=control.label,
        continuous_update=False, style=style, layout=wide,
    )  # fmt: skip


def _in_a_kernel() -> bool:
    """Whether a front end may be there that shows widgets: not in a terminal's IPython, nor without ipywidgets."""
    from importlib.util import find_spec

    from IPython.core.getipython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None and find_spec("ipywidgets") is not None
