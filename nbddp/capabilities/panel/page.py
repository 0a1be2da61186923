"""A panel's state as HTML: pure functions from values to text. How it looks is in `view`. What a colour says, a word
or a sign says too."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from nbddp.analysis.quantities import duration, size
from nbddp.capabilities.debugger.transcript import Talk
from nbddp.capabilities.panel import curves as panel_curves
from nbddp.capabilities.panel import document
from nbddp.capabilities.panel.output import Output, chosen
from nbddp.capabilities.panel.plan import Considered
from nbddp.capabilities.panel.rows import SIGNS, Rank
from nbddp.capabilities.panel.state import State
from nbddp.figures import terminal_colours
from nbddp.figures.html import DARK, RULE, SHEET, STYLE
from nbddp.figures.page_script import DOT
from nbddp.launch.machine import Node, gpu_noun
from nbddp.launch.topology import Topology, counted
from nbddp.output.progress import STAGES

COPY = (
    '<div class="line"><label for="{key}">{label}</label>'
    '<input id="{key}" readonly onfocus="this.select()" value="{value}">'
    '<button type="button" class="jupyter-button nbddp-copy" aria-label="Copy the line for {label}">Copy</button></div>'
)
DOCK = (  # JupyterLab's own command, which a click on such a button carries out; Notebook 7 has no place to dock
    '<button type="button" class="jupyter-button nbddp-dock" data-commandlinker-command="notebook:create-output-view" '
    'data-commandlinker-args="{}" title="show the panel beside the notebook">Dock</button>'
)
CURRENT = ' aria-current="step"'
LIVE = "this.parentElement?.setAttribute('role', 'status')"
FIND = "const e = this.closest('.scrolls'); "  # none where the text has been replaced meanwhile
REGION = FIND + "e?.setAttribute('role', 'region'); e?.setAttribute('aria-label', 'rank {rank}')"
NAMES = "this.closest('.nbddp-plot')?.querySelector('[role=slider]')?.setAttribute('aria-label', 'step of the curve')"
SHOWN = 100  # lines of a transcript
METER = 240  # CSS pixels of a small curve
LINE_KEYS = (
    "<small>Enter sends the line, ↑ and ↓ recall earlier ones, Tab completes a name</small>"
    '<div class="nbddp-names" aria-live="polite"></div>'
)
DONE, NOW, NEXT = "✓", "▸", "·"  # signs of a stage


def live(shown: str) -> str:
    """Text that is read out when it changes. A screen reader hears only of changes in an element that stays. That is
    the widget's own element, around this one. So it gets the role as soon as the text is on the page."""
    return f'{shown}<img hidden alt="" src="{DOT}" onload="{LIVE}">'


def heading(state: State) -> str:
    """What the pool is like; read out when it changes."""
    return live(f"<div><b>{escape(state.pool_words())}</b></div>")


def dock() -> str:
    """A button that shows the panel beside the notebook, where the front end can."""
    return DOCK


def refusal(found: Considered, control: str) -> str:
    """Why the plan is impossible, beside the control that causes it; empty beside the others."""
    if not found.refusal or found.culprit != control:
        return ""
    return f'<div class="refused" role="alert">✕ {escape(found.refusal)}</div>'


def layout(found: Considered) -> str:
    """The planned layout: node ⊃ process, each with its devices in words."""
    if found.topology is None:
        return f"<small>{escape(found.note or 'there is no layout for these values')}</small>"
    placed = found.topology
    nodes = "".join(_nodes(placed))
    notes = [found.note, *(placed.untold() if placed.simulates_gpus else [])]
    note = "".join(f"<div><small>{escape(line)}</small></div>" for line in notes if line)
    return f'<div>{escape(placed.equation())}</div>{note}<div class="nodes">{nodes}</div>'


def _nodes(placed: Topology) -> Iterator[str]:
    for nodes in placed.folded():
        if len(nodes) > 1:
            words = f"nodes {nodes[0].index}–{nodes[-1].index}: same; {placed.ranks_on(nodes)}"
            yield f'<div class="node">{escape(words)}</div>'
        else:
            yield _node(placed, nodes[0])


def _node(placed: Topology, node: Node) -> str:
    idle = [str(gpu) for gpu, ranks in placed.owners(node.index).items() if not ranks]
    more = f"<small> · {gpu_noun(node.devices)} {', '.join(idle)} idle</small>" if idle else ""
    ranks = "".join(
        f'<div class="rank"><b>rank {w.rank}</b><br><small>local rank {w.local_rank}<br>'
        f"{escape(w.device_words())}</small></div>"
        for w in placed.on_node(node.index)
    )
    name = f" · {escape(node.host)}" if node.host and not node.simulated else ""
    head = f"<b>{escape(node.label())}</b><small>{name}</small>{more}"
    return f'<div class="node">{head}<div class="ranks">{ranks}</div></div>'


