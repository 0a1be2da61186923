"""Trials of the seams of ipykernel, IPython and ipyparallel, as those of torch in `torch_trials`.

There is no cluster to try them on: what only a connected client or a running kernel has is looked for in the code of
its class.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from nbddp.seams import Untried, expect, ipykernel_seams, ipyparallel_seams

PATIENCE = 2.0  # seconds for a reader thread


@contextlib.contextmanager
def stream(watch: bool) -> Iterator[Any]:
    """ipykernel's stream in place of stderr."""
    import zmq
    from ipykernel.iostream import IOPubThread, OutStream
    from jupyter_client.session import Session

    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        thread = IOPubThread(socket)
        thread.start()
        made = OutStream(Session(), thread, "stderr", watchfd=watch)
        try:
            yield made
        finally:
            made.close()
            thread.stop()
            thread.close()


def captured_output() -> None:
    if "PYTEST_CURRENT_TEST" in os.environ:
        raise Untried("ipykernel captures nothing under pytest")
    expect(ipykernel_seams.watch_pipes(), "ipykernel reads captured output otherwise")
    with stream(watch=True) as made:
        expect(ipykernel_seams.captured_pipe(made) is not None, "the pipe is kept elsewhere")
        os.write(2, b"\n")
        _wait(lambda: ipykernel_seams.may_hold_text(made), "what was written to the descriptor was not read")


def text_not_yet_sent() -> None:
    with stream(watch=False) as made:
        made.flush_interval = 60
        made.write("\n")
        _wait(lambda: ipykernel_seams.may_hold_text(made), "written text does not show")
        made.flush()
        _wait(lambda: not ipykernel_seams.may_hold_text(made), "a stream does not tell that it is empty")


def _wait(done: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        expect(time.monotonic() < end, otherwise)
        time.sleep(0.002)


def _takes(method: str, *wanted: str) -> None:
    taken = ipykernel_seams.parameters(method)
    expect(tuple(taken[: len(wanted)]) == wanted, f"it takes ({', '.join(taken)})")


def status_messages() -> None:
    _takes(ipykernel_seams.OVERRIDES[0], "status", "channel")


def interrupt_of_an_await() -> None:
    _takes(ipykernel_seams.OVERRIDES[1], "future")


def topics() -> None:
    from ipyparallel.engine.kernel import IPythonParallelKernel

    class Named(IPythonParallelKernel):  # type: ignore[misc]
        def __init__(self) -> None:  # without a shell, sockets and threads
            return

    expect(isinstance(ipykernel_seams.topic(Named(), "nbddp"), bytes), "topics are not bytes")


@contextlib.contextmanager
def shell() -> Iterator[Any]:
    from IPython.core.interactiveshell import InteractiveShell

    made = InteractiveShell.instance()
    made.history_manager.enabled = False
    made.showtraceback = lambda *args, **kwargs: None
    yield made


def history_of_errors() -> None:
    with shell() as made:
        if not ipykernel_seams.words_history(made):
            raise Untried("this IPython does not keep errors in its history")
        worded: list[Any] = []

        def word(error: BaseException, *args: Any, **kwargs: Any) -> dict[str, Any]:
            worded.append(error)
            return {"ename": "", "evalue": "", "traceback": []}

        ipykernel_seams.word_history_by(made, word)
        made.run_cell("1 / 0", store_history=True)
        expect(worded, "an error is kept otherwise")


def traceback_of_a_reply() -> None:
    expect(ipykernel_seams.reads_traceback(), "ipykernel's reply has its traceback from elsewhere")


def clients_connection() -> None:
    from ipyparallel import Client

    lacking = ipyparallel_seams.unsent(Client)
    expect(not lacking, f"a client has no {', '.join(lacking)}")


def engines_kernel() -> None:
    from ipyparallel.engine.app import IPEngine

    expect("Kernel" in ipyparallel_seams.used_by(IPEngine), "an engine makes its kernel otherwise")


def controllers_processes() -> None:
    from ipyparallel.controller.app import IPController

    expect("Process" in ipyparallel_seams.used_by(IPController), "a controller starts processes otherwise")


TRIALS: dict[str, Callable[[], None]] = {
    "captured output": captured_output,
    "text not yet sent": text_not_yet_sent,
    "status messages": status_messages,
    "interrupt of an await": interrupt_of_an_await,
    "topics of messages": topics,
    "history of errors": history_of_errors,
    "traceback of a reply": traceback_of_a_reply,
    "client's connection": clients_connection,
    "engine's kernel": engines_kernel,
    "controller's processes": controllers_processes,
}
