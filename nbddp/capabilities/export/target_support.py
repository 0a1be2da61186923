"""Which options of a job each target writes. The rest are answered. If the job is the same without the option, a
sentence beside the text reports that; else an error says what to use (`Unsupported`). Pure.

A target that is missing from an option's row writes that option.
"""

from __future__ import annotations

from collections.abc import Mapping

from nbddp.capabilities.export.torchrun_line import SRUN, STATIC, Launch
from nbddp.errors import BadInput

SCRIPT = ""  # no target: cells become a script, whose docstring has torchrun's line
JOB = "it describes a job; add --to, such as --to slurm"


class Unsupported(str):
    """A sentence that refuses an option: another job would run without it."""


TORCHRUNS = "torchrun's launcher does not run there"
ALONE = ("torchrun", "slurm", "sky", SCRIPT)  # targets whose line for one node has --standalone
KUBERNETES_GPU = "Kubernetes has no field for it; add a nodeSelector for the label of your cluster's GPU nodes"
TABLE: Mapping[str, Mapping[str, str]] = {
    "gpu": {
        "torchrun": "torchrun uses the GPUs of the node where it is typed",
        "kubeflow": KUBERNETES_GPU,
        "pytorchjob": KUBERNETES_GPU,
        "torchx": "dist.ddp selects a type by a named resource; add -h RESOURCE to the line",
        SCRIPT: Unsupported(JOB),
    },
    "gpus_per_proc": dict.fromkeys(
        ("torchrun", SCRIPT), "torchrun assigns no GPUs; the script selects those of its LOCAL_RANK"
    ),
    "host": {
        "slurm": "the rendezvous is on the first node that Slurm assigns",
        "sky": "the rendezvous is on SkyPilot's first node",
        "kubeflow": "Kubeflow sets the rendezvous",
        "pytorchjob": "Kubeflow sets the rendezvous",
        "torchx": "TorchX sets the rendezvous",
        "ray": "Ray sets the rendezvous",
    },
    "port": {
        "slurm": "the port follows from the job's number",
        "kubeflow": "Kubeflow sets the rendezvous",
        "pytorchjob": "Kubeflow sets the rendezvous",
        "ray": "Ray sets the rendezvous",
    },
    "name": {"kubeflow": "Kubeflow's Trainer names the job, and the program prints that name"},
    "time": {
        "torchrun": "torchrun has no time limit; type timeout 3600 before the line for one of an hour",
        "sky": "SkyPilot has no time limit; sky launch --down ends the machines with the job",
        "torchx": "a time limit is the scheduler's, as in -s slurm -cfg time=01:00:00",
        "ray": "Ray has no time limit; ray job stop ends a job",
        SCRIPT: Unsupported(JOB),
    },
    "partition": {
        "torchx": "a partition is the scheduler's, as in -s slurm -cfg partition=P",
        **dict.fromkeys(("torchrun", "sky", "kubeflow", "pytorchjob", "ray"), "partitions are Slurm's"),
        SCRIPT: Unsupported(JOB),
    },
    "cpus_per_proc": {"torchrun": "torchrun assigns no cores; type taskset before the line", SCRIPT: Unsupported(JOB)},
    "memory": {"torchrun": "torchrun limits no memory", SCRIPT: Unsupported(JOB)},
    "image": {
        "torchrun": Unsupported("torchrun starts no container; remove --image, and run the command in one"),
        "slurm": Unsupported(
            "Slurm starts no image without a plug-in; remove --image, and add the plug-in's option to the line "
            "of srun, such as --container-image of pyxis"
        ),
        "ray": Unsupported("a Ray cluster is started with its image; remove --image, and set the image there"),
        SCRIPT: Unsupported(JOB),
    },
    "package": {
        "torchx": Unsupported("dist.ddp installs nothing; use an --image that has the package"),
        SCRIPT: Unsupported(JOB),
    },
    "setup": {
        "kubeflow": Unsupported(
            "Kubeflow's Trainer runs a Python function and no shell line; use an --image that needs none"
        ),
        "torchx": Unsupported("dist.ddp runs no shell line; use an --image that needs none"),
        "ray": Unsupported("Ray runs a Python function and no shell line; prepare the nodes when the cluster starts"),
        SCRIPT: Unsupported(JOB),
    },
    "logs": dict.fromkeys(("torchx", "ray"), TORCHRUNS),
    "visible": dict.fromkeys(("torchx", "ray"), TORCHRUNS),
}
OPTIONS = {"visible": "--visible own", "logs": "--log-dir, --redirects, --tee and --local-ranks-filter"}
MEETS = ("kubeflow", "pytorchjob", "torchx", "ray")  # targets that have a way of their own


def notes(target: str, said: Mapping[str, object], launch: Launch) -> list[str]:
    """A line for each option that the target does not write. said: options of the line or the cells, by field.

    Raises BadInput for an option without which another job would run.
    """
    _check_rendezvous(target, launch, said)
    if "gpu" in said and not launch.gpus_per_proc:
        raise BadInput(f"--gpu {said['gpu']} needs GPUs; add --gpus-per-proc 1, or remove --gpu")
    found = {name: _answer(target, name, launch) for name in said}
    for name, why in found.items():
        if isinstance(why, Unsupported):
            raise BadInput(f"{_typed(name)}: {why}")
    return [f"{_typed(name)} has no effect here: {why}" for name, why in found.items() if why]


def _typed(name: str) -> str:
    return OPTIONS.get(name) or f"--{name.replace('_', '-')}"


def _answer(target: str, name: str, launch: Launch) -> str:
    """Why the target does not write this option; empty if it does."""
    if name in ("logs", "visible") and target == "slurm" and launch.rendezvous == SRUN:
        return f"with --rendezvous {SRUN} torchrun does not run; use {STATIC} or c10d"
    if target in TABLE.get(name, {}):
        return TABLE[name][target]
    if name in ("host", "port", "rendezvous") and target in ALONE and launch.nnodes == 1 and launch.rendezvous != SRUN:
        return "on one node torchrun finds a port itself"
    if name == "name" and target in ("torchrun", SCRIPT) and (launch.nnodes == 1 or launch.rendezvous == STATIC):
        return "torchrun names a job only where its nodes meet by c10d"
    return ""


def _check_rendezvous(target: str, launch: Launch, said: Mapping[str, object]) -> None:
    if launch.rendezvous == SRUN and target != "slurm":
        raise BadInput(
            f"--rendezvous {SRUN}: with it Slurm starts every process; use --to slurm, or remove --rendezvous"
        )
    if target in MEETS and said.get("rendezvous") == STATIC:
        raise BadInput(f"--rendezvous {STATIC}: --to {target} has its own rendezvous; remove --rendezvous")
