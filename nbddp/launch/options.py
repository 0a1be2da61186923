"""The options of `%%ddp`, and what `commands` shares with it: a line of text → plain specs.

Each option is declared once: those of every pool in `OWN`, the others in the rows of capabilities. argparse does the
parsing; this file holds the words. Every error is a BadInput that names the option as typed, and `--help` is an answer
(HelpAsked), not an exit. Nothing else in the package parses a command line. Pure: no IPython, no torch.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import keyword
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from nbddp.errors import BadInput
from nbddp.launch import answers
from nbddp.launch.units import lasting
from nbddp.protocol.capability import Option, Target, load, option_fields, rows
from nbddp.protocol.request import HANG_AFTER, SHUTDOWN, Options
from nbddp.protocol.run_spec import CELL

if TYPE_CHECKING:
    from nbddp.capabilities import PoolFields
else:
    PoolFields = option_fields("pool")

START = "start"  # the kind of line; a cell's is CELL, and `nbddp.protocol.capability` has all
NPROC_WORDS = ("auto", "gpu", "cpu")
MOST_RANKS = 100_000  # a rank set is written out as numbers: a mistyped 0-9999999999 must not fill the memory
MEANT = 0.65  # difflib's ratio from which a word may be another one, mistyped: `resart`, but not `free` for `forecast`
# fmt: off
OWN = (
    Option(
        name="nproc", group="pool", flags=("-n", "--nproc", "--nproc-per-node", "--nproc_per_node"),
        type="nbddp.launch.options:workers_per_node", metavar="N", offers=NPROC_WORDS,
        help="workers per node: a number, gpu (one per GPU), cpu (one per core) or auto; default: unchanged in a "
        "running pool, else one per GPU, else 2",
    ),
    Option(
        name="nnodes", type="nbddp.launch.options:nodes_or_range", metavar="N|MIN:MAX",
        help="number of nodes; without --hosts or --slurm they are simulated. With MIN:MAX nodes may join and leave, "
        "and the cell restarts on those present",
    ),
    Option(name="gpus_per_proc", type="nbddp.launch.options:positive", metavar="K", help="consecutive GPUs per worker"),
    Option(
        name="visible", choices=("all", "own"),
        help="GPUs that a worker sees. all: LOCAL_RANK selects one, as under torchrun. own: LOCAL_RANK is 0, as "
        "under torchrun --virtual-local-rank",
    ),
    Option(
        name="oversubscribe", const=True, default=False,
        help="start more workers than there are GPUs, or than the memory allows",
    ),
    Option(name="device", choices=("auto", "cpu", "cuda"), help="type of device; cpu does not use the GPUs"),
    Option(
        name="keep_warm", python=False, type="nbddp.launch.options:duration", metavar="TIME",
        help="keep the process that has imported torch for TIME, such as 10m, after the notebook kernel exits or "
        "restarts; the next start is faster (default: off; 10m for python -m nbddp run at a terminal)",
    ),
    Option(
        name="fresh", on=("cell", "script"), group="run", const=True, default=False, keeps=False,
        help="start new worker processes first; all variables are lost",
    ),
    Option(
        name="ranks", of="run", on=("cell",), type="nbddp.launch.options:rank_set", metavar="SET",
        help="run on these ranks only, such as 0,2-3",
    ),
    Option(
        name="output", of="run", on=("cell",), flags=("-o", "--output"), default="",
        type="nbddp.launch.options:bindable", metavar="NAME",
        help="store each rank's value of the last expression in NAME; NAME[rank] is that rank's value",
    ),
    Option(
        name="show", of="run", group="output", type="nbddp.launch.options:rank_set", metavar="SET",
        help="show the output of these ranks only, or none",
    ),
    Option(
        name="timeout", of="run", group="faults", type="nbddp.launch.options:seconds", metavar="S",
        help="stop the cell after S seconds; variables are kept",
    ),
    Option(
        name="hang_after", of="run", default=HANG_AFTER, type="nbddp.launch.options:seconds_or_never", metavar="S",
        help=f"report and stop a deadlock after S seconds, or never (default {HANG_AFTER:g})",
    ),
    Option(
        name="max_restarts", of="run", flags=("--max-restarts", "--max_restarts"), default=0,
        type="nbddp.launch.options:count", metavar="K",
        help="after a failure, start new workers and run the {what} again, at most K times",
    ),
    Option(
        name="shutdown_timeout", of="run", flags=("--shutdown-timeout", "--shutdown_timeout"), default=SHUTDOWN,
        type="nbddp.launch.options:seconds", metavar="S",
        help="seconds that ranks have to clean up when a failure, a deadlock or --timeout stops the cell (default "
        f"{SHUTDOWN:g})",
    ),
)
# fmt: on


@functools.cache
def known() -> Mapping[str, Option]:
    """Name → option, in the order of `--help`, with its flags and its group."""
    found: list[Option] = []
    for options in (OWN, *(row.options for row in rows())):
        at = len(found)
        for option in options:
            names = [other.name for other in found]
            at = names.index(option.after) + 1 if option.after in names else at
            flags = option.flags or (f"--{option.name.replace('_', '-')}",) * bool(option.help)
            found.insert(at, replace(option, flags=flags, group=option.group or found[at - 1].group))
            at += 1
    return {option.name: option for option in found}


class HelpAsked(Exception):
    """`--help` was typed; the text is the answer."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text


