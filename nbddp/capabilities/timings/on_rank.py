"""Records DistributedDataParallel step by step, without touching the user's code or results.

Times of a step come from four places. These are DDP's forward, the first gradient that enters backward, the end of the
autograd engine's work, and optimizers' step hooks. Buckets are seen where DDP hands them over. Its C++ reducer gets a
process group that passes every call on to the real one and notes the time. So no communication hook is registered, and
DDP's own arithmetic stays (the division fused into the copy). Pickling and deepcopy of the model work as before. A
user's `register_comm_hook` is wrapped instead, since its buckets do not pass through the reducer's group. A program
that ends backward itself, by torch 2.15's `finalize_backward`, waits for the buckets there: what it does before
overlaps them.

Times are the host's (`time.perf_counter_ns`, one clock for all ranks of a machine). The host runs ahead of a GPU. So
all times of a model on a GPU are those of CUDA events, converted to the host's clock (`on_rank_gpu_clock`). Only the
end of a bucket that gloo moves is the host's: there the host waits for it. A step that is captured in a CUDA graph is
not recorded.

It also notes the time in torch's data loaders, the size of each forward's inputs, and the thread's waits for a core
(`on_rank_marks`). A rank may be slow between its steps, in its work, or by its machine.

A note in a step costs ten times as much as in a loop of its own. The model's work probably empties the processor's
caches. Code that runs once in a step costs by its length, so a step makes few calls of Python.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from nbddp.analysis.steps import RankRecording
from nbddp.capabilities.timings import on_rank_gpu_clock, on_rank_marks
from nbddp.capabilities.timings.on_rank_gpu_clock import DeviceClock, GpuMark
from nbddp.capabilities.timings.on_rank_marks import (
    BucketMarks,
    CallPlaces,
    DdpModel,
    Finder,
    StepMarks,
    Tally,
    before_gradient,
    passed,
)
from nbddp.compat import torch as torch_compat
from nbddp.compat.clock import clock
from nbddp.compat.extra import torch as torch_extra
from nbddp.deadlock.on_rank import call_log
from nbddp.deadlock.on_rank.call_log import RECV, SEND, UNKNOWN, CallRecord
from nbddp.protocol import pickling
from nbddp.protocol.codec import Json, to_json
from nbddp.protocol.outcome import Outcome
from nbddp.protocol.run_spec import CALL, CELL, RunSpec
from nbddp.worker.parts import RankWorker

RING = 2000  # steps kept
SPENT = 8000  # calls of collectives and waits for them, remembered
AT_ONCE = 256  # steps that `pace` tells of
LOADS = 64  # batches that a step remembers
VALUES = 256  # in the inputs of a step, of which the tensors are counted
STAND_IN = "nbddp"  # the backend's name where the real one is not known
now = clock.perf_counter_ns


def _clocks() -> tuple[int, int]:
    return now(), clock.thread_time_ns()


@dataclass(frozen=True)
class CallSpan:
    """A call of a collective or a wait for one (`waits`): begin and end in nanoseconds (time.perf_counter_ns), and the
    thread's CPU time until each; the thread's native id; the operation, if it is known."""

    waits: bool
    begin: int
    end: int
    ran: tuple[int, int]
    thread: int
    note: CallRecord | None

    @property
    def op(self) -> str:
        return {SEND: "send", RECV: "recv"}.get(self.note[0], str(self.note[0])) if self.note else ""

    @property
    def is_collective(self) -> bool:
        """Whether it is the call of one whose number is known."""
        return not self.waits and self.note is not None and not self.note.is_peer and self.note[2] != UNKNOWN


@dataclass(eq=False)
class RunRecord:
    """A cell or a called function: its number, the n of its In[n], its begin (time.time_ns()); of begin and end the
    values of `_clocks`."""

    run: int
    cell: int | None
    began_ns: int
    begin: tuple[int, int]
    end: tuple[int, int] | None = None


class Recorder:
    """The recordings of one worker. `on` is False under `--no-timings`; `run` is the number of the run, `cell` the n of
    its In[n] (None if it is no cell); `trained` both of them as they were when a DDP model or an optimizer last took
    a step."""

    def __init__(self) -> None:
        self.sleeps = True
        self.hears: Callable[[], None] = lambda: None  # has it hear of runs
        self.began: Callable[[], tuple[int, int, int]] = lambda: (clock.time_ns(), *_clocks())  # when the run did
        self.spent: deque[CallSpan] = deque(maxlen=SPENT)
        self.places = CallPlaces()
        self.runs: deque[RunRecord] = deque(maxlen=call_log.EPOCHS)
        self.keeps = False  # whether what is spent now is remembered
        self.on = True
        self.run = 0
        self.cell: int | None = None
        self.cells: Callable[[], Mapping[str, str]] = dict  # file → `Cell In[n]`
        self._names: Mapping[str, str] = {}
        self.trained: tuple[int, int | None] | None = None
        self.steps: deque[StepMarks] = deque(maxlen=RING)
        self._models: WeakKeyDictionary[Any, DdpModel] = WeakKeyDictionary()
        self.optimizers: WeakSet[Any] = WeakSet()
        self._groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._clock = DeviceClock()
        self.engine: Any = None  # autograd's
        self.heard: Callable[[str, bool, int, int], None] | None = None  # phase, begins, step, model: when it happens
        self._in_flight: list[tuple[Any, list[BucketMarks]]] = []
        self._in_backward = False
        self._stepping = 0
        self._loads: deque[tuple[int, int]] = deque(maxlen=LOADS)  # since the last step began
        self.own: deque[tuple[str, int, int]] = deque(maxlen=RING)  # `loader` or `optimizer`, begin, end, always

    def wake(self) -> None:
        """Hear of runs from the one that goes on: it trains, loads data, has a process group, or is traced."""
        self.hears()
        self.sleeps = False

    def group_begins(self) -> None:
        self.wake()

    def begin(self, spec: RunSpec) -> None:
        self.run, self.on, self.cell = spec.run, spec.options.get("timings", True), spec.cell
        self._names = self.cells()
        if self.on:
            self.keep(spec)

    def keep(self, spec: RunSpec) -> None:
        """Remember what is spent in this run, if it is one of a cell or a called function."""
        if spec.op in (CELL, CALL) and not self.keeps:
            self.keeps = True
            began = self.began()
            self.runs.append(RunRecord(spec.run, spec.cell, began[0], began[1:]))

    def _spend(self, waits: bool, began: tuple[int, int], note: CallRecord | None) -> None:
        """Remember a call or a wait that began then and ends now."""
        if self.sleeps:
            self.wake()
        if self.keeps:
            ended = _clocks()
            thread = threading.get_native_id()
            spent = CallSpan(waits, began[0], ended[0], (began[1], ended[1]), thread, note)
            self.spent.append(spent)
            if note is not None and spent.is_collective:
                self.places.note(self.run, note, self._names)

    def finder(self) -> Finder:
        """Of the lines that call collectives."""
        spent = list(self.spent)
        called = frozenset(s.note[1:3] for s in spent if s.note is not None and s.is_collective)
        return self.places.finder(called, spent[0].begin if len(spent) == SPENT else 0, list(self.steps))

    def end(self, outcome: Outcome, error: BaseException | None) -> None:
        if self.keeps:
            self.runs[-1].end, self.keeps = _clocks(), False
        self.let_go()

    def let_go(self) -> None:
        """Drop the groups whose buckets have all been noted. Until then gloo's thread may run a callback of ours, and a
        garbage collection there must not find the last reference. Called by the main thread alone."""
        self._in_flight = [held for held in self._in_flight if [bucket for bucket in held[1] if not bucket.done]]

    def install(self) -> None:
        """Put the wraps in place; once, when the worker starts."""
        call_log.CALLS.spends = self._spend
        import torch
        import torch.distributed as dist
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        if not dist.is_available() or not hasattr(dist, "Reducer"):
            return
        self.engine = torch_extra.autograd_engine()
        if self.engine is None:
            return
        from torch.nn.parallel import DistributedDataParallel as DDP

        group = _group_class(torch)
        keep_out_of_graphs(sys.modules[__name__], on_rank_marks, on_rank_gpu_clock)
        self._wrap(dist.Reducer, "__init__", lambda original: self._reducer(original, group))
        self._wrap(DDP, "forward", self._forward)
        self._wrap(DDP, "register_comm_hook", self._comm_hook)
        if hasattr(DDP, "finalize_backward"):  # torch 2.15
            self._wrap(DDP, "finalize_backward", self._finalize)
        iterator = torch_extra.loader_iterator()
        if iterator is not None and "__next__" in vars(iterator):
            self._wrap(iterator, "__next__", self._next_batch)
        register_optimizer_step_pre_hook(self._optimizer(0))
        register_optimizer_step_post_hook(self._optimizer(1))

    def collect(self) -> RankRecording:
        """The steps of the last run that took some, of the model it used last."""
        finished = [s for s in self.steps if s.through]
        if not finished:
            return RankRecording()
        last = finished[-1]
        chosen = [s for s in finished if s.run == last.run and s.model is last.model]
        lines = on_rank_marks.agreed(chosen)
        return RankRecording(last.run, last.cell, last.model.title, tuple(s.step(lines) for s in chosen))

    def pace(self, run: int, since: int) -> list[list[int]]:
        """Number, begin, end of backward; the wait for buckets after the gradients; the wait for a core until the
        gradients existed, and until the buckets did (nanoseconds; 0 if unknown), of the first steps of a run that began
        after `since`. Asked while the program runs: a step on a GPU whose events have not been read yet, and all after
        it, come later."""
        found: list[list[int]] = []
        for step in list(self.steps):
            times = [passed(step.entered), passed(step.computed), passed(step.through)]
            if step.run != run or 0 < times[0] <= since:
                continue
            if not all(times) or len(found) == AT_ONCE:
                break
            found.append([step.number, times[0], times[2], times[2] - times[1], *(step.waited() or (0, 0))])
        return found

    def step(self, run: int, number: int) -> Json | None:
        """Step `number` of a run, of the model that took its last step, as JSON; None if it is not there."""
        own = [s for s in list(self.steps) if s.run == run]
        own = [s for s in own if s.model is own[-1].model]
        found = next((s for s in reversed(own) if s.number == number), None)
        if found is None:
            return None
        return {"model": found.model.title, "step": to_json(found.step(on_rank_marks.agreed(own)))}

    def models(self) -> list[Any]:
        """The living DDP models that have taken a step."""
        return list(self._models)

    def tallies(self) -> list[Tally]:
        """Of the living reducers."""
        return [group.tally for group in self._groups.values()]

    def bucket_bytes(self, ddp: Any) -> int | None:
        """Bytes of a model's buckets in its last step with an exchange; None if none was recorded."""
        model = self._models.get(ddp)
        if model is None:
            return None
        own = (s.buckets for s in reversed(self.steps) if s.model is model and s.buckets)
        return next((sum(b.bytes for b in some) for some in own), None)

    def unfinished_bytes(self, ddp: Any) -> int:
        """Bytes of the buckets that a backward has sent which has not ended, as one that failed."""
        group = self._groups.get(ddp.reducer)
        return 0 if group is None or group.step is None else sum(b.bytes for b in group.step.buckets)

    # -- wraps ---------------------------------------------------------------------------

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(make(original)))

    def _reducer(self, original: Any, group_class: Any) -> Any:
        import torch

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def __init__(
            reducer: Any, params: Any, indices: Any, limits: Any, group: Any, *args: Any, **named: Any
        ) -> None:
            if self.sleeps:
                self.wake()
            recording = group_class(group, self._clock) if self.on else None
            if recording is not None:
                try:
                    original(reducer, params, indices, limits, recording, *args, **named)
                    self._groups[reducer] = recording
                    recording.tally = Tally(frozenset(map(id, params)), group.size())
                    return
                except TypeError:
                    pass  # a torch whose reducer takes no group that is written in Python: this model is not recorded
            original(reducer, params, indices, limits, group, *args, **named)

        return __init__

    def _next_batch(self, original: Any) -> Any:
        def __next__(iterator: Any) -> Any:
            if self.sleeps:
                self.wake()
            begin = now()
            try:
                return original(iterator)
            finally:
                if self.on:
                    end = now()
                    self._loads.append((begin, end))
                    self.own.append(("loader", begin, end))

        return __next__

    def _forward(self, original: Any) -> Any:
        import torch

        def forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
            begun = self._begins(ddp, args, kwargs) if self.on and torch.is_grad_enabled() else None
            out = original(ddp, *args, **kwargs)
            if begun is not None:
                self._leaves_forward(*begun, out)
            return out

        return torch.compiler.disable(forward, recursive=False)  # what it calls is compiled, as from DDP's own

    def _begins(self, ddp: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> tuple[Any, StepMarks] | None:
        """A forward of these inputs begins: the reducer's group and the step's marks; None if it is not recorded."""
        group = self._groups.get(ddp.reducer)
        if group is None:
            return None
        model = group.model
        if model is None:
            model = group.model = self._models[ddp] = DdpModel(ddp)
        if self._in_flight:
            self.let_go()
        self._in_backward = False  # one that failed
        if model.device is not None:
            if self._clock.captures():
                return None
            self._clock.begin(model.device)
        group.tally.forwards += 1
        step: StepMarks = model.begin(self.run, self.cell, bool(ddp.require_backward_grad_sync))
        if self._loads:
            step.loader = list(self._loads)
            self._loads.clear()
        step.manual = step.synced and getattr(ddp, "require_manual_backward_finalization", False)
        step.inputs = elements((args, kwargs) if kwargs or len(args) != 1 else args[0])
        if step.called is not None:
            self._note_line(step.called, "forward")
        step.entered = self._now(step)
        if self.heard is not None:
            self.heard("forward", True, step.number, id(model))
        return group, step

    def _note_line(self, called: on_rank_marks.Lines, phase: str) -> None:
        """The line of a cell that asks for this phase. To walk over frames takes some 14 µs, so few steps do it."""
        frame = sys._getframe(1).f_back or on_rank_marks.asks_for_backward()
        found = on_rank_marks.place(frame, self._names)
        if found is not None:
            called[phase] = found

    def _now(self, step: StepMarks) -> GpuMark | int:
        return now() if step.model.device is None else self._clock.mark(step.model.device)

    def _leaves_forward(self, group: Any, step: StepMarks, out: Any) -> None:
        step.left = self._now(step)
        if self.heard is not None:
            self.heard("forward", False, step.number, id(step.model))
        group.step = step
        reached = _Backward(self, group, step).reaches_output
        for tensor in tensors(out):
            if tensor.requires_grad:
                before_gradient(tensor, reached)

    def _finalize(self, original: Any) -> Any:
        import torch

        def finalize_backward(ddp: Any) -> None:
            group = self._groups.get(ddp.reducer)
            step = None if group is None else group.step
            if step is None or not step.manual or not step.computed:  # not recorded, or called within backward
                original(ddp)
                if step is not None:
                    step.manual = False
                return
            self._computed(step)
            original(ddp)
            self._through(group, step)

        return torch.compiler.disable(finalize_backward, recursive=False)

    def _computed(self, step: StepMarks) -> None:
        """From here on the program waits for the buckets."""
        step.computed = self._now(step)
        step.queued.clear()
        self._note_wait(step)

    def _note_wait(self, step: StepMarks) -> None:
        """How long the thread has waited for a core; of a step on a GPU that is no part of its time."""
        waited = on_rank_marks.core_wait() if step.model.device is None else None
        if waited is not None:
            step.queued.append(waited)

    def _through(self, group: Any, step: StepMarks) -> None:
        """All buckets have been waited for."""
        step.through = self._now(step)
        self._note_wait(step)
        if self.heard is not None:
            self.heard("backward", False, step.number, id(step.model))
        self._in_backward = False
        self.steps.append(step)
        group.tally.buckets += len(step.buckets)
        self.trained = (self.run, self.cell)
        if group.step is step:  # what comes now is no gradient of it: a rank that has joined shadows the others
            group.step = None
        self._in_flight.append((group.real, step.buckets))

    def _comm_hook(self, original: Any) -> Any:
        import torch

        def register_comm_hook(ddp: Any, state: object, hook: Any) -> Any:
            group = self._groups.get(ddp.reducer)
            if group is None or not callable(hook):
                return original(ddp, state, hook)

            @functools.wraps(hook)
            def recorded(state: object, bucket: Any) -> Any:
                own = group.note(bucket.buffer(), bucket.index())
                future = hook(state, bucket)
                return future if own is None else group.sent(own, future)

            result = original(ddp, state, torch.compiler.disable(recorded, recursive=False))
            torch_extra.replace_last_hook(ddp, hook, state)  # what pickling takes along is the user's own
            return result

        return register_comm_hook

    def _optimizer(self, which: int) -> Callable[..., None]:
        """A hook that notes the begin (0) or the end (1) of an optimizer's step."""
        from torch.compiler import is_compiling

        def steps(optimizer: Any, *_: Any) -> None:
            if is_compiling():  # a compiled step is not noted, but the same graph
                return
            if self.sleeps or self.heard is not None:
                self._optimizer_steps(which == 0)
            self.trained = (self.run, self.cell)
            if not self.on:
                return
            if which == 0:
                self.optimizers.add(optimizer)
                self._stepping = now()
            else:
                self.own.append(("optimizer", self._stepping, now()))
            if self.steps and not self._in_backward:  # one that steps within backward has no time after it
                step = self.steps[-1]
                if step.model.device is not None and self._clock.captures():
                    return
                if which == 0:
                    if step.called is not None and not step.stepping:
                        self._note_line(step.called, "optimizer")
                    step.stepping = step.stepping or self._now(step)
                else:
                    step.stepped = step.stepped or self._now(step)

        return steps

    def _optimizer_steps(self, begins: bool) -> None:
        if self.sleeps:
            self.wake()
        if self.heard is not None:
            last = self.steps[-1] if self.steps and self.steps[-1].run == self.run else None
            self.heard("optimizer", begins, *((0, 0) if last is None else (last.number, id(last.model))))


class _Backward:
    """One backward through a DDP model's output, as autograd's engine comes by."""

    __slots__ = ("group", "recorder", "step")

    def __init__(self, recorder: Recorder, group: Any, step: StepMarks) -> None:
        self.recorder, self.group, self.step = recorder, group, step

    def reaches_output(self, *gradients: Any) -> None:
        """Backward has reached DDP's output: note it, and have the engine tell when it is through."""
        step, recorder = self.step, self.recorder
        if step.begun:
            return
        step.begun = recorder._now(step)
        if step.called is not None:
            recorder._note_line(step.called, "backward")
        if recorder.heard is not None:
            recorder.heard("backward", True, step.number, id(step.model))
        recorder._in_backward = True
        recorder.engine.queue_callback(self.computed)

    def computed(self) -> None:
        """Runs before DDP's own callback, which waits for the buckets."""
        self.recorder._computed(self.step)
        self.recorder.engine.queue_callback(self.all_waited_for)

    def all_waited_for(self) -> None:
        if not self.step.manual:  # else the program says when
            self.recorder._through(self.group, self.step)


def _group_class(torch: Any) -> Any:
    """A process group for DDP's reducer: passes everything on, and notes all-reduces of gradients.

    It has the real group's backends, so that DDP's logging data say of it what they say of the real one.
    """
    unseen = torch.compiler.disable
    reduce = torch.distributed.ProcessGroup.allreduce
    noted_reduce, own_reduce = unseen(reduce), torch_extra.outside_graphs(call_log.unnoted(reduce))
    # what waits for it is no callback of the program's
    future_of = torch_extra.outside_graphs(call_log.unnoted(torch.distributed.Work.get_future))

    class RecordingGroup(_Notes, torch.distributed.ProcessGroup):  # type: ignore[misc]
        def __init__(self, real: Any, clock: DeviceClock) -> None:
            torch.distributed.ProcessGroup.__init__(self, real.rank(), real.size())
            _Notes.__init__(self, clock, torch_extra.serves(real, "cuda") == "nccl")
            self.real = real
            shared = torch_extra.share_backends(real, self)
            self.backend_name = shared or STAND_IN
            # torch's recorder has each all-reduce; where it has none of this group they are noted as a program's are
            self.reduce = own_reduce if shared and torch_compat.has_generic_recorder() else noted_reduce

        @unseen  # type: ignore[untyped-decorator]
        def getBackendName(self) -> str:
            return self.backend_name

        @torch_extra.outside_graphs
        def allreduce(self, tensors: Any, options: Any) -> Any:
            if self.step is None or len(tensors) != 1 or not tensors[0].is_floating_point():
                return self.reduce(self.real, tensors, options)
            bucket = self.note(tensors[0])
            work = self.reduce(self.real, tensors, options)
            if bucket is not None:
                self.handed_over(bucket, future_of(work))
            return work

    for name in ("broadcast", "allgather", "reduce_scatter", "barrier"):
        setattr(RecordingGroup, name, unseen(_of_real(name)))
    return RecordingGroup


def _of_real(name: str) -> Callable[..., Any]:
    """The method of a group that calls the real group's."""

    def call(group: Any, *args: Any) -> Any:
        return getattr(group.real, name)(*args)

    return call


class _Notes:
    """What a reducer's group writes down: into the step that is in backward now. in_order: on GPUs its backend carries
    out one collective after the other, as NCCL does on its stream."""

    def __init__(self, clock: DeviceClock, in_order: bool) -> None:
        self.clock, self.in_order = clock, in_order
        self.model: DdpModel | None = None
        self.step: StepMarks | None = None
        self.tally = Tally()

    def note(self, tensor: Any, index: int | None = None) -> BucketMarks | None:
        """A bucket is handed over now; None if no step is in backward."""
        step = self.step
        if step is None or not step.begun:
            return None
        device = tensor.device if tensor.is_cuda else None
        at = now() if device is None else self.clock.mark(device)
        numel, buckets = tensor.numel(), step.buckets
        index = len(buckets) if index is None else index
        bucket = BucketMarks(index, numel, numel * tensor.element_size(), at, device, self.in_order)
        buckets.append(bucket)
        return bucket

    def handed_over(self, bucket: BucketMarks, future: Any) -> None:
        """The backend has the bucket, and gives a future of its result.

        The end is noted on gloo's thread, by C functions alone: a list is given the time. A function called there must
        not hold the group. Whoever drops the last reference to a group joins its threads, and a thread that joins
        itself aborts the process."""
        if bucket.device is not None and future.done():
            bucket.done.append(self.clock.result_of(future, bucket.device))
        else:
            future.add_done_callback(functools.partial(next, map(bucket.done.append, iter(now, None))))

    def sent(self, bucket: BucketMarks, future: Any) -> Any:
        """A user's hook has sent a bucket: its future, which notes when the result is there."""
        device = bucket.device
        bucket.sent = now() if device is None else self.clock.mark(device)
        if device is None or not future.done():
            return future.then(functools.partial(passed_on, bucket.done))
        bucket.done.append(self.clock.result_of(future, device))
        return future


def passed_on(done: list[GpuMark | int], future: Any) -> Any:
    done.append(now())
    return future.value()


def keep_out_of_graphs(*modules: Any) -> None:
    """Keep the functions of these modules out of torch.compile's graphs. It traces all Python that runs meanwhile, ours
    too, which has no place in a graph."""
    for module in modules:
        own = [m for m in vars(module).values() if getattr(m, "__module__", "") == module.__name__]
        for owner in (module, *filter(inspect.isclass, own)):
            for name, function in list(vars(owner).items()):
                if inspect.isfunction(function) and function.__module__ == module.__name__:
                    setattr(owner, name, torch_extra.outside_graphs(function))


def tensors(found: Any) -> Iterator[Any]:
    """The tensors in a value: itself, or those within dicts, lists and tuples."""
    import torch

    if type(found) is torch.Tensor:
        return iter((found,))
    return (value for value in _values(found) if isinstance(value, torch.Tensor))


def elements(found: Any) -> int | None:
    """How many elements the tensors in a value have; None if it has none, or more than VALUES values in all. A long
    list of numbers, or a list within itself, is not gone through."""
    import torch

    if type(found) is torch.Tensor:
        return found.numel() or None
    values = list(islice(_values(found), VALUES + 1))
    if len(values) > VALUES:
        return None
    return sum(value.numel() for value in values if isinstance(value, torch.Tensor)) or None


def _values(found: Any) -> Iterator[Any]:
    """A value and all within it, where dicts, lists and tuples are."""
    yield found
    if isinstance(found, dict):
        found = found.values()
    elif not isinstance(found, list | tuple):
        return
    for value in found:
        yield from _values(value)


# -- on a worker ---------------------------------------------------------------------------------


def part(worker: RankWorker) -> Recorder:
    """The worker's own."""
    recorder = Recorder()
    recorder.cells, recorder.began = lambda: worker.files.shown, lambda: worker.began
    recorder.hears = lambda: worker.parts.wake("timings")
    recorder.install()
    return recorder


def timings(worker: RankWorker, buffers: Sequence[Any]) -> list[bytes]:
    """What the recorder has of the last run with DDP steps."""
    return [pickling.pack_answer(worker.parts["timings"].collect())]


def pace(worker: RankWorker, run: int, since: int) -> Any:
    """The DDP steps of run `run` that began after `since`, as far as they are known."""
    return worker.parts["timings"].pace(run, since)


def step(worker: RankWorker, run: int, number: int) -> Any:
    """One DDP step of run `run`."""
    return worker.parts["timings"].step(run, number)
