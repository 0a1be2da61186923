"""A worker's place and a run's rendezvous → the variables that torchrun sets.

Names and values are those of torchrun 2.13 (`torch/distributed/elastic/agent/server/local_elastic_agent.py`), with one
exception. TORCH_NCCL_ASYNC_ERROR_HANDLING is 2 here (abort the communicator, keep the process), because a worker of a
pool must survive a failed collective; torchrun's 1 tears the process down. The other ways in which NCCL's watchdog ends
a process are switched off likewise (KEEPS_PROCESS). Pure: plain mappings in, plain mappings out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbddp.launch.topology import Node, Topology, Worker

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")  # gloo's, NCCL's, torch.distributed.rpc's
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # that torchrun passes on to its ranks
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
KEEPS_PROCESS = {  # defaults of ours; what the user has set wins (torch's ProcessGroupNCCL.hpp)
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the watchdog would abort the process for an error that the program meets
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # it would hold its lock for a minute; what is recorded is asked for in time
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # its monitor would kill the process while an abort takes long
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
}
# replaces the process groups that ranks are read and freed by, whatever its value except for these
TORCHCOMMS, NOT_TORCHCOMMS = "TORCH_DISTRIBUTED_USE_TORCHCOMMS", ("", "0")
SEEN_AT_IMPORT = (
    "TORCH", "PYTORCH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_", "PYTHON",
)  # fmt: skip


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one run meet: a store outside all of them, fresh for each run."""

    addr: str
    port: int
    run_id: str = "none"
    restart_count: int = 0
    max_restarts: int = 0


def of_worker(
    worker: Worker,
    topology: Topology,
    base: Mapping[str, str],
    *,
    visible: str = "all",
    joining: str = "lo",
) -> dict[str, str]:
    """The variables that stay for a worker's life: rank, sizes, devices, threads.

    base: the environment the worker is started from; what the user set there wins where
        torchrun lets it win (OMP_NUM_THREADS, TORCH_NCCL_ASYNC_ERROR_HANDLING).
    visible: "all" (LOCAL_RANK picks the device) or "own" (only its own devices are seen
        and LOCAL_RANK is 0, torchrun's --virtual-local-rank).
    joining: the interface by which gloo and NCCL are to meet.
    """
    env = {
        "RANK": worker.rank,
        "LOCAL_RANK": 0 if visible == "own" and worker.devices else worker.local_rank,
        "WORLD_SIZE": worker.world_size,
        "LOCAL_WORLD_SIZE": worker.local_world_size,
        "GROUP_RANK": worker.node,
        "GROUP_WORLD_SIZE": worker.nnodes,
        "ROLE_RANK": worker.rank,
        "ROLE_WORLD_SIZE": worker.world_size,
        "ROLE_NAME": "default",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": SIGNALS,
        **{name: base.get(name, value) for name, value in KEEPS_PROCESS.items()},
    }
    text = {name: str(value) for name, value in env.items()}
    if "OMP_NUM_THREADS" not in base and worker.local_world_size > 1:
        text["OMP_NUM_THREADS"] = "1"
    text |= {name: joining for name in INTERFACES if joining and name not in base}
    mask = "" if topology.hides_gpus else visible_devices(worker, topology.nodes[worker.node], visible)
    if mask is not None:
        text["CUDA_VISIBLE_DEVICES"] = mask
    return text


def of_run(meet: Rendezvous, error_file: str = "") -> dict[str, str]:
    """The variables that change with every run: rendezvous, attempt, error file."""
    env = {
        "MASTER_ADDR": meet.addr,
        "MASTER_PORT": str(meet.port),
        "TORCHELASTIC_RESTART_COUNT": str(meet.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(meet.max_restarts),
        "TORCHELASTIC_RUN_ID": meet.run_id,
    }
    if error_file:
        env["TORCHELASTIC_ERROR_FILE"] = error_file
    return env


def visible_devices(worker: Worker, node: Node, visible: str) -> str | None:
    """CUDA_VISIBLE_DEVICES for one worker, or None to leave it as the parent has it.

    Under "all", a real node's devices are the parent's own list, so nothing is set. A simulated node must hide the
    GPUs of the others, and simulated GPUs are on no list of the parent's. Masks are the parent's own entries (indices
    or UUIDs), never positions in a masked list.
    """
    if not node.devices:
        return None
    if visible == "own":
        return ",".join(d.mask for d in worker.devices)
    if node.simulated or any(d.simulated for d in node.devices):
        return ",".join(d.mask for d in node.devices)
    return None


def differing(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Names whose values are not the same in both."""
    return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))


def needs_new_agent(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Names that differ and are read while torch is imported, a process starts or GPUs are counted.

    A worker forked from a warm process never re-reads them, and the warm process counts the GPUs once. So a change of
    one of these needs a new warm process; any other change reaches a worker when it starts.
    """
    return [name for name in differing(old, new) if name.startswith(SEEN_AT_IMPORT)]
