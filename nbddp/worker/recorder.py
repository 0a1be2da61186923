"""Records what DistributedDataParallel does, step by step, without touching the user's code or results.

Times of a step come from four places: DDP's forward, the first gradient that enters backward, the end
of the autograd engine's work, and optimizers' step hooks. Buckets are seen where DDP hands them
over: its C++ reducer is given a process group that passes every call on to the real one
and notes when. So no communication hook is registered, DDP's own arithmetic (the division
fused into the copy) stays, and pickling and deepcopy of the model are as before. A user's
`register_comm_hook` is wrapped instead, since its buckets do not pass through the reducer's group.

Times are the host's (`time.perf_counter_ns`, one clock for all ranks of a machine). The host runs ahead of a GPU, so
all times of a model that is on one are those of CUDA events, told on the host's clock (`device_clock`). Only the end of
a bucket that gloo moves is the host's: there the host waits for it. A step that is captured in a CUDA graph is not
recorded.

The time in torch's data loaders is noted too, how large the inputs of each forward are, and how long the thread has
waited for a core (`contention`): a rank may be slow for what it does between its steps, for its work or its machine.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from nbddp.seams import torch_seams
from nbddp.worker import contention
from nbddp.worker.device_clock import DeviceClock, Mark

RING = 2000  # steps kept
AT_ONCE = 256  # steps that `pace` tells of
LOADS = 64  # batches that a step remembers
VALUES = 256  # in the inputs of a step, of which the tensors are counted
STAND_IN = "nbddp"  # the backend's name where the real one cannot be told
now = time.perf_counter_ns


class Recorder:
    """The recordings of one worker. `on` is False under `--no-timings`; `run` is the number of the run, `cell` the n of
    its In[n] (None if it is no cell); `trained` both of them as they were when a DDP model or an optimizer last took
    a step."""

    def __init__(self) -> None:
        self.on = True
        self.run = 0
        self.cell: int | None = None
        self.trained: tuple[int, int | None] | None = None
        self.steps: deque[dict[str, Any]] = deque(maxlen=RING)
        self._models: WeakKeyDictionary[Any, _Model] = WeakKeyDictionary()
        self.optimizers: WeakSet[Any] = WeakSet()
        self._groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._clock = DeviceClock()
        self.heard: Callable[[str, bool, int, int], None] | None = None  # phase, begins, step, model: when it happens
        self._in_flight: list[tuple[Any, list[dict[str, Any]]]] = []
        self._in_backward = False
        self._stepping = 0
        self._loads: deque[tuple[int, int]] = deque(maxlen=LOADS)  # since the last step began
        self.own: deque[tuple[str, int, int]] = deque(maxlen=RING)  # `loader` or `optimizer`, begin, end, always

    def begin(self, run: int, on: bool, cell: int | None = None) -> None:
        self.run, self.on, self.cell = run, on, cell

    def let_go(self) -> None:
        """Drop the groups whose buckets have all been noted: until then gloo's thread may run a callback of ours, and
        a garbage collection there must not find the last reference. Called by the main thread alone."""
        self._in_flight = [held for held in self._in_flight if not all(note["done"] for note in held[1])]

    def install(self) -> None:
        """Put the wraps in place; once, when the worker starts."""
        import torch
        import torch.distributed as dist
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        if not dist.is_available() or not hasattr(dist, "Reducer") or torch_seams.autograd_engine() is None:
            return
        from torch.nn.parallel import DistributedDataParallel as DDP

        _keep_out_of_graphs(torch.compiler.disable)
        group = _group_class(torch)
        self._wrap(dist.Reducer, "__init__", lambda original: self._reducer(original, group))
        self._wrap(DDP, "forward", self._forward)
        self._wrap(DDP, "register_comm_hook", self._comm_hook)
        iterator = torch_seams.loader_iterator()
        if iterator is not None and "__next__" in vars(iterator):
            self._wrap(iterator, "__next__", self._next_batch)
        register_optimizer_step_pre_hook(lambda optimizer, *_: self._optimizer(0, optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._optimizer(1, optimizer))

    def collect(self) -> dict[str, Any]:
        """The steps of the last run that took some, of the model it used last, as plain data."""
        finished = [s for s in self.steps if s["backward"][2]]
        if not finished:
            return {"model": "", "steps": [], "run": 0, "cell": None}
        last = finished[-1]
        chosen = [s for s in finished if (s["run"], s["model"]) == (last["run"], last["model"])]
        found = {"model": last["title"], "run": last["run"], "cell": last["cell"]}
        return {**found, "steps": [self._plain(s) for s in chosen]}

    def pace(self, run: int, since: int) -> list[list[int]]:
        """Number, begin, end of backward, and the time waited for buckets after the gradients (nanoseconds) of the
        first steps of a run that began after `since`. Asked while the program runs: a step on a GPU whose events have
        not been read yet, and all after it, come later."""
        found: list[list[int]] = []
        for step in list(self.steps):
            times = [_passed(step["forward"][0]), *map(_passed, step["backward"][1:])]
            if step["run"] != run or 0 < times[0] <= since:
                continue
            if not all(times) or len(found) == AT_ONCE:
                break
            found.append([step["number"], times[0], times[2], times[2] - times[1]])
        return found

    def step(self, run: int, number: int) -> dict[str, Any] | None:
        """Step `number` of a run, of the model that took its last step, as plain data; None if it is not there."""
        own = [s for s in list(self.steps) if s["run"] == run]
        found = next((s for s in reversed(own) if s["number"] == number and s["model"] == own[-1]["model"]), None)
        return None if found is None else {"model": found["title"], "step": self._plain(found)}

    def models(self) -> list[Any]:
        """The living DDP models that have taken a step."""
        return list(self._models)

    def bucket_bytes(self, ddp: Any) -> int | None:
        """Bytes of a model's buckets in its last step with an exchange; None if none was recorded."""
        model = self._models.get(ddp)
        if model is None:
            return None
        own = (s["buckets"] for s in reversed(self.steps) if s["model"] == id(model) and s["buckets"])
        return next((sum(b["bytes"] for b in some) for some in own), None)

    def _plain(self, step: dict[str, Any]) -> dict[str, Any]:
        buckets = sorted(step["buckets"], key=lambda b: b["index"])
        names = _names(step["orders"], [b["numel"] for b in buckets])
        keys = ("number", "forward", "backward", "synced", "rebuilt", "rebuilds", "loader", "queued", "inputs")
        optimizer = step["optimizer"] if step["optimizer"][1] else None
        plain: dict[str, Any] = told({**{k: step[k] for k in keys}, "optimizer": optimizer})
        of_bucket = ("index", "bytes", "ready", "sent", "done", "queued")
        told_buckets = told([{k: b[k] for k in of_bucket} for b in buckets])
        return {**plain, "buckets": [{**b, "names": n} for b, n in zip(told_buckets, names, strict=True)]}

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
            recording = group_class(group, self._clock) if self.on else None
            if recording is not None:
                try:
                    original(reducer, params, indices, limits, recording, *args, **named)
                    self._groups[reducer] = recording
                    return
                except TypeError:
                    pass  # a torch whose reducer takes no group that is written in Python: this model is not recorded
            original(reducer, params, indices, limits, group, *args, **named)

        return __init__

    def _next_batch(self, original: Any) -> Any:
        def __next__(iterator: Any) -> Any:
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
            begun = self._begins(ddp, (args, kwargs))
            out = original(ddp, *args, **kwargs)
            if begun is not None:
                self._leaves_forward(*begun, out)
            return out

        return torch.compiler.disable(forward, recursive=False)  # what it calls is compiled, as from DDP's own

    def _begins(self, ddp: Any, inputs: Any = ()) -> tuple[Any, dict[str, Any]] | None:
        """A forward of these inputs begins: the reducer's group and the step's record; None if it is not recorded."""
        import torch

        group = self._groups.get(ddp.reducer) if self.on else None
        if group is None or not torch.is_grad_enabled():
            return None
        model = self._models.get(ddp)
        if model is None:
            model = self._models[ddp] = _Model(ddp)
        self.let_go()
        self._in_backward = False  # one that failed
        if model.device is not None:
            if self._clock.captures():
                return None
            self._clock.begin(model.device)
        step = model.begin(self.run, self.cell, bool(ddp.require_backward_grad_sync))
        step["loader"], step["queued"] = [list(span) for span in self._loads], contention.waited()
        step["inputs"] = elements(inputs)
        self._loads.clear()
        step["forward"][0] = self._now(step)
        self._say("forward", True, step)
        return group, step

    def _say(self, phase: str, begins: bool, step: dict[str, Any]) -> None:
        if self.heard is not None:
            self.heard(phase, begins, step["number"], step["model"])

    def _now(self, step: dict[str, Any]) -> Mark | int:
        return now() if step["device"] is None else self._clock.mark(step["device"])

    def _leaves_forward(self, group: Any, step: dict[str, Any], out: Any) -> None:
        step["forward"][1] = self._now(step)
        self._say("forward", False, step)
        group.step = step
        first = functools.partial(self._first_gradient, group, step)
        for tensor in tensors(out):
            if tensor.requires_grad:
                before_gradient(tensor, first)

    def _first_gradient(self, group: Any, step: dict[str, Any], *gradients: Any) -> None:
        """Backward has reached DDP's output: note it, and have the engine tell when it is through."""
        if step["backward"][0]:
            return
        step["backward"][0] = self._now(step)
        self._say("backward", True, step)
        self._in_backward = True
        engine = torch_seams.autograd_engine()
        engine.queue_callback(functools.partial(self._computed, engine, group, step))

    def _computed(self, engine: Any, group: Any, step: dict[str, Any]) -> None:
        """Runs before DDP's own callback, which waits for the buckets."""
        step["backward"][1] = self._now(step)
        engine.queue_callback(functools.partial(self._all_waited_for, group, step))

    def _all_waited_for(self, group: Any, step: dict[str, Any]) -> None:
        step["backward"][2] = self._now(step)
        self._say("backward", False, step)
        self._in_backward = False
        self.steps.append(step)
        self.trained = (self.run, self.cell)
        if group.step is step:  # what comes now is no gradient of it: a rank that has joined shadows the others
            group.step = None
        self._in_flight.append((group.real, step["buckets"]))

    def _comm_hook(self, original: Any) -> Any:
        import torch

        def register_comm_hook(ddp: Any, state: object, hook: Any) -> Any:
            group = self._groups.get(ddp.reducer)
            if group is None or not callable(hook):
                return original(ddp, state, hook)

            @functools.wraps(hook)
            def recorded(state: object, bucket: Any) -> Any:
                note = group.note(bucket.buffer(), bucket.index())
                future = hook(state, bucket)
                return future if note is None else group.sent(note, future)

            result = original(ddp, state, torch.compiler.disable(recorded, recursive=False))
            torch_seams.replace_last_hook(ddp, hook, state)  # what pickling takes along is the user's own
            return result

        return register_comm_hook

    def _optimizer(self, which: int, optimizer: Any) -> None:
        import torch

        if torch.compiler.is_compiling():  # a compiled step is not noted, but the same graph
            return
        self.trained = (self.run, self.cell)
        if self.heard is not None:
            last = self.steps[-1] if self.steps and self.steps[-1]["run"] == self.run else {"number": 0, "model": 0}
            self.heard("optimizer", which == 0, last["number"], last["model"])
        if not self.on:
            return
        self.optimizers.add(optimizer)
        if which == 0:
            self._stepping = now()
        else:
            self.own.append(("optimizer", self._stepping, now()))
        if self.steps and not self._in_backward:  # one that steps within backward has no time after it
            step = self.steps[-1]
            captured = step["device"] is not None and self._clock.captures()
            if not step["optimizer"][which] and not captured:
                step["optimizer"][which] = self._now(step)


