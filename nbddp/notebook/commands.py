"""The grammar of `%ddp` and `python -m nbddp`: one line per subcommand here, its arguments below.

Pure: no IPython, no torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbddp.capabilities.scripts import grammar, launch, torchrun
from nbddp.errors import BadInput
from nbddp.launch.options import (
    REPEAT,
    WARMUP,
    HelpAsked,
    LaunchSpec,
    Parser,
    bindable,
    complete,
    launch_spec,
    nearest,
    one_rank,
    pool_options,
    positive,
    rank_set,
    split_argv,
    split_line,
    waiting_for,
    workers_per_node,
)
from nbddp.launch.topology import Topology, planned
from nbddp.launch.units import amount, delay, speed

__all__ = [
    "COMMANDS",
    "Command",
    "HelpAsked",
    "complete_command",
    "memory_of",
    "overview",
    "parse_command",
    "planned_layout",
]

COMMANDS: dict[str, str] = {
    "panel": "start, watch and steer the pool with the mouse",
    "status": "table of the workers: rank, node, local rank, device, pid, state, memory",
    "start": "start the pool without running a cell",
    "stop": "end all workers of the pool and the warm process",
    "attach": "start workers on Slurm nodes that an earlier kernel kept (--keep-alive)",
    "scale": "change the number of nodes of a pool started with --nnodes MIN:MAX",
    "restart": "replace the worker processes; the ranks stay, their names are lost",
    "sync": "copy the notebook's folder to the pool's hosts again",
    "topology": "figure of nodes, processes and devices, of the pool or of a planned layout",
    "push": "copy names from the notebook to every rank",
    "pull": "fetch names from every rank, as sequences indexed by rank",
    "timings": "figure and table of DDP's last steps, or of any program's collectives: who waits for whom",
    "compare": "compare the ranks' copies of a name: checksums, norms, largest differences",
    "memory": "each rank's memory: parameters, gradients, optimizer state, buckets, peak; or of NAMEs, or over a step",
    "forecast": "predict step time and scaling efficiency on more nodes",
    "bench": "measure time and bandwidth of collectives by size, as nccl-tests does",
    "debug": "after a failure: a prompt on the frames of the rank that failed first (during a run, use breakpoint())",
    "stacks": "where every rank is: line, collective, ranks it waits for, stack",
    "doctor": "check torch, ipykernel, IPython, ipyparallel and the pool's hosts",
    "log": "print a rank's full output of the last run, or its path",
    "run": "run a script or module on every rank, as torchrun does",
    "torchrun": "run a script by torchrun's own command line; also python -m torch.distributed.run",
    "launch": "run a script by the command line of python -m torch.distributed.launch",
    "export": "write the %%ddp cells as a script for torchrun, or a job for Slurm, Kubeflow, SkyPilot, TorchX, Ray",
    "submit": "submit a batch script to Slurm, and follow its state and log",
    "errors": "exit code and error file of each rank that failed in the last run, as a dict",
    "help": "show this text",
}
TERMINAL_COMMANDS = (
    "status", "start", "stop", "restart", "scale", "topology", "stacks", "doctor", "run", "torchrun", "launch",
    "export",
)  # fmt: skip


@dataclass(frozen=True)
class Command:
    """What a `%ddp` line requests: a subcommand and its arguments by name. notes: what else to say about it."""

    name: str
    args: dict[str, Any]
    launch: LaunchSpec = field(default_factory=LaunchSpec)
    notes: tuple[str, ...] = ()


def _ranks(parser: Parser) -> None:
    parser.add_argument("--ranks", type=rank_set, metavar="SET", help="only these ranks")


def _restart(parser: Parser) -> None:
    pool_options(parser)
    _ranks(parser)


def _names(parser: Parser) -> None:
    parser.add_argument("names", nargs="+", type=bindable, metavar="NAME")
    _ranks(parser)


def _log(parser: Parser) -> None:
    parser.add_argument("--rank", type=one_rank, metavar="R", help="print the full output of this rank")


def _timings(parser: Parser) -> None:
    parser.add_argument("--step", type=one_rank, metavar="K", help="show step K instead of the median step")
    parser.add_argument("--collectives", action="store_true", help="show the collectives of the last cell that called "
        "some, instead of DDP's steps (default where no step of DDP is recorded)")  # fmt: skip


def _memory(parser: Parser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        type=bindable,
        metavar="NAME",
        help="what these names hold on each rank, in bytes: what is sharded and what is shared",
    )
    parser.add_argument("--timeline", action="store_true",
                        help="allocations over a step of the last cell that was run with %%%%ddp --memory, by rank and "
                        "by line")  # fmt: skip
    parser.add_argument("--step", type=_step, metavar="K", help="with --timeline: step K instead of the one with the "
                        "highest peak; all: the whole cell")  # fmt: skip
    _ranks(parser)


def _step(text: str) -> int | str:
    if text == "all":
        return text
    try:
        return one_rank(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step; use one number, such as 0, or all") from None


def memory_of(command: Command) -> str:
    """`parts`, `names` or `timeline`. Raises BadInput for words that do not go together."""
    args = command.args
    if args["timeline"] and args["names"]:
        raise BadInput(f"%ddp memory --timeline takes no names; leave out {args['names'][0]} or --timeline")
    if args["step"] is not None and not args["timeline"]:
        asked = f"--step {args['step']}"
        raise BadInput(f"%ddp memory {asked} needs --timeline; type %ddp memory --timeline {asked}")
    if args["ranks"] is not None and not args["names"]:
        raise BadInput("%ddp memory --ranks needs names, such as %ddp memory model --ranks 0")
    return "timeline" if args["timeline"] else "names" if args["names"] else "parts"


def _topology(parser: Parser) -> None:
    plan = parser.add_argument_group("planned layout (nothing is started)")
    plan.add_argument("--nnodes", type=positive, metavar="N", help="nodes (default 1)")
    plan.add_argument("--gpus-per-node", type=positive, metavar="G", help="GPUs of each node (default: none)")
    plan.add_argument("--gpus-per-proc", type=positive, metavar="K", help="consecutive GPUs per process (default 1)")
    plan.add_argument("-n", "--nproc", "--nproc-per-node", "--nproc_per_node", dest="nproc", type=workers_per_node,
                      metavar="N", help="processes per node (default: as many as fit the GPUs)")  # fmt: skip
    plan.add_argument("--oversubscribe", action="store_true", help="allow more processes than GPUs")


def _scale(parser: Parser) -> None:
    parser.add_argument("nodes", type=positive, metavar="NODES")


def _attach(parser: Parser) -> None:
    parser.add_argument("job", nargs="?", type=positive, metavar="JOB", help="needed only if several jobs are kept")


def _submit(parser: Parser) -> None:
    parser.usage = "%%ddp submit [options] JOB.sbatch [arguments]\n       %%ddp submit --follow JOB"
    parser.add_argument("script", nargs="?", metavar="JOB.sbatch", help="batch script, as of %%ddp export --to slurm")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="arguments", help="arguments of the batch script")
    parser.add_argument("--follow", type=positive, metavar="JOB", help="follow a job that was submitted before")
    parser.add_argument("--detach", action="store_true", help="submit the job without following it")
    parser.add_argument("--on-stop", choices=("cancel", "leave"), default="cancel", help="what Stop does to the job "
                        "(default: cancel it)")  # fmt: skip


def _debug(parser: Parser) -> None:
    parser.epilog = (
        "breakpoint() in a %%ddp cell stops the ranks there and opens a prompt for all of them: n, s, r and c step "
        "them together, p x shows x on every rank, @1 p x on rank 1, q ends the cell, h lists the rest. If a "
        "panel is open (%ddp panel), its Debugger page is the prompt. After a failure %ddp debug shows the frames of "
        "the rank that failed first: w, u, d, l, p x, a, q. Where nobody can type, it prints them."
    )


def _errors(parser: Parser) -> None:
    parser.add_argument("--torchrun", action="store_true", help="print torchrun's summary instead")


SCRIPTS = ("run", torchrun.TORCHRUN, torchrun.LAUNCH)  # subcommands that run a script
NAMED = ("push", "pull", "compare", "memory")  # subcommands that take names
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
    from nbddp.capabilities.forecast.cost import ALGORITHMS
    from nbddp.capabilities.forecast.scale import MOST_NODES

    add = parser.add_argument
    add("--inter-node", type=_typed(speed), metavar="SPEED", help="bandwidth between nodes, such as 25GB/s")
    add("--intra-node", type=_typed(speed), metavar="SPEED", help="bandwidth within a node "
        "(default: measured)")  # fmt: skip
    add("--latency", type=_typed(delay), metavar="TIME", help="latency between nodes, such as 10us")
    add("--ranks-per-node", type=positive, metavar="N", help="default: as in the pool")
    add("--nodes", type=positive, default=MOST_NODES, metavar="N", help="largest number of nodes (default 1024)")
    add("--strong", action="store_true", help="strong scaling: the global batch stays the same")
    add("--algorithm", choices=ALGORITHMS, help="all-reduce algorithm (default: the one with the better fit)")


def _collective(text: str) -> str:
    from nbddp.analysis.wait_time import BUS_FACTOR

    if text not in BUS_FACTOR:
        near = nearest(text, BUS_FACTOR)
        advice = f"did you mean {near}?" if near else f"use {', '.join(BUS_FACTOR)}"
        raise argparse.ArgumentTypeError(f"there is no collective {text!r}; {advice}")
    return text


def _bench(parser: Parser) -> None:
    from nbddp.analysis.wait_time import BUS_FACTOR

    add = parser.add_argument
    add("collectives", nargs="*", type=_collective, metavar="COLLECTIVE",
        help=f"{', '.join(BUS_FACTOR)}; default: all_reduce")  # fmt: skip
    add(
        "--min",
        dest="smallest",
        type=_typed(amount),
        default=1 << 10,
        metavar="SIZE",
        help="smallest size (default 1KiB)",
    )
    add(
        "--max",
        dest="largest",
        type=_typed(amount),
        default=64 << 20,
        metavar="SIZE",
        help="largest size (default 64MiB)",
    )
    add("--factor", type=positive, default=4, metavar="K", help="ratio of one size to the previous one (default 4)")
    add(
        "--repeat",
        type=positive,
        default=REPEAT,
        metavar="N",
        help=f"measurements per size (default {REPEAT}; fewer if a call is slow)",
    )
    add("--warmup", type=positive, default=WARMUP, metavar="N", help="calls before the first measurement "
        f"(default {WARMUP})")  # fmt: skip


ARGUMENTS: dict[str, Callable[[Parser], None]] = {
    "start": pool_options, "attach": _attach, "scale": _scale, "restart": _restart, "push": _names,
    "pull": _names, "log": _log, "timings": _timings,
    "memory": _memory, "topology": _topology, "compare": _names, "bench": _bench, "forecast": _forecast,
    "errors": _errors, "debug": _debug,
    "submit": _submit,
}  # fmt: skip


def command_parser(name: str, prog: str = "%ddp") -> Parser:
    """The grammar of one subcommand of `%ddp` (or of `python -m nbddp`)."""
    if name == "run":
        return grammar.run_parser(prog)
    if name in (torchrun.TORCHRUN, torchrun.LAUNCH):
        return torchrun.parser_of(prog, name)
    parser = Parser(prog=f"{prog} {name}", allow_abbrev=False, exit_on_error=False, description=COMMANDS[name])
    if name in ARGUMENTS:
        ARGUMENTS[name](parser)
    if name == "export":
        from nbddp.capabilities.export.options import export_arguments

        export_arguments(parser, prog == "%ddp")
        return parser
    if prog != "%ddp" and name not in ("start", "doctor"):
        parser.add_argument("pool", nargs="?", default="", help="the pool's id, if several pools are running")
    return parser


def overview(prog: str = "%ddp") -> str:
    """All subcommands, a line each."""
    names = COMMANDS if prog == "%ddp" else TERMINAL_COMMANDS
    width = max(map(len, names))
    lines = [f"  {prog} {name:<{width}}  {COMMANDS[name]}" for name in names]
    if prog == "%ddp":
        lines.insert(0, f"  %%ddp {'':<{width}} run the cell on every rank; %ddp --help lists its options")
    return "\n".join([*lines, "", f"{prog} SUBCOMMAND --help shows its options."])


def parse_command(line: str | Sequence[str], prog: str = "%ddp") -> Command:
    """A `%ddp` line (or a terminal's words) → Command. Raises as `parse_cell` does."""
    words = torchrun.rewritten(split_line(line, prog) if isinstance(line, str) else list(line))
    if not words or words[0] in ("help", "-h", "--help"):
        return Command("help", {"options": bool(words)})
    known = COMMANDS if prog == "%ddp" else TERMINAL_COMMANDS
    name = words[0]
    if name not in known:
        near = nearest(name, known)
        advice = f"did you mean {prog} {near}?" if near else f"{prog} lists them"
        raise BadInput(f"{prog} has no subcommand {name!r}; {advice}")
    if name == "run":
        return Command(name, {}, grammar.parse_run(words[1:], os.environ, prog))
    if name in (torchrun.TORCHRUN, torchrun.LAUNCH):
        spec, notes = torchrun.parse(words[1:], os.environ, prog, name)
        return Command(name, {}, spec, tuple(notes))
    own, argv = split_argv(words[1:]) if name == "export" else (words[1:], ())
    space = command_parser(name, prog).parse_strictly(own)
    if name == "export":
        return Command(name, {**vars(space), "argv": argv})
    launch = launch_spec(space) if name in ("start", "restart") else LaunchSpec()
    return Command(name, vars(space), launch)


def planned_layout(command: Command) -> Topology | None:
    """The layout that `topology` with options requests; None without options. Raises BadInput if it is impossible."""
    asked = {name: command.args[name] for name in PLAN}
    if not any(asked.values()):
        return None
    if command.args.get("pool"):
        raise BadInput(
            f"topology shows a pool or a planned layout, not both; leave out {command.args['pool']} or the options"
        )
    return planned(**asked)


def complete_command(line: str) -> list[str]:
    """Subcommands, or the options of the one already typed."""
    words = line.split()
    if not words or (len(words) == 1 and not line.endswith(" ")):
        return [c for c in COMMANDS if c.startswith(words[0] if words else "")]
    asked = torchrun.rewritten(words)
    if asked[0] in SCRIPTS:
        return launch.complete(command_parser(asked[0]), " ".join(asked[1:]) + " " * line.endswith(" "))
    if words[0] not in COMMANDS:
        return []
    current = "" if line.endswith(" ") else words[-1]
    typed = words[1:] if not current else words[1:-1]
    due = waiting_for(command_parser(words[0]), typed[-1]) if typed else None
    if due is not None:
        return launch.value(due, current) or complete(command_parser(words[0]), line)
    if words[0] == "bench" and not (typed and typed[-1].startswith("-")):
        from nbddp.analysis.wait_time import BUS_FACTOR

        collectives = [c for c in BUS_FACTOR if c.startswith(current) and c not in typed]
    else:
        collectives = []
    ends = {"export": (".py",), "submit": launch.BATCH}.get(words[0], ())
    files = launch.files(current, ends) if ends and not current.startswith("-") else []
    return [*collectives, *files, *complete(command_parser(words[0]), line)]
