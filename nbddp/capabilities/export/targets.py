"""A launch and a job → the text that starts it on torchrun, Slurm, SkyPilot, Kubeflow, TorchX or Ray.

Pure functions, none of which imports what it writes for. Values are quoted for what reads them: words of a shell by
shlex, YAML by JSON (which is YAML), Python by repr. Fields and flags are those of SkyPilot 0.14, Kubeflow's Trainer SDK
0.5, the training operator's PyTorchJob v1, TorchX 0.7 and Ray 2.60.
"""

from __future__ import annotations

import base64
import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nbddp.capabilities.export.sbatch import Job, sbatch_script
from nbddp.capabilities.export.torchrun_line import (
    PORT,
    SRUN,
    STATIC,
    Launch,
    UnquotedWord,
    agent_words,
    c10d_words,
    shell_line,
    static_words,
    torchrun_line,
    torchrun_words,
)
from nbddp.errors import BadInput
from nbddp.protocol.codec import Json


@dataclass(frozen=True)
class Files:
    """Files, by name and content, for an engine that copies none: the script's own text, and beside it the pushed
    values that it reads. An empty text: the script is where the processes start."""

    source: str = ""
    values_name: str = ""
    values: bytes = b""


NONE = Files()
Text = Callable[[Launch, Job, Files], str]
LONGEST_COMMAND = 120_000  # bytes; Linux takes 131072 as one word of a command, and Kubeflow adds some lines
LONGEST_FUNCTION = 10_000_000  # bytes; Ray warns of larger ones, and refuses 95 MiB
PYTORCH_IMAGE = "pytorch/pytorch:latest"
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def torchrun(launch: Launch, job: Job, files: Files = NONE) -> str:
    """A line for each node."""
    if launch.rendezvous == SRUN:
        raise BadInput(f"with --rendezvous {SRUN} Slurm starts every process; use --to slurm, or another rendezvous")
    prefix = "".join(f"{line}\n" for line in (*job.setup, *_installing(job)))
    if launch.nnodes == 1:
        return f"{prefix}{torchrun_line(launch)}\n"
    if launch.rendezvous != STATIC:
        return f"{prefix}# on each of {launch.nnodes} nodes\n{torchrun_line(launch)}\n"
    return prefix + "".join(f"# on node {n}\n{torchrun_line(launch, n)}\n" for n in range(launch.nnodes))


def slurm(launch: Launch, job: Job, files: Files = NONE) -> str:
    return sbatch_script(launch, job)


def sky(launch: Launch, job: Job, files: Files = NONE) -> str:
    """A task of SkyPilot: `sky launch train.yaml`. Its nodes are as many as are asked for."""
    _refuse_elastic(launch, "SkyPilot starts a fixed number of nodes")
    addr, rank = UnquotedWord('"$MASTER_ADDR"'), UnquotedWord('"$SKYPILOT_NODE_RANK"')
    if launch.nnodes == 1:
        start = ["--standalone"]
    elif launch.rendezvous == STATIC:
        start = static_words(launch, rank, addr, str(launch.port))
    else:
        start = c10d_words(launch, UnquotedWord(f'"$MASTER_ADDR:{launch.port}"'), UnquotedWord('"$SKYPILOT_TASK_ID"'))
    meet = 'MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n' if launch.nnodes > 1 else ""
    gpus = launch.nproc * launch.gpus_per_proc
    if gpus and not job.gpu:
        raise BadInput("SkyPilot chooses machines by the type of their GPUs; add --gpu, such as --gpu A100")
    resources: dict[str, Any] = {"accelerators": f"{job.gpu}:{gpus}"} if gpus else {}
    resources["cpus"] = f"{job.cores(launch)}+"
    if job.memory_per_cpu:
        resources["memory"] = f"{-(-_memory(launch, job) // 1024)}+"  # GiB
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    setup = "\n".join((*job.setup, *_installing(job)))
    return _yaml({
        "name": job.name, "num_nodes": launch.nnodes, "resources": resources, "workdir": ".",
        "envs": dict(launch.env) or None, "setup": setup or None,
        "run": meet + shell_line(torchrun_words(launch, start)),
    })  # fmt: skip