def _passed(mark: Mark | int) -> int:
    """A mark's time if it has come to pass and was read; else 0."""
    return mark if isinstance(mark, int) else mark.at


class _Model:
    """One DDP model: its parameters' names, and in which order their gradients come."""

    def __init__(self, ddp: Any) -> None:
        self.title = type(ddp.module).__name__
        self.device = next((p.device for p in ddp.module.parameters() if p.is_cuda), None)
        named = [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad]
        self.sizes = {n: p.numel() for n, p in named}
        self.declared = [n for n, _ in reversed(named)]
        self.came: list[str] = []
        self.count = 0
        # DDP rebuilds its buckets once, in the forward that follows the first exchange (of a static graph, the second)
        self._until_rebuild = 2 if ddp.static_graph else 1 if not ddp.find_unused_parameters else 0
        self._exchanged = 0
        self._handles = [before_gradient(p, functools.partial(self._comes, n)) for n, p in named]

    def begin(self, run: int, cell: int | None, synced: bool) -> dict[str, Any]:
        """A new step's record."""
        before = synced and self._exchanged < self._until_rebuild
        rebuilds = 0 < self._until_rebuild == self._exchanged
        self._exchanged += before or rebuilds
        if self.came and self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles = []
        number, self.count = self.count, self.count + 1
        orders = [[(n, self.sizes[n]) for n in order] for order in (self.came, self.declared)]
        return {
            "number": number, "run": run, "cell": cell, "model": id(self), "title": self.title,
            "forward": [0, 0], "backward": [0, 0, 0], "optimizer": [0, 0], "buckets": [], "synced": synced,
            "loader": [], "queued": None, "inputs": None, "device": self.device, "rebuilt": before,
            "rebuilds": rebuilds, "orders": orders,
        }  # fmt: skip

    def _comes(self, name: str, *gradients: Any) -> None:
        if name not in self.came:
            self.came.append(name)


