"""The widgets of one pool's ranks: what they say, what stays of them, and what their readers do.

A mirror is a widget in the notebook that stands for one on a rank. It has the id and the state of the rank's widget, so
that the front end finds it after a reload and can move it. What the reader does goes on to the rank, whose answer comes
back as any change does.
"""

from __future__ import annotations

import functools
import html
import re
import sys
import threading
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from nbddp.output.buffer import model_id
from nbddp.output.layout import BAR
from nbddp.protocol.codec import Json
from nbddp.protocol.messages import MimeBundle

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution
    from nbddp.pool.state import PoolState


IDENTITY = ("model_name", "model_module", "model_module_version", "view_name", "view_module", "view_module_version")


class WidgetsPart:
    def __init__(self, pool: PoolState):
        self._pool, self._widgets = pool, Widgets(self._send)
        self._settled: list[MimeBundle] = []  # of the run that is on
        self.display_words, self.display_over = self._widgets.describe, self._widgets.is_over

    def message(self, rank: int, kind: str, content: CommContent, buffers: Sequence[Any]) -> bool:
        self._widgets.take(rank, kind, content, buffers)
        return may_end_bar(kind, content)

    def run_begins(self, run: Execution) -> None:
        self._widgets.begin()

    def display_left(self, data: MimeBundle, rich: bool) -> MimeBundle:
        self._settled.append(data)
        return self._widgets.settled(data, reflect if rich and can_reflect() else None)

    def run_ended(self, run: Execution) -> None:
        settled, self._settled = self._settled, []
        self._widgets.drop_bars(settled)

    def ranks_ended(self, ranks: Collection[int]) -> None:
        self._widgets.forget(ranks)

    def _send(self, rank: int, ident: str, data: WidgetMessage, buffers: Sequence[bytes]) -> None:
        """What a front end has sent to a widget. Of a rank that has ended the widget stays as it was."""
        with suppress(ReferenceError):  # the pool has ended
            if self._widgets.has(ident) and (wire := self._pool.group.wire) is not None:
                wire.tell_kernel(rank, "comm_msg", {"comm_id": ident, "data": data}, buffers, _print_of_callback)


def _print_of_callback(rank: int, kind: str, content: Json) -> None:
    """What a widget's callback prints on a rank; where a callback's print in the notebook itself would go."""
    if kind == "stream":
        out = sys.stderr if content["name"] == "stderr" else sys.stdout
        print(*(f"rank {rank}{BAR}{line}" for line in content["text"].splitlines()), sep="\n", file=out, flush=True)
    elif kind == "error":
        print(f"rank {rank}{BAR}{content['ename']}: {content['evalue']}", file=sys.stderr, flush=True)


# -- widgets that stand for those of ranks ---------------------------------------------------------


def reflect(model: WidgetModel, answer: Answer) -> Mirror:
    """A mirror of a rank's widget; `answer` is given what the front end sends. Raises ImportError without
    ipywidgets."""
    mirror: Mirror = _mirror_class()(model, answer)
    return mirror


def can_reflect() -> bool:
    """Whether ipywidgets is here and works: only the import tells."""
    try:
        _mirror_class()
    except ImportError:
        return False
    return True


@functools.cache
def _mirror_class() -> Any:
    from ipywidgets import Widget

    class Reflection(Widget):  # type: ignore[misc]
        """Its state is the model's, word for word; traits of its own it has none but those that say what it is."""

        def __init__(self, model: WidgetModel, answer: Answer):
            self.model, self.answer = model, answer
            super().__init__(model_id=model.ident)
            self.on_msg(self.custom)

        def open(self) -> None:
            for name in IDENTITY:
                if f"_{name}" in self.model.state:
                    self.set_trait(f"_{name}", self.model.of(name))
            super().open()

        def get_state(self, key: Any = None, drop_defaults: bool = False) -> Json:
            keys = self.model.state if key is None else [key] if isinstance(key, str) else key
            return {k: self.model.state[k] for k in keys if k in self.model.state}

        def set_state(self, sync_data: Json) -> None:
            """The front end has changed something."""
            self.model.state.update(sync_data)
            state, paths, buffers = apart(sync_data)
            self.answer({"method": "update", "state": state, "buffer_paths": paths}, buffers)

        def custom(self, widget: Any, content: Any, buffers: Any) -> None:
            """The front end has sent a message of the widget's own."""
            self.answer({"method": "custom", "content": content}, [bytes(b) for b in buffers or ()])

        def pass_on(self, data: WidgetMessage, buffers: Sequence[bytes]) -> None:
            """What the rank has sent to the front end."""
            if self.comm is not None:
                self.comm.send(data=data, buffers=list(buffers))

    return Reflection


