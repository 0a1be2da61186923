"""The private APIs: behaviour of torch, ipykernel, IPython and ipyparallel that nbddp relies on without a promise.

A table, as data: the purpose of each private API, and the loss without it. `capabilities.doctor.probe_runner` tries
each one, and `%ddp doctor` shows the results. Pure: no torch, no IPython.
"""

from __future__ import annotations

from dataclasses import dataclass

TORCH, IPYKERNEL, IPYTHON, IPYPARALLEL = "torch", "ipykernel", "IPython", "ipyparallel"


@dataclass(frozen=True)
class Seam:
    """`needed`: no cell runs without it. Otherwise cells run, and `without` says what is lost."""

    key: str
    library: str
    without: str
    needed: bool = False


@dataclass(frozen=True)
class ProbeResult:
    """The result of testing a private API. `works` is None where it could not be tried here; `why` has that reason, or
    the failure."""

    present: bool
    works: bool | None
    why: str = ""


SEAMS = (
    Seam("flight recorder", TORCH, "fewer deadlocks are found: only those that Python frames show"),
    Seam("NCCL's flight recorder", TORCH, "deadlocks in NCCL's collectives are not found"),
    Seam("flight recorder's keys", TORCH, "the place where a rank is blocked is unknown"),
    Seam("tables of groups", TORCH, "a subgroup is assumed to have all ranks"),
    Seam("default group", TORCH, "taken from torch's public group.WORLD"),
    Seam("another default group", TORCH, "lesson 04's check cannot run smaller worlds"),
    Seam("sequence numbers", TORCH, "a collective's number comes from the recorder only"),
    Seam("clearing of groups", TORCH, "after a failed init the next one may fail too"),
    Seam("abort of groups", TORCH, "of NCCL's groups only the default one is aborted"),
    Seam("abort of transfers", TORCH, "a rank blocked in a recv from any source is replaced"),
    Seam("store of env://", TORCH, "init_process_group is given nbddp's store as an argument"),
    Seam("sockets of a new group", TORCH, "a rank that destroys an NCCL group at once may cut off a slow rank"),
    Seam("store on a given socket", TORCH, "no cell can call init_process_group", needed=True),
    Seam("store out of reach", TORCH, "any local process can reach the ranks' store"),
    Seam("checks of DETAIL", TORCH, "under TORCH_DISTRIBUTED_DEBUG=DETAIL no deadlock is found"),
    Seam("C++'s log level", TORCH, "--debug changes C++'s log only after %ddp stop"),
    Seam("frames of backward", TORCH, "a rank blocked in backward is not recognized"),
    Seam("marks on Work and Store", TORCH, "a rank blocked in wait() or a store is not located"),
    Seam("DDP's reducer", TORCH, "no timings, no traces of buckets, no forecast"),
    Seam("state of a step", TORCH, "--sanitize misses mistakes, or reports too many"),
    Seam("copies of DDP models", TORCH, "%ddp prove cannot run"),
    Seam("copies of FSDP2 models", TORCH, "%ddp prove cannot run with FSDP2"),
    Seam("backends of a group", TORCH, "DDP's logging data name the backend nbddp"),
    Seam("end of backward", TORCH, "no timings, no traces of buckets, no forecast"),
    Seam("data loaders", TORCH, "time in data loaders counts as other time between steps"),
    Seam("end of data loaders", TORCH, "after Stop, processes of a data loader may take 5 s each to end"),
    Seam("DDP's list of hooks", TORCH, "a model with a communication hook cannot be pickled"),
    Seam("methods of collectives", TORCH, "--check does not compare all_gather_into_tensor"),
    Seam("compiled modules", TORCH, "%ddp compare names a compiled module's parts by its wrapper"),
    Seam("shards of DTensors", TORCH, "%ddp memory counts a sharded tensor as a whole one"),
    Seam("parts of sparse tensors", TORCH, "sparse tensors are coalesced before they are compared"),
    Seam("profilers of a program", TORCH, "--trace around a program that uses torch.profiler ends the rank"),
    Seam("history of GPU memory", TORCH, "%ddp memory --timeline has no data about GPUs"),
    Seam("import of the compiler", TORCH, "the first DDP(model) on each rank takes seconds"),
    Seam("status messages", IPYKERNEL, "each cell sends messages that nobody needs, which costs time"),
    Seam("interrupt of an await", IPYKERNEL, "Stop may not end a cell with a top-level await"),
    Seam("event loop", IPYKERNEL, "deadlocks with finished ranks are shown, not ended"),
    Seam("messages during a cell", IPYKERNEL, "the panel's buttons act only after the cell"),
    Seam("questions of a cell", IPYKERNEL, "in a notebook breakpoint() needs %ddp panel"),
    Seam("flush before a display", IPYKERNEL, "each cell waits twice for the thread that sends output"),
    Seam("topics of messages", IPYKERNEL, "outcomes are sent under a topic of our own"),
    Seam("history of errors", IPYTHON, "a cell that fails within torch ends up to 1 s later"),
    Seam("traceback of a reply", IPYTHON, "replies carry the traceback of an earlier cell"),
    Seam("files of autoreload", IPYTHON, "a module that %autoreload has reloaded is reported as changed"),
    Seam("client's connection", IPYPARALLEL, "no cell runs", needed=True),
    Seam("engine's kernel", IPYPARALLEL, "no cell runs", needed=True),
    Seam("controller's processes", IPYPARALLEL, "a killed controller may leave a process behind"),
)


def said(works: bool | None) -> str:
    return "–" if works is None else "yes" if works else "no"