def _group_class(torch: Any) -> Any:
    """A process group for DDP's reducer: passes everything on, and notes all-reduces of gradients.

    It has the real group's backends, so that DDP's logging data say of it what they say of the real one.
    """
    unseen = torch.compiler.disable

    class RecordingGroup(_Notes, torch.distributed.ProcessGroup):  # type: ignore[misc]
        def __init__(self, real: Any, clock: DeviceClock) -> None:
            torch.distributed.ProcessGroup.__init__(self, real.rank(), real.size())
            _Notes.__init__(self, clock, torch_seams.serves(real, "cuda") == "nccl")
            self.real = real
            self.backend_name = torch_seams.share_backends(real, self) or STAND_IN

        @unseen  # type: ignore[untyped-decorator]
        def getBackendName(self) -> str:
            return self.backend_name

        @unseen  # type: ignore[untyped-decorator]
        def allreduce(self, tensors: Any, options: Any) -> Any:
            note = self.note(tensors[0]) if len(tensors) == 1 and tensors[0].is_floating_point() else None
            work = self.real.allreduce(tensors, options)
            if note is not None:
                self.handed_over(note, work.get_future())
            return work

        @unseen  # type: ignore[untyped-decorator]
        def broadcast(self, tensors: Any, options: Any) -> Any:
            return self.real.broadcast(tensors, options)

        @unseen  # type: ignore[untyped-decorator]
        def allgather(self, *args: Any) -> Any:
            return self.real.allgather(*args)

        @unseen  # type: ignore[untyped-decorator]
        def reduce_scatter(self, *args: Any) -> Any:
            return self.real.reduce_scatter(*args)

        @unseen  # type: ignore[untyped-decorator]
        def barrier(self, options: Any) -> Any:
            return self.real.barrier(options)

    return RecordingGroup