def pytorchjob(launch: Launch, job: Job, files: Files = NONE) -> str:
    """A PyTorchJob of Kubeflow's training operator, which gives torchrun its options as PET_ variables."""
    _check_name(job.name)
    container: dict[str, Any] = {
        "name": "pytorch", "image": job.image or PYTORCH_IMAGE, "command": _command(launch, job),
        "env": [{"name": name, "value": value} for name, value in launch.env] or None,
        "resources": _limits(launch, job),
    }  # fmt: skip
    pod = {"replicas": 1, "restartPolicy": "OnFailure" if launch.max_restarts else "Never",
           "template": {"spec": {"containers": [_without_none(container)]}}}  # fmt: skip
    ends = {"activeDeadlineSeconds": seconds(job.time)}
    if launch.max_restarts and launch.min_nodes is None:
        ends["backoffLimit"] = launch.max_restarts
    spec: dict[str, Any] = {"nprocPerNode": str(launch.nproc), "runPolicy": ends}
    if launch.min_nodes is not None:
        spec["elasticPolicy"] = {"rdzvBackend": "c10d", "minReplicas": launch.min_nodes, "maxReplicas": launch.nnodes,
                                 "maxRestarts": launch.max_restarts}  # fmt: skip
        spec["pytorchReplicaSpecs"] = {"Worker": {**pod, "replicas": launch.nnodes}}
    else:
        workers = {"Worker": {**pod, "replicas": launch.nnodes - 1}} if launch.nnodes > 1 else {}
        spec["pytorchReplicaSpecs"] = {"Master": pod, **workers}
    return _yaml({"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": job.name}, "spec": spec})


def kubeflow(launch: Launch, job: Job, files: Files = NONE) -> str:
    """A program that hands the script to Kubeflow's Trainer, which sends the text of the function and nothing else.
    Raises BadInput if that is too large."""
    running = textwrap.indent(_running(launch, files), "    ")
    _refuse_large(running, LONGEST_COMMAND, "Kubeflow's Trainer sends the script in one command")
    _refuse_elastic(launch, "Kubeflow's Trainer starts a fixed number of nodes")
    env = dict(launch.env) | _as_variables(launch)
    options = [
        "func=train", f"num_nodes={launch.nnodes}", f"resources_per_node={_limits(launch, job)['limits']!r}",
        *([f"image={job.image!r}"] if job.image else []),
        *([f"packages_to_install={list(job.packages)!r}"] if job.packages else []),
        *([f"env={env!r}"] if env else []),
    ]  # fmt: skip
    return f"""\
from kubeflow.trainer import CustomTrainer, TrainerClient


def train():
{running}

trainer = CustomTrainer(
{textwrap.indent("".join(f"{option},{chr(10)}" for option in options), "    ")})
client = TrainerClient()
name = client.train(trainer=trainer, runtime="torch-distributed")
client.wait_for_job_status(name, timeout={seconds(job.time)})
"""


def torchx(launch: Launch, job: Job, files: Files = NONE) -> str:
    """A line of TorchX; `-s` selects the scheduler."""
    nodes = str(launch.nnodes) if launch.min_nodes is None else f"{launch.min_nodes}:{launch.nnodes}"
    words = ["torchx", "run", "-s", "local_cwd", "dist.ddp", "-j", f"{nodes}x{launch.nproc}", "--script",
             launch.program[0], "--name", job.name, "--cpu", str(job.cores(launch))]  # fmt: skip
    gpus = launch.nproc * launch.gpus_per_proc
    words += ["--gpu", str(gpus)] if gpus else []
    words += ["--max_retries", str(launch.max_restarts)] if launch.max_restarts else []
    words += ["--image", job.image] if job.image else []
    words += ["--memMB", str(_memory(launch, job))] if job.memory_per_cpu else []
    words += ["--rdzv_port", str(launch.port)] if launch.port != PORT else []
    for name, value in launch.env:
        if any(c in value for c in ",;"):
            raise BadInput(f"TorchX reads --env as a list, so no value can have a comma or semicolon; remove {name}")
    words += ["--env", ",".join(f"{name}={value}" for name, value in launch.env)] if launch.env else []
    return shell_line([*words, *(["--", *launch.arguments] if launch.arguments else [])]) + "\n"


