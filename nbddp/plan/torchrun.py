"""torchrun's command line, and that of `torch.distributed.launch`, as typed behind `%ddp` → a LaunchSpec.

Flags, abbreviations, defaults and `PET_*` variables are those of torchrun 2.13 (torch/distributed/run.py, launch.py).
A flag that has no meaning in a pool of living workers is answered: in a sentence beside the run where the program is
the same without it, else with an error that says what to use. Pure.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp.errors import BadInput
from nbddp.plan import logs
from nbddp.plan.options import LaunchSpec, Parser, count, nodes_or_range, seconds, workers_per_node
from nbddp.plan.program import DASHED, SIGNALS, Program, shutdown_of, signals_of

TORCHRUN, LAUNCH = "torchrun", "launch"
MODULES = {"torch.distributed.run": TORCHRUN, "torch.distributed.launch": LAUNCH}
PYTHON = re.compile(r"(.*/)?python[\d.]*")
FILES = {"launch.py": LAUNCH, "run.py": TORCHRUN}  # in torch/distributed

MEET = "the pool starts a new store for each run, where its ranks meet; use --hosts to name other machines"
# flags without which the program runs all the same: why they have no meaning here, and what to use
NOTED = {
    "rdzv_backend": MEET, "rdzv_endpoint": MEET, "rdzv_conf": MEET, "master_addr": MEET, "master_port": MEET,
    "local_addr": "the pool finds the addresses at which its hosts reach each other; %ddp start --interface selects "
    "an interface",
    "monitor_interval": "the kernel reports an exit to the pool at once, so nothing is polled",
    "start_method": "workers are forked from a process that has imported torch; NBDDP_START_METHOD=spawn changes that",
    "event_log_handler": "torchrun's agent does not run, so it logs no events; %ddp errors and %ddp stacks show what "
    "happened",
    "numa_binding": "a worker's cores are those of the notebook's kernel; start Jupyter under numactl to bind them",
}  # fmt: skip
# flags without which another program would run
REFUSED = {
    "no_python": "a rank of a pool is a Python process; run other programs with !torchrun --no-python",
    "logs_specs": "torchrun's plug-ins for logs run in its agent; --log-dir, --redirects and --tee write logs here",
    "node_rank": "one command starts all nodes of a pool; leave out --node-rank and name the machines with "
    "%ddp start --hosts nodea,nodeb",
}  # fmt: skip
HONOURED = (
    "nnodes", "nproc_per_node", "rdzv_id", "standalone", "max_restarts", "role", "module", "run_path", "log_dir",
    "redirects", "tee", "local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters",
    "signals_to_handle", "shutdown_timeout", "virtual_local_rank", "training_script", "training_script_args", "use_env",
)  # fmt: skip
UNREAD = ("no_python", "run_path", "standalone", "module", "virtual_local_rank")  # flags without a value
NOT_FROM_ENV = ("logs_specs", "numa_binding", "use_env")  # torchrun reads no variable for these


def rewritten(words: Sequence[str]) -> list[str]:
    """`python -m torch.distributed.run …` and `python …/distributed/launch.py …` as `torchrun …` and `launch …`."""
    found = _split(words)
    return list(words) if found is None else [found[0], *found[1]]


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


@functools.cache
def parser_of(prog: str, form: str) -> Parser:
    """form: TORCHRUN or LAUNCH. Defaults are None, so that what was said is known."""
    parser = Parser(
        prog=f"{prog} {form}", exit_on_error=False,
        usage=f"{prog.replace('%', '%%')} {form} [options] SCRIPT [arguments]",
        description="Run a script on the pool by torchrun's command line; torchrun --help explains its options.",
    )  # fmt: skip
    texts: dict[str, Callable[[str], Any] | None] = {
        "--nnodes": nodes_or_range, "--nproc-per-node": workers_per_node,
        "--rdzv-backend": None, "--rdzv-endpoint": None,
        "--rdzv-id": None, "--rdzv-conf": None, "--max-restarts": count, "--monitor-interval": seconds,
        "--start-method": None, "--event-log-handler": None, "--role": None, "--node-rank": int,
        "--master-addr": None, "--master-port": int, "--local-addr": None, "--logs-specs": None, "--numa-binding": None,
        "--signals-to-handle": _signals, "--shutdown-timeout": _whole, "--log-dir": None,
        "--local-ranks-filter": logs.local_ranks,
        "--duplicate-stdout-filters": logs.words, "--duplicate-stderr-filters": logs.words,
    }  # fmt: skip
    for name, kind in texts.items():
        parser.add_argument(*_spelled(name), type=kind or str)
    parser.add_argument("-r", *_spelled("--redirects"), type=logs.streams)
    parser.add_argument("-t", *_spelled("--tee"), type=logs.streams)
    parser.add_argument("-m", *_spelled("--module"), action="store_true", default=None)
    for name in ("--standalone", "--no-python", "--run-path", "--virtual-local-rank"):
        parser.add_argument(*_spelled(name), action="store_true", default=None)
    if form == LAUNCH:
        parser.add_argument(*_spelled("--use-env"), action="store_true")
    parser.add_argument("training_script", metavar="SCRIPT")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, metavar="arguments")
    return parser


def _spelled(name: str) -> list[str]:
    return [name] if "-" not in name[2:] else [name, f"--{name[2:].replace('-', '_')}"]


def _signals(text: str) -> str:
    try:
        return signals_of(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not a time in whole seconds; use a number such as 30")
    return int(text)


def parse(words: Sequence[str], env: Mapping[str, str], prog: str, form: str) -> tuple[LaunchSpec, list[str]]:
    """A command line, without its first word → what it asks for, and what to say of flags that have no meaning here.

    env: where torchrun looks for `PET_*`. Raises BadInput, or HelpAsked.
    """
    parser = parser_of(prog, form)
    space = parser.parse_strictly([*_from_environment(parser, env), *words])
    refused = next((name for name in REFUSED if getattr(space, name)), None)
    if refused is not None:
        raise BadInput(f"{parser.prog} --{refused.replace('_', '-')}: {REFUSED[refused]}")
    spec = _spec(space, env, form)
    return spec, _notes(space)


def _from_environment(parser: Parser, env: Mapping[str, str]) -> list[str]:
    """What `PET_*` variables say, as words before those that were typed."""
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


def _spec(space: argparse.Namespace, env: Mapping[str, str], form: str) -> LaunchSpec:
    elastic = space.nnodes if isinstance(space.nnodes, tuple) and space.nnodes[0] != space.nnodes[1] else None
    nnodes = space.nnodes[0] if isinstance(space.nnodes, tuple) else space.nnodes
    named = "" if space.standalone or space.rdzv_id == "none" else space.rdzv_id or ""
    shutdown = shutdown_of(env) if space.shutdown_timeout is None else float(space.shutdown_timeout)
    by_option = form == LAUNCH and not space.use_env
    program = Program(
        space.training_script, bool(space.module), run_id=named, role=space.role or "", shutdown=shutdown,
        local_rank=DASHED if by_option else "", signals=space.signals_to_handle or SIGNALS,
    )  # fmt: skip
    return LaunchSpec(
        nproc=1 if space.nproc_per_node is None else space.nproc_per_node,
        nnodes=None if elastic else nnodes, elastic=elastic, visible="own" if space.virtual_local_rank else None,
        max_restarts=space.max_restarts or 0, fresh=True, argv=tuple(space.training_script_args), program=program,
        logs=logs.of_options(space),
    )  # fmt: skip


def _notes(space: argparse.Namespace) -> list[str]:
    """A line for flags that share a reason."""
    said: dict[str, list[str]] = {}
    for name, why in NOTED.items():
        if getattr(space, name) is not None and not (name == "rdzv_backend" and space.rdzv_backend == "static"):
            said.setdefault(why, []).append(f"--{name.replace('_', '-')}")
    return [f"{', '.join(names)}: {why}" for why, names in said.items()]
