"""Traces made by hand, as torch.profiler writes them: every answer about them is known. Times are microseconds."""

from __future__ import annotations

import itertools
from typing import Any

from nbddp.analysis.steps import Place
from nbddp.capabilities.trace.merge import Collective, Merged, RankTrace, merge

PID, MAIN, ENGINE, GLOO = 77, 1, 2, 9  # of the process; its main thread, autograd's, gloo's
STREAM, NCCL_STREAM = 7, 20


class Made:
    """One rank's trace while it is made."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.collectives: list[Collective] = []
        self.waits: list[tuple[int, int, int, str]] = []
        self._correlations = itertools.count(1)

    def span(self, name: str, start: float, end: float, tid: int = MAIN, cat: str = "cpu_op", **args: Any) -> None:
        pid = 0 if cat in ("kernel", "gpu_memcpy", "gpu_memset") else PID
        self.events.append(
            {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, "pid": pid, "tid": tid, "args": args}
        )

    def annotation(self, name: str, start: float, end: float) -> None:
        self.span(name, start, end, cat="user_annotation")

    def kernel(
        self, name: str, start: float, end: float, launched: float, thread: int = MAIN, stream: int = STREAM
    ) -> None:
        """A kernel, and the call of CUDA's runtime that launches it, of one microsecond."""
        n = next(self._correlations)
        self.span("cudaLaunchKernel", launched, launched + 1, thread, "cuda_runtime", correlation=n)
        self.span(name, start, end, stream, "kernel", correlation=n, device=0, stream=stream)

    def memcpy(self, name: str, start: float, end: float) -> None:
        self.span(name, start, end, STREAM, "gpu_memcpy", correlation=next(self._correlations), bytes=4096)

    def called(
        self, call: str, op: str, at: float, end: float, group: str = "0", thread: int = MAIN,
        place: Place | None = None,
    ) -> None:  # fmt: skip
        """A call of a collective, in a profile and in the flight recorder. place: the line of the cell."""
        self.span(f"c10d::{call}", at, end, thread)
        number = 1 + sum(c.group == group for c in self.collectives)
        self.collectives.append(Collective(op, group, (), number, int(at * 1000) + 500, place=place))

    def all_reduce(self, at: float, done: float) -> None:
        """One on gloo that is waited for at once."""
        self.called("allreduce_", "gloo:all_reduce", at, at + 2)
        self.span("gloo:all_reduce", at + 3, done, GLOO, "user_annotation")
        self.wait(at + 2, done)

    def wait(self, start: float, end: float) -> None:
        self.waits.append((int(start * 1000), int(end * 1000), MAIN, "wait for all_reduce"))


def merged(*ranks: Made) -> Merged:
    """The ranks' traces as one."""
    return merge({r: RankTrace(m.events, 0, 0, PID, 0, m.collectives, m.waits) for r, m in enumerate(ranks)}, {})