def lines(found: Considered, key: str) -> str:
    """The lines that ask for the same elsewhere, to copy. key: sets their ids apart from another panel's."""
    rows = (("cell", "Cell", found.cell), ("torchrun", "torchrun", found.torchrun))
    copied = "".join(COPY.format(key=f"{key}-{n}", label=label, value=escape(text)) for n, label, text in rows)
    note = found.of_torchrun()
    return copied + (f"<div><small>{escape(note)}</small></div>" if note else "")


def start(state: State) -> str:
    """How a start goes on, and why the last one failed."""
    if state.stage is not None:
        return _stages(state.stage.text(), STAGES.index(state.stage.part))
    if state.failure:
        log = f"<pre>{escape(chr(10).join(state.log))}</pre>" if state.log else ""
        return f'<div class="refused" role="alert">✕ {escape(state.failure)}</div>{log}'
    return ""


def _stages(text: str, at: int) -> str:
    signs = [DONE if i < at else NOW if i == at else NEXT for i in range(len(STAGES))]
    items = (
        f"<li{CURRENT * (i == at)}>{sign} {name}</li>" for i, (sign, name) in enumerate(zip(signs, STAGES, strict=True))
    )
    return f'<ol class="stages">{"".join(items)}</ol><small>{escape(text)} …</small>'


# -- a saved notebook ------------------------------------------------------------------------------

UNDERSTUDY, CURVES = "nbddp-understudy", "nbddp-last-curves"
DEAD = ".jp-OutputArea:not(:has(.nbddp-panel))"  # a cell's outputs without a panel that lives
AFTER = (
    f".{UNDERSTUDY} {{display: none}} "
    f"{DEAD}:has(.jupyter-widgets) .{UNDERSTUDY} {{display: block; white-space: pre-wrap; line-height: 1.35}} "
    f"{DEAD}:has(.{UNDERSTUDY}) .jupyter-widgets {{display: none}} "
    f".{UNDERSTUDY}::before {{content: ''; display: block; width: var(--width); max-width: 100%; "
    "aspect-ratio: var(--shape); background: #ffffff var(--picture) no-repeat; background-size: contain} "
    f".{UNDERSTUDY}::after {{content: attr(data-words); font-family: var(--jp-code-font-family, monospace)}} "
    f".{CURVES} {{display: none}} {DEAD}:has(.jupyter-widgets) .{CURVES} {{display: block}} "
)


def understudy(png: str, width: int, said: str, curves: str = "") -> str:
    """What a page shows in the place of widgets whose kernel is gone, and hides as long as they live. All of it is CSS:
    where that is removed, or the outputs of a cell are arranged in another way, nothing is shown. png: as base64;
    width: CSS pixels; curves: a document of the last run, HTML."""
    data = b64decode(png[:48])
    shape = f"{int.from_bytes(data[16:20], 'big')} / {int.from_bytes(data[20:24], 'big')}"
    places = f"--width: {width}px; --shape: {shape}; --picture: url(data:image/png;base64,{png})"
    dark = f"{', '.join(f'{theme} .{UNDERSTUDY}::before' for theme in DARK)} {{{RULE}}} "
    return (
        f'<style>{STYLE}{AFTER}{dark}</style><div class="{UNDERSTUDY} {SHEET}" role="img" style="{places}" '
        f'aria-label="{escape(said.partition(chr(10))[0])}" data-words="{escape(said)}"></div>'
        + (f'<div class="{CURVES}">{curves}</div>' if curves else "")
    )


# -- ranks -----------------------------------------------------------------------------------------

COLUMNS = ("rank", "place", "state", "steps/s", "memory", "CPU", "GPU")
NONE, CPU = "–", "cpu"


def running(state: State) -> str:
    """What runs, and since when; apart from the strip, since it changes every second."""
    if not state.ranks:
        return ""
    since = f"{state.program}, {state.seconds} s" if state.program else "no cell is running"
    return f'<div class="since">{escape(since)}</div>'