@functools.cache
def fields_of(*of: str) -> tuple[Option, ...]:
    """The options that are fields of a spec, of the pool or of the run."""
    return tuple(option for option in known().values() if option.of in of and not option.into)


@dataclass(frozen=True)
class LaunchSpec(PoolFields, Options):
    """What one `%%ddp` line asks for: of the run what `Options` has, and of the pool; rows of capabilities add fields.

    `nproc` None keeps the running pool as it is. `output`: the name that gets the values. `keep_warm`: in seconds.
    """

    nproc: int | str | None = None
    nnodes: int | None = None
    elastic: tuple[int, int] | None = None
    gpus_per_proc: int | None = None
    visible: str | None = None
    oversubscribe: bool = False
    device: str | None = None
    keep_warm: float | None = None
    fresh: bool = False
    output: str = ""

    def says(self, option: Option) -> bool:
        """Whether it has a value for this option."""
        return getattr(self, option.name) not in ("", option.default)

    @functools.cached_property
    def said(self) -> tuple[Option, ...]:
        """The options for which it has a value."""
        return tuple(option for option in fields_of("pool", "run") if self.says(option))

    @property
    def on_hosts(self) -> bool:
        """Whether the pool's own agents start the workers on other hosts."""
        return any(self.says(option) for option in fields_of("pool") if option.workers == "hosts")

    @property
    def elsewhere(self) -> bool:
        """Whether the workers may have other files and another environment than this process: on other hosts, or as
        engines of a cluster."""
        return any(self.says(option) for option in fields_of("pool") if option.workers)

    def _of_run(self) -> dict[str, Any]:
        return {**self.options(), "output": self.output}

    def asks_for_pool(self) -> bool:
        """True if the line says anything about the pool."""
        return self != LaunchSpec(**self._of_run())

    def asks_for_run(self) -> bool:
        """True if the line says anything about the run."""
        return self._of_run() != LaunchSpec()._of_run()


def merged(spec: LaunchSpec, running: LaunchSpec | None) -> LaunchSpec:
    """`spec`, completed from the spec of the running pool, if there is one; nnodes only if nproc is not said either."""
    old = running or LaunchSpec()
    kept = {}
    for option in fields_of("pool"):
        says = spec.says(option)
        if option.merge and (says or old.says(option)):
            kept[option.name] = load(option.merge)(spec, old)
        elif option.keeps and not says:
            kept[option.name] = getattr(old, option.name)
    keep_shape = spec.nproc is None and spec.nnodes is None
    kept |= {
        "nproc": spec.nproc if spec.nproc is not None else old.nproc if spec.nnodes is None else None,
        "nnodes": spec.nnodes or (old.nnodes if keep_shape else None),
        "elastic": spec.elastic or (None if spec.nnodes else old.elastic),
    }
    return replace(spec, **kept)


def visible_gpus(spec: LaunchSpec) -> str:
    """Which GPUs each worker sees, also where neither line nor pool has said so: with more workers than GPUs its
    own."""
    return spec.visible or ("own" if spec.oversubscribe else "all")


def nearest(typed: str, known: Iterable[str]) -> str:
    """The word that was meant, as far as that can be said: one that shares most letters; empty if none does."""
    words = {word.lstrip("-"): word for word in known}
    found = difflib.get_close_matches(typed.lstrip("-"), list(words), n=1, cutoff=MEANT)
    return words[found[0]] if found else ""


