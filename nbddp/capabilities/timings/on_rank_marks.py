"""A step of DistributedDataParallel as its marks are taken: each is 0 until it is, then the host's time or a GPU's."""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from nbddp.analysis.steps import Bucket, Place, Step
from nbddp.capabilities.timings.on_rank_gpu_clock import GpuMark
from nbddp.compat import system
from nbddp.compat import torch as torch_compat
from nbddp.deadlock.on_rank.call_log import CallRecord

STATISTICS = "/proc/thread-self/schedstat"  # its second number; Linux alone has it
PHASES = ("forward", "backward", "optimizer")
NOTED, NOTED_EACH = 8, 64  # steps that note lines: the first of a run, and then one of so many
Lines = dict[str, tuple[str, int]]  # phase → what a cell is called, and a line of it
CELL = re.compile(r"In\[(\d+)\]")
_open: dict[int, int] = {}  # a thread's native id → its descriptor
os.register_at_fork(after_in_child=_open.clear)


class BucketMarks:
    """A bucket: its elements and bytes, when it was ready and sent, and `done`, which has one mark once its result is
    there. queued: its device's backend carries out one collective after the other."""

    __slots__ = ("bytes", "device", "done", "index", "numel", "queued", "ready", "sent")

    def __init__(self, index: int, numel: int, size: int, at: GpuMark | int, device: Any, in_order: bool) -> None:
        self.index, self.numel, self.bytes = index, numel, size
        self.ready = self.sent = at
        self.done: list[GpuMark | int] = []
        self.device, self.queued = device, device is not None and in_order

    def bucket(self, names: list[str]) -> Bucket:
        """names: of its parameters."""
        done = told(self.done[0]) if self.done else 0
        return Bucket(self.index, self.bytes, told(self.ready), told(self.sent), done, tuple(names), self.queued)


class StepMarks:
    """A step: forward is entered and left; backward has begun, has all gradients computed, and is through when all
    buckets have been waited for; the optimizer's step begins and has been taken. order: that of the gradients, where
    it was known then. loader: begin and end of each batch's making. manual: the program itself ends backward, and has
    not yet. queued, inputs: as in `analysis.steps.Step`. called: phase → the cell's line, if it notes them."""

    __slots__ = (
        "begun", "buckets", "called", "cell", "computed", "entered", "inputs", "left", "loader", "manual", "model",
        "number", "order", "queued", "rebuilds", "rebuilt", "run", "stepped", "stepping", "synced", "through",
    )  # fmt: skip

    def __init__(self, model: DdpModel, number: int, run: int, cell: int | None, synced: bool) -> None:
        self.model, self.number, self.run, self.cell, self.synced = model, number, run, cell, synced
        self.order = model.order
        self.entered: GpuMark | int = 0
        self.left: GpuMark | int = 0
        self.begun: GpuMark | int = 0
        self.computed: GpuMark | int = 0
        self.through: GpuMark | int = 0
        self.stepping: GpuMark | int = 0
        self.stepped: GpuMark | int = 0
        self.rebuilt = self.rebuilds = self.manual = False
        self.buckets: list[BucketMarks] = []
        self.loader: list[tuple[int, int]] | None = None
        self.queued: list[int] = []
        self.inputs: int | None = None
        self.called: Lines | None = None

    def waited(self) -> tuple[int, int] | None:
        """`queued`, if both are known."""
        return (self.queued[0], self.queued[1]) if len(self.queued) == 2 else None

    def step(self, lines: Lines | None = None) -> Step:
        """What is noted of it by now. lines: of each phase, where no line was noted in this step."""
        buckets = sorted(self.buckets, key=lambda b: b.index)
        names = names_of([self.order, self.model.declared], self.model.sizes, [b.numel for b in buckets])
        return Step(
            self.number, (told(self.entered), told(self.left)),
            (told(self.begun), told(self.computed), told(self.through)),
            (told(self.stepping), told(self.stepped)) if self.stepped else None,
            tuple(b.bucket(n) for b, n in zip(buckets, names, strict=True)),
            self.synced, self.rebuilt, self.rebuilds, tuple(self.loader or ()), self.waited(), self.inputs,
            numbered((lines or {}) if self.called is None else self.called),
        )  # fmt: skip