# -- widgets and their states ------------------------------------------------------------------------

TARGET = "jupyter.widget"
REFERENCE = "IPY_MODEL_"
BLOCKS = " ▏▎▍▌▋▊▉█"
CELLS = 10  # characters of a bar, as tqdm's words have them
NARROW = 40  # pixels: a bar of this width or less shows no progress, it only says that something runs
DEPTH = 20  # boxes in boxes
TAG = re.compile(r"<[^>]*>")
PIXELS = re.compile(r"(\d+(?:\.\d+)?)px")
ROWS, COLUMNS = ("VBox", "Box", "GridBox", "Tab", "Accordion", "Stack"), ("HBox",)
BARS = ("FloatProgress", "IntProgress")
TEXTS = ("HTML", "HTMLMath", "Label")
LINKS = ("Link", "DirectionalLink")
ENDED = ("success", "danger")  # styles that tqdm gives to a bar when it is closed


class WidgetMessage(TypedDict, total=False):
    """The widget protocol's data of a comm. content: of a message of the widget's own."""

    method: str
    state: Json
    buffer_paths: list[list[str | int]]
    content: Any


class CommContent(TypedDict, total=False):
    comm_id: str
    target_name: str
    data: WidgetMessage


Answer = Callable[[WidgetMessage, Sequence[bytes]], None]
Send = Callable[[int, str, WidgetMessage, Sequence[bytes]], None]  # rank, comm, data, buffers


class Mirror(Protocol):
    """A widget that stands in the notebook for one of a rank's."""

    def pass_on(self, data: WidgetMessage, buffers: Sequence[bytes]) -> None: ...
    def close(self) -> None: ...


Reflect = Callable[["WidgetModel", Answer], Mirror]


@dataclass
class WidgetModel:
    """One widget: whose it is, and its state as the front end would have it."""

    rank: int
    ident: str
    state: Json = field(default_factory=dict)
    mirror: Mirror | None = None

    @property
    def kind(self) -> str:
        """`FloatProgress`, `HBox`: the name of its model."""
        return str(self.of("model_name")).removesuffix("Model")

    def of(self, name: str) -> Any:
        """A property of the widget protocol that is written with an underscore."""
        return self.state.get(f"_{name}", "")

    def references(self) -> Iterator[str]:
        """Ids of the widgets that this one names."""
        return _references(self.state)