def ray(launch: Launch, job: Job, files: Files = NONE) -> str:
    """A program that trains on a Ray cluster; Ray makes the process group. The script goes along in the function,
    since Ray leaves out what git ignores when it copies a folder."""
    running = textwrap.indent(_running(launch, files), "    ")
    _refuse_large(running, LONGEST_FUNCTION, "Ray's program has the script in a function")
    workers = launch.nnodes * launch.nproc
    number = str(workers) if launch.min_nodes is None else f"({launch.min_nodes * launch.nproc}, {workers})"
    each: dict[str, int] = {"CPU": job.cpus_per_proc}
    if launch.gpus_per_proc:
        each["GPU"] = launch.gpus_per_proc
    if job.memory_per_cpu:
        each["memory"] = (mebibytes(job.memory_per_cpu) * job.cpus_per_proc) << 20
    kind = f", accelerator_type={job.gpu!r}" if job.gpu and launch.gpus_per_proc else ""
    failures = f", failure_config=FailureConfig(max_failures={launch.max_restarts})" if launch.max_restarts else ""
    environment: dict[str, Any] = {"env_vars": dict(launch.env)} if launch.env else {}
    environment |= {"pip": list(job.packages)} if job.packages else {}
    start = f"ray.init(runtime_env={environment | {'working_dir': '.'}!r})"
    return f"""\
import ray
from ray.train import {"FailureConfig, " * bool(failures)}RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train():
    import torch.distributed as dist

    dist.init_process_group = lambda *args, **options: None  # Ray has made the group
{running}

{start}
trainer = TorchTrainer(
    train,
    torch_config=TorchConfig(backend={launch.backend!r}),
    scaling_config=ScalingConfig(
        num_workers={number}, use_gpu={bool(launch.gpus_per_proc)}, resources_per_worker={each!r}{kind}
    ),
    run_config=RunConfig(name={job.name!r}{failures}),
)
trainer.fit()
"""


TARGETS: dict[str, Text] = {
    "torchrun": torchrun, "slurm": slurm, "sky": sky, "kubeflow": kubeflow, "pytorchjob": pytorchjob, "torchx": torchx,
    "ray": ray,
}  # fmt: skip


# -- parts -----------------------------------------------------------------------------------------


def seconds(time: str) -> int:
    """Slurm's `hours:minutes:seconds`, `minutes:seconds`, `minutes` or `days-hours:minutes:seconds`."""
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    if not all(p.isascii() and p.isdigit() for p in (*parts, *([days] if dash else []))) or len(parts) > 3:
        raise BadInput(f"{time!r} is not a time; write it as hours:minutes:seconds, such as 01:30:00")
    numbers = [int(p) for p in parts]
    if dash:
        numbers += [0] * (3 - len(numbers))
    elif len(numbers) == 1:
        numbers = [0, numbers[0], 0]
    else:
        numbers = [0] * (3 - len(numbers)) + numbers
    return int(days or 0) * 86400 + numbers[0] * 3600 + numbers[1] * 60 + numbers[2]


def mebibytes(text: str) -> int:
    """Slurm's `2G`, `512M` or `1T`; a number alone is MiB. Raises BadInput."""
    found = re.fullmatch(r"([1-9]\d{0,8})([KMGT]?)", text, re.IGNORECASE | re.ASCII)
    if not found:
        raise BadInput(f"--memory {text!r} is not an amount of memory; write it as 512M or 2G")
    kibi = int(found[1]) << 10 * "KMGT".index(found[2].upper() or "M")
    return max(1, kibi >> 10)


def _running(launch: Launch, files: Files) -> str:
    """The body of a function that runs the script: its text, which each process writes for itself, since another could
    read half a file; or, without the text, the file of that name in a folder of sys.path."""
    name, *arguments = launch.program
    modules, argv = "os, runpy, sys, tempfile", ", ".join(["path", *map(_quoted, arguments)])
    if files.source:
        find = f"""\
path = os.path.join(tempfile.mkdtemp(), {_quoted(name.rpartition("/")[2])})
with open(path, "w", encoding="utf-8") as file:
    file.write({_quoted(files.source)})
"""
    else:
        find = f"""\
found = (os.path.join(folder, {_quoted(name)}) for folder in ["", *sys.path])
path = next((path for path in found if os.path.exists(path)), {_quoted(name)})
"""
    if files.source and files.values:
        modules = f"base64, {modules}"
        find += f"""\
with open(os.path.join(os.path.dirname(path), {_quoted(files.values_name)}), "wb") as file:
    file.write(base64.b64decode({base64.b64encode(files.values).decode()!r}))
"""
    return f"""\
import {modules}
{find}sys.argv = [{argv}]
runpy.run_path(path, run_name="__main__")
"""


