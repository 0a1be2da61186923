"""`%ddp memory`; `Pool.memory`, `Pool.sizes`, `Pool.allocations`: the contents of ranks' memory, now or over a step."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from nbddp.analysis.answers import IdleRanks, unpacked
from nbddp.analysis.quantities import size
from nbddp.analysis.steps import origin
from nbddp.capabilities.memory.history import RankAllocations, RecordedSteps
from nbddp.capabilities.memory.parts import MemoryAnswer, NameSize, RankMemory
from nbddp.capabilities.memory.timeline import Allocations
from nbddp.errors import BadInput
from nbddp.figures.table import Table
from nbddp.launch.options import Parser, bindable, one_rank
from nbddp.launch.topology import counted, rank_words
from nbddp.notebook.commands import Asked, CommandLine, ranks_option
from nbddp.pool.worker_group import check_ranks

MOST_NAMES = 3  # that share memory are named


def memory(ranks: IdleRanks) -> list[RankMemory]:
    """What each rank's memory holds (`nbddp.capabilities.memory.on_rank`). Raises BadInput if no rank has a
    model."""
    answers: dict[int, MemoryAnswer | None] = unpacked(ranks.answers("memory", meets=False))
    found = {r: f for r, f in answers.items() if f}
    if not found:
        raise BadInput("no rank has a module or an optimizer; create them in a %%ddp cell first")
    run, cell = max((step for _, step in found.values() if step), default=(0, None), key=lambda step: step[0])
    trained = origin(run, cell, ranks.newest()) if run else None
    return [replace(held, rank=r, trained=trained) for r, (held, _) in found.items()]


def sizes(pool: IdleRanks, *names: str, ranks: Sequence[int] | None = None) -> Sizes:
    """The bytes that names hold on each rank. Raises PoolNotRunning, or BadInput for a name that no rank has or that
    holds no tensor."""
    chosen = check_ranks(ranks, pool.placed().world_size, "--ranks")
    found: dict[int, dict[str, NameSize | None]] = unpacked(pool.answers("named_memory", chosen, names=list(names)))
    held = {n: {r: one for r, of in found.items() if (one := of[n])} for n in dict.fromkeys(names)}
    for name, there in held.items():
        if not there:
            raise BadInput(f"{name!r} is not defined on {rank_words(chosen)}; assign it in a %%ddp cell")
        if not any(h.tensors for h in there.values()):
            raise BadInput(
                f"{name!r} holds a value of type {next(iter(there.values())).type}, without tensors; name a tensor, an "
                "array, a module, an optimizer, or a dict or list of them"
            )
    return report_of_sizes(held)


def allocations(ranks: IdleRanks, step: int | None = None, whole: bool = False) -> Allocations:
    """The allocations over a step of the last cell that ran with `memory`. step: its number; None: the step with the
    highest peak. whole: the whole cell. Raises PoolNotRunning, or BadInput if nothing was recorded, or not this step.
    """
    found: dict[int, RecordedSteps | None] = unpacked(ranks.answers("allocations", part="steps"))
    there = {r: f for r, f in found.items() if f}
    if not there:
        raise BadInput("no allocations have been recorded on these workers; %%ddp --memory records a cell's")
    newest = max(there.values(), key=lambda f: f["run"])
    missing = {r: _why_none(found[r], newest) for r in found}
    missing = {r: why for r, why in missing.items() if why}
    having = [r for r in found if r not in missing]
    if not having:
        raise BadInput(f"no rank has a record of its allocations; rank {min(missing)}: {missing[min(missing)]}")
    steps = sorted(set.intersection(*(set(there[r]["steps"]) for r in having)))
    number = None if whole else _step_of({r: there[r]["steps"] for r in having}, steps, step)
    answers: dict[int, RankAllocations] = unpacked(ranks.answers("allocations", having, part="step", step=number))
    return Allocations(
        [replace(answers[r], rank=r) for r in having], number, steps, newest["model"], missing,
        origin(newest["run"], newest["cell"], ranks.newest()),
    )  # fmt: skip


def _why_none(found: RecordedSteps | None, newest: RecordedSteps) -> str:
    """Why a rank has nothing of the newest recording; empty if it has."""
    if found is None or found["run"] != newest["run"]:
        return "it did not take part"
    return found["why"]


def _step_of(peaks: dict[int, dict[int, int]], steps: Sequence[int], asked: int | None) -> int | None:
    """The step that was asked for, or the one with the highest peak; None if none is on every rank."""
    if asked is None:
        return max(steps, key=lambda n: max(of[n] for of in peaks.values()), default=None)
    if asked not in steps:
        have = f"steps {steps[0]} to {steps[-1]} are recorded on every rank" if steps else "no step is on every rank"
        raise BadInput(f"there is no step {asked}; {have}; --step all shows the whole cell")
    return asked


def arguments(parser: Parser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        type=bindable,
        metavar="NAME",
        help="variables whose size in bytes is shown by rank, with sharded and shared parts",
    )
    parser.add_argument("--timeline", action="store_true",
                        help="show allocations over a step of the last cell with %%%%ddp --memory, by rank and "
                        "by line")  # fmt: skip
    parser.add_argument("--step", type=_step, metavar="K", help="with --timeline: step K instead of the one with the "
                        "highest peak; all: the whole cell")  # fmt: skip
    ranks_option(parser)


def _step(text: str) -> int | str:
    if text == "all":
        return text
    try:
        return one_rank(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step; use one number, such as 0, or all") from None


def asked_for(line: CommandLine) -> str:
    """`parts`, `names` or `timeline`. Raises BadInput for words that do not go together."""
    args = line.args
    if args["timeline"] and args["names"]:
        raise BadInput(f"%ddp memory --timeline takes no variables; remove {args['names'][0]} or --timeline")
    if args["step"] is not None and not args["timeline"]:
        asked = f"--step {args['step']}"
        raise BadInput(f"%ddp memory {asked} needs --timeline; type %ddp memory --timeline {asked}")
    if args["ranks"] is not None and not args["names"]:
        raise BadInput("%ddp memory --ranks needs variables, such as %ddp memory model --ranks 0")
    return "timeline" if args["timeline"] else "names" if args["names"] else "parts"


def show(asked: Asked, line: CommandLine) -> Any:
    what, args = asked_for(line), line.args
    if what == "names":
        return sizes(asked.pool, *args["names"], ranks=args["ranks"])
    if what == "timeline":
        return figure_of_allocations(asked.pool, args["step"])
    from nbddp.capabilities.memory.figure import draw_memory

    return draw_memory(memory(asked.pool))


def show_recorded(asked: Asked, said: bool) -> list[Any]:
    """`%%ddp --memory`."""
    return [figure_of_allocations(asked.pool)]


def figure_of_allocations(ranks: IdleRanks, asked: int | str | None = None) -> Any:
    """Step `asked`, `all` of the cell, or the step with the highest peak."""
    from nbddp.capabilities.memory.figure_timeline import draw_allocations

    step = asked if isinstance(asked, int) else None
    return draw_allocations(allocations(ranks, step, whole=asked == "all"))


# -- what named objects hold -----------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Sizes(Table):
    """A row per name, or per group of ranks that differ, under a sentence per name. `held[name][rank]` is a
    NameSize."""

    held: Mapping[str, Mapping[int, NameSize]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "\n".join([self.title, "", repr(Table(self.columns, self.rows))])

    def _repr_html_(self) -> str:
        words = "<br>".join(escape(line) for line in self.title.splitlines())
        return f"<div>{words}</div>{Table(self.columns, self.rows)._repr_html_()}"


def report_of_sizes(held: Mapping[str, Mapping[int, NameSize]]) -> Sizes:
    """held: name → rank → what it holds there; each name is on one rank at least."""
    kinds = [k for k in ("parameters", "module buffers", "gradients", "optimizer state", "tensors")
             if any(h.parts.get(k) for of in held.values() for h in of.values())]  # fmt: skip
    rows: list[list[object]] = []
    for name, of in held.items():
        for ranks, one in _folded(of):
            parts = [size(one.parts[k]) if one.parts.get(k) else "" for k in kinds]
            rows.append([name, rank_words(ranks), *parts, size(one.total), size(one.whole)])
    columns = ["name", "ranks", *kinds, "each rank holds", "unsharded"]
    if not any(h.sharded for of in held.values() for h in of.values()):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Sizes(columns, rows, "\n".join(sentence(n, of) for n, of in held.items()), held=held)


def _folded(of: Mapping[int, NameSize]) -> list[tuple[list[int], NameSize]]:
    """Ranks that hold the same, in order of their first."""
    groups: dict[object, list[int]] = {}
    for rank in sorted(of):
        key = (tuple(sorted(of[rank].parts.items())), of[rank].whole)
        groups.setdefault(key, []).append(rank)
    return [(ranks, of[ranks[0]]) for ranks in groups.values()]


def sentence(name: str, of: Mapping[int, NameSize]) -> str:
    """`model (DDP): 98 KiB on each of 4 ranks; …`."""
    some = list(of.values())
    first = some[0]
    low, high = size(min(h.total for h in some)), size(max(h.total for h in some))
    where = f"on each of {counted(len(of), 'rank')}" if len(of) > 1 else f"on rank {next(iter(of))}"
    text = [f"{name} ({first.type}): {low if low == high else f'{low} to {high}'} {where}"]
    if first.sharded:
        text.append(f"a shard of {size(first.whole)}: {'; '.join(first.sharded)}")
    if first.spans < first.total:
        text.append(f"a view of {size(first.spans)} in a storage of {size(first.total)}, which it keeps alive")
    if first.tied:
        text.append(f"{counted(first.tied, 'tensor')} in storages of others, counted once")
    return "; ".join([*text, *_shared(first)])


def _shared(one: NameSize) -> list[str]:
    """Which other names hold the same memory, most first."""
    some = sorted(one.shared.items(), key=lambda item: (-item[1], item[0]))
    if not some:
        return []
    named = [f"{name} ({'all of it' if share == one.total else size(share)})" for name, share in some[:MOST_NAMES]]
    more = f" and {len(some) - MOST_NAMES} more variables" if len(some) > MOST_NAMES else ""
    return [f"shared with {', '.join(named)}{more}"]