def strip(state: State) -> str:
    """What each rank does: a table of fixed columns, a line for each rank."""
    if not state.ranks:
        return "<small>no workers are running; Launch starts them</small>"
    head = "".join(f'<th scope="col">{name}</th>' for name in COLUMNS)
    body = "".join(map(_rank, state.ranks))
    gpus = " gpus" * any(row.device != CPU for row in state.ranks)  # a wider column: of reports, or of words
    gpus = " simulated" if state.placed is not None and state.placed.simulates_gpus else gpus
    return f'<table class="strip{gpus}" aria-label="ranks"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _rank(row: Rank) -> str:
    slow = " ◂ slowest" if row.slowest else ""
    words = ", ".join(filter(None, (row.state, row.doing)))
    state = f'<td title="{escape(words)}{slow}"><span aria-hidden="true">{SIGNS[row.state]}</span> '
    state += f"<b>{row.state}{slow}</b> {escape(row.doing)}</td>"
    numbers = (
        NONE if row.rate is None else f"{row.rate:.1f}",
        NONE if row.memory is None else size(row.memory),
        NONE if row.cpu is None else f"{row.cpu:.0f} %",
        _gpu(row),
    )
    cells = "".join(f'<td class="number">{text}</td>' for text in numbers)
    place = escape(row.place + ("" if row.device == CPU else f" · {row.device}"))
    mark = ' class="slowest"' if row.slowest else ""
    return f'<tr{mark}><th scope="row">{row.rank}</th><td title="{place}">{place}</td>{state}{cells}</tr>'


def _gpu(row: Rank) -> str:
    """How busy a rank's GPUs are, and how much memory of them is in use."""
    busy = [] if row.gpu is None else [f"{row.gpu} %"]
    used = [] if row.gpu_memory is None else [size(row.gpu_memory)]
    return " · ".join([*busy, *used]) or NONE


def notice(state: State) -> str:
    """What the last command has done; read out when it changes."""
    return live(f'<div class="notice">{escape(state.notice)}</div>')


def detail(state: State) -> str:
    """More of it, such as stacks."""
    return f'<pre tabindex="0">{escape(state.detail)}</pre>' if state.detail else ""


# -- output ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankBlock:
    """One rank's part of what is side by side: what it is, and the text of it that scrolls."""

    rank: int
    head: str
    text: str


def moving(state: State) -> str:
    """What is in progress, rank by rank: one bar below the other. It keeps the room that the cell has once needed."""
    found = [out for out, _ in chosen(state.outputs, state.showing)]
    rows = "".join(
        f'<tr><th scope="row">{out.rank}</th><td>{"<br>".join(map(escape, out.moving))}</td></tr>'
        for out in found
        if out.moving
    )
    if not state.room:
        return ""
    table = f'<table class="bars" aria-label="in progress">{rows}</table>' if rows else ""
    return f'<div>in progress</div><div class="moving" style="min-height: {1.4 * state.room:.1f}em">{table}</div>'


def no_output(state: State) -> str:
    return "" if _has_printed(state) else "<small>nothing has been printed</small>"


def output(state: State) -> list[RankBlock]:
    """What the ranks have printed, side by side or one alone."""
    if not _has_printed(state):
        return []
    return [_output(out, hidden, state.showing.search) for out, hidden in chosen(state.outputs, state.showing)]


def _has_printed(state: State) -> bool:
    return any(out.lines or out.moving for out in state.outputs)


def _output(out: Output, hidden: int, search: str) -> RankBlock:
    lines = "\n".join(_line(stream, text, search) for stream, text in out.lines)
    more = f"<small> · {counted(hidden, 'line')} hidden</small>" if hidden else ""
    return _block(out.rank, more, lines)


def _block(rank: int, more: str, lines: str) -> RankBlock:
    """The element that scrolls is a region of this name, and not the text in it, which is replaced."""
    text = f'<pre>{lines}</pre><img hidden alt="" src="{DOT}" onload="{REGION.format(rank=rank)}">'
    return RankBlock(rank, f'<div class="head"><b>rank {rank}</b>{more}</div>', text)


def _line(stream: str, text: str, search: str) -> str:
    mark = "stderr│ " if stream == "stderr" else ""
    if not search:
        return mark + terminal_colours.html(text)
    text = terminal_colours.plain(text)
    at = text.casefold().find(search.casefold())
    if at < 0:
        return mark + escape(text)
    end = at + len(search)
    return f"{mark}{escape(text[:at])}<mark>{escape(text[at:end])}</mark>{escape(text[end:])}"


# -- timings ---------------------------------------------------------------------------------------


def newest(state: State) -> str:
    """The newest step in words."""
    if not state.curve.drawn:
        none = "no DDP steps so far in this cell" if state.program else "the last cell had no DDP steps"
        found = f"{none}; those of earlier cells are below"
        return f"<small>{found if state.past else 'no DDP steps yet; a training cell records them'}</small>"
    return f"<div>{panel_curves.words(state.curve.points[-1])}</div>"


