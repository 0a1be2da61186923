"""The grammar of `%ddp` and `python -m nbddp`: one line per subcommand here, its arguments below.

Pure: no IPython, no torch.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbddp.base.units import amount, delay, speed
from nbddp.errors import BadInput
from nbddp.plan.options import (
    HelpAsked,
    LaunchSpec,
    Parser,
    bindable,
    complete,
    launch_spec,
    one_rank,
    pool_options,
    positive,
    rank_set,
    split_line,
    workers_per_node,
)
from nbddp.plan.topology import Topology, planned
from nbddp.trace.cost import ALGORITHMS
from nbddp.trace.scale import MOST_NODES
from nbddp.trace.waiting import BUS_FACTOR

__all__ = ["COMMANDS", "Command", "HelpAsked", "complete_command", "overview", "parse_command", "planned_layout"]

COMMANDS: dict[str, str] = {
    "status": "one table: rank, node, local rank, device, pid, state, memory",
    "start": "start the pool without running a cell",
    "stop": "end all workers of the pool, and the warm process",
    "restart": "new worker processes under the same ranks; names on them are gone",
    "topology": "figure of nodes, processes and devices: those of the pool, or of a layout that is only planned",
    "push": "copy names of the notebook to every rank",
    "pull": "fetch names from every rank, as sequences indexed by rank",
    "timings": "figure and table of DDP's last steps: what each rank computed, sent and waited for",
    "compare": "are the ranks' copies of a name equal? checksums, norms and largest differences",
    "memory": "figure and table of each rank's memory: parameters, gradients, optimizer state, buckets, peak",
    "forecast": "step time and scaling efficiency on more nodes, from measured collectives and the last steps",
    "bench": "nccl-tests in a cell: time and bandwidth of collectives by size, results checked",
    "stacks": "where every rank is: its line, its collective, whom it waits for, its stack",
    "doctor": "what nbddp needs of torch, ipykernel, IPython and ipyparallel: is it there, does it work",
    "log": "the whole output of a rank in the last run, or where it is",
    "help": "this text",
}
TERMINAL_COMMANDS = ("status", "start", "stop", "restart", "topology", "stacks", "doctor")


@dataclass(frozen=True)
class Command:
    """What one `%ddp` line asks for: a subcommand and its arguments by name."""

    name: str
    args: dict[str, Any]
    launch: LaunchSpec = field(default_factory=LaunchSpec)


def _ranks(parser: Parser) -> None:
    parser.add_argument("--ranks", type=rank_set, metavar="SET", help="only these ranks")


def _restart(parser: Parser) -> None:
    pool_options(parser)
    _ranks(parser)


def _names(parser: Parser) -> None:
    parser.add_argument("names", nargs="+", type=bindable, metavar="NAME")
    _ranks(parser)


def _log(parser: Parser) -> None:
    parser.add_argument("--rank", type=one_rank, metavar="R", help="print the whole output of this rank")


def _timings(parser: Parser) -> None:
    parser.add_argument("--step", type=one_rank, metavar="K", help="this step, not the median one")


def _topology(parser: Parser) -> None:
    plan = parser.add_argument_group("a planned layout; nothing is started")
    plan.add_argument("--nnodes", type=positive, metavar="N", help="nodes (default 1)")
    plan.add_argument("--gpus-per-node", type=positive, metavar="G", help="GPUs of each node (default: none)")
    plan.add_argument("--gpus-per-proc", type=positive, metavar="K", help="consecutive GPUs per process (default 1)")
    plan.add_argument("-n", "--nproc", "--nproc-per-node", "--nproc_per_node", dest="nproc", type=workers_per_node,
                      metavar="N", help="processes per node (default: as many as the GPUs suffice for)")  # fmt: skip
    plan.add_argument("--oversubscribe", action="store_true", help="allow more processes than GPUs")


PLAN = ("nnodes", "gpus_per_node", "gpus_per_proc", "nproc", "oversubscribe")


def _typed(parse: Callable[[str], float]) -> Callable[[str], float]:
    """A quantity with its unit, for argparse."""

    def quantity(text: str) -> float:
        try:
            return parse(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    return quantity


def _forecast(parser: Parser) -> None:
    add = parser.add_argument
    add("--inter-node", type=_typed(speed), metavar="SPEED", help="of a node's link to others, such as 25GB/s")
    add("--intra-node", type=_typed(speed), metavar="SPEED", help="of a rank's link within a node; default: "
        "as measured")  # fmt: skip
    add("--latency", type=_typed(delay), metavar="TIME", help="of a message between nodes, such as 10us")
    add("--ranks-per-node", type=positive, metavar="N", help="default: as the pool has them")
    add("--nodes", type=positive, default=MOST_NODES, metavar="N", help="up to so many (default 1024)")
    add("--strong", action="store_true", help="show the step's parts for a batch that is shared by all ranks")
    add("--algorithm", choices=ALGORITHMS, help="of the all-reduce; default: the one that fits better")


def _collective(text: str) -> str:
    if text not in BUS_FACTOR:
        near = difflib.get_close_matches(text, BUS_FACTOR, n=1, cutoff=0.5)
        advice = f"did you mean {near[0]}?" if near else f"use {', '.join(BUS_FACTOR)}"
        raise argparse.ArgumentTypeError(f"there is no collective {text}; {advice}")
    return text


def _bench(parser: Parser) -> None:
    add = parser.add_argument
    add("collectives", nargs="*", type=_collective, metavar="COLLECTIVE",
        help=f"{', '.join(BUS_FACTOR)}; default: all_reduce")  # fmt: skip
    add("--min", dest="smallest", type=_typed(amount), default=1 << 10, metavar="SIZE", help="default 1KiB")
    add("--max", dest="largest", type=_typed(amount), default=64 << 20, metavar="SIZE", help="default 64MiB")
    add("--factor", type=positive, default=4, metavar="K", help="from one size to the next (default 4)")
    add("--repeat", type=positive, default=12, metavar="N", help="times a size is measured, fewer if it is slow")
    add("--warmup", type=positive, default=3, metavar="N", help="calls before that (default 3)")


ARGUMENTS: dict[str, Callable[[Parser], None]] = {
    "start": pool_options, "restart": _restart, "push": _names, "pull": _names, "log": _log, "timings": _timings,
    "topology": _topology, "compare": _names, "bench": _bench, "forecast": _forecast,
}  # fmt: skip


def command_parser(name: str, prog: str = "%ddp") -> Parser:
    """The grammar of one subcommand of `%ddp` (or of `python -m nbddp`)."""
    parser = Parser(prog=f"{prog} {name}", allow_abbrev=False, exit_on_error=False, description=COMMANDS[name])
    if name in ARGUMENTS:
        ARGUMENTS[name](parser)
    if prog != "%ddp" and name not in ("start", "doctor"):
        parser.add_argument("pool", nargs="?", default="", help="the pool's id, where more than one is running")
    return parser


def overview(prog: str = "%ddp") -> str:
    """All subcommands, a line each."""
    names = COMMANDS if prog == "%ddp" else TERMINAL_COMMANDS
    width = max(map(len, names))
    lines = [f"  {prog} {name:<{width}}  {COMMANDS[name]}" for name in names]
    if prog == "%ddp":
        lines.insert(0, f"  %%ddp {'':<{width}} run the cell on every rank; %ddp --help tells its options")
    return "\n".join([*lines, "", f"{prog} SUBCOMMAND --help tells more."])


def parse_command(line: str | Sequence[str], prog: str = "%ddp") -> Command:
    """A `%ddp` line (or a terminal's words) → Command. Raises as `parse_cell` does."""
    words = split_line(line, prog) if isinstance(line, str) else list(line)
    if not words or words[0] in ("help", "-h", "--help"):
        return Command("help", {"options": bool(words)})
    known = COMMANDS if prog == "%ddp" else TERMINAL_COMMANDS
    name = words[0]
    if name not in known:
        near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
        advice = f"did you mean {prog} {near[0]}?" if near else f"{prog} alone tells them all"
        raise BadInput(f"{prog} has no subcommand {name}; {advice}")
    space = command_parser(name, prog).parse_strictly(words[1:])
    launch = launch_spec(space) if name in ("start", "restart") else LaunchSpec()
    return Command(name, vars(space), launch)


def planned_layout(command: Command) -> Topology | None:
    """What `topology` with options asks for; None without any. Raises BadInput where it is impossible."""
    asked = {name: command.args[name] for name in PLAN}
    if not any(asked.values()):
        return None
    if command.args.get("pool"):
        raise BadInput(
            f"topology tells of a pool or a planned layout, not both; leave out {command.args['pool']} or the rest"
        )
    return planned(**asked)


def complete_command(line: str) -> list[str]:
    """Subcommands, or the options of the one already typed."""
    words = line.split()
    if not words or (len(words) == 1 and not line.endswith(" ")):
        return [c for c in COMMANDS if c.startswith(words[0] if words else "")]
    if words[0] not in COMMANDS:
        return []
    return complete(command_parser(words[0]), line)
