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

from nbddp.draw import buckets as bucket_figures
from nbddp.draw.averaging import averaging as averaging_figure
from nbddp.draw.collectives import collectives as collectives_figure
from nbddp.draw.launching import launching
from nbddp.draw.moments import moments
from nbddp.draw.placement import placement
from nbddp.draw.rendezvous import arrivals
from nbddp.draw.ring import ring as ring_figure
from nbddp.draw.samples import samples as grid
from nbddp.draw.shown import Shown
from nbddp.draw.spmd import prints
from nbddp.draw.stills import stills
from nbddp.draw.whatif import what_if as stepped
from nbddp.draw.zero import zero as barred
from nbddp.errors import BadInput
from nbddp.export.launch import C10D, SRUN, STATIC
from nbddp.teach import buckets as bucketing
from nbddp.teach import collectives as calls
from nbddp.teach import running
from nbddp.teach.averaging import MEAN, NOTHING, OWN, SAME, SUM
from nbddp.teach.averaging import averaging as fitted
from nbddp.teach.launching import GLOO, NCCL
from nbddp.teach.launching import plan as launch_plan
from nbddp.teach.moments import EQUAL, UNEQUAL, sharded
from nbddp.teach.placement import GLOBAL, LOCAL
from nbddp.teach.placement import layout as placed
from nbddp.teach.rendezvous import FAULTS, NOTHING, OWN, arrival
from nbddp.teach.ring import PROGRAMS, RING, SHORT
from nbddp.teach.ring import ring as ring_after
from nbddp.teach.samples import DROPPED, PADDED, STRAIGHT, TOLD, UNTOLD, dealt
from nbddp.teach.spmd import NOBODY, printing
from nbddp.teach.whatif import DELAYS, MODELS, MOST_NODES, SPEEDS
from nbddp.teach.whatif import what_if as supposed
from nbddp.teach.zero import PRECISIONS, stages

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
            picture.layout.width = f"{int.from_bytes(data[16:20], 'big') // 2}px"
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
        return bundle, {"image/png": {"alt": words, "width": int.from_bytes(data[16:20], "big") // 2}}


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


def layout() -> Explorer:
    """Lesson 02: nodes, processes and GPUs, and what each rank gets by its local or by its global rank."""
    return Explorer(
        lambda **chosen: placement(placed(**chosen)),
        (
            Slider("nodes", "nodes", 1, 4),
            Slider("gpus", "GPUs per node", 1, 8),
            Slider("per_process", "GPUs per process", 1, 8),
            Choice("by", "device taken by", (LOCAL, GLOBAL)),
        ),
        (
            {"nodes": 2, "gpus": 4, "per_process": 2, "by": LOCAL},
            {"nodes": 2, "gpus": 4, "per_process": 1, "by": GLOBAL},
        ),
    )


def arrived() -> Explorer:
    """Lesson 03: four processes on two nodes look for each other; who has arrived, and who waits for whom."""
    return Explorer(
        lambda **chosen: arrivals(arrival(**chosen)),
        (
            Slider("arrived", "processes started", 1, 4),
            Choice("last_first", "who starts first", (("node 0", False), ("the last node", True))),
            Choice("fault", "mistake", FAULTS),
        ),
        (
            {"arrived": 3, "last_first": False, "fault": NOTHING},
            {"arrived": 4, "last_first": False, "fault": OWN},
        ),
    )


def order() -> Explorer:
    """Lesson 01: two prints on every rank, and the order in which a terminal may show them."""
    return Explorer(
        lambda **chosen: prints(printing(**chosen)),
        (
            Slider("ranks", "ranks", 2, 4),
            Choice("slow", "slow rank", (("nobody", NOBODY), ("0", 0), ("1", 1), ("2", 2), ("3", 3))),
            Choice("barrier", "barrier after the work", (("no", False), ("yes", True))),
        ),
        (
            {"ranks": 4, "slow": 1, "barrier": False},
            {"ranks": 4, "slow": 1, "barrier": True},
        ),
    )


def ring() -> Explorer:
    """Lesson 04: which rank's part is in which chunk after some steps of the ring, and of three broken ones."""
    return Explorer(
        lambda **chosen: ring_figure(ring_after(**chosen)),
        (
            Slider("ranks", "ranks", 2, 5),
            Slider("step", "steps taken", 0, 8),
            Choice("program", "program", PROGRAMS),
        ),
        (
            {"ranks": 4, "step": 3, "program": RING},
            {"ranks": 4, "step": 5, "program": SHORT},
        ),
    )


def averaging() -> Explorer:
    """Lesson 05: loss and distance of the ranks' parameters, by how they start and what they do with gradients."""
    return Explorer(
        lambda **chosen: averaging_figure(fitted(**chosen)),
        (
            Slider("ranks", "ranks", 2, 4),
            Slider("steps", "steps", 5, 40, 5),
            Choice("begin", "start", (SAME, OWN)),
            Choice("exchange", "gradients", (NOTHING, MEAN, SUM)),
        ),
        (
            {"ranks": 4, "steps": 30, "begin": SAME, "exchange": NOTHING},
            {"ranks": 4, "steps": 30, "begin": OWN, "exchange": MEAN},
        ),
    )


def samples() -> Explorer:
    """Lesson 06: which rank reads which sample in which epoch."""
    return Explorer(
        lambda **chosen: grid(dealt(**chosen)),
        (
            Slider("samples", "samples", 1, 16),
            Slider("ranks", "ranks", 1, 4),
            Choice("order", "order", (TOLD, UNTOLD, STRAIGHT)),
            Choice("tail", "what does not divide", (PADDED, DROPPED)),
        ),
        (
            {"samples": 10, "ranks": 4, "order": TOLD, "tail": PADDED},
            {"samples": 10, "ranks": 4, "order": UNTOLD, "tail": DROPPED},
        ),
    )


def statistics() -> Explorer:
    """Lesson 07: means and variances of shards against those of the whole batch."""
    return Explorer(
        lambda **chosen: moments(sharded(**chosen)),
        (
            Slider("per_rank", "samples per rank", 2, 32),
            Slider("ranks", "ranks", 1, 4),
            Slider("shift", "shift from rank to rank, in tenths", 0, 40, 5),
            Choice("sizes", "shards", (EQUAL, UNEQUAL)),
        ),
        (
            {"per_rank": 4, "ranks": 4, "shift": 0, "sizes": EQUAL},
            {"per_rank": 8, "ranks": 2, "shift": 20, "sizes": UNEQUAL},
        ),
    )


def buckets() -> Explorer:
    """Lesson 08: which gradients share a bucket, and how much of the exchange backward hides, on paper."""
    start = {"layers": 8, "width": 1024, "cap_mb": 4, "backward": 20, "ranks": 8, "link": "100 Gb/s InfiniBand"}
    return Explorer(
        lambda **chosen: bucket_figures.exchange(bucketing.exchange(**chosen)),
        (
            Slider("layers", "layers", 1, 24),
            Choice("width", "width of a layer", (512, 1024, 2048)),
            Choice("cap_mb", "bucket_cap_mb", (bucketing.DEFAULT, 1, 2, 4, 8, 16, 25, 100)),
            Slider("backward", "backward, ms", 5, 100, 5),
            Choice("ranks", "ranks", (2, 8, 64, 512)),
            Choice("link", "link", tuple(bucketing.LINKS)),
        ),
        ({**start, "cap_mb": bucketing.DEFAULT}, start),
    )


def measured_buckets(model: Sequence[tuple[str, int]], cap_mb: float | str = bucketing.DEFAULT) -> Shown:
    """Lesson 08: the median step that the pool has recorded last, beside the packer's. model: name and bytes of each
    parameter, as `named_parameters()` has them. Raises BadInput where no exchange is recorded."""
    recording = running.pool().timings()
    return bucket_figures.beside(bucketing.beside(recording, model, cap_mb))


def collectives() -> Explorer:
    """Lesson 09: what every rank of a small program has called after some moves, and who waits for whom."""
    uneven, slow = "one batch fewer on the last rank", "the last rank is slow"
    return Explorer(
        lambda **chosen: collectives_figure(calls.log(**chosen)),
        (
            Choice("program", "program", tuple(calls.PROGRAMS)),
            Slider("ranks", "ranks", 2, 6),
            Slider("moves", "moves", 0, 12),
        ),
        ({"program": uneven, "ranks": 4, "moves": 3}, {"program": slow, "ranks": 4, "moves": 2}),
    )


def launch() -> Explorer:
    """Lesson 11: a layout, and what starts it: the torchrun line of each node, and a batch script for Slurm."""
    return Explorer(
        lambda **chosen: launching(launch_plan(**chosen)),
        (
            Slider("nodes", "nodes", 1, 4),
            Slider("processes", "processes per node", 1, 8),
            Choice("backend", "backend", (NCCL, GLOO)),
            Choice("rendezvous", "rendezvous", (C10D, STATIC, SRUN)),
        ),
        (
            {"nodes": 2, "processes": 4, "backend": NCCL, "rendezvous": C10D},
            {"nodes": 2, "processes": 2, "backend": GLOO, "rendezvous": STATIC},
        ),
    )


def what_if() -> Explorer:
    """Lesson 12: a step on more nodes, with another network, model, and number of micro-batches to an exchange."""
    return Explorer(
        lambda **chosen: stepped(supposed(**chosen)),
        (
            Slider("nodes", "nodes", 1, MOST_NODES),
            Choice("link", "link of a node", SPEEDS),
            Choice("latency", "latency", DELAYS),
            Choice("model", "parameters", tuple(MODELS)),
            Slider("micro_batches", "micro-batches", 1, 16),
        ),
        (
            {"nodes": 8, "link": "100Gb/s", "latency": "10us", "model": "1 B", "micro_batches": 1},
            {"nodes": 8, "link": "100Gb/s", "latency": "10us", "model": "1 B", "micro_batches": 8},
        ),
    )


def zero() -> Explorer:
    """Lesson 12: what a rank holds of a model, by the stage of ZeRO."""
    return Explorer(
        lambda **chosen: barred(stages(**chosen)),
        (
            Choice("billion", "parameters in 10⁹", (0.125, 1, 3, 7.5, 13, 70, 175)),
            Choice("ranks", "ranks", (1, 2, 4, 8, 16, 64, 256, 1024)),
            Choice("precision", "precision", tuple(PRECISIONS)),
        ),
        (
            {"billion": 7.5, "ranks": 64, "precision": "mixed"},
            {"billion": 7.5, "ranks": 64, "precision": "float32"},
        ),
    )
