"""torchrun's command line, and that of `torch.distributed.launch`, as typed behind `%ddp` → a LaunchSpec.

Flags, abbreviations, defaults and `PET_*` variables are those of torchrun 2.15 (torch/distributed/run.py, launch.py). A
flag that has no meaning in a pool of living workers is answered. If the program is the same without it, a sentence
beside the run reports that; else an error says what to use. Pure.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp.capabilities.scripts import logs
from nbddp.capabilities.scripts.program import DASHED, ScriptProgram, shutdown_of, signals_of
from nbddp.errors import BadInput
from nbddp.launch.options import (
    NPROC_WORDS,
    LaunchSpec,
    Parser,
    Reader,
    add_options,
    count,
    launch_spec,
    nodes_or_range,
    seconds,
)
from nbddp.launch.torchrun_env import SIGNALS
from nbddp.notebook.commands import CommandLine
from nbddp.protocol.capability import Command

TORCHRUN, LAUNCH = "torchrun", "launch"
MODULES = {"torch.distributed.run": TORCHRUN, "torch.distributed.launch": LAUNCH}
NOTEBOOK = "%ddp"
PYTHON = re.compile(r"(.*/)?python[\d.]*")
FILES = {"launch.py": LAUNCH, "run.py": TORCHRUN}  # in torch/distributed

MEET = "the pool starts a new store for each run; %ddp start --hosts nodea,nodeb names machines"
# flags without which the program runs all the same: why they have no meaning here, and what to use
NOTED = {
    "rdzv_backend": MEET, "rdzv_endpoint": MEET, "rdzv_conf": MEET, "master_addr": MEET, "master_port": MEET,
    "local_addr": "the pool finds the addresses at which its hosts reach each other; %ddp start --interface selects "
    "an interface",
    "monitor_interval": "the operating system reports an exit to the pool at once, so nothing is polled",
    "start_method": "torchrun itself ignores it for scripts; %ddp start --start-method sets how workers start",
    "event_log_handler": "torchrun's agent does not run, so it logs no events; %ddp errors and %ddp stacks show what "
    "happened",
    "numa_binding": "a worker uses the cores of the notebook kernel; start Jupyter under numactl to bind them",
    "log_line_prefix_template": "each line is shown under its rank, so torchrun's prefix is not written",
    "run_path": "a rank of a pool always runs the script in its own interpreter; remove --run-path",
}  # fmt: skip
# flags without which another program would run
REFUSED = {
    "no_python": "a rank of a pool is a Python process; run other programs with !torchrun --no-python",
    "logs_specs": "torchrun's plug-ins for logs run in its agent; --log-dir, --redirects and --tee write logs here",
    "print_completion": "nbddp does not print shell completions; use !torchrun --print-completion, without a script",
    "node_rank": "one command starts all nodes of a pool; remove --node-rank and name the machines with "
    "%ddp start --hosts nodea,nodeb",
}  # fmt: skip
HONOURED = {
    "nnodes": "number of nodes; without --hosts they are simulated. With MIN:MAX nodes may join and leave",
    "nproc_per_node": "workers per node: a number, gpu, cpu or auto (default 1)",
    "rdzv_id": "TORCHELASTIC_RUN_ID", "standalone": "one node; a pool always has its own store",
    "max_restarts": "after a failure, start new workers and run the script again, at most K times (default 0)",
    "role": "ROLE_NAME (default: default)", "module": "SCRIPT is a module, as in python -m",
    "log_dir": "folder of log files: RUN/attempt_0/LOCAL_RANK/stdout.log, stderr.log and error.json",
    "redirects": "write these streams to files instead of showing them: 1 stdout, 2 stderr, 3 both, or 0:3,1:2",
    "tee": "write these streams to files and show them", "local_ranks_filter": "show these local ranks only",
    "duplicate_stdout_filters": "write lines of stdout with one of these words to filtered_stdout.log too",
    "duplicate_stderr_filters": "write lines of stderr with one of these words to filtered_stderr.log too",
    "signals_to_handle": "signals that are passed on to the ranks, in a terminal",
    "shutdown_timeout": "seconds between SIGTERM and SIGKILL when ranks are stopped (default 30)",
    "virtual_local_rank": "let each worker see only its own GPUs; LOCAL_RANK is 0",
    "training_script": "path of the script, or with -m the name of the module",
    "training_script_args": "the script's sys.argv[1:]", "use_env": "do not pass --local-rank to the script",
}  # fmt: skip
ENV = "set an environment variable on every rank, as does KEY=VALUE before torchrun"
ASSIGNED = re.compile(r"[A-Za-z_]\w*=.*", re.ASCII | re.DOTALL)  # a word before a command
UNREAD = ("no_python", "run_path", "standalone", "module", "virtual_local_rank")  # flags without a value
NOT_FROM_ENV = ("logs_specs", "numa_binding", "print_completion", "use_env")  # torchrun reads no variable for these


def pasted(words: Sequence[str]) -> list[str] | None:
    """`python -m torch.distributed.run …` and `python …/distributed/launch.py …` as `torchrun …` and `launch …`, also
    behind `!`, and `NAME=value torchrun …` as `torchrun --env NAME=value …`. None for any other line."""
    typed = [words[0].removeprefix("!"), *words[1:]]
    typed = typed[1:] if typed[:1] == [""] else typed  # `! torchrun`
    typed = typed[1:] if typed[:1] == ["env"] else typed
    first = next((i for i, word in enumerate(typed) if not ASSIGNED.fullmatch(word)), 0)
    found = _split(typed[first:])
    if found is None:
        return None
    return [found[0], *(part for word in typed[:first] for part in ("--env", word)), *found[1]]


def _split(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """`torchrun` or `launch`, and the words that follow."""
    if not words:
        return None
    first, *rest = words
    if first.rpartition("/")[2] in (TORCHRUN, LAUNCH):
        return first.rpartition("/")[2], rest
    if not PYTHON.fullmatch(first):
        return None
    while rest and re.fullmatch(r"-[uBEIsSO]+", rest[0]):
        del rest[0]
    if rest[:1] == ["-m"] and len(rest) > 1 and rest[1] in MODULES:
        return MODULES[rest[1]], rest[2:]
    if rest and rest[0].startswith("-m") and rest[0][2:] in MODULES:
        return MODULES[rest[0][2:]], rest[1:]
    folder, _, file = rest[0].rpartition("/") if rest else ("", "", "")
    if file == "launch.py" or (file in FILES and folder.endswith("torch/distributed")):
        return FILES[file], rest[1:]
    return None


def torchrun_arguments(parser: Parser) -> None:
    """Defaults are None, so that what was said is known. As torchrun does, it takes abbreviated flags."""
    _arguments(parser, TORCHRUN)


def launch_arguments(parser: Parser) -> None:
    _arguments(parser, LAUNCH)


def _arguments(parser: Parser, form: str) -> None:
    parser.abbreviates = True
    parser.usage = f"{parser.prog.replace('%', '%%')} [options] SCRIPT [arguments]"
    parser.description = "Run a script on the pool by torchrun's command line."
    parser.offers = {"training_script": (".py",), "nproc_per_node": NPROC_WORDS, "log_dir": ("/",)}
    prog = parser.prog.removesuffix(f" {form}")
    texts: dict[str, Callable[[str], Any] | None] = {
        "--nnodes": nodes_or_range, "--nproc-per-node": Reader("nbddp.launch.options:workers_per_node"),
        "--rdzv-backend": None, "--rdzv-endpoint": None,
        "--rdzv-id": None, "--rdzv-conf": None, "--max-restarts": count, "--monitor-interval": seconds,
        "--start-method": None, "--event-log-handler": None, "--role": None, "--node-rank": int,
        "--master-addr": None, "--master-port": int, "--local-addr": None, "--logs-specs": None, "--numa-binding": None,
        "--log-line-prefix-template": None, "--print-completion": None,
        "--signals-to-handle": _signals, "--shutdown-timeout": _whole, "--log-dir": None,
        "--local-ranks-filter": logs.local_ranks,
        "--duplicate-stdout-filters": logs.words, "--duplicate-stderr-filters": logs.words,
    }  # fmt: skip

    def add(*names: str, **how: Any) -> None:
        dest = names[-1].lstrip("-").replace("-", "_")
        parser.add_argument(*names[:-1], *_spelled(names[-1]), help=_help(dest, prog), **how)

    for name, kind in texts.items():
        add(name, type=kind or str, metavar=METAVARS.get(name, "X"))
    add("-r", "--redirects", type=logs.streams, metavar="STREAMS")
    add("-t", "--tee", type=logs.streams, metavar="STREAMS")
    add("-m", "--module", action="store_true", default=None)
    for name in ("--standalone", "--no-python", "--run-path", "--virtual-local-rank"):
        add(name, action="store_true", default=None)
    if form == LAUNCH:
        add("--use-env", action="store_true")
    add_options(parser, TORCHRUN, "script", helps={"env": ENV})
    add("training_script", metavar="SCRIPT")
    add("training_script_args", nargs=argparse.REMAINDER, metavar="arguments")


METAVARS = {
    "--nnodes": "N|MIN:MAX", "--nproc-per-node": "N", "--rdzv-id": "ID", "--max-restarts": "K", "--role": "NAME",
    "--signals-to-handle": "LIST", "--shutdown-timeout": "S", "--log-dir": "FOLDER", "--local-ranks-filter": "LIST",
    "--duplicate-stdout-filters": "WORDS", "--duplicate-stderr-filters": "WORDS",
}  # fmt: skip


def _help(dest: str, prog: str) -> str:
    """The help of a flag, from the tables above, for argparse."""
    if dest in HONOURED:
        return HONOURED[dest].replace("%", "%%")
    kind, why = ("no effect", NOTED[dest]) if dest in NOTED else ("refused", REFUSED[dest])
    return f"{kind}: {_for(why, prog)}".replace("%", "%%")


def _for(text: str, prog: str) -> str:
    """In a terminal each launch has a pool of its own, so the options of a pool are the launch's."""
    return text if prog == NOTEBOOK else text.replace(f"{NOTEBOOK} start", f"{prog} run")


