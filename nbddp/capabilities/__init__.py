"""The table of capabilities: a row for each folder that adds something to the program, and nothing else.

It imports no folder: a target is the text "module:name" (`nbddp.protocol.capability`). Who deletes a folder deletes its
row as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbddp.protocol.capability import Advice, Capability, Command, Guard, Method, OnAgent, Option, PoolPart, RankPart

if TYPE_CHECKING:  # what the rows add to `nbddp`, to `Pool`, and to what is asked of it, for type checkers and editors
    from collections.abc import Mapping
    from dataclasses import dataclass
    from typing import TypedDict

    import nbddp.capabilities.bench.command
    import nbddp.capabilities.bench.public
    import nbddp.capabilities.calls.command
    import nbddp.capabilities.calls.public
    import nbddp.capabilities.collectives.command
    import nbddp.capabilities.collectives.public
    import nbddp.capabilities.compare.command
    import nbddp.capabilities.compare.public
    import nbddp.capabilities.forecast.command
    import nbddp.capabilities.forecast.public
    import nbddp.capabilities.hosts.command
    import nbddp.capabilities.hosts.public
    import nbddp.capabilities.memory.command
    import nbddp.capabilities.memory.public
    import nbddp.capabilities.prove.command
    import nbddp.capabilities.prove.public
    import nbddp.capabilities.sanitizer.command
    import nbddp.capabilities.sanitizer.public
    import nbddp.capabilities.scripts.command
    import nbddp.capabilities.scripts.public
    import nbddp.capabilities.slurm.command
    import nbddp.capabilities.status.command
    import nbddp.capabilities.status.public
    import nbddp.capabilities.timings.command
    import nbddp.capabilities.timings.public
    import nbddp.capabilities.topology.public
    import nbddp.capabilities.trace.command
    import nbddp.capabilities.trace.public
    from nbddp import export, teach
    from nbddp.capabilities.panel.command import Panel
    from nbddp.capabilities.sanitizer.options import Sanitize
    from nbddp.capabilities.scripts.logs import LogOptions
    from nbddp.capabilities.slurm.commands import Slurm

    __all__ = ["Panel", "Slurm", "export", "teach"]

    class PoolMethods:
        allocations = nbddp.capabilities.memory.command.allocations
        attach = nbddp.capabilities.slurm.command.attach
        bench = nbddp.capabilities.bench.command.bench
        call = nbddp.capabilities.calls.command.call
        checkup = nbddp.capabilities.hosts.command.checkup
        collectives = nbddp.capabilities.collectives.command.collectives
        compare = nbddp.capabilities.compare.command.compare
        findings = nbddp.capabilities.sanitizer.command.findings
        forecast = nbddp.capabilities.forecast.command.forecast
        memory = nbddp.capabilities.memory.command.memory
        prove = nbddp.capabilities.prove.command.prove
        pull = nbddp.capabilities.calls.command.pull
        push = nbddp.capabilities.calls.command.push
        run = nbddp.capabilities.calls.command.run
        run_script = nbddp.capabilities.scripts.command.run_script
        scale = nbddp.capabilities.hosts.command.scale
        sizes = nbddp.capabilities.memory.command.sizes
        status = nbddp.capabilities.status.command.status
        sync = nbddp.capabilities.hosts.command.sync
        timings = nbddp.capabilities.timings.command.timings
        trace = nbddp.capabilities.trace.command.trace

    class PublicMethods:
        allocations = Method(nbddp.capabilities.memory.public.allocations)
        attach = Method(nbddp.capabilities.slurm.command.attach)
        bench = Method(nbddp.capabilities.bench.public.bench)
        call = nbddp.capabilities.calls.public.call
        checkup = Method(nbddp.capabilities.hosts.public.checkup)
        collectives = Method(nbddp.capabilities.collectives.public.collectives)
        compare = Method(nbddp.capabilities.compare.public.compare)
        findings = Method(nbddp.capabilities.sanitizer.public.findings)
        forecast = Method(nbddp.capabilities.forecast.public.forecast)
        memory = Method(nbddp.capabilities.memory.public.memory)
        prove = Method(nbddp.capabilities.prove.public.prove)
        pull = Method(nbddp.capabilities.calls.public.pull)
        push = Method(nbddp.capabilities.calls.public.push)
        run = nbddp.capabilities.calls.public.run
        run_script = Method(nbddp.capabilities.scripts.public.run_script)
        scale = Method(nbddp.capabilities.hosts.command.scale)
        sizes = Method(nbddp.capabilities.memory.public.sizes)
        status = Method(nbddp.capabilities.status.public.status)
        sync = Method(nbddp.capabilities.hosts.command.sync)
        topology = Method(nbddp.capabilities.topology.public.topology)
        timings = Method(nbddp.capabilities.timings.public.timings)
        trace = Method(nbddp.capabilities.trace.public.trace)

    @dataclass(frozen=True, kw_only=True)
    class PoolFields:
        """keep_alive: in seconds. env: None takes a variable back."""

        debug: str | None = None
        env: tuple[tuple[str, str | None], ...] = ()
        hosts: str | None = None
        via: str | None = None
        ssh_config: str | None = None
        python: str | None = None
        setup: str | None = None
        keep_alive: float | None = None
        interface: str | None = None
        sync: bool = False
        cluster: str | None = None
        slurm: Slurm | None = None
        simulate_gpus: str | None = None
        start_method: str | None = None

    @dataclass(frozen=True, kw_only=True)
    class RunFields:
        """trace: the file that gets the merged trace, or whether one is recorded."""

        show_timings: bool = False
        timings: bool = True
        memory: bool = False
        trace: str | bool = False
        check: bool = False
        logs: LogOptions | None = None
        sanitize: Sanitize | bool = False

    class PoolArguments(TypedDict, total=False):
        debug: str | None
        env: Mapping[str, str] | None
        hosts: str | None
        via: str | None
        ssh_config: str | None
        python: str | None
        setup: str | None
        keep_alive: float | None
        interface: str | None
        sync: bool
        cluster: str | None
        slurm: Slurm | bool | None
        simulate_gpus: int | str | None
        start_method: str | None

    class RunArguments(TypedDict, total=False):
        timings: bool
        memory: bool
        trace: bool
        check: bool
        logs: LogOptions | str | None
        sanitize: Sanitize | bool


PACKAGES = {"export": "nbddp.export", "teach": "nbddp.teach"}  # public names of what lies elsewhere
SANITIZED = ("cell", "script", "terminal", "torchrun")  # lines that take --sanitize

# fmt: off
ROWS = (
    Capability(
        name="status",
        commands=(
            Command(
                name="status", of_pool=True,
                help="show each worker's rank, node, local rank, device, pid, state and memory",
                notebook="nbddp.capabilities.status.command:in_notebook",
                terminal="nbddp.capabilities.status.command:in_terminal",
            ),
        ),
        methods={"status": "nbddp.capabilities.status.command:status"},
        public={"status": "nbddp.capabilities.status.public:status"},
    ),
    Capability(
        name="calls",
        commands=(
            Command(
                name="push", after="restart", names="notebook",
                help="copy variables from the notebook to every rank",
                grammar="nbddp.notebook.commands:names_arguments",
                notebook="nbddp.capabilities.calls.command:push_names",
            ),
            Command(
                name="pull", after="push", names="ranks",
                help="fetch variables from every rank, as sequences indexed by rank",
                grammar="nbddp.notebook.commands:names_arguments",
                notebook="nbddp.capabilities.calls.command:pull_names",
            ),
        ),
        methods={name: f"nbddp.capabilities.calls.command:{name}" for name in ("call", "pull", "push", "run")},
        public={name: f"nbddp.capabilities.calls.public:{name}" for name in ("call", "pull", "push", "run")},
        requests={op: f"nbddp.capabilities.calls.on_rank:{op}" for op in ("call", "push", "pull")},
    ),
    Capability(name="gpus", on_agent=OnAgent(gpus="nbddp.capabilities.gpus.on_agent:told")),
    Capability(
        name="widgets",
        part=PoolPart(
            target="nbddp.capabilities.widgets.part:WidgetsPart", messages=("comm_open", "comm_msg", "comm_close"),
        ),
    ),
    Capability(
        name="by_rank",
        part=PoolPart(target="nbddp.capabilities.by_rank.part:ByRankPart", when=("run",)),
    ),
    Capability(
        name="panel",
        commands=(
            Command(
                name="panel",
                help="start, watch and steer the pool with the mouse",
                notebook="nbddp.capabilities.panel.command:show",
            ),
        ),
        part=PoolPart(target="nbddp.capabilities.panel.session:PanelPart"),
        names={"Panel": "nbddp.capabilities.panel.command:Panel"},
        methods={"_repr_mimebundle_": "nbddp.capabilities.panel.panel:shown"},
        on_agent=OnAgent(ops={"use": "nbddp.capabilities.panel.on_agent:use"}),
    ),
    Capability(
        name="hosts",
        commands=(
            Command(
                name="scale", after="stop", of_pool=True,
                help="change the number of nodes of a pool started with --nnodes MIN:MAX",
                grammar="nbddp.capabilities.hosts.command:scale_arguments",
                notebook="nbddp.capabilities.hosts.command:scale_in_notebook",
                terminal="nbddp.capabilities.hosts.command:scale_in_terminal",
            ),
            Command(
                name="sync", after="restart",
                help="copy the notebook's folder to the pool's hosts again",
                notebook="nbddp.capabilities.hosts.command:sync_in_notebook",
            ),
        ),
        options=(
            Option(
                name="hosts", workers="hosts", group="other hosts", after="keep_warm", metavar="LIST", offers=("*",),
                help="start the workers on these hosts by ssh: nodea,user@nodeb:2222, or a file with one host per "
                "line (nodea slots=4)",
            ),
            Option(
                name="via", metavar="WAY", value="nbddp.capabilities.hosts.via:via",
                help="command that starts a process there: ssh (default), mpiexec, or one such as "
                "'kubectl exec -i {host} -- {command}'",
            ),
            Option(
                name="ssh_config", metavar="FILE", offers=("*",), help="ssh configuration file (default: your own)",
            ),
            Option(
                name="python", metavar="PATH", offers=("*",),
                help="Python interpreter with nbddp on those hosts (default: the path of this one)",
            ),
            Option(name="setup", metavar="LINE", help="shell line to run there first, such as 'module load cuda'"),
            Option(
                name="keep_alive", annotation="float | None", type="nbddp.launch.options:duration", metavar="TIME",
                value="nbddp.capabilities.hosts.via:keep_alive",
                help="keep workers on --hosts for TIME, such as 10m, after a lost connection, and Slurm's nodes after "
                "the notebook kernel has exited (%ddp attach)",
            ),
            Option(
                name="interface", metavar="NAME",
                help="network interface that connects all hosts (default: chosen by trying them)",
            ),
            Option(
                name="sync", annotation="bool", default=False, keeps=False, const=True,
                help="copy the notebook's folder there first, without files that git ignores; workers start in the "
                "copy",
            ),
        ),
        methods={
            "scale": "nbddp.capabilities.hosts.command:scale", "sync": "nbddp.capabilities.hosts.command:sync",
            "checkup": "nbddp.capabilities.hosts.command:checkup",
        },
        public={"checkup": "nbddp.capabilities.hosts.public:checkup"},
        rank=(RankPart(name="silence", target="nbddp.capabilities.hosts.on_rank:Silence", when="hosts"),),
        on_agent=OnAgent(
            ops={
                "doors": "nbddp.capabilities.hosts.on_agent:doors", "knock": "nbddp.capabilities.hosts.on_agent:knock",
                "close_doors": "nbddp.capabilities.hosts.on_agent:close_doors",
                "scale": "nbddp.capabilities.hosts.on_agent:scale",
            },
            starts={"facts": "nbddp.capabilities.hosts.facts:main"},
        ),
        sources=dict.fromkeys(
            ("elastic", "hosts", "interface", "sync"), "nbddp.capabilities.hosts.remote_nodes:RemoteNodes"
        ),
    ),
    Capability(
        name="simulated_gpus",
        part=PoolPart(
            target="nbddp.capabilities.simulated_gpus.part:SimulatedGpusPart", when=("option:simulate_gpus",),
        ),
        options=(
            Option(
                name="simulate_gpus", annotation="int | str | None", group="pool", after="device", metavar="N|NxMODEL",
                on=("cell", "start", "script", "terminal", "torchrun"),
                type="nbddp.capabilities.simulated_gpus.options:asked",
                offers=(
                    "4", "4xT4", "4xV100-16GB", "4xV100-32GB", "4xP100", "4xA100-40GB", "4xA100-80GB", "4xA10G", "4xL4",
                    "4xL40S", "4xRTX-4090", "4xH100", "8xA100-80GB", "8xH100",
                ),
                given="nbddp.capabilities.simulated_gpus.options:given",
                merge="nbddp.capabilities.simulated_gpus.options:merged", to_ranks=True,
                exported="Its cells ran on simulated GPUs; the script is for real ones, and simulates none.",
                help="run CUDA programs without GPUs: each node has N simulated ones, computed on the CPU (N T4; "
                "4xA100-80GB names a model; 0 for none)",
            ),
        ),
        rank=(
            RankPart(
                name="simulated_gpus", target="nbddp.capabilities.simulated_gpus.on_worker:part",
                when="pool:simulate_gpus",
            ),
        ),
        advice=Advice(
            said=r"(?i)cuda|nccl|nvidia|accelerator|dummy base class|got \(NoneType\)|list index out of range",
            target="nbddp.capabilities.simulated_gpus.advice:without_gpus",
        ),
    ),
    Capability(
        name="topology",
        commands=(
            Command(
                name="topology", after="sync", of_pool=True,
                help="draw the nodes, processes and devices of the pool or of a planned layout",
                grammar="nbddp.capabilities.topology.command:arguments",
                notebook="nbddp.capabilities.topology.command:in_notebook",
                terminal="nbddp.capabilities.topology.command:in_terminal",
            ),
        ),
        public={"topology": "nbddp.capabilities.topology.public:topology"},
    ),
    Capability(
        name="stale_modules",
        part=PoolPart(target="nbddp.capabilities.stale_modules.part:StaleModulesPart", when=("run",)),
        rank=(RankPart(name="stale_modules", target="nbddp.capabilities.stale_modules.on_rank:StaleModules"),),
    ),
    Capability(
        name="timings",
        commands=(
            Command(
                name="timings", after="pull",
                help="show where time goes in DDP's steps or any program's collectives, and who waits for whom",
                grammar="nbddp.capabilities.timings.command:arguments",
                notebook="nbddp.capabilities.timings.command:show",
            ),
        ),
        options=(
            Option(
                name="show_timings", annotation="bool", default=False, python=False, of="run", on=("cell", "script"),
                after="output", flags=("--timings",), const=True, excludes="timings",
                shows="nbddp.capabilities.timings.command:show_recorded", later="%ddp timings",
                help="show %ddp timings after the {what}",
            ),
            Option(
                name="timings", annotation="bool", default=True, of="run", on=("cell", "script"),
                flags=("--no-timings",), const=False, excludes="timings", to_ranks=True,
                help="do not record DDP's steps",
            ),
        ),
        methods={"timings": "nbddp.capabilities.timings.command:timings"},
        public={"timings": "nbddp.capabilities.timings.public:timings"},
        rank=(RankPart(name="timings", target="nbddp.capabilities.timings.on_rank:part", sleeps=True),),
        probes={"DDP's reducer": "nbddp.capabilities.timings.probes:ddps_reducer"},
        requests={
            "timings": "nbddp.capabilities.timings.on_rank:timings",
            "clocks": "nbddp.capabilities.timings.on_rank_clocks:clocks",
        },
        questions={
            "pace": "nbddp.capabilities.timings.on_rank:pace", "step": "nbddp.capabilities.timings.on_rank:step",
        },
    ),
    Capability(
        name="collectives",
        methods={"collectives": "nbddp.capabilities.collectives.command:collectives"},
        public={"collectives": "nbddp.capabilities.collectives.public:collectives"},
        requests={"together": "nbddp.capabilities.collectives.on_rank:together"},
    ),
    Capability(
        name="trace",
        options=(
            Option(
                name="trace", annotation="bool", default=False, of="run", group="run", after="timings",
                type="nbddp.capabilities.trace.options:file", const="", metavar="FILE", to_ranks=True,
                shows="nbddp.capabilities.trace.command:show_recorded", of_failed=True,
                terminal="nbddp.capabilities.trace.command:in_terminal",
                help="run torch.profiler on every rank and merge the traces for Perfetto into FILE (default "
                "ddp-trace.json.gz)",
            ),
        ),
        methods={"trace": "nbddp.capabilities.trace.command:trace"},
        public={"trace": "nbddp.capabilities.trace.public:trace"},
        rank=(RankPart(name="trace", target="nbddp.capabilities.trace.on_rank:part", hears="trace"),),
        requests={"trace": "nbddp.capabilities.trace.on_rank:trace"},
    ),
    Capability(
        name="compare",
        commands=(
            Command(
                name="compare", after="timings", names="ranks",
                help="compare a variable across ranks: checksums, norms and largest differences",
                grammar="nbddp.notebook.commands:names_arguments", notebook="nbddp.capabilities.compare.command:show",
            ),
        ),
        methods={"compare": "nbddp.capabilities.compare.command:compare"},
        public={"compare": "nbddp.capabilities.compare.public:compare"},
        requests={"compare": "nbddp.capabilities.compare.on_rank:compare"},
    ),
    Capability(
        name="prove",
        commands=(
            Command(
                name="prove", after="compare", names="ranks",
                help="test on copies whether N ranks take the same step as one process with all their batches",
                grammar="nbddp.capabilities.prove.command:arguments", notebook="nbddp.capabilities.prove.command:show",
            ),
        ),
        methods={"prove": "nbddp.capabilities.prove.command:prove"},
        public={"prove": "nbddp.capabilities.prove.public:prove"},
        probes={
            "copies of DDP models": "nbddp.capabilities.prove.probes:copies_of_ddp_models",
            "copies of FSDP2 models": "nbddp.capabilities.prove.probes:copies_of_fsdp2_models",
        },
        requests={"prove": "nbddp.capabilities.prove.on_rank:prove"},
        questions={"proof": "nbddp.capabilities.prove.on_rank:proof"},
    ),
    Capability(
        name="memory",
        commands=(
            Command(
                name="memory", after="compare", names="ranks",
                help="show memory by rank (parameters, gradients, optimizer state, buckets, peak), by NAME, or "
                "over a step",
                grammar="nbddp.capabilities.memory.command:arguments",
                notebook="nbddp.capabilities.memory.command:show",
            ),
        ),
        options=(
            Option(
                name="memory", annotation="bool", default=False, of="run", on=("cell",), group="run", after="timings",
                const=True, to_ranks=True, shows="nbddp.capabilities.memory.command:show_recorded",
                later="%ddp memory --timeline",
                help="record allocations, and show %ddp memory --timeline after the cell",
            ),
        ),
        methods={
            "memory": "nbddp.capabilities.memory.command:memory", "sizes": "nbddp.capabilities.memory.command:sizes",
            "allocations": "nbddp.capabilities.memory.command:allocations",
        },
        public={
            "memory": "nbddp.capabilities.memory.public:memory", "sizes": "nbddp.capabilities.memory.public:sizes",
            "allocations": "nbddp.capabilities.memory.public:allocations",
        },
        rank=(
            RankPart(name="memory", target="nbddp.capabilities.memory.on_rank:part"),
            RankPart(
                name="allocations", target="nbddp.capabilities.memory.on_rank_timeline:AllocationRecorder",
                hears="memory",
            ),
        ),
        requests={
            "memory": "nbddp.capabilities.memory.on_rank:memory",
            "named_memory": "nbddp.capabilities.memory.on_rank_sizes:named_memory",
            "allocations": "nbddp.capabilities.memory.on_rank_timeline:allocations",
        },
    ),
    Capability(
        name="forecast",
        commands=(
            Command(
                name="forecast", after="memory",
                help="predict step time and scaling efficiency on more nodes",
                grammar="nbddp.capabilities.forecast.command:arguments",
                notebook="nbddp.capabilities.forecast.command:show",
            ),
        ),
        methods={"forecast": "nbddp.capabilities.forecast.command:forecast"},
        public={"forecast": "nbddp.capabilities.forecast.public:forecast"},
    ),
    Capability(
        name="bench",
        commands=(
            Command(
                name="bench", after="forecast",
                help="measure time and bandwidth of collectives by size, as nccl-tests does",
                grammar="nbddp.capabilities.bench.command:arguments",
                notebook="nbddp.capabilities.bench.command:show",
            ),
        ),
        methods={"bench": "nbddp.capabilities.bench.command:bench"},
        public={"bench": "nbddp.capabilities.bench.public:bench"},
        requests={"bench": "nbddp.capabilities.bench.on_rank:bench"},
    ),
    Capability(
        name="debugger",
        part=PoolPart(
            target="nbddp.capabilities.debugger.part:DebuggerPart", when=("shell", "run"), messages=("nbddp_stopped",),
        ),
        commands=(
            Command(
                name="debug", after="bench",
                help="open a debugger prompt in the rank that failed first (during a run, use breakpoint())",
                grammar="nbddp.capabilities.debugger.command:arguments",
                notebook="nbddp.capabilities.debugger.command:show",
            ),
        ),
        rank=(RankPart(name="debugger", target="nbddp.capabilities.debugger.on_rank:part"),),
        requests={"evaluate": "nbddp.capabilities.debugger.on_rank:evaluate"},
        questions={
            "debug": "nbddp.capabilities.debugger.on_rank:debug",
            "debug_names": "nbddp.capabilities.debugger.on_rank:debug_names",
        },
    ),
    Capability(
        name="stacks",
        commands=(
            Command(
                name="stacks", after="debug", of_pool=True,
                help="show each rank's line, collective, stack and the ranks it waits for",
                notebook="nbddp.capabilities.stacks.command:in_notebook",
                terminal="nbddp.capabilities.stacks.command:in_terminal",
            ),
        ),
    ),
    Capability(
        name="doctor",
        part=PoolPart(target="nbddp.capabilities.doctor.background:Probes", when=("start",)),
        commands=(
            Command(
                name="doctor", after="stacks",
                help="check torch, ipykernel, IPython, ipyparallel and the pool's hosts",
                notebook="nbddp.capabilities.doctor.command:in_notebook",
                terminal="nbddp.capabilities.doctor.command:in_terminal",
            ),
        ),
        questions={"seams": "nbddp.capabilities.doctor.on_rank:seams"},
        on_agent=OnAgent(starts={"trials": "nbddp.capabilities.doctor.probe_runner:in_copy"}),
    ),
    Capability(
        name="scripts",
        part=PoolPart(
            target="nbddp.capabilities.scripts.part:ScriptsPart", when=("field:program", "field:logs", "died"),
            asked=("program", "logs"),
        ),
        commands=(
            Command(
                name="run", after="log",
                help="run a script or module on every rank, as torchrun does",
                grammar="nbddp.capabilities.scripts.grammar:arguments",
                parse="nbddp.capabilities.scripts.grammar:parse",
                notebook="nbddp.capabilities.scripts.command:run", terminal="nbddp.capabilities.scripts.terminal:run",
            ),
            Command(
                name="torchrun", after="run",
                help="run a script by a command line of torchrun, or of python -m torch.distributed.run",
                grammar="nbddp.capabilities.scripts.torchrun:torchrun_arguments",
                parse="nbddp.capabilities.scripts.torchrun:parse", pasted="nbddp.capabilities.scripts.torchrun:pasted",
                notebook="nbddp.capabilities.scripts.command:run", terminal="nbddp.capabilities.scripts.terminal:run",
            ),
            Command(
                name="launch", after="torchrun",
                help="run a script by a command line of python -m torch.distributed.launch",
                grammar="nbddp.capabilities.scripts.torchrun:launch_arguments",
                parse="nbddp.capabilities.scripts.torchrun:parse",
                notebook="nbddp.capabilities.scripts.command:run", terminal="nbddp.capabilities.scripts.terminal:run",
            ),
            Command(
                name="errors", after="launch",
                help="return the exit code and error file of each rank that failed in the last run",
                grammar="nbddp.capabilities.scripts.command:errors_arguments",
                notebook="nbddp.capabilities.scripts.command:errors",
            ),
        ),
        options=(
            Option(
                name="module", of="run", into="program", on=("script", "terminal"), after="fresh",
                flags=("-m", "--module"), const=True,
                help="SCRIPT is a module, as in python -m",
            ),
            Option(
                name="keep", of="run", into="program", on=("script",), const=True,
                help="run in the existing processes, and keep the script's variables there for the next cell",
            ),
            Option(
                name="logs", annotation="LogOptions | str | None", of="run", after="show",
                value="nbddp.capabilities.scripts.logs:of_options", given="nbddp.capabilities.scripts.logs:given",
            ),
            Option(
                name="log_dir", of="run", into="logs", flags=("--log-dir", "--log_dir"),
                metavar="FOLDER", offers=("/",),
                help="folder of log files: RUN/attempt_0/LOCAL_RANK/stdout.log, stderr.log and error.json, as torchrun",
            ),
            Option(
                name="redirects", of="run", into="logs", flags=("-r", "--redirects"),
                type="nbddp.capabilities.scripts.logs:streams", metavar="STREAMS",
                help="write these streams to files instead of showing them: 1 stdout, 2 stderr, 3 both, or by local "
                "rank, as 0:3,1:2",
            ),
            Option(
                name="tee", of="run", into="logs", flags=("-t", "--tee"),
                type="nbddp.capabilities.scripts.logs:streams", metavar="STREAMS",
                help="write these streams to files and show them",
            ),
            Option(
                name="local_ranks_filter", of="run", into="logs",
                flags=("--local-ranks-filter", "--local_ranks_filter"),
                type="nbddp.capabilities.scripts.logs:local_ranks", metavar="LIST",
                help="show the output of these local ranks only",
            ),
        ),
        methods={"run_script": "nbddp.capabilities.scripts.command:run_script"},
        public={"run_script": "nbddp.capabilities.scripts.public:run_script"},
        requests={"script": "nbddp.capabilities.scripts.on_rank:script"},
    ),
    Capability(
        name="export",
        commands=(
            Command(
                name="export", after="launch",
                help="write the %%ddp cells as a script for torchrun, or a job for Slurm, Kubeflow, SkyPilot, "
                "TorchX, Ray",
                grammar="nbddp.capabilities.export.options:arguments", parse="nbddp.capabilities.export.options:parse",
                notebook="nbddp.capabilities.export.command:in_notebook",
                terminal="nbddp.capabilities.export.command:in_terminal",
            ),
        ),
    ),
    Capability(
        name="lint",
        commands=(
            Command(
                name="lint", after="export",
                help="find mistakes in the source of DDP programs: scripts, notebooks and cells that ran",
                grammar="nbddp.capabilities.lint.command:arguments", parse="nbddp.capabilities.lint.command:parse",
                notebook="nbddp.capabilities.lint.command:in_notebook",
                terminal="nbddp.capabilities.lint.command:in_terminal",
            ),
        ),
    ),
    Capability(
        name="private",
        on_agent=OnAgent(warm="nbddp.capabilities.private.sock_owner:told"),
        guard=Guard(
            store="nbddp.capabilities.private.store_guard:serve", rank="nbddp.capabilities.private.on_rank:guard",
        ),
        probes={"store out of reach": "nbddp.capabilities.private.probes:store_out_of_reach"},
    ),
    Capability(
        name="warm",
        on_agent=OnAgent(
            ops={"keep": "nbddp.capabilities.warm.on_agent:keep"}, warm="nbddp.capabilities.warm.on_agent:told",
            begins="nbddp.capabilities.warm.on_agent:begin", succeeds="nbddp.capabilities.warm.on_agent:go_on",
        ),
        agents="nbddp.capabilities.warm.client:WarmProcesses",
        waits="nbddp.capabilities.warm.client:waiting",
    ),
    Capability(
        name="slurm",
        part=PoolPart(target="nbddp.capabilities.slurm.held_jobs:HeldJobs"),
        offers="nbddp.capabilities.slurm.held_jobs:offers",
        commands=(
            Command(
                name="attach", after="stop",
                help="show the last run again; without a pool: start workers on Slurm nodes that --keep-alive kept",
                grammar="nbddp.capabilities.slurm.command:attach_arguments",
                notebook="nbddp.capabilities.slurm.command:attach_in_notebook",
            ),
            Command(
                name="submit", after="export",
                help="submit a batch script to Slurm, and follow its state and log",
                grammar="nbddp.capabilities.slurm.command:submit_arguments",
                notebook="nbddp.capabilities.slurm.command:submit_in_notebook",
            ),
        ),
        options=(
            Option(
                name="slurm", annotation="Slurm | bool | None", workers="hosts", group="Slurm", after="sync",
                type="nbddp.capabilities.slurm.options:job", const="", metavar="JOB",
                value="nbddp.capabilities.slurm.options:asked", given="nbddp.capabilities.slurm.options:given",
                merge="nbddp.capabilities.slurm.options:merged",
                help="start the workers on Slurm nodes: of JOB, else of this notebook kernel's job, else of a new job",
            ),
            Option(
                name="nodes", into="slurm", type="nbddp.capabilities.slurm.options:nodes", metavar="N",
                help="ask Slurm for N nodes, or for 2-4 (default 1)",
            ),
            Option(name="partition", into="slurm", metavar="P", help="as for salloc"),
            Option(name="time", into="slurm", metavar="T", help="as for salloc, such as 1:00:00"),
            Option(name="gpus_per_node", into="slurm", metavar="G", help="as for salloc, such as 4 or a100:4"),
            Option(name="account", into="slurm", metavar="A", help="as for salloc"),
            Option(name="qos", into="slurm", metavar="Q", help="as for salloc"),
            Option(name="constraint", into="slurm", metavar="C", help="as for salloc"),
            Option(
                name="cpus_per_node", into="slurm", type="nbddp.launch.options:positive", metavar="C",
                help="cores per node (default: one per worker, if no GPUs are requested)",
            ),
            Option(
                name="slurm_options", into="slurm", metavar="WORDS",
                help="other options for salloc, such as '--exclusive --mem=0'",
            ),
        ),
        names={"Slurm": "nbddp.capabilities.slurm.commands:Slurm"},
        methods={"attach": "nbddp.capabilities.slurm.command:attach"},
        sources={"slurm": "nbddp.capabilities.slurm.host_source:SlurmNodes"},
        waits="nbddp.capabilities.slurm.allocation:kept",
    ),
    Capability(
        name="attached",
        options=(
            Option(
                name="cluster", workers="engines", group="other hosts", after="sync", metavar="ID",
                merge="nbddp.capabilities.attached.clusters:merged",
                help="use the engines of a running ipyparallel cluster: its id, PROFILE/ID or its connection file; "
                "--nproc N takes N engines of each host",
            ),
        ),
        sources={"cluster": "nbddp.capabilities.attached.host_source:ClusterEngines"},
    ),
    Capability(
        name="env",
        part=PoolPart(target="nbddp.capabilities.env.part:EnvPart", when=("start",)),
        options=(
            Option(
                name="debug", after="keep_warm", choices=("off", "info", "detail"), const="info",
                help="turn on the debug output of torch, gloo and NCCL (TORCH_DISTRIBUTED_DEBUG, NCCL_DEBUG, …) until "
                "--debug off; detail also compares each collective across ranks",
            ),
            Option(
                name="env", annotation="Mapping[str, str] | None", default=(), repeats=True, metavar="KEY=VALUE",
                on=("cell", "start", "script", "terminal", "torchrun"),
                type="nbddp.capabilities.env.options:setting", given="nbddp.capabilities.env.options:given",
                merge="nbddp.capabilities.env.options:of_line",
                help="set an environment variable on every rank; KEY alone undoes that. Workers are replaced if the "
                "variable is read once per process",
            ),
        ),
        requests={"environment": "nbddp.capabilities.env.on_rank:environment"},
    ),
    Capability(
        name="start_method",
        part=PoolPart(target="nbddp.capabilities.start_method.part:StartMethodPart", when=("option:start_method",)),
        options=(
            Option(
                name="start_method", group="pool", after="device", choices=("fork", "spawn"), to_ranks=True,
                help="how workers start. fork (default, except on macOS): from a process that has imported torch. "
                "spawn: as under torchrun; each imports torch itself, and hash() of a string differs by rank",
            ),
        ),
        on_agent=OnAgent(spawns="nbddp.capabilities.start_method.on_agent:spawns"),
    ),
    Capability(
        name="capacity",
        part=PoolPart(target="nbddp.capabilities.capacity.part:CapacityPart", when=("start",)),
        on_agent=OnAgent(ops={"limits": "nbddp.capabilities.capacity.on_agent:limits"}),
    ),
    Capability(
        name="terminal",
        main="nbddp.capabilities.terminal.main:main",
        terminal={
            "start": "nbddp.capabilities.terminal.main:start",
            "stop": "nbddp.capabilities.terminal.main:stop", "restart": "nbddp.capabilities.terminal.main:restart",
        },
    ),
    Capability(
        name="check",
        options=(
            Option(
                name="check", annotation="bool", default=False, of="run", after="hang_after", const=True,
                to_ranks=True,
                help="before each collective, compare operation, shape, dtype and reduce op across ranks",
            ),
        ),
        rank=(RankPart(name="check", target="nbddp.capabilities.check.on_rank:Checker", when="option:check"),),
    ),
    Capability(
        name="sanitizer",
        part=PoolPart(target="nbddp.capabilities.sanitizer.part:HintsPart", when=("shell", "run")),
        options=(
            Option(
                name="sanitize", annotation="Sanitize | bool", default=False, of="run", group="run", after="check",
                const=True, to_ranks=True, on=SANITIZED, value="nbddp.capabilities.sanitizer.options:asked",
                of_failed=True,
                shows="nbddp.capabilities.sanitizer.command:show_recorded",
                terminal="nbddp.capabilities.sanitizer.command:in_terminal",
                help="detect silent mistakes in data-parallel training, and report them after the {what}",
            ),
            Option(
                name="allow", into="sanitize", of="run", repeats=True, default=(), metavar="KIND", on=SANITIZED,
                type="nbddp.capabilities.sanitizer.options:kind", offers="nbddp.capabilities.sanitizer.table:KINDS",
                help="with --sanitize: do not report findings of this kind",
            ),
            Option(
                name="same_input", into="sanitize", of="run", annotation="bool", default=False, const=True,
                on=SANITIZED, help="with --sanitize: expect the same input on all ranks",
            ),
        ),
        methods={"findings": "nbddp.capabilities.sanitizer.command:findings"},
        public={"findings": "nbddp.capabilities.sanitizer.public:findings"},
        probes={"state of a step": "nbddp.capabilities.sanitizer.probes:state_of_a_step"},
        rank=(
            RankPart(
                name="sanitizer", target="nbddp.capabilities.sanitizer.on_rank:part", when="option:sanitize",
                hears="sanitize",
            ),
            RankPart(name="hints", target="nbddp.capabilities.sanitizer.on_rank_hints:part", sleeps=True),
        ),
        requests={"sanitized": "nbddp.capabilities.sanitizer.on_rank:sanitized"},
    ),
    Capability(
        name="completion",
        part=PoolPart(target="nbddp.capabilities.completion.part:CompletionPart", when=("shell",)),
        questions={
            "complete": "nbddp.capabilities.completion.on_rank:complete",
            "inspect": "nbddp.capabilities.completion.on_rank:inspected",
        },
    ),
    Capability(
        name="libraries", rank=(RankPart(name="libraries", target="nbddp.capabilities.libraries.on_rank:Libraries"),)
    ),
    Capability(
        name="subprocesses",
        rank=(RankPart(name="subprocesses", target="nbddp.capabilities.subprocesses.on_rank:install"),),
    ),
    Capability(
        name="background",
        part=PoolPart(target="nbddp.capabilities.background.part:BackgroundPart", when=("late",)),
        rank=(RankPart(name="background", target="nbddp.capabilities.background.on_rank:StartedBy"),),
    ),
    Capability(
        name="spool",
        part=PoolPart(target="nbddp.capabilities.spool.part:SpoolPart", when=("start",)),
        rank=(RankPart(name="spool", target="nbddp.capabilities.spool.on_rank:part"),),
        on_agent=OnAgent(
            ops={
                "hold": "nbddp.capabilities.spool.on_agent:hold",
                "written": "nbddp.capabilities.spool.on_agent:written",
            },
        ),
    ),
)
# fmt: on
