"""`nbddp.Pool`: the part of a pool that programs use. All of it is documented, typed and stable (docs/stability.md).

A `WorkerPool` (`nbddp.pool.pool`) does the work; the magics use it as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from nbddp.errors import BadInput, in_own_frames, warn_deprecated
from nbddp.execution.values import RankValues
from nbddp.launch.options import fields_of, known, nearest
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.capability import load, public_methods, with_options
from nbddp.protocol.request import HANG_AFTER, SHUTDOWN

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from nbddp.capabilities import PoolArguments, PublicMethods, RunArguments
else:
    PublicMethods = public_methods()

P = ParamSpec("P")
T = TypeVar("T")


class Pool(PublicMethods):
    """Worker processes that stay alive between calls, with torchrun's variables set: one for each rank.

    Example:

        with nbddp.Pool(nproc=4) as pool:
            losses = pool.run(train, 0.1)  # train(0.1) on each of 4 ranks
            print(losses[0])

    As a context manager the pool starts at once and stops at the end of the block. Otherwise it starts with `start()`
    or with the first run. It stops with `stop()`, or when no variable refers to it any more.

    The arguments are the options of `%ddp start`; all are optional. Messages write them as a line does: `--nproc` is
    `nproc`. Methods that show something, such as `timings` and `status`, return a `Result`. That is a figure in a
    notebook, text with `str()`, and data with `to_dict()` and `to_frame()`.

    - nproc (int or str): workers per node, a number, `gpu` (one per GPU), `cpu` (one per core) or `auto`. Default: one
      per GPU, or 2 without GPUs.
    - nnodes (int or pair of int): number of nodes; (1, 4) for 1 to 4 nodes that may join and leave. Default: 1, or
      the number of hosts. Without hosts, nodes are simulated on this machine.
    - gpus_per_proc (int): consecutive GPUs per worker. Default: 1.
    - visible (str): the GPUs that a worker sees, `all` (default) or `own`.
    - oversubscribe (bool): start more workers than there are GPUs, or than the memory allows. Default: False.
    - device (str): `auto` (default), `cpu` or `cuda`.
    - start_method (str): how workers start. `fork` (default, except on macOS): from a process that has imported torch.
      `spawn`: as under torchrun; each imports torch itself, and `hash()` of a string differs by rank.
    - debug (str): debug output of torch, gloo and NCCL: `off` (default), `info` or `detail`.
    - env (mapping of str to str): more environment variables for the ranks. Default: none.
    - simulate_gpus (int or str): simulated GPUs on each node, such as 4 or `4xA100-80GB`. Default: none.
    - hosts (str): start the workers on these hosts, as `nodea,user@nodeb:2222`, or a file with one host per line.
      Default: this machine.
    - via (str): how to start a process there: `ssh` (default), `mpiexec`, or a command with {host} and {command}.
    - ssh_config, python, setup (str): ssh's configuration file, the Python interpreter there, and a shell line to run
      there first. Defaults: the user's own file, the path of this interpreter, nothing.
    - keep_alive (float): seconds that workers on hosts survive a lost connection, and Slurm's nodes this process.
      Default: 0.
    - interface (str): the network interface that connects all hosts. Default: chosen by trying them.
    - sync (bool): copy the working directory to the hosts first. Default: False.
    - cluster (str): a running ipyparallel cluster: its id, PROFILE/ID or its connection file. Default: none.
    - slurm (`nbddp.Slurm` or True): nodes of a new Slurm job, as `nbddp.Slurm(nodes=2, time="1:00:00")`; True for the
      job of this process. Default: no job.

    Raises BadInput for an invalid argument. `start` and runs raise BadInput for a placement that is impossible here,
    and AgentFailed for a host that does not start.
    """

    @with_options("pool")
    def __init__(
        self,
        nproc: int | str | None = None,
        *,
        nnodes: int | tuple[int, int] | None = None,
        gpus_per_proc: int | None = None,
        visible: str | None = None,
        oversubscribe: bool = False,
        device: str | None = None,
        **options: Unpack[PoolArguments],
    ):
        own: dict[str, Any] = {
            "nproc": nproc, "nnodes": nnodes, "gpus_per_proc": gpus_per_proc, "visible": visible,
            "oversubscribe": oversubscribe, "device": device,
        }  # fmt: skip
        check_arguments("Pool", "pool", {**own, **options})
        self._pool = WorkerPool(**own, **options)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        placed = self._pool.topology
        return f"<nbddp.Pool: {placed.equation() if placed is not None and self.running else 'not started'}>"

    if not TYPE_CHECKING:  # nbddp 0.1 had all of a `WorkerPool` here

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or not (hasattr(WorkerPool, name) or name in vars(self._pool)):
                unknown = AttributeError(f"nbddp.Pool has no {name!r}; help(nbddp.Pool) lists what it has")
                raise in_own_frames(unknown)
            warn_deprecated(f"nbddp.Pool.{name}", "help(nbddp.Pool) lists what stays", "0.3")
            return getattr(self._pool, name)

    @property
    def running(self) -> bool:
        """Whether the pool has workers."""
        return self._pool.running

    @property
    def world_size(self) -> int:
        """Number of ranks; 0 before the pool has started."""
        return self._pool.world_size

    def start(self) -> list[str]:
        """Start the workers; those that already run as requested stay. Returns sentences that describe the changes.

        Raises BadInput for a placement that is impossible here, and AgentFailed for a host that does not start.

        Example:

            pool.start()
        """
        return self._pool.start()

    def stop(self) -> None:
        """Stop all workers and release Slurm's nodes. The workers first run their `atexit` functions.

        The pool can be started again; the variables on its ranks are lost.

        Example:

            pool.stop()
        """
        self._pool.stop()

    def restart(self, ranks: Sequence[int] | None = None) -> list[str]:
        """Start new processes under the same ranks. Their variables and their process group are lost.

        - ranks (several int): which ranks. Default: all.

        Returns sentences that describe the changes. Raises PoolNotRunning, or BadInput for a rank that does not exist.

        Example:

            pool.restart(ranks=[1])
        """
        return self._pool.restart(ranks)

    @with_options("run")
    def run_cell(
        self,
        code: str,
        *,
        ranks: Sequence[int] | None = None,
        show: Sequence[int] | None = None,
        hang_after: float | None = HANG_AFTER,
        timeout: float | None = None,
        shutdown_timeout: float = SHUTDOWN,
        max_restarts: int = 0,
        argv: Sequence[str] = (),
        want_value: bool = False,
        **options: Unpack[RunArguments],
    ) -> RankValues[Any]:
        """Run source text on the ranks as a `%%ddp` cell does: its variables stay there for the next one.

        - code (str): Python source.
        - want_value (bool): return each rank's value of its last expression (default False: no values).
        - ranks, show (several int): the ranks that run, and the ranks whose output is shown. Default: all.
        - hang_after, timeout, shutdown_timeout (float): seconds, as for `call`.
        - max_restarts (int): how many times a failure restarts the workers and the code (default 0).
        - argv (several str): `sys.argv[1:]`. Default: none.
        - timings (bool): record DDP's steps for `timings` (default True).
        - memory, trace (bool): record allocations for `allocations`, and a profile for `trace` (default False).
        - logs (str): folder of log files, as `%ddp run --log-dir` writes them. Default: no files.
        - check (bool): before each collective, compare it across ranks (default False).
        - sanitize (bool): look for silent mistakes, for `findings` (default False).

        Raises BadInput for an impossible argument, or a RunFailed: WorkerFailed, RunStopped, RunHung or RunTimedOut.
        Ranks that were not replaced keep their variables.

        Example:

            assert pool.run_cell("import os; int(os.environ['RANK']) + 1", want_value=True)[1] == 2
        """
        check_arguments("run_cell", "run", options)
        return self._pool.run_cell(
            code, ranks=ranks, show=show, hang_after=hang_after, timeout=timeout, shutdown_timeout=shutdown_timeout,
            max_restarts=max_restarts, argv=argv, want_value=want_value, **options,
        )  # fmt: skip


def inner(pool: Pool | WorkerPool) -> WorkerPool:
    """The `WorkerPool` of a pool that a program gives."""
    return pool._pool if isinstance(pool, Pool) else pool


def face(pool: WorkerPool) -> Pool:
    """The `nbddp.Pool` of a `WorkerPool`: both are the same pool."""
    made = Pool.__new__(Pool)
    made._pool = pool
    return made


# -- arguments that are options of a line: an error says what to write ---------------------------------

# the annotations of a pool's own arguments; rows have theirs
OWN_TYPES = {
    "nproc": "int | str", "nnodes": "int | tuple[int, int]", "gpus_per_proc": "int", "visible": "str",
    "oversubscribe": "bool", "device": "str",
}  # fmt: skip
TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "bool": (bool,), "float": (int, float), "Mapping[str, str]": (Mapping,),
    "tuple[int, int]": (tuple,),
}  # fmt: skip


def check_arguments(call: str, of: str, given: Mapping[str, object]) -> None:
    """Hold the arguments of `call` against the options. of: `pool` or `run`.

    Raises TypeError for a name that is no argument, and BadInput for a value of the wrong type or that no option takes.
    """
    options = {option.name: option for option in fields_of(of)}
    for name, value in given.items():
        if name not in options or not (options[name].python or name in OWN_TYPES):
            unknown = TypeError(f"{call}() got an unexpected keyword argument {name!r}{_meant(name, of)}")
            raise in_own_frames(unknown)
        if value is None:
            continue
        annotation = OWN_TYPES.get(name, options[name].annotation).removesuffix(" | None")
        if not _is_of(value, annotation):
            takes = annotation.replace(" | ", " or ")
            raise BadInput(f"{call}({name}={value!r}): {name} is of type {takes}, not {type(value).__name__}")
        if options[name].choices and value not in options[name].choices:
            raise BadInput(f"{call}({name}={value!r}): {name} is one of {', '.join(options[name].choices)}")
        if name in OWN_TYPES and options[name].type:
            _read(call, name, value, options[name].type)


def _meant(name: str, of: str) -> str:
    if name in known() and known()[name].of == of:
        return f"; it is an option of lines alone: {known()[name].flags[0]}"
    near = nearest(name, [option.name for option in fields_of(of) if option.python])
    return f"; did you mean {near}?" if near else ""


def _is_of(value: object, annotation: str) -> bool:
    words = annotation.split(" | ")
    if isinstance(value, bool):
        return "bool" in words
    return any(isinstance(value, TYPES[word]) if word in TYPES else type(value).__name__ == word for word in words)


def _read(call: str, name: str, value: Any, reader: str) -> None:
    """Raises BadInput for what the same option of a line refuses."""
    try:
        load(reader)(":".join(map(str, value)) if isinstance(value, tuple) else str(value))
    except argparse.ArgumentTypeError as e:
        raise BadInput(f"{call}({name}={value!r}): {e}") from None
