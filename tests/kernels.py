"""A real notebook kernel, driven as a front end drives it.

`Kernel.run` sends a cell and returns a `Shown`: every output message in order, and what a
notebook would hold when the cell has ended (`outputs`: display updates carried out, `clear_output` obeyed).
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import IPython
from jupyter_client.manager import KernelManager

from nbddp.capabilities.warm import fingerprint
from tests import warm as tests_warm

CELL_TIMEOUT = 90.0
# Since Python 3.13 pdb stops at `breakpoint()` itself: the lines that lead from there to the line below.
FROM_BREAKPOINT = ["n"] if sys.version_info >= (3, 13) else []
HAS_AUTORELOAD = IPython.version_info >= (8,) or sys.version_info < (3, 12)  # IPython 7's imports `imp`
FACTS = (
    "__import__('json').dumps(__import__('nbddp.capabilities.warm.fingerprint', "
    "fromlist=['']).inherited(__import__('os').environ))"
)


@dataclass
class Shown:
    """What one cell showed."""

    reply: dict[str, Any] = field(default_factory=dict)
    messages: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    began: float = 0.0
    took: float = 0.0

    @property
    def number(self) -> int:
        """The cell's In[n]."""
        return next(int(c["execution_count"]) for _, kind, c in self.messages if kind == "execute_input")

    @property
    def ok(self) -> bool:
        return self.reply["status"] == "ok"

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """The cell's outputs as a saved notebook would have them."""
        found: list[dict[str, Any]] = []
        for _, kind, content in self.messages:
            ident = (content.get("transient") or {}).get("display_id")
            if kind == "update_display_data":
                for output in found:
                    if output.get("id") == ident:
                        output["data"] = content["data"]
            elif kind == "clear_output":
                found.clear()
            elif kind == "stream" and found and found[-1].get("name") == content["name"]:
                found[-1]["text"] += content["text"]
            elif kind in ("stream", "display_data", "execute_result", "error"):
                found.append({"output_type": kind, **content, "id": ident})
        return found

    def text(self, name: str = "stdout") -> str:
        return "".join(o["text"] for o in self.outputs if o.get("name") == name)

    @property
    def displays(self) -> list[dict[str, Any]]:
        """Mimebundles that stay, without the empty live view."""
        return [o["data"] for o in self.outputs if "data" in o and o["data"] != {"text/plain": ""}]

    @property
    def error(self) -> str:
        """The error as the notebook shows it, without colours."""
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(self.reply.get("traceback", ())))

    @property
    def evalue(self) -> str:
        return str(self.reply.get("evalue", ""))


class Kernel:
    """An ipykernel in its own process, in `cwd`."""

    def __init__(self, cwd: str | None = None, env: dict[str, str] | None = None):
        own = {**(env or os.environ)}
        own.pop("PYTEST_CURRENT_TEST", None)  # ipykernel would not capture file descriptors
        for left in (2, 1, 0):
            self.manager = KernelManager(kernel_name="python3")
            self.manager.start_kernel(cwd=cwd, env=own)
            self.client = self.manager.client()
            self.client.start_channels()
            try:
                self.client.wait_for_ready(timeout=60)
            except RuntimeError as error:  # its ports are chosen before it is started, and another may take one
                self.close()
                if not left or "Kernel died" not in str(error):
                    raise
            else:
                break

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def send(self, code: str) -> str:
        return str(self.client.execute(code, allow_stdin=False))

    def collect(self, msg_id: str, timeout: float = CELL_TIMEOUT) -> Shown:
        shown = Shown(began=time.monotonic())
        while True:
            message = self.client.get_iopub_msg(timeout=timeout)
            if message["parent_header"].get("msg_id") != msg_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            shown.messages.append((time.time(), kind, content))
        shown.took = time.monotonic() - shown.began
        while True:
            reply = self.client.get_shell_msg(timeout=timeout)
            if reply["parent_header"].get("msg_id") == msg_id:
                shown.reply = reply["content"]
                return shown

    def run(self, code: str, timeout: float = CELL_TIMEOUT) -> Shown:
        """Run a cell. ipykernel 6 drops what is sent in the moment after an error, as no hand is quick enough to."""
        while (shown := self.collect(self.send(code), timeout)).reply["status"] == "aborted":
            pass
        return shown

    def ask(self, send: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A complete or inspect request, and its answer."""
        msg_id = send(*args, **kwargs)
        while True:
            reply = self.client.get_shell_msg(timeout=CELL_TIMEOUT)
            if reply["parent_header"].get("msg_id") == msg_id:
                content: dict[str, Any] = reply["content"]
                return content

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=False)
        self.manager.cleanup_resources()


@functools.cache
def of_kernels() -> dict[str, Any]:
    """What a kernel's process has else than this one: ipykernel sets variables."""
    kernel = Kernel()
    try:
        expression = {"facts": FACTS}
        reply = kernel.client.execute("", user_expressions=expression, reply=True, timeout=CELL_TIMEOUT)
        facts = json.loads(ast.literal_eval(reply["content"]["user_expressions"]["facts"]["data"]["text/plain"]))
    finally:
        kernel.close()
    own = fingerprint.inherited(os.environ)
    return {name: facts[name] for name in fingerprint.differing(own, facts) if name in facts and name != "folder"}


@contextmanager
def loaded(cwd: str, env: dict[str, str] | None = None, *, warm: bool = True) -> Iterator[Kernel]:
    """A kernel with nbddp loaded, until the block ends.

    warm: its agent is a fork of the tests' template (tests/warm.py).
    """
    if warm:
        tests_warm.ready(env or os.environ, **of_kernels(), folder=os.path.realpath(cwd))
    kernel = Kernel(cwd, env)
    try:
        shown = kernel.run("%load_ext nbddp")
        assert shown.ok, shown.error
        yield kernel
    finally:
        kernel.close()
