"""`nbddp.Pool.run`, `call`, `push` and `pull`: functions and values between a program and its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from nbddp.capabilities.calls import command
from nbddp.execution.values import RankValues
from nbddp.protocol.capability import with_options
from nbddp.protocol.request import HANG_AFTER, SHUTDOWN
from nbddp.public import check_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nbddp.capabilities import RunArguments

P = ParamSpec("P")
T = TypeVar("T")


def run(pool: Any, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> RankValues[T]:
    """Call `function(*args, **kwargs)` on every rank. Returns the value of each rank.

    - function (callable), args and kwargs (any values): its arguments. All are sent with cloudpickle.

    Raises the exception of the rank that failed first. Its cause is a WorkerFailed, which has the remote traceback.
    If the exception cannot be sent, raises the WorkerFailed itself. Raises BadInput if the function or an argument
    cannot be sent, and RunStopped or RunHung as `call` does.

    Example:

        assert pool.run(divmod, 7, 2)[0] == (3, 1)
    """
    return command.run(pool, function, *args, **kwargs)


def call(
    pool: Any,
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    ranks: Sequence[int] | None = None,
    hang_after: float | None = HANG_AFTER,
    timeout: float | None = None,
    shutdown_timeout: float = SHUTDOWN,
    **options: Unpack[RunArguments],
) -> RankValues[T]:
    """Call `function(*args, **kwargs)` as `run` does, on some ranks, within limits, with the options of `run_cell`.

    - function (callable); args (sequence), kwargs (mapping of str): its arguments. Default: none.
    - ranks (several int): which ranks. Default: all.
    - hang_after (float): seconds before a deadlock is ended (default 5); None: it is never ended.
    - timeout (float): seconds that the call may take. Default: no limit.
    - shutdown_timeout (float): seconds that ranks have to clean up when the call is stopped (default 30).
    - options: those of `run_cell`, for example `sanitize=True`, and then `findings()`.

    Returns the values; a rank whose function calls `sys.exit()` has none. Raises BadInput if something cannot be
    sent or a rank does not exist, or a RunFailed: WorkerFailed, RunStopped, RunHung or RunTimedOut.

    Example:

        assert pool.call(abs, (-3,), ranks=[1], timeout=30.0)[1] == 3
    """
    check_arguments("call", "run", options)
    return command.call(
        pool, function, args, kwargs, ranks=ranks, hang_after=hang_after, timeout=timeout,
        shutdown_timeout=shutdown_timeout, **options,
    )  # fmt: skip


with_options("run")(call)  # not as a decorator: type checkers find the table in a circle


def push(pool: Any, names: Mapping[str, object], ranks: Sequence[int] | None = None) -> None:
    """Copy values to variables on the ranks.

    - names (mapping): name → value. ranks (several int): which ranks. Default: all.

    Raises PoolNotRunning, or BadInput if a value cannot be pickled. Then no variable is set.

    Example:

        pool.push({"learning_rate": 0.1})
    """
    command.push(pool, names, ranks)


def pull(pool: Any, names: str | Sequence[str], ranks: Sequence[int] | None = None) -> dict[str, RankValues[Any]]:
    """Fetch one variable or several from the ranks. Returns a dict: name → the value of each rank.

    - names (str or several str): the variables. ranks (several int): which ranks. Default: all.

    Raises PoolNotRunning, or BadInput for a variable that is not defined on a rank.

    Example:

        pool.push({"learning_rate": 0.1})
        assert pool.pull("learning_rate")["learning_rate"][0] == 0.1
    """
    return command.pull(pool, names, ranks)