class _Notes:
    """What a reducer's group writes down: into the step that is in backward now. in_order: on GPUs its backend carries
    out one collective after the other, as NCCL does on its stream."""

    def __init__(self, clock: DeviceClock, in_order: bool) -> None:
        self.clock, self.in_order = clock, in_order
        self.step: dict[str, Any] | None = None

    def note(self, tensor: Any, index: int | None = None) -> dict[str, Any] | None:
        """A bucket is handed over now; None if no step is in backward."""
        step = self.step
        if step is None or not step["backward"][0]:
            return None
        device = tensor.device if tensor.is_cuda else None
        at = now() if device is None else self.clock.mark(device)
        note = {
            "index": len(step["buckets"]) if index is None else index, "bytes": tensor.numel() * tensor.element_size(),
            "numel": tensor.numel(), "ready": at, "sent": at, "done": 0, "device": device,
            "queued": device is not None and self.in_order,
        }  # fmt: skip
        step["buckets"].append(note)
        return note

    def handed_over(self, note: dict[str, Any], future: Any) -> None:
        """The backend has the bucket, and gives a future of its result."""
        if note["device"] is not None and future.done():
            note["done"] = self.clock.result_of(future, note["device"])
        else:
            future.then(functools.partial(self.noted, note))

    def sent(self, note: dict[str, Any], future: Any) -> Any:
        """A user's hook has sent a bucket: its future, which notes when the result is there."""
        device = note["device"]
        note["sent"] = now() if device is None else self.clock.mark(device)
        if device is None or not future.done():
            return future.then(functools.partial(self.passed_on, note))
        note["done"] = self.clock.result_of(future, device)
        return future

    @staticmethod
    def noted(note: dict[str, Any], future: Any) -> None:
        """The bucket's result is there. Runs on gloo's thread, so it must not hold the group: whoever drops
        the last reference to a group joins its threads, and a thread that joins itself aborts the process."""
        note["done"] = now()

    @staticmethod
    def passed_on(note: dict[str, Any], future: Any) -> Any:
        note["done"] = now()
        return future.value()


