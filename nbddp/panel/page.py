"""A panel's state as HTML: pure functions from values to text. How it looks is in `style`. What a colour says, a word
or a sign says too."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from nbddp.panel.plan import Considered
from nbddp.panel.state import STAGES, State
from nbddp.plan.machine import Node
from nbddp.plan.topology import Topology

COPY = (
    '<div class="line"><label for="{key}">{label}</label>'
    '<input id="{key}" readonly onfocus="this.select()" value="{value}"></div>'
)
CURRENT = ' aria-current="step"'
DONE, NOW, NEXT = "✓", "▸", "·"  # signs of a stage


def heading(state: State) -> str:
    """What the pool is like; read out when it changes."""
    return f'<div role="status" aria-live="polite"><b>{escape(state.pool_words())}</b></div>'


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
    note = f"<div><small>{escape(found.note)}</small></div>" if found.note else ""
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
    more = f"<small> · GPU {', '.join(idle)} idle</small>" if idle else ""
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
    return "".join(COPY.format(key=f"{key}-{n}", label=label, value=escape(text)) for n, label, text in rows)


def start(state: State) -> str:
    """How a start goes on, and why the last one failed."""
    if state.stage is not None:
        return _stages(state.stage.text(), STAGES.index(state.stage.part))
    if state.failure:
        log = f"<pre>{escape(chr(10).join(state.log))}</pre>" if state.log else ""
        return f'<div class="refused" role="alert">✕ {escape(state.failure)}</div>{log}'
    return f'<div role="status">{escape(state.notice)}</div>'


def _stages(text: str, at: int) -> str:
    signs = [DONE if i < at else NOW if i == at else NEXT for i in range(len(STAGES))]
    items = (
        f"<li{CURRENT * (i == at)}>{sign} {name}</li>" for i, (sign, name) in enumerate(zip(signs, STAGES, strict=True))
    )
    return f'<ol class="stages">{"".join(items)}</ol><small role="status">{escape(text)} …</small>'