@dataclass(eq=False)
class Tally:
    """What a DDP model has done so far: forwards with gradients, and buckets of ended backwards. parameters: by `id`,
    those that its reducer exchanges; ranks: how many its group has. It holds no group, and may survive the model."""

    parameters: frozenset[int] = frozenset()
    ranks: int = 0
    forwards: int = 0
    buckets: int = 0


class DdpModel:
    """One DDP model: its parameters' names, and in which order their gradients come."""

    def __init__(self, ddp: Any) -> None:
        self.title = type(ddp.module).__name__
        self.device = next((p.device for p in ddp.module.parameters() if p.is_cuda), None)
        named = [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad]
        self.sizes = {n: p.numel() for n, p in named}
        self.declared = [n for n, _ in reversed(named)]
        self.order: list[str] = []
        self.count = 0
        self._run, self._since = -1, 0  # the run that is on, and its first step
        # DDP rebuilds its buckets once, in the forward that follows the first exchange (of a static graph, the second)
        self._until_rebuild = 2 if ddp.static_graph else 1 if not ddp.find_unused_parameters else 0
        self._exchanged = 0
        self._came: list[str] = []
        self._handles = [before_gradient(p, functools.partial(self._comes, n)) for n, p in named]

    def begin(self, run: int, cell: int | None, synced: bool) -> StepMarks:
        """A new step's marks."""
        if self._came and self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles, self.order = [], self._came
        step = StepMarks(self, self.count, run, cell, synced)
        if self._notes_lines(run):
            step.called = {}
        self.count += 1
        if self._exchanged <= self._until_rebuild:
            step.rebuilt = synced and self._exchanged < self._until_rebuild
            step.rebuilds = 0 < self._until_rebuild == self._exchanged
            self._exchanged += step.rebuilt or step.rebuilds
        return step

    def _notes_lines(self, run: int) -> bool:
        """Whether the step that begins is one of those that note lines."""
        if run != self._run:
            self._run, self._since = run, self.count
        done = self.count - self._since
        return done < NOTED or done % NOTED_EACH == 0

    def _comes(self, name: str, *gradients: Any) -> None:
        if name not in self._came:
            self._came.append(name)


def before_gradient(tensor: Any, call: Any) -> Any:
    """Have `call` run in backward before this tensor's gradient goes on; the handle that ends it. A hook on the tensor
    itself would be seen there, and torch.save would warn of it."""
    node = tensor.grad_fn
    if node is None:  # a leaf: where its gradient is accumulated
        import torch

        node = torch.autograd.graph.get_gradient_edge(tensor).node
    return node.register_prehook(call)


def names_of(orders: list[list[str]], numels: dict[str, int], sizes: list[int]) -> list[list[str]]:
    """Names of the parameters in each bucket: an order of parameters is cut where buckets end. Of the orders that
    DDP may have used the first whose cuts fit; empty lists if none does."""
    for order in orders:
        found, left = [], list(order)
        for size in sizes:
            names: list[str] = []
            while size > 0 and left:
                names.append(left.pop(0))
                size -= numels[names[-1]]
            if size != 0:
                break
            found.append(names)
        else:
            if not left and sizes:
                return found
    return [[] for _ in sizes]


def asks_for_backward() -> FrameType | None:
    """The frame of the main thread that waits for autograd's engine, which works for GPUs in threads of its own."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_name != torch_compat.BACKWARD:
        frame = frame.f_back
    return frame


def place(frame: FrameType | None, names: Mapping[str, str]) -> tuple[str, int] | None:
    """What a cell is called, and its line, at or outside a frame; None outside cells. names: by file."""
    while frame is not None:
        name = names.get(frame.f_code.co_filename)
        if name is not None:
            return name, frame.f_lineno
        frame = frame.f_back
    return None


def agreed(steps: Sequence[StepMarks]) -> Lines:
    """The lines of phases that each step asked for at the same one, as far as they were noted."""
    noted = [step.called for step in steps if step.called is not None]
    found = {phase: {lines[phase] for lines in noted if phase in lines} for phase in PHASES}
    return {phase: next(iter(places)) for phase, places in found.items() if len(places) == 1}


def numbered(lines: Lines) -> tuple[tuple[str, int, int], ...]:
    """Phases with the n of an In[n] and a line; without those that no cell has asked for."""
    found = ((phase, CELL.search(name), line) for phase, (name, line) in lines.items())
    return tuple((phase, int(cell[1]), line) for phase, cell, line in found if cell)


def told(mark: GpuMark | int) -> int:
    """A mark's time; waits for its GPU."""
    return mark if isinstance(mark, int) else mark.read()