ENTERED = (  # what torch calls, maybe from within a function that is compiled
    (Recorder, ("_begins", "_say", "_leaves_forward", "_first_gradient", "_computed", "_all_waited_for")),
    (_Model, ("_comes",)),
    (_Notes, ("note", "handed_over", "sent")),
)


def _keep_out_of_graphs(disable: Callable[..., Any]) -> None:
    """torch.compile traces every Python function that runs meanwhile, ours too, which have no place in a graph."""
    for owner, names in ENTERED:
        for name in names:
            setattr(owner, name, disable(getattr(owner, name)))
    for name in ("noted", "passed_on"):
        setattr(_Notes, name, staticmethod(disable(getattr(_Notes, name))))


def before_gradient(tensor: Any, call: Callable[..., None]) -> Any:
    """Have `call` run in backward before this tensor's gradient goes on; the handle that ends it. A hook on the tensor
    itself would be seen there, and torch.save would warn of it."""
    import torch

    return torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(call)


def tensors(found: Any) -> Iterator[Any]:
    """The tensors in a value: itself, or those within dicts, lists and tuples."""
    import torch

    return (value for value in _values(found) if isinstance(value, torch.Tensor))


def elements(found: Any) -> int | None:
    """How many elements the tensors in a value have; None if it has none, or more than VALUES values in all, as a long
    list of numbers and a list within itself do: these are not gone through."""
    import torch

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


def _names(orders: list[list[tuple[str, int]]], sizes: list[int]) -> list[list[str]]:
    """Names of the parameters in each bucket: an order of parameters is cut where buckets end. Of the orders that
    DDP may have used the first whose cuts fit; empty lists if none does."""
    for order in orders:
        found, left = [], list(order)
        for size in sizes:
            names: list[str] = []
            while size > 0 and left:
                name, numel = left.pop(0)
                names.append(name)
                size -= numel
            if size != 0:
                break
            found.append(names)
        else:
            if not left and sizes:
                return found
    return [[] for _ in sizes]


def told(found: Any) -> Any:
    """Plain data with each mark's time in its place."""
    if isinstance(found, Mark):
        return found.read()
    if isinstance(found, dict):
        return {k: told(v) for k, v in found.items()}
    return [told(v) for v in found] if isinstance(found, list) else found