class Widgets:
    """All widgets of a pool's ranks. Fed by whoever hears the ranks' messages, in any thread.

    send: passes a front end's message on to a rank.
    """

    def __init__(self, send: Send = lambda *message: None):
        self._send = send
        self._models: dict[str, WidgetModel] = {}
        self._links: set[str] = set()  # of these: they name widgets, and no widget names them
        self._closed: set[str] = set()  # of those that were shown in the run that is on
        self._reflect: Reflect | None = None
        self._lock = threading.RLock()

    # -- what ranks tell ---------------------------------------------------------------------

    def take(self, rank: int, kind: str, content: CommContent, buffers: Sequence[Any] = ()) -> None:
        """Take in one message of a comm; comms that are no widgets' are left."""
        ident, data = str(content.get("comm_id", "")), content.get("data") or WidgetMessage()
        raw = [bytes(b) for b in buffers]
        with self._lock:
            if kind == "comm_open" and content.get("target_name") == TARGET:
                self._models[ident] = _slim(WidgetModel(rank, ident, _whole(data, raw)))
                if self._models[ident].kind in LINKS:
                    self._links.add(ident)
            elif kind == "comm_close":
                self._close(ident)
            elif ident in self._models:
                self._change(self._models[ident], data, raw)

    def _close(self, ident: str) -> None:
        model = self._models.pop(ident, None)
        self._links.discard(ident)
        if model is not None:
            self._closed.add(ident)
            if model.mirror is not None:
                model.mirror.close()

    def _change(self, model: WidgetModel, data: WidgetMessage, buffers: list[bytes]) -> None:
        if data.get("method") in ("update", "echo_update"):
            model.state.update(_whole(data, buffers))
        if model.mirror is not None:
            for ident in model.references():
                self._open(ident)
            model.mirror.pass_on(data, buffers)

    def forget(self, ranks: Container[int]) -> None:
        """The processes of ranks have ended: what is shown of their widgets stays, and changes no more."""
        with self._lock:
            self._models = {i: m for i, m in self._models.items() if m.rank not in ranks}

    def has(self, ident: str) -> bool:
        return ident in self._models

    def begin(self) -> None:
        """A run begins."""
        self._closed.clear()

    # -- in words --------------------------------------------------------------------------------

    def describe(self, data: MimeBundle) -> str | None:
        """What the widget of a mimebundle says now. None if the bundle has no widget, or one that is not known."""
        ident = model_id(data)
        with self._lock:
            return None if ident not in self._models else self._words(ident)

    def is_bar(self, data: MimeBundle) -> bool:
        """Whether it is a progress bar and words about it, and nothing else."""
        with self._lock:
            kinds = [m.kind for m in self._tree(model_id(data))]
        return any(k in BARS for k in kinds) and set(kinds) <= {*ROWS, *COLUMNS, *BARS, *TEXTS}

    def has_ended(self, data: MimeBundle) -> bool:
        """Whether it is a bar that its program has closed."""
        with self._lock:
            bars = [m for m in self._tree(model_id(data)) if m.kind in BARS]
        return self.is_bar(data) and all(m.state.get("bar_style") in ENDED for m in bars)

    def is_over(self, data: MimeBundle) -> bool:
        """Whether it will not move again, as far as its program says: a bar that was ended, or anything closed."""
        return model_id(data) in self._closed or self.has_ended(data)

    def _tree(self, ident: str, depth: int = 0) -> Iterator[WidgetModel]:
        """The widget and what it has in it; not what it looks like (layouts, styles)."""
        model = self._models.get(ident)
        if model is None or depth > DEPTH:
            return
        yield model
        for child in _children(model):
            yield from self._tree(child, depth + 1)

    def _words(self, ident: str, depth: int = 0) -> str:
        model = self._models.get(ident)
        if model is None or depth > DEPTH:
            return ""
        children = list(filter(None, (self._words(c, depth + 1) for c in _children(model))))
        if model.kind in COLUMNS:
            return _beside(children).rstrip()
        if children or model.kind in ROWS:
            return "\n".join(children)
        if model.kind in BARS:
            return _bar(model.state, self._width(model))
        return _control(model)

    def _width(self, model: WidgetModel) -> float:
        """In pixels, as far as its layout has a width."""
        layout = self._models.get(str(model.state.get("layout", "")).removeprefix(REFERENCE))
        found = PIXELS.fullmatch(str(layout.state.get("width") or "")) if layout is not None else None
        return float(found[1]) if found else float("inf")

    # -- where they are shown ----------------------------------------------------------------------

    def settled(self, data: MimeBundle, reflect: Reflect | None) -> MimeBundle:
        """The mimebundle that stays when a run has ended: in words, with the widget itself where `reflect` makes
        one; empty if it was closed, or has nothing to say."""
        ident, words = model_id(data), self.describe(data)
        if ident in self._closed:
            return {}
        text = {"text/plain": str(data.get("text/plain", "")) if words is None else words}
        with self._lock:
            if words is None or self.is_bar(data) or reflect is None:
                return {} if words == "" else text
            self._reflect = reflect
            return {**data, **text} if self._open(ident) else text

    def drop_bars(self, shown: Sequence[MimeBundle]) -> None:
        """Let go of bars that have ended, and of what they consist of."""
        with self._lock:
            for data in filter(self.has_ended, shown):
                for model in list(self._tree(model_id(data))):
                    for part in (*model.references(), model.ident):
                        self._models.pop(part, None)

    def _open(self, ident: str) -> bool:
        """Have mirrors of a widget and of all that it names, what is named first; whether there is one."""
        model = self._models.get(ident)
        if model is None or self._reflect is None:
            return False
        if model.mirror is None:
            model.mirror = _Opening()  # widgets may name each other
            for other in model.references():
                self._open(other)
            rank = model.rank
            model.mirror = self._reflect(model, lambda data, buffers: self._send(rank, ident, data, buffers))
            for link in [self._models[name] for name in self._links if name in self._models]:
                if ident in link.references():
                    self._open(link.ident)
        return True


class _Opening:
    """Stands for a mirror that is being made."""

    def pass_on(self, data: WidgetMessage, buffers: Sequence[bytes]) -> None:
        pass

    def close(self) -> None:
        pass


