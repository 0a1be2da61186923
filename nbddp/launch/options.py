"""The grammar of a `%%ddp` line, and what `commands` shares with it: a line of text → plain specs.

argparse does the parsing; this file holds the words. Every error is a BadInput that
names the option as typed, and `--help` is an answer (HelpAsked), not an exit. Nothing
else in the package parses a command line. Pure: no IPython, no torch.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import keyword
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nbddp.capabilities.hosts.via import EXAMPLE, NAMED, SSH, via_of
from nbddp.capabilities.scripts import logs
from nbddp.capabilities.slurm.commands import Slurm
from nbddp.errors import BadInput
from nbddp.launch import env_options
from nbddp.launch.units import lasting
from nbddp.protocol.program import SHUTDOWN
from nbddp.protocol.request import Options, Request
from nbddp.protocol.run_spec import CELL, SCRIPT

TRACE_FILE = "ddp-trace.json.gz"
NPROC_WORDS = ("auto", "gpu", "cpu")
NEW = 0  # for the number of a job: one that is not there yet
SALLOC = (  # options that are salloc's, with a value and an example
    ("partition", "P", ""), ("time", "T", ", such as 1:00:00"), ("gpus-per-node", "G", ", such as 4 or a100:4"),
    ("account", "A", ""), ("qos", "Q", ""), ("constraint", "C", ""),
)  # fmt: skip
MOST_RANKS = 100_000  # a rank set is written out as numbers: a mistyped 0-9999999999 must not fill the memory
MEANT = 0.65  # difflib's ratio from which a word may be another one, mistyped: `resart`, but not `free` for `forecast`


class HelpAsked(Exception):
    """`--help` was typed; the text is the answer."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text


@dataclass(frozen=True)
class LaunchSpec(Options):
    """What one `%%ddp` line asks for: of the run what `Options` has, and of the pool.

    `nproc` None keeps the standing pool as it is. `output` is the name that gets the values, `trace` the file that gets
    the merged trace. `keep_warm` is in seconds; None: as it is. `hosts`: as typed (`capabilities.hosts.names` reads
    it); `via`, `ssh_config`, `python` and `setup` say how they are reached, `interface` how they meet; `sync`: whether
    the notebook's folder is copied there. `keep_alive`: how many seconds workers on hosts outlive a lost connection,
    and Slurm's nodes the kernel; None: not at all, or as it is. `cluster`: as typed. `debug`: a level of
    `launch.env_options`; `env`: variables of the ranks, None to take one back.
    """

    nproc: int | str | None = None
    nnodes: int | None = None
    elastic: tuple[int, int] | None = None
    gpus_per_proc: int | None = None
    visible: str | None = None
    oversubscribe: bool = False
    device: str | None = None
    keep_warm: float | None = None
    hosts: str | None = None
    ssh_config: str | None = None
    python: str | None = None
    setup: str | None = None
    via: str | None = None
    slurm: Slurm | None = None
    keep_alive: float | None = None
    interface: str | None = None
    sync: bool = False
    cluster: str | None = None
    debug: str | None = None
    env: tuple[tuple[str, str | None], ...] = ()
    fresh: bool = False
    output: str = ""
    show_timings: bool = False
    trace: str | None = None

    @property
    def on_hosts(self) -> bool:
        """Whether the pool's own agents start the workers on other hosts."""
        return bool(self.hosts) or self.slurm is not None

    @property
    def elsewhere(self) -> bool:
        """Whether the workers may have other files and another environment than this process: on other hosts, or as
        engines of a cluster."""
        return self.on_hosts or bool(self.cluster)

    def asks_for_pool(self) -> bool:
        """True if the line says anything about the pool."""
        return (
            any(
                v is not None
                for v in (
                    self.nproc,
                    self.nnodes,
                    self.elastic,
                    self.gpus_per_proc,
                    self.visible,
                    self.device,
                    self.hosts,
                    self.slurm,
                    self.cluster,
                    self.keep_warm,
                    self.keep_alive,
                    self.debug,
                )
            )
            or self.oversubscribe
            or self.sync
            or bool(self.env)
        )

    def run(self) -> tuple[Any, ...]:
        """What the line says of the run."""
        return *self.options().values(), self.output, self.show_timings, self.trace

    def request(self, code: str, number: int) -> Request:
        """The run that this line and the code below it ask for, as In[number]."""
        return Request(
            op=CELL if self.program is None else SCRIPT, code=code, cell=number, argv0=f"Cell In[{number}]",
            want_value=bool(self.output), trace=self.trace is not None, **self.options(),
        )  # fmt: skip