def passed(mark: GpuMark | int) -> int:
    """A mark's time if it has come to pass and was read; else 0."""
    return mark if isinstance(mark, int) else mark.at


# -- lines that call collectives --------------------------------------------------------------------

# Of calls that pass through Python some are noted, as phases are; the others, DDP's in backward, are asked for by the
# line that asks for backward.

KEPT = 1000  # calls that are noted at the same time
Key = tuple[str, int]  # a group, and the sequence number of a call in it
Finder = Callable[[Key, int], Place | None]  # a call and when it was made → its line


class CallPlaces:
    """The calls of a worker that were noted: of each kind in a run the first, and then one of so many."""

    def __init__(self) -> None:
        self._noted: deque[tuple[Key, Place]] = deque(maxlen=KEPT)
        self._counts: Counter[tuple[str, str]] = Counter()  # of this run
        self._run = 0

    def note(self, run: int, call: CallRecord, names: Mapping[str, str]) -> None:
        """A collective has been called from outside of the caller of this. names: file → what its cell is called."""
        op, key, sequence = call
        if run != self._run:
            self._run, self._counts = run, Counter()
        done = self._counts[op, key]
        self._counts[op, key] = done + 1
        if done >= NOTED and done % NOTED_EACH:
            return
        frame = sys._getframe(2)
        found = place(frame, names) or place(_backward(frame), names)
        number = CELL.search(found[0]) if found else None
        if found and number:
            self._noted.append(((key, sequence), (int(number[1]), found[1])))

    def finder(self, called: frozenset[Key], since: int, steps: Sequence[StepMarks]) -> Finder:
        """called: the calls that passed through Python, since then; steps: of DDP. All times are those of
        time.perf_counter_ns()."""
        noted, spans = dict(self._noted), sorted(_backwards(steps))
        begins = [begin for begin, _, _ in spans]

        def find(call: Key, at: int) -> Place | None:
            if call in noted or call in called or at < since:
                return noted.get(call)
            i = bisect_right(begins, at) - 1
            return spans[i][2] if i >= 0 and at <= spans[i][1] else None

        return find


def _backward(frame: FrameType | None) -> FrameType | None:
    """The frame that waits for autograd's engine, if the engine's own thread is the one of this frame."""
    if threading.current_thread() is threading.main_thread():
        return None
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    is_pythons = frame is not None and frame.f_code.co_filename == threading.__file__  # its threads begin there
    return None if is_pythons else asks_for_backward()


def _backwards(steps: Sequence[StepMarks]) -> Iterator[tuple[int, int, Place]]:
    """Begin and end of each backward on a CPU whose line is known. Those on GPUs have times of the GPU, which lie after
    the calls."""
    by_run: dict[tuple[int, int], list[StepMarks]] = {}
    for step in steps:
        by_run.setdefault((step.run, id(step.model)), []).append(step)
    for some in by_run.values():
        lines = agreed(some)
        for step in some:
            found = next((p[1:] for p in numbered(step.called or lines) if p[0] == "backward"), None)
            if found and isinstance(step.begun, int) and isinstance(step.through, int) and step.through:
                yield step.begun, step.through, found


# -- waits for a core ------------------------------------------------------------------------------


def core_wait() -> int | None:
    """Nanoseconds that the calling thread has waited for a core since it began; None where nobody counts."""
    me = threading.get_native_id()
    try:
        if me not in _open:
            if not system.is_linux():
                return None
            _open[me] = os.open(STATISTICS, os.O_RDONLY | os.O_CLOEXEC)
        return int(os.pread(_open[me], 64, 0).split(None, 2)[1])
    except (OSError, ValueError, IndexError):  # no such file, or a program that closed it
        _open.pop(me, None)
        return None