class Parser(argparse.ArgumentParser):
    """argparse that raises BadInput, and offers the nearest option for a mistyped one.

    offers: argument → what Tab offers for it, besides its choices: words, endings of files, "*" for all files or "/"
    for folders; or a target, for words that are imported for Tab alone. abbreviates: takes `--nproc_per_nod`, too.
    exclusive: name of a group → the flags of which one alone can be typed, by what they set.
    """

    offers: Mapping[str, Sequence[str] | Target] = {}
    abbreviates = False

    def __init__(self, prog: str, usage: str | None = None, description: str = ""):
        super().__init__(
            prog=prog, usage=usage, description=description, allow_abbrev=False, add_help=False, exit_on_error=False
        )
        self.exclusive: dict[str, dict[str, str]] = {}
        self.add_argument("-h", "--help", action="help", help="show this text")

    def error(self, message: str) -> NoReturn:
        raise BadInput(answers.missing(self))

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpAsked(message or "")

    def format_usage(self) -> str:
        return answers.usage(self)

    def format_help(self) -> str:
        return answers.help_text(self)

    def print_help(self, file: Any = None) -> None:
        raise HelpAsked(self.format_help())

    def long_options(self) -> list[str]:
        return [o for a in self._actions for o in a.option_strings if o.startswith("--")]

    def parse_strictly(self, words: Sequence[str]) -> argparse.Namespace:
        """parse_args, but what is wrong is said in sentences of nbddp, and an unknown option gets the nearest one."""
        typed = filled(self, words)
        try:
            space, rest = self.parse_known_args(typed)
        except argparse.ArgumentError as e:
            raise BadInput(self._answer(e, typed)) from None
        if rest:
            self._refuse(rest[0])
        for flags in self.exclusive.values():
            both = [flag for dest, flag in flags.items() if dest in space]
            if len(both) > 1:
                raise BadInput(f"{self.prog} {both[0]} and {both[1]} exclude each other; remove one of the two")
        return space

    def _answer(self, error: argparse.ArgumentError, words: Sequence[str]) -> str:
        names = (error.argument_name or "").split("/")
        option = next((n for n in names if n.startswith("--")), names[0])
        if isinstance(error.__context__, argparse.ArgumentTypeError):  # the types below say what to type
            return f"{self.prog} {option}: {error.message}"
        if not option.startswith("-"):
            return answers.missing(self)
        return answers.wrong(self, words, option, isinstance(error.__context__, ValueError))

    def in_full(self, word: str) -> str:
        """An abbreviated option as it is declared, with its value: `--nproc_per_nod=2` → `--nproc_per_node=2`."""
        name, sign, value = word.partition("=")
        found = [option for option in self.long_options() if option.startswith(name)]
        if not name.startswith("--") or name in found or not found:
            return word
        others = [option for option in found if option_of(self, option) is not option_of(self, found[0])]
        if others:
            raise BadInput(f"{self.prog} {name} abbreviates {found[0]} and {others[0]}; write one of them")
        return f"{found[0]}{sign}{value}"

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


def filled(parser: Parser, words: Sequence[str]) -> list[str]:
    """The words, with `=` behind an option whose value may be missing, and is: argparse would take the script for it.
    Abbreviated options are written in full. What follows the script is left as it is."""
    if all(action.option_strings for action in parser._actions):
        return list(words)
    found: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        rest[0] = parser.in_full(rest[0]) if parser.abbreviates else rest[0]
        number = taken(parser, rest)
        action = option_of(parser, rest[0])
        missing = action is not None and action.nargs == "?" and number == 1
        found += [f"{rest[0]}={action.const}" if action and missing else rest[0], *rest[1:number]]
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


def seconds_or_never(text: str) -> float | None:
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


duration = quantity(lasting)  # `10m` → seconds


def count(text: str) -> int:
    if not is_number(text) or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of restarts; use 0 or more")
    return int(text)