def nearest(typed: str, known: Iterable[str]) -> str:
    """The word that was meant, as far as that can be said: one that shares most letters; empty if none does."""
    words = {word.lstrip("-"): word for word in known}
    found = difflib.get_close_matches(typed.lstrip("-"), list(words), n=1, cutoff=MEANT)
    return words[found[0]] if found else ""


class Parser(argparse.ArgumentParser):
    """argparse that raises BadInput, and offers the nearest option for a mistyped one."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{self.prog}: {message}; {self.prog} --help lists the options")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpAsked(message or "")

    def print_help(self, file: Any = None) -> None:
        raise HelpAsked(self.format_help())

    def long_options(self) -> list[str]:
        return [o for a in self._actions for o in a.option_strings if o.startswith("--")]

    def parse_strictly(self, words: Sequence[str]) -> argparse.Namespace:
        """parse_args, but an unknown option is answered with the nearest known one."""
        try:
            space, rest = self.parse_known_args(filled(self, words))
        except argparse.ArgumentError as e:
            names = (e.argument_name or "").split("/")
            option = next((n for n in names if n.startswith("--")), names[0])
            # what the types below refuse says what to type; argparse's own words do not
            said = isinstance(e.__context__, argparse.ArgumentTypeError)
            raise BadInput(f"{self.prog} {option}: {e.message}{'' if said else self._usage_of(option)}") from None
        if rest:
            self._refuse(rest[0])
        return space

    def _usage_of(self, option: str) -> str:
        """`; write it as --nproc N`, for an option of this parser."""
        action = next((a for a in self._actions if option in a.option_strings), None)
        value = "" if action is None or action.nargs == 0 else f" {action.metavar or '|'.join(action.choices or ())}"
        return f"; write it as {option}{value}"

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-") and self.prog == "%%ddp":
            raise BadInput(
                f"{self.prog} does not take {word!r}; arguments for the cell's own sys.argv go after --, as in "
                f"{self.prog} -- {word}"
            )
        if not word.startswith("-") or word == "--":
            raise BadInput(f"{self.prog} does not take {word!r}; {self.prog} --help lists what it takes")
        name = word.split("=")[0]
        near = nearest(name, self.long_options())
        advice = f"did you mean {near}?" if near else f"{self.prog} --help lists the options"
        raise BadInput(f"{self.prog} has no option {name}; {advice}")


def filled(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """The words, with `=` behind an option whose value may be missing, and is: argparse would take the script for it.
    What follows the script is left as it is."""
    if all(action.option_strings for action in parser._actions):
        return list(words)
    found: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        number = taken(parser, rest)
        action = option_of(parser, rest[0])
        missing = action is not None and action.nargs == "?" and number == 1
        found += [f"{rest[0]}=" if missing else rest[0], *rest[1:number]]
        del rest[:number]
    return [*found, *rest]


def taken(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """How many words the option that comes first takes, itself included."""
    action = option_of(parser, words[0])
    if action is None or len(words) == 1 or action.nargs not in (None, "?"):
        return 1
    return 2 if action.nargs is None or _fits(action, words[1]) else 1


def option_of(parser: argparse.ArgumentParser, word: str) -> argparse.Action | None:
    return next((action for action in parser._actions if word in action.option_strings), None)


def _fits(action: argparse.Action, word: str) -> bool:
    """Whether a word can be the value of an option."""
    if action.choices is not None:
        return word in action.choices
    try:
        return not callable(action.type) or action.type(word) is not None
    except argparse.ArgumentTypeError:
        return False


def workers_per_node(text: str) -> int | str:
    if text in NPROC_WORDS:
        return text
    try:
        return positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of workers; use a positive number such as 2, or one of {', '.join(NPROC_WORDS)}"
        ) from None


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number; use 1 or more")
    return value


def quantity(parse: Callable[[str], float]) -> Callable[[str], float]:
    """A quantity with its unit, for argparse. parse: raises ValueError with a sentence that says what to type."""

    def parsed(text: str) -> float:
        try:
            return parse(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    return parsed


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds; use a positive number such as 30")
    return value


def _seconds_or_never(text: str) -> float | None:
    return None if text == "never" else seconds(text)


def nodes_or_range(text: str) -> int | tuple[int, int]:
    """`2`, or `1:4` → (1, 4)."""
    least, colon, most = text.partition(":")
    if not colon:
        return positive(text)
    found = positive(least), positive(most)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} counts backwards; write it as {most}:{least}")
    return found


def _nodes(text: str) -> int | str:
    """`2`, or salloc's `1-4`."""
    least, dash, most = text.partition("-")
    return f"{positive(least)}-{positive(most)}" if dash else positive(text)


