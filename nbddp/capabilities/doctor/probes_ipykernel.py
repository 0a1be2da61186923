"""Trials of the seams of ipykernel, IPython and ipyparallel, as those of torch in `probes_torch`.

There is no cluster to try them on: what only a connected client or a running kernel has is looked for in the code of
its class.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from nbddp.compat import ipykernel, ipyparallel
from nbddp.compat.probes import Untried, expect


def _takes(method: str, *wanted: str) -> None:
    taken = ipykernel.parameters(method)
    expect(tuple(taken[: len(wanted)]) == wanted, f"it takes ({', '.join(taken)})")


def status_messages() -> None:
    _takes(ipykernel.OVERRIDES[0], "status", "channel")


def interrupt_of_an_await() -> None:
    _takes(ipykernel.OVERRIDES[1], "future")


def event_loop() -> None:
    async def held() -> ipykernel.EventLoopContents | None:
        asyncio.get_running_loop().call_later(60, print, "it")
        return ipykernel.held_by(asyncio.get_running_loop())

    found = asyncio.run(held())
    expect(found is not None and (print, "it") in found.calls, "an event loop keeps what it will call in another way")


def messages_during_a_cell() -> None:
    from ipykernel.ipkernel import IPythonKernel

    lacking = ipykernel.lacks_of_shell(IPythonKernel)
    expect(not lacking, f"a kernel has no {', '.join(lacking)}")


def questions_of_a_cell() -> None:
    from ipykernel.ipkernel import IPythonKernel

    lacking = ipykernel.lacks_of_stdin(IPythonKernel)
    expect(not lacking, f"a kernel has no {', '.join(lacking)}")


def flush_before_a_display() -> None:
    import zmq
    from ipykernel.iostream import IOPubThread, OutStream

    sends = IOPubThread(zmq.Context.instance().socket(zmq.PUB))  # it is not started, and so never comes to it
    stream = OutStream(None, sends, "stdout", watchfd=False)
    expect(ipykernel.knows_nothing_to_flush(stream), "a stream does not know that it has sent everything")
    stream.write("x")
    expect(not ipykernel.knows_nothing_to_flush(stream), "a stream does not know what it has to send")
    sends.close()


def topics() -> None:
    from ipyparallel.engine.kernel import IPythonParallelKernel

    class Named(IPythonParallelKernel):  # type: ignore[misc]
        def __init__(self) -> None:  # without a shell, sockets and threads
            return

    expect(isinstance(ipykernel.topic(Named(), "nbddp"), bytes), "topics are not bytes")


@contextlib.contextmanager
def shell() -> Iterator[Any]:
    from IPython.core.interactiveshell import InteractiveShell

    made = InteractiveShell.instance()
    made.history_manager.enabled = False
    made.showtraceback = lambda *args, **kwargs: None
    yield made


def history_of_errors() -> None:
    with shell() as made:
        if not ipykernel.words_history(made):
            raise Untried("this IPython does not keep errors in its history")
        worded: list[Any] = []

        def word(error: BaseException, *args: Any, **kwargs: Any) -> dict[str, Any]:
            worded.append(error)
            return {"ename": "", "evalue": "", "traceback": []}

        ipykernel.word_history_by(made, word)
        made.run_cell("1 / 0", store_history=True)
        expect(worded, "errors are kept in another way")


def traceback_of_a_reply() -> None:
    expect(ipykernel.reads_traceback(), "ipykernel's reply takes its traceback from elsewhere")


def files_of_autoreload() -> None:
    with shell() as made:
        try:
            made.run_line_magic("load_ext", "autoreload")
        except ModuleNotFoundError as e:
            if e.name == "imp":  # IPython 7's imports it, and Python 3.12 has it no more
                raise Untried("this Python cannot load this IPython's %autoreload") from None
            raise
        times, failed = ipykernel.autoreload(made)
        expect(times.get("nbddp") and isinstance(failed, dict), "%autoreload keeps the times of files in another way")


def clients_connection() -> None:
    from ipyparallel import Client

    lacking = ipyparallel.unsent(Client)
    expect(not lacking, f"a client has no {', '.join(lacking)}")


def engines_kernel() -> None:
    from ipyparallel.engine.app import IPEngine

    expect("Kernel" in ipyparallel.used_by(IPEngine), "an engine creates its kernel in another way")


def controllers_processes() -> None:
    from ipyparallel.controller.app import IPController

    expect("Process" in ipyparallel.used_by(IPController), "a controller starts processes in another way")


TRIALS: dict[str, Callable[[], None]] = {
    "status messages": status_messages,
    "interrupt of an await": interrupt_of_an_await,
    "event loop": event_loop,
    "messages during a cell": messages_during_a_cell,
    "questions of a cell": questions_of_a_cell,
    "flush before a display": flush_before_a_display,
    "topics of messages": topics,
    "history of errors": history_of_errors,
    "traceback of a reply": traceback_of_a_reply,
    "files of autoreload": files_of_autoreload,
    "client's connection": clients_connection,
    "engine's kernel": engines_kernel,
    "controller's processes": controllers_processes,
}