def rank_set(text: str) -> tuple[int, ...]:
    """`0,2-3` → (0, 2, 3); `none` → ()."""
    if text == "none":
        return ()
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not is_number(first) or (dash and not is_number(last)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a set of ranks; write it as 0,2-3")
        if max(len(first), len(last)) > len(str(MOST_RANKS)) or int(last or first) >= MOST_RANKS:
            raise argparse.ArgumentTypeError(f"{part!r} goes beyond any pool; use ranks below {MOST_RANKS}")
        a, b = int(first), int(last or first)
        if b < a:
            raise argparse.ArgumentTypeError(f"{part!r} counts backwards; write it as {b}-{a}")
        found.update(range(a, b + 1))
    return tuple(sorted(found))


def is_number(text: str) -> bool:
    """True for 0-9 alone: str.isdigit also takes digits that int() refuses, such as ²."""
    return text.isascii() and text.isdigit()


def one_rank(text: str) -> int:
    if not is_number(text) or len(text) > len(str(MOST_RANKS)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank; use one number, such as 0")
    return int(text)


def bindable(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid Python name; use one such as loss")
    return text


@dataclass(frozen=True)
class Reader:
    """Reads the value of an option for argparse. What it needs is imported when a value is typed."""

    target: Target

    def __call__(self, text: str) -> Any:
        return load(self.target)(text)


def options_of(line: str) -> list[Option]:
    """The options of a kind of line: `cell`, `start`, `script`, `terminal` or `torchrun`."""
    return [one for one in known().values() if line in one.on and (line != START or one.of == "pool")]


def add_options(parser: Parser, line: str, what: str = CELL, helps: Mapping[str, str] | None = None) -> None:
    """What is not typed has no value. what: runs by that line; helps: option → words there, if not those it has."""
    parser.offers = {**parser.offers, **{option.name: option.offers for option in options_of(line) if option.offers}}
    groups: dict[str, Any] = {}
    for option in options_of(line):
        if not option.flags:
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        group = groups[option.group]
        if option.excludes:
            parser.exclusive.setdefault(option.excludes, {})[option.name] = option.flags[0]
        words = (helps or {}).get(option.name, option.help).replace("{what}", what).replace("%", "%%")
        group.add_argument(
            *option.flags, dest=option.name, default=argparse.SUPPRESS, help=words, **_for_argparse(option)
        )


def _for_argparse(option: Option) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if option.const is not None:
        found |= {"const": option.const, "action": "store_const"}
        if option.metavar or option.choices:
            found |= {"action": "store", "nargs": "?"}
    if option.repeats:
        found["action"] = "append"
    if option.type:
        found["type"] = Reader(option.type)
    return found | {name: value for name in ("metavar", "choices") if (value := getattr(option, name))}


def pool_options(parser: Parser) -> None:
    """The options of a pool."""
    add_options(parser, START)


@functools.cache
def cell_parser() -> Parser:
    """The grammar of a `%%ddp` line."""
    parser = Parser(
        prog="%%ddp",
        usage="%%%%ddp [options] [-- arguments of the cell]",
        description="Run the cell on every worker of the pool, as torchrun would run it as a script.",
    )
    add_options(parser, CELL)
    return parser


@functools.lru_cache(maxsize=256)
def parse_cell(line: str) -> LaunchSpec:
    """A `%%ddp` line → LaunchSpec. Raises BadInput, or HelpAsked with the text to show. It depends on nothing else, and
    most cells have the line of one before."""
    words, argv = split_argv(split_line(line, "%%ddp"))
    space = cell_parser().parse_strictly(words)
    spec = launch_spec(space, CELL, argv=argv)
    if spec.max_restarts and spec.ranks is not None:
        raise BadInput(
            "%%ddp --max-restarts restarts all workers, so it cannot be combined with --ranks; remove one of the two"
        )
    return spec


def split_argv(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Words before the first bare `--`, and those after it."""
    if "--" not in words:
        return words, ()
    at = words.index("--")
    return words[:at], tuple(words[at + 1 :])


def launch_spec(space: argparse.Namespace, line: str, **more: Any) -> LaunchSpec:
    """What was typed on such a line, and what is known besides. Raises BadInput for what does not go together."""
    typed = vars(space)
    of_line = options_of(line)
    parts = {option.into for option in of_line if option.name in typed}
    values: dict[str, Any] = {}
    for option in of_line:
        if not option.into and (option.name in typed or option.name in parts):
            value = load(option.value)(typed) if option.value else typed[option.name]
            values[option.name] = tuple(value) if option.repeats else value
    if isinstance(values.get("nnodes"), tuple):
        values["elastic"] = values.pop("nnodes")
    return LaunchSpec(**{**values, **more})


def typed(name: str, value: Any) -> list[str]:
    """A value as it is typed, such as `["--nproc", "4"]`."""
    flag = next(flag for flag in known()[name].flags if flag.startswith("--"))
    return [flag] if value is True else [flag, str(value)]


def split_line(line: str, prog: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as e:
        raise BadInput(f"{prog}: {e} in {line.strip()!r}; close the quote or escape it with a backslash") from None