def _job(text: str) -> int:
    if text == "":
        return NEW
    if not _is_number(text) or not 0 < int(text) < 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a job number; squeue --me lists yours")
    return int(text)


def _via(space: argparse.Namespace) -> str | None:
    if space.via is None:
        return None
    if not space.hosts:
        raise BadInput(f"--via {space.via} needs --hosts; name the hosts, as in --hosts nodea,nodeb")
    return via_of(space.via)


def _lasting(text: str) -> float:
    try:
        return lasting(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _trace_file(name: str) -> str:
    """Empty: the default."""
    if name and not name.endswith((".json", ".json.gz")):
        raise argparse.ArgumentTypeError(
            f"{name}: Perfetto reads only .json and .json.gz; use such a name, as in {TRACE_FILE}"
        )
    return name or TRACE_FILE


def _level(text: str) -> str:
    """Empty: the default."""
    return text or env_options.INFO


def count(text: str) -> int:
    if not _is_number(text) or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of restarts; use 0 or more")
    return int(text)


def rank_set(text: str) -> tuple[int, ...]:
    """`0,2-3` → (0, 2, 3); `none` → ()."""
    if text == "none":
        return ()
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a set of ranks; write it as 0,2-3")
        if max(len(first), len(last)) > len(str(MOST_RANKS)) or int(last or first) >= MOST_RANKS:
            raise argparse.ArgumentTypeError(f"{part!r} goes beyond any pool; use ranks below {MOST_RANKS}")
        a, b = int(first), int(last or first)
        if b < a:
            raise argparse.ArgumentTypeError(f"{part!r} counts backwards; write it as {b}-{a}")
        found.update(range(a, b + 1))
    return tuple(sorted(found))


def _is_number(text: str) -> bool:
    """True for 0-9 alone: str.isdigit also takes digits that int() refuses, such as ²."""
    return text.isascii() and text.isdigit()


def one_rank(text: str) -> int:
    if not _is_number(text) or len(text) > len(str(MOST_RANKS)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank; use one number, such as 0")
    return int(text)


def bindable(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid Python name; use one such as loss")
    return text


def pool_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pool")
    group.add_argument(
        "-n", "--nproc", "--nproc-per-node", "--nproc_per_node", dest="nproc", type=workers_per_node, metavar="N",
        help="workers per node: a number, gpu (one per GPU), cpu (one per core) or auto; "
        "default: unchanged in a running pool, else one per GPU, else 2",
    )  # fmt: skip
    group.add_argument("--nnodes", type=nodes_or_range, metavar="N|MIN:MAX",
                       help="number of nodes; without --hosts or --slurm they are simulated. MIN:MAX: nodes may come "
                       "and go, and the cell restarts on those present")  # fmt: skip
    group.add_argument("--gpus-per-proc", type=positive, metavar="K", help="consecutive GPUs per worker")
    group.add_argument(
        "--visible", choices=("all", "own"),
        help="GPUs that a worker sees: all, and LOCAL_RANK selects (as torchrun), or only its own, and "
        "LOCAL_RANK is 0 (as torchrun --virtual-local-rank)",
    )  # fmt: skip
    group.add_argument(
        "--oversubscribe", action="store_true", help="allow more workers than there are GPUs or memory for"
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), help="cpu: do not use the GPUs")
    group.add_argument(
        "--keep-warm", type=_lasting, metavar="TIME",
        help="when the kernel ends or restarts, keep the process that has imported torch for TIME, such as 10m, 90s or "
        "2h; the next kernel starts faster (default: off; 10m for python -m nbddp run at a terminal)",
    )  # fmt: skip
    group.add_argument("--debug", nargs="?", const=env_options.INFO, type=_level, choices=tuple(env_options.LEVELS),
                       help="debug output of torch, gloo and NCCL (TORCH_DISTRIBUTED_DEBUG, NCCL_DEBUG, …) until "
                       "--debug off; detail also compares each collective across ranks")  # fmt: skip
    group.add_argument("--env", action="append", default=[], type=env_options.setting, metavar="KEY=VALUE",
                       help="set an environment variable on every rank; KEY alone undoes that. Workers are replaced "
                       "if the variable is read once per process")  # fmt: skip
    far = parser.add_argument_group("other hosts")
    far.add_argument(
        "--hosts",
        metavar="LIST",
        help="start the workers on these hosts by ssh: nodea,user@nodeb:2222, or a file "
        "with one host per line (nodea slots=4)",
    )
    far.add_argument("--via", metavar="WAY", help=f"how to start a process there: {SSH} (default), {', '.join(NAMED)}, "
                     f"or a command such as {EXAMPLE}")  # fmt: skip
    far.add_argument("--ssh-config", metavar="FILE", help="configuration file of ssh (default: your own)")
    far.add_argument("--python", metavar="PATH", help="Python interpreter there that has nbddp (default: the path of "
                     "this kernel's)")  # fmt: skip
    far.add_argument("--setup", metavar="LINE", help="shell line to run there first, such as 'module load cuda'")
    far.add_argument(
        "--keep-alive",
        type=_lasting,
        metavar="TIME",
        help="keep workers on --hosts for TIME, such as 10m, "
        "after a lost connection, and Slurm's nodes after the kernel (%%ddp attach)",
    )
    far.add_argument("--interface", metavar="NAME", help="network interface that connects all hosts (default: chosen "
                     "by trying them)")  # fmt: skip
    far.add_argument(
        "--sync",
        action="store_true",
        help="copy the notebook's folder there first, without files that git ignores; workers start in the copy",
    )
    far.add_argument("--cluster", metavar="ID", help="use the engines of a running ipyparallel cluster: its id, "
                     "PROFILE/ID or its connection file; --nproc N takes N engines of each host")  # fmt: skip
    _slurm_options(parser)


def _slurm_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("Slurm").add_argument
    add(
        "--slurm",
        nargs="?",
        const=NEW,
        type=_job,
        metavar="JOB",
        help="start the workers on Slurm nodes: of JOB, else of the kernel's own job, else of a new job",
    )
    add("--nodes", type=_nodes, metavar="N", help="ask Slurm for N nodes, or for 2-4 (default 1)")
    for name, value, what in SALLOC:
        add(f"--{name}", metavar=value, help=f"as for salloc{what}")
    add("--cpus-per-node", type=positive, metavar="C", help="cores per node (default: one per worker, if no GPUs are "
        "requested)")  # fmt: skip
    add("--slurm-options", metavar="WORDS", help="other options for salloc, such as '--exclusive --mem=0'")


def fault_options(parser: argparse.ArgumentParser, what: str) -> None:
    """What is to happen when something goes wrong. what: a cell or a script."""
    faults = parser.add_argument_group("faults")
    faults.add_argument("--timeout", type=seconds, metavar="S", help=f"end the {what} after S seconds"
                        + "; names are kept" * (what == "cell"))  # fmt: skip
    faults.add_argument("--hang-after", type=_seconds_or_never, default=5.0, metavar="S",
                        help="report and end a deadlock after S seconds, or never (default 5)")  # fmt: skip
    faults.add_argument(
        "--check",
        action="store_true",
        help="before each collective, compare operation, shape, dtype and reduce op across ranks",
    )
    faults.add_argument("--max-restarts", "--max_restarts", type=count, default=0, metavar="K",
                        help=f"on a failure start new workers and run the {what} again, at most K times")  # fmt: skip
    grace = "seconds from SIGTERM to SIGKILL when ranks have to end"
    if what == "cell":
        grace = "seconds that ranks have to clean up when a failure, a deadlock or --timeout ends the cell"
    faults.add_argument("--shutdown-timeout", "--shutdown_timeout", type=seconds, metavar="S",
                        help=f"{grace} (default {SHUTDOWN:g})")  # fmt: skip


@functools.cache
def cell_parser() -> Parser:
    """The grammar of a `%%ddp` line."""
    parser = Parser(
        prog="%%ddp", allow_abbrev=False, add_help=False, exit_on_error=False,
        usage="%%%%ddp [options] [-- arguments of the cell]",
        description="Run the cell on every worker of the pool, as torchrun would run it as a script.",
    )  # fmt: skip
    pool_options(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--fresh", action="store_true", help="start new worker processes first; all names are lost")
    run.add_argument("--ranks", type=rank_set, metavar="SET", help="run on these ranks only, such as 0,2-3")
    run.add_argument("--show", type=rank_set, metavar="SET", help="show the output of these ranks only, or none")
    run.add_argument("-o", "--output", type=bindable, metavar="NAME",
                     help="bind NAME to the last expression's value on every rank: NAME[rank]")  # fmt: skip
    fault_options(parser, "cell")
    logs.add_options(parser.add_argument_group("output"))
    which = run.add_mutually_exclusive_group()
    which.add_argument("--timings", action="store_true", help="show %%ddp timings when the cell has ended")
    which.add_argument("--no-timings", action="store_true", help="do not record DDP's steps")
    run.add_argument("--memory", action="store_true",
                     help="record allocations, and show %%ddp memory --timeline when the cell has ended")  # fmt: skip
    trace_option(run)
    parser.add_argument("-h", "--help", action="help", help="show this text")
    return parser


@functools.lru_cache(maxsize=256)
def parse_cell(line: str) -> LaunchSpec:
    """A `%%ddp` line → LaunchSpec. Raises BadInput, or HelpAsked with the text to show. It depends on nothing else, and
    most cells have the line of one before."""
    words, argv = split_argv(split_line(line, "%%ddp"))
    space = cell_parser().parse_strictly(words)
    if space.max_restarts and space.ranks is not None:
        raise BadInput(
            "%%ddp --max-restarts restarts all workers, so it cannot be combined with --ranks; leave one out"
        )
    return launch_spec(
        space, ranks=space.ranks, show=space.show, output=space.output or "", fresh=space.fresh,
        hang_after=space.hang_after, timeout=space.timeout, check=space.check, max_restarts=space.max_restarts,
        shutdown_timeout=SHUTDOWN if space.shutdown_timeout is None else space.shutdown_timeout,
        timings=not space.no_timings, show_timings=space.timings, trace=space.trace,
        memory=space.memory, argv=argv, logs=logs.of_options(space),
    )  # fmt: skip


def split_argv(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Words before the first bare `--`, and those after it."""
    if "--" not in words:
        return words, ()
    at = words.index("--")
    return words[:at], tuple(words[at + 1 :])


def complete_cell(line: str) -> list[str]:
    """Options that may come next on a `%%ddp` line; `line` ends at the cursor."""
    return complete(cell_parser(), line)


def at_cursor(line: str) -> tuple[str, list[str]]:
    """The word that is being typed, which may be empty, and those before it."""
    words = line.split()
    return ("", words) if not words or line.endswith(" ") else (words[-1], words[:-1])


def complete(parser: Parser, line: str) -> list[str]:
    """Options, or values of the one before, that may be the word that is being typed."""
    current, before = at_cursor(line)
    if "--" in before:
        return []
    action = waiting_for(parser, before[-1]) if before else None
    if action is not None:
        choices = list(action.choices or (NPROC_WORDS if action.type is workers_per_node else ()))
        return [c for c in choices if str(c).startswith(current)]
    named = [a for a in parser._actions if before[-1:] and before[-1] in a.option_strings and a.nargs == "?"]
    may = [str(c) for a in named for c in a.choices or ()]
    return [c for c in [*may, *parser.long_options()] if c.startswith(current) and "_" not in c]


def trace_option(group: Any) -> None:
    group.add_argument(
        "--trace",
        nargs="?",
        const=TRACE_FILE,
        type=_trace_file,
        metavar="FILE",
        help=f"run torch.profiler on every rank and merge the traces for Perfetto into FILE (default {TRACE_FILE})",
    )


def waiting_for(parser: Parser, word: str) -> argparse.Action | None:
    """The action that takes the word after `word`, if `word` is an option with a value."""
    for action in parser._actions:
        if word in action.option_strings and action.nargs is None:
            return action
    return None


def _slurm_of(space: argparse.Namespace) -> Slurm | None:
    """What is asked of Slurm; None if nothing is. Raises BadInput where it does not fit together."""
    names = ("nodes", *(name.replace("-", "_") for name, *_ in SALLOC), "cpus_per_node")
    said = {name: getattr(space, name) for name in names if getattr(space, name) is not None}
    if space.slurm_options:
        said["more"] = space.slurm_options
    if space.slurm is not None and space.nnodes and not space.slurm:
        least, most = space.nnodes if isinstance(space.nnodes, tuple) else (space.nnodes, space.nnodes)
        said.setdefault("nodes", least if least == most else f"{least}-{most}")
    if space.slurm is None:
        if said:
            option = next(iter(said)).replace("more", "slurm_options").replace("_", "-")
            raise BadInput(f"--{option} needs --slurm; add --slurm, or leave it out")
        if space.keep_alive is not None and not space.hosts:
            raise BadInput("--keep-alive needs --hosts or --slurm; add one of them, or use --keep-warm")
        return None
    if space.hosts:
        raise BadInput(f"--slurm chooses the hosts, so it cannot be combined with --hosts {space.hosts}; leave one out")
    if space.slurm and said:
        raise BadInput(f"--slurm {space.slurm} already has its nodes; leave out --{next(iter(said)).replace('_', '-')}")
    return Slurm(job=space.slurm or None, **said)


def launch_spec(space: argparse.Namespace, **run: Any) -> LaunchSpec:
    elastic = isinstance(space.nnodes, tuple)
    return LaunchSpec(
        nproc=space.nproc, nnodes=None if elastic else space.nnodes, elastic=space.nnodes if elastic else None,
        gpus_per_proc=space.gpus_per_proc, visible=space.visible,
        oversubscribe=space.oversubscribe, device=space.device, keep_warm=space.keep_warm, hosts=space.hosts,
        ssh_config=space.ssh_config, python=space.python, setup=space.setup, via=_via(space), slurm=_slurm_of(space),
        keep_alive=space.keep_alive, interface=space.interface, sync=space.sync, cluster=space.cluster,
        debug=space.debug, env=tuple(space.env), **run,
    )  # fmt: skip


def split_line(line: str, prog: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as e:
        raise BadInput(f"{prog}: {e} in {line.strip()!r}; close the quote or escape it with a backslash") from None