def may_end_bar(kind: str, content: CommContent) -> bool:
    """Whether a message can be the last of a bar."""
    state = (content.get("data") or WidgetMessage()).get("state") or {}
    return kind == "comm_close" or state.get("bar_style") in ENDED


def _slim(model: WidgetModel) -> WidgetModel:
    """Without what a layout leaves open, which is nearly all of it: a bar has four layouts of 45 properties."""
    if model.kind == "Layout":
        model.state = {name: value for name, value in model.state.items() if value is not None}
    return model


def _whole(data: WidgetMessage, buffers: Sequence[bytes]) -> Json:
    """The state in a message, with its buffers where they belong."""
    state = dict(data.get("state") or {})
    for path, buffer in zip(data.get("buffer_paths") or (), buffers, strict=False):
        place: Any = state
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = buffer
    return state


def apart(state: Json) -> tuple[Json, list[list[str | int]], list[bytes]]:
    """A state without its buffers, where they belong, and the buffers: as a message has it."""
    paths: list[list[str | int]] = []
    buffers: list[bytes] = []

    def without(value: Any, path: list[str | int]) -> Any:
        if isinstance(value, bytes | bytearray | memoryview):
            paths.append(path)
            buffers.append(bytes(value))
            return None
        if isinstance(value, dict):
            return {k: without(v, [*path, k]) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [without(v, [*path, i]) for i, v in enumerate(value)]
        return value

    return without(dict(state), []), paths, buffers


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value.startswith(REFERENCE):
            yield value.removeprefix(REFERENCE)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _references(inner)


def _children(model: WidgetModel) -> list[str]:
    return list(_references(model.state.get("children") or ()))


# -- one widget in words -------------------------------------------------------------------------


def _beside(words: Sequence[str]) -> str:
    """Widgets in a row; a bar touches what is left and right of it, as tqdm writes it."""
    row = ""
    for part in words:
        touch = not row or row.endswith((" ", "|")) or part.startswith((" ", "|"))
        row += part if touch else f" {part}"
    return row


def _plain(text: Any) -> str:
    """HTML as a line of text."""
    return html.unescape(TAG.sub("", str(text))).replace("\u2007", " ").replace("\xa0", " ")


def _bar(state: Json, width: float) -> str:
    label = _plain(state.get("description") or "")
    low, high = (float(state.get(k) or 0) for k in ("min", "max"))
    share = min(1.0, max(0.0, (float(state.get("value") or 0) - low) / (high - low))) if high > low else 0.0
    if width <= NARROW:
        return label
    whole, part = divmod(round(share * CELLS * (len(BLOCKS) - 1)), len(BLOCKS) - 1)
    drawn = (BLOCKS[-1] * whole + (BLOCKS[part] if part else "")).ljust(CELLS)
    return f"{label}|{drawn}|"


def _control(model: WidgetModel) -> str:
    """Any other widget: its label and what is chosen or shown."""
    state = model.state
    label = _plain(state.get("description") or "")
    if model.kind in TEXTS:
        return _beside([w for w in (label, _plain(state.get("value") or "")) if w])
    if model.kind == "Output":
        return "".join(_shown(output) for output in state.get("outputs") or ()).rstrip("\n")
    value = _value(model)
    if label and value is None:
        return f"[{label}]"
    if label or value is not None:
        return ": ".join(w for w in (label, str(value)) if w)
    return f"[{model.kind}]" if model.of("view_name") else ""


def _value(model: WidgetModel) -> Any:
    """What a control is set to; None where it has no value that can be read."""
    labels, index = model.of("options_labels"), model.state.get("index")
    if isinstance(labels, list | tuple) and labels:
        chosen = index if isinstance(index, list | tuple) else [index]
        return ", ".join(str(labels[i]) for i in chosen if isinstance(i, int) and 0 <= i < len(labels))
    value = model.state.get("value")
    if isinstance(value, list | tuple):
        return " – ".join(map(str, value))
    return value if isinstance(value, str | int | float) else None


def _shown(output: Json) -> str:
    """One output, as notebooks keep them."""
    if output.get("output_type") == "stream":
        return str(output.get("text", ""))
    if output.get("output_type") == "error":
        return f"{output.get('ename')}: {output.get('evalue')}\n"
    return f"{(output.get('data') or {}).get('text/plain', '')}\n"