def curves(state: State) -> str:
    """Step time and exposed communication over the steps, which grow while a loop runs."""
    drawn = document.live(state.curve)
    return f'{drawn}<img hidden alt="" src="{DOT}" onload="{NAMES}">' if drawn else ""


def legend(state: State) -> str:
    """What the lines are, and what a click does."""
    if not state.curve.drawn:
        return ""
    note = f"<div><small>{escape(state.timing_note)}</small></div>" if state.timing_note else ""
    cut = len(panel_curves.cut(state.curve, panel_curves.top(state.curve)))
    more = f"▲ {counted(cut, 'step')} longer than the scale&emsp;" if cut else ""
    chosen = "┃ the selected step: click on the curve, or press ← and → there"
    return note + document.legend(f"{more}{chosen}")


def meters(state: State) -> str:
    """Memory of the ranks over the run, and how busy the GPUs are where there are any."""
    found = state.meters
    memory = [(s.at, float(s.memory)) for s in found if s.memory is not None]
    held = [(s.at, float(s.gpu_memory)) for s in found if s.gpu_memory is not None]
    busy = [(s.at, s.gpu) for s in found if s.gpu is not None]
    drawn = (
        _meter("memory of the rank that has most", memory, lambda v: size(int(v))),
        _meter("GPU memory in use, the most", held, lambda v: size(int(v))),
        _meter("GPU utilisation, mean", busy, lambda v: f"{v:.0f} %"),
    )
    return f'<div class="meters">{"".join(drawn)}</div>' if any(drawn) else ""


def _meter(what: str, points: Sequence[tuple[float, float]], worded: Callable[[float], str]) -> str:
    """A small curve from 0 up, with its last and its highest value."""
    if len(points) < 2:
        return ""
    most, first, last = max(v for _, v in points), points[0][0], points[-1][0]
    line = " ".join(
        f"{METER * (at - first) / max(1e-9, last - first):.1f},{30 - 28 * value / max(1e-9, most):.1f}"
        for at, value in points
    )
    words = f"{what}: {worded(points[-1][1])} now, {worded(most)} at most, over {last - first:.0f} s"
    return (
        f'<div><svg class="curves" viewBox="0 0 {METER} 32" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(words)}">'
        f'<polyline points="{line}"/></svg><small>{escape(words)}</small></div>'
    )


def past(state: State) -> str:
    """The runs before, to compare with."""
    if not state.past:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("run", "steps", "step", "exposed", "memory"))
    body = "".join(
        f'<tr><th scope="row">{escape(run.name)}</th><td>{run.steps:,}</td><td>{duration(run.step)}</td>'
        f"<td>{duration(run.exposed)}</td><td>{NONE if run.memory is None else size(run.memory)}</td></tr>"
        for run in reversed(state.past)
    )
    return (
        f'<table class="past"><caption>runs so far: median step and exposed communication, most memory of a rank'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def timeline(state: State) -> str:
    """The step that is selected: its drawing, and words."""
    if state.step is None:
        return "<small>click on the curve, or choose a step and press Show, to see the step's timeline</small>"
    return state.step.html


# -- debugger --------------------------------------------------------------------------------------


def no_talk(state: State) -> str:
    words = "breakpoint() in a %%ddp cell stops the ranks there; they wait for a line"
    return "" if state.talks else f"<small>{words}</small>"


def talks(state: State) -> list[RankBlock]:
    """What ranks say that stand in their debuggers, side by side."""
    return [_talk(talk, bool(state.program)) for talk in state.talks]


def _source(talk: Talk) -> str:
    """The lines around the place where a rank has stopped, its own marked, and its variables."""
    if not talk.stopped or not talk.source:
        return ""
    lines = "".join(
        f'<li value="{number}"{" class=at" * (number == talk.line)}{CURRENT * (number == talk.line)}>'
        f"<code>{escape(text) or ' '}</code></li>"
        for number, text in talk.source
    )
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in talk.variables
    )
    table = f'<table aria-label="variables of rank {talk.rank}">{rows}</table>' if rows else ""
    return f'<ol class="source" aria-label="source of rank {talk.rank}">{lines}</ol>{table}'


def _talk(talk: Talk, runs: bool) -> RankBlock:
    """runs: whether the cell does, too."""
    state = "… working" if talk.asked else "⏸ stopped" if talk.stopped else "● running"
    state = state if runs else "the cell has ended"
    at = f" <small>{state}{', ' * bool(talk.where and runs)}{escape(talk.where if runs else '')}</small>"
    block = _block(talk.rank, at, escape("\n".join(talk.lines[-SHOWN:])))
    return replace(block, head=block.head + _source(talk))
