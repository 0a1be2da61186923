"""The grammar of `%ddp export`, and the `Launch` and `Job` of `nbddp.export` that its options describe. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

from nbddp.capabilities.env.options import merged, setting
from nbddp.capabilities.export import target_support, targets
from nbddp.capabilities.export.sbatch import Job
from nbddp.capabilities.export.torchrun_line import C10D, PORT, SRUN, STATIC, Launch
from nbddp.capabilities.scripts.logs import LogOptions
from nbddp.errors import BadInput
from nbddp.launch.options import Parser, count, nodes_or_range, positive, rank_set, split_argv
from nbddp.notebook.commands import CommandLine
from nbddp.protocol.capability import Command

NOTEBOOK, SCRIPT = "%ddp export", "train.py"
HOST, NAME = "node0", "ddp"
FILES = {"script": (".py",), "notebook": (".ipynb",), "output": (".py", ".sbatch", ".slurm", ".sh", ".yaml")}


@dataclass(frozen=True)
class Shape:
    """What a pool and cells say of a launch; the defaults are those of a launch of which nothing says anything."""

    nnodes: int | tuple[int, int] = 1
    nproc: int = 2
    gpus_per_proc: int = 0
    max_restarts: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    visible: str | None = None
    logs: LogOptions | None = None
    said: tuple[str, ...] = ()  # `Option.exported`, of options that a pool or a cell has


class ExportArguments(TypedDict):
    """What a line has, as `arguments` reads it."""

    notebook: str | None
    script: str
    cells: Collection[int] | None
    tag: str
    force: bool
    to: str | None
    output: str | None
    nnodes: int | tuple[int, int] | None
    nproc: int | None
    gpus_per_proc: int | None
    gpu: str
    max_restarts: int | None
    rendezvous: str | None
    host: str | None
    port: int | None
    name: str | None
    time: str | None
    partition: str
    cpus_per_proc: int | None
    memory: str
    image: str
    package: Sequence[str]
    setup: Sequence[str]
    env: Sequence[tuple[str, str | None]]
    argv: Sequence[str]


def arguments(parser: Parser) -> None:
    """In a notebook its own cells are meant, in a terminal those of a file that is named."""
    notebook = parser.prog == NOTEBOOK
    parser.offers = FILES
    add = parser.add_argument
    if not notebook:
        add("notebook", metavar="NOTEBOOK", help="notebook file, or with only --to the script")
    add("script", nargs="?", default=SCRIPT, metavar="SCRIPT", help=f"file to write (default {SCRIPT})")
    add("--cells", type=rank_set, metavar="SET", help="only the cells with these numbers: 3,5-7 for In[3], In[5] to "
        "In[7] (default: all %%%%ddp cells that ended without an error)")  # fmt: skip
    add("--tag", default="", metavar="TAG", help="only cells with this tag"
        + " (needs --notebook)" * notebook)  # fmt: skip
    if notebook:
        add("--notebook", metavar="FILE", help="take the cells from a notebook file instead of this session")
    add("--force", action="store_true", help="replace existing files")
    job = parser.add_argument_group("job (--to prints its text, and writes no script)")
    add = job.add_argument
    add("--to", choices=tuple(targets.TARGETS), help="launcher or scheduler that starts the script")
    add("-o", "--output", metavar="FILE", help="write the text to FILE")
    add("--nnodes", type=nodes_or_range, metavar="N|MIN:MAX", help="nodes; MIN:MAX: elastic (default: the pool's)")
    add("-n", "--nproc", "--nproc-per-node", "--nproc_per_node", dest="nproc", type=positive, metavar="N",
        help="processes per node (default: the pool's)")  # fmt: skip
    add("--gpus-per-proc", type=_whole, metavar="K", help="GPUs of each process, 0 for CPU (default: the pool's)")
    add("--gpu", default="", metavar="TYPE", help="type of the GPUs, such as A100")
    add("--max-restarts", type=count, metavar="K", help="restarts after a failure (default 0)")
    add("--rendezvous", choices=(C10D, STATIC, SRUN), help="rendezvous of the nodes (default c10d; srun: without "
        "torchrun)")  # fmt: skip
    add("--host", metavar="HOST", help="host of the rendezvous, for --to torchrun (default node0)")
    add("--port", type=positive, metavar="P", help=f"port of the rendezvous (default {PORT})")
    add("--name", metavar="NAME", help="the job's name (default ddp)")
    add("--time", metavar="T", help="time limit, hours:minutes:seconds (default 01:00:00)")
    add("--partition", default="", metavar="P", help="Slurm's partition")
    add("--cpus-per-proc", type=positive, metavar="C", help="cores per process (default 4)")
    add("--memory", default="", metavar="M", help="memory per core, such as 2G")
    add("--image", default="", metavar="IMAGE", help="container image")
    add("--package", action="append", default=[], metavar="PACKAGE", help="Python package to install; repeatable")
    add("--setup", action="append", default=[], metavar="LINE", help="shell line to run first; repeatable")
    add("--env", action="append", default=[], type=setting, metavar="KEY=VALUE", help="environment variable")


def parse(command: Command, parser: Parser, words: Sequence[str]) -> CommandLine:
    own, argv = split_argv(list(words))
    return CommandLine(command, {**vars(parser.parse_strictly(own)), "argv": argv})


def _whole(text: str) -> int:
    return 0 if text == "0" else positive(text)


def launch_of(args: ExportArguments, shape: Shape, argv: Sequence[str]) -> Launch:
    """Raises BadInput if it is impossible."""
    asked = args["nnodes"] if args["nnodes"] is not None else shape.nnodes
    least, most = asked if isinstance(asked, tuple) else (None, asked)
    return Launch(
        args["script"], tuple(argv), most, args["nproc"] or shape.nproc,
        shape.gpus_per_proc if args["gpus_per_proc"] is None else args["gpus_per_proc"], args["rendezvous"] or C10D,
        args["host"] or HOST, args["port"] or PORT, args["name"] or NAME,
        shape.max_restarts if args["max_restarts"] is None else args["max_restarts"],
        None if least == most else least, merged(tuple(shape.env.items()), args["env"]),
        shape.visible == "own", shape.logs,
    )  # fmt: skip


def job_of(args: ExportArguments) -> Job:
    job = Job(
        partition=args["partition"], memory_per_cpu=args["memory"], setup=tuple(args["setup"]),
        packages=tuple(args["package"]), image=args["image"], gpu=args["gpu"],
    )  # fmt: skip
    name, cores, time = args["name"], args["cpus_per_proc"], args["time"]
    return replace(
        job, name=job.name if name is None else name, cpus_per_proc=cores or job.cpus_per_proc,
        time=job.time if time is None else time,
    )  # fmt: skip


def said_of(args: ExportArguments, launch: Launch) -> dict[str, object]:
    """The options of a job that the line has, or that its cells have and a launch carries."""
    names = (*target_support.TABLE, "rendezvous")
    typed = {name: args.get(name) for name in names if args.get(name) not in (None, "", [])}
    carried = {"logs": launch.logs, "visible": launch.own_gpus}
    return {**typed, **{name: value for name, value in carried.items() if value}}


def check_words(args: ExportArguments, notebook: bool) -> None:
    """Raises BadInput for options that do not go together."""
    if args["tag"] and notebook and not args["notebook"]:
        raise BadInput("--tag needs --notebook FILE: only a notebook's file has the tags of its cells")
    if args["output"] and not args["to"]:
        raise BadInput("-o is for --to; the script's file is named without an option: %ddp export train.py")
    if args["to"] and (args["cells"] is not None or args["tag"]):
        raise BadInput(f"--to {args['to']} writes the job for a script; first export the cells, without --to")