def _quoted(text: str) -> str:
    """A literal of Python that a shell's here-document leaves as it is: Kubeflow's Trainer sends a function in one."""
    return re.sub(r"\\\\|[$`]", lambda found: f"\\x{ord(found[0][0]):02x}", repr(text))


def _refuse_large(text: str, most: int, why: str) -> None:
    size = len(text.encode())
    if size > most:
        raise BadInput(
            f"{why}, which can have {most // 1000} kB, but the script and its values are {size // 1000} kB; create "
            "large values in a %%ddp cell, or read them from storage that the nodes reach"
        )


def _installing(job: Job) -> list[str]:
    return [shell_line(["pip", "install", *job.packages])] if job.packages else []


def _command(launch: Launch, job: Job) -> list[str]:
    """The container's command. Kubeflow's operator restarts it."""
    agent = agent_words(replace(launch, max_restarts=0))
    first = [*job.setup, *_installing(job)]
    words = ["torchrun", *agent, *launch.program]
    return ["bash", "-c", "\n".join(["set -e", *first, f"exec {shell_line(words)}"])] if first else words


def _limits(launch: Launch, job: Job) -> dict[str, dict[str, int | str]]:
    gpus = launch.nproc * launch.gpus_per_proc
    memory = {"memory": f"{_memory(launch, job)}Mi"} if job.memory_per_cpu else {}
    return {"limits": {"cpu": job.cores(launch), **memory, **({"nvidia.com/gpu": gpus} if gpus else {})}}


def _memory(launch: Launch, job: Job) -> int:
    """MiB of a node."""
    return mebibytes(job.memory_per_cpu) * job.cores(launch)


def _as_variables(launch: Launch) -> dict[str, str]:
    """The options of torchrun's agent as the variables that it reads, where its line is somebody else's."""
    words, found = agent_words(launch), {}
    while words:
        name, *rest = words
        value = rest[0] if rest and not rest[0].startswith("--") else None
        found[f"PET_{name[2:].replace('-', '_').upper()}"] = value or "1"
        words = rest[value is not None :]
    return found


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise BadInput(f"{name!r} is not a Kubernetes object name; use small letters, digits and -, as in --name ddp")


def _refuse_elastic(launch: Launch, why: str) -> None:
    if launch.min_nodes is not None:
        raise BadInput(f"{why}; use --nnodes {launch.nnodes}, or --to torchrun, torchx, pytorchjob or ray")
    if launch.rendezvous == SRUN:
        raise BadInput(f"--rendezvous {SRUN} is Slurm's; use --to slurm, or remove --rendezvous")


def _without_none(found: Json) -> Json:
    return {name: value for name, value in found.items() if value is not None}


def _yaml(data: Json, depth: int = 0) -> str:
    """Mappings and lists as YAML's blocks, scalars as JSON, texts of several lines as a block of lines."""
    return "".join(_rows(_without_none(data), depth))


def _rows(data: Any, depth: int) -> list[str]:
    pad, rows = "  " * depth, []
    if isinstance(data, list):
        for item in data:
            inner = _rows(item, depth + 1) if isinstance(item, (dict, list)) else [f"{pad}  {json.dumps(item)}\n"]
            rows += [f"{pad}- {inner[0].lstrip(' ')}", *inner[1:]]
        return rows
    for name, value in data.items():
        if isinstance(value, (dict, list)):
            rows += [f"{pad}{_key(name)}:\n", *_rows(value, depth + 1)]
        elif isinstance(value, str) and "\n" in value and _is_block(value):
            rows += [f"{pad}{_key(name)}: |-\n", *(f"{pad}  {line}\n" if line else "\n" for line in value.split("\n"))]
        else:
            rows.append(f"{pad}{_key(name)}: {json.dumps(value)}\n")
    return rows


def _key(name: str) -> str:
    """JSON, unless it is plain, and not one of YAML's words for true and false."""
    plain = re.fullmatch(r"[A-Za-z]\w{2,}", name) and name.lower() not in ("true", "false", "null", "yes", "off")
    return name if plain else json.dumps(name)


def _is_block(text: str) -> bool:
    """Whether YAML's block of lines holds this text as it is."""
    return text == text.strip() and text.isprintable() is False and all(line.isprintable() for line in text.split("\n"))