def _spelled(name: str) -> list[str]:
    return [name] if "-" not in name[2:] else [name, f"--{name[2:].replace('-', '_')}"]


def _signals(text: str) -> str:
    try:
        return signals_of(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in whole seconds; use a number such as 30")
    return int(text)


def parse(command: Command, parser: Parser, words: Sequence[str]) -> CommandLine:
    """A command line, without its first word, and what to say of flags that have no meaning here.

    torchrun looks for `PET_*` in the environment. Raises BadInput, or HelpAsked.
    """
    if words and _spelled("--print-completion")[0] == words[0].partition("=")[0].replace("_", "-"):  # needs no script
        raise BadInput(f"{parser.prog} --print-completion: {REFUSED['print_completion']}")
    read = dict(word.split("=", 1) for word in _assigned(words) if word.startswith("PET_"))
    space = parser.parse_strictly([*_from_environment(parser, {**os.environ, **read}), *words])
    prog = parser.prog.removesuffix(f" {command.name}")
    refused = next((name for name in REFUSED if getattr(space, name)), None)
    if refused is not None:
        raise BadInput(f"{parser.prog} --{refused.replace('_', '-')}: {_for(REFUSED[refused], prog)}")
    return CommandLine(command, {}, _spec(space), tuple(_for(note, prog) for note in _notes(space)))


def _assigned(words: Sequence[str]) -> list[str]:
    """What `--env` sets before the script: torchrun itself would read PET_ variables there."""
    found, rest = [], list(words)
    while len(rest) > 1 and rest[0] == "--env" and ASSIGNED.fullmatch(rest[1]):
        found.append(rest[1])
        rest = rest[2:]
    return found


def _from_environment(parser: Parser, env: Mapping[str, str]) -> list[str]:
    """The values of `PET_*` variables, as words before the typed ones."""
    words = []
    for dest in (*HONOURED, *NOTED, *REFUSED):
        value = env.get(f"PET_{dest.upper()}")
        if value is None or dest.startswith("training_script") or dest in NOT_FROM_ENV:
            continue
        option = f"--{dest.replace('_', '-')}"
        if dest in UNREAD:
            words += [option] if _switch(dest, value) else []
        else:
            words.append(f"{option}={value}")
    return words


def _switch(dest: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise BadInput(f"PET_{dest.upper()} is {value!r}; it is a switch, so set it to 1 or 0")
    return value == "1"


def _spec(space: argparse.Namespace) -> LaunchSpec:
    elastic = space.nnodes if isinstance(space.nnodes, tuple) and space.nnodes[0] != space.nnodes[1] else None
    nnodes = space.nnodes[0] if isinstance(space.nnodes, tuple) else space.nnodes
    named = "" if space.standalone or space.rdzv_id == "none" else space.rdzv_id or ""
    shutdown = shutdown_of(os.environ) if space.shutdown_timeout is None else float(space.shutdown_timeout)
    by_option = not getattr(space, "use_env", True)  # torch.distributed.launch without --use-env
    program = ScriptProgram(
        space.training_script, bool(space.module), run_id=named, role=space.role or "",
        local_rank=DASHED if by_option else "", signals=space.signals_to_handle or SIGNALS,
    )  # fmt: skip
    if env := [one for one in vars(space).pop("env", ()) if not one[0].startswith("PET_")]:
        space.env = env
    return launch_spec(
        space, TORCHRUN,
        nproc=1 if space.nproc_per_node is None else space.nproc_per_node,
        nnodes=None if elastic else nnodes, elastic=elastic, visible="own" if space.virtual_local_rank else None,
        max_restarts=space.max_restarts or 0, shutdown_timeout=shutdown, fresh=True, program=program,
        argv=tuple(space.training_script_args), logs=logs.of_options(vars(space)),
    )  # fmt: skip


def _notes(space: argparse.Namespace) -> list[str]:
    """A line for flags that share a reason."""
    said: dict[str, list[str]] = {}
    for name, why in NOTED.items():
        if getattr(space, name) is not None and not (name == "rdzv_backend" and space.rdzv_backend == "static"):
            said.setdefault(why, []).append(f"--{name.replace('_', '-')}")
    return [f"{', '.join(names)}: {why}" for why, names in said.items()]
