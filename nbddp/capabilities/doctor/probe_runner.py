"""Tries every private API of `capabilities.doctor.seams` in a temporary process, and reports the results.

`python -m nbddp.capabilities.doctor.probe_runner` writes one line of JSON per private API as soon as it is tested. So a
trial that ends the process loses no other result. A pool has a copy of its warm process do it (`in_copy`), into a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import IO, Any

from nbddp.agent import hardware
from nbddp.capabilities.doctor import probes_torch
from nbddp.capabilities.doctor.findings import Machine
from nbddp.capabilities.doctor.seams import SEAMS, ProbeResult, Seam
from nbddp.compat import ipykernel, ipyparallel
from nbddp.compat.extra import ipykernel as ipykernel_extra
from nbddp.compat.extra import torch as torch_extra
from nbddp.compat.extra.probes import Failed, Untried, absent, expect
from nbddp.deadlock.on_rank import flight
from nbddp.protocol.capability import load, rows
from nbddp.protocol.codec import Message

NAMES: dict[str, tuple[str, ...]] = {**torch_extra.NAMES, **ipykernel.NAMES, **ipyparallel.NAMES}
PATIENCE = 100.0  # seconds for all trials; a first import of torch from a slow disk takes most of it


# -- trials of ipykernel, IPython and ipyparallel ----------------------------------------------------
# There is no cluster to try them on. So the code of a class is searched for attributes that only a connected client or
# a running kernel has.


def _takes(method: str, *wanted: str) -> None:
    taken = ipykernel_extra.parameters(method)
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

    lacking = ipykernel_extra.lacks_of_shell(IPythonKernel)
    expect(not lacking, f"a kernel has no {', '.join(lacking)}")


def questions_of_a_cell() -> None:
    from ipykernel.ipkernel import IPythonKernel

    lacking = ipykernel_extra.lacks_of_stdin(IPythonKernel)
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


def topics_of_messages() -> None:
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
        if not ipykernel_extra.words_history(made):
            raise Untried("this IPython does not keep errors in its history")
        worded: list[Any] = []

        def word(error: BaseException, *args: Any, **kwargs: Any) -> dict[str, object]:
            worded.append(error)
            return {"ename": "", "evalue": "", "traceback": []}

        ipykernel.word_history_by(made, word)
        made.run_cell("1 / 0", store_history=True)
        expect(worded, "errors are kept in another way")


def traceback_of_a_reply() -> None:
    expect(ipykernel_extra.reads_traceback(), "ipykernel's reply takes its traceback from elsewhere")


def files_of_autoreload() -> None:
    with shell() as made:
        try:
            made.run_line_magic("load_ext", "autoreload")
        except ModuleNotFoundError as e:
            if e.name == "imp":  # IPython 7's imports it, and Python 3.12 has it no more
                raise Untried("this Python cannot load this IPython's %autoreload") from None
            raise
        times, failed = ipykernel_extra.autoreload(made)
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


# -- all of them -------------------------------------------------------------------------------------


def _named(seam: Seam) -> str:
    """The function that tests a private API has its name: `cs_log_level` of "C++'s log level"."""
    return re.sub(r"[^a-z0-9 ]", "", seam.key.lower()).replace(" ", "_")


FUNCTIONS: dict[str, Callable[[], None]] = {**vars(probes_torch), **globals()}
TRIALS = {seam.key: FUNCTIONS[_named(seam)] for seam in SEAMS if _named(seam) in FUNCTIONS}
TRIALS |= {key: load(target) for row in rows() for key, target in row.probes.items()}


def tried(key: str) -> ProbeResult:
    """The result of testing a private API. Whatever its trial raises is the answer."""
    if key not in TRIALS:
        return ProbeResult(True, None, "nothing here uses it")
    lacking = absent(NAMES.get(key, ()))
    if lacking:
        return ProbeResult(False, False, lacking)
    try:
        TRIALS[key]()
    except Untried as e:
        return ProbeResult(True, None, str(e))
    except Failed as e:
        return ProbeResult(key in NAMES, False, str(e))
    except Exception as e:
        return ProbeResult(key in NAMES, False, f"{type(e).__name__}: {e}")
    return ProbeResult(True, True)


def machine() -> Machine:
    import psutil
    import torch

    return {
        "cores": len(hardware.allowed_cores()),
        "memory": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def report(out: IO[str]) -> None:
    """Test all private APIs; a line for each, and one for the machine. A trial that never ends, ends the process."""
    with open(os.devnull, "w") as nowhere:  # a thread in C does it, which needs no interpreter
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=nowhere)
        _report(out)
        faulthandler.cancel_dump_traceback_later()


def _report(out: IO[str]) -> None:
    flight.switch_on()

    def say(**message: Any) -> None:
        print(f"\n{json.dumps(message)}", file=out, flush=True)  # a library may have begun a line

    for seam in SEAMS:
        verdict = tried(seam.key)
        say(seam=seam.key, present=verdict.present, works=verdict.works, why=verdict.why)
    say(machine=machine())


def in_copy(request: Message) -> int:
    """Report into the file `into`, which is there as soon as it is whole; as a child of the agent."""
    if hasattr(os, "nice"):
        os.nice(19)  # the ranks that start meanwhile come first
    with open(request["part"], "w", encoding="utf-8") as out:
        report(out)
    os.replace(request["part"], request["into"])
    os._exit(0)  # torch's own clean-up at exit takes longer than everything else


def main() -> None:
    with os.fdopen(os.dup(1), "w") as out:  # some trials write to descriptors 1 and 2
        report(out)
    os._exit(0)  # torch's own clean-up at exit takes longer than everything else


if __name__ == "__main__":
    main()
