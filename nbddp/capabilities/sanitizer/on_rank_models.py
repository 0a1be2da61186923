"""A rank's record of DistributedDataParallel: models, forwards, backwards, hooks, and their final parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode

from nbddp.capabilities.sanitizer import on_rank_digest as digest
from nbddp.capabilities.sanitizer.on_rank_settings import module_numbers
from nbddp.capabilities.sanitizer.recording import Backward, Forward, HookCall, ModelFacts
from nbddp.compat import torch as torch_compat
from nbddp.compat.extra import torch as torch_extra
from nbddp.worker.gpus import capturing

AT_ONCE = 16  # tensors that one sample of a step has
OUTPUTS = 8  # forwards whose outputs are digested
RANDOM_FORWARDS = 16  # whose generators are looked at
HOOK_CALLS = 64
OTHERS = 8  # modules in another mode that are named
KEPT = 16  # backwards before which gradients are looked at
LOOKS = 256  # forwards at which modules' numbers are looked at, at ever longer distances
ENDS = 4096  # tensors of a model that are looked at in the end


def is_whole(tensor: Any) -> bool:
    """Whether a tensor is a rank's own in full: no shard of one, and not on the `meta` device."""
    return not hasattr(tensor, "device_mesh") and tensor.device.type != "meta"


def sharded_over(tensor: Any) -> tuple[int, ...]:
    """The ranks that have the other parts of a DTensor; none if it is whole."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ()
    dims = [i for i, each in enumerate(tensor.placements) if each.is_shard() and mesh.size(i) > 1]
    return tuple(sorted({rank for i in dims for rank in ranks_of(mesh.get_group(i))}))


def shard_groups(tensor: Any) -> set[tuple[int, ...]]:
    """The groups of ranks over which a DTensor is sharded: one for each such dimension of its mesh."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return set()
    return {ranks_of(mesh.get_group(i)) for i, p in enumerate(tensor.placements) if p.is_shard() and mesh.size(i) > 1}


class KnownModel:
    """A DDP model, or an FSDP2 root, that this rank has met. parameters: name → parameter that is exchanged."""

    def __init__(self, module: Any, facts: ModelFacts, parameters: Mapping[str, torch.Tensor], group: Any) -> None:
        self.module, self.facts, self.group = weakref.ref(module), facts, group
        self.parameters = {id(each): (name, weakref.ref(each)) for name, each in parameters.items()}
        self.settings = {id(each): (each.dtype, each.device) for each in parameters.values()}
        self.frozen: set[int] = set()
        self.own: OwnBuffers | None = None
        self.forwards = 0  # with gradients

    def knows(self, parameter: Any) -> str:
        """The name under which a parameter is exchanged; empty if it is not."""
        name, reference = self.parameters.get(id(parameter), ("", None))
        return name if reference is not None and reference() is parameter else ""

    def tensors(self) -> list[Any]:
        found = [reference() for _, reference in self.parameters.values()]
        return [each for each in found if each is not None and is_whole(each)]

    def sequence(self) -> int | None:
        return torch_compat.sequence(self.group) or None


class Models:
    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.known: weakref.WeakKeyDictionary[Any, KnownModel] = weakref.WeakKeyDictionary()
        self.members: dict[int, KnownModel] = {}  # id of a module within a model → the model
        self.inside = 0  # depth of forwards of models
        self.engine = torch_extra.autograd_engine()
        self.trained: set[int] = set()  # models that had a training forward since a loader asked

    def install(self) -> None:
        wrap = self.recorder.wrap
        wrap(DDP, "__init__", self._init)
        wrap(DDP, "forward", self._forward)
        wrap(DDP, "register_comm_hook", self._comm_hook)

    # -- models ----------------------------------------------------------------------------

    def _init(self, original: Any) -> Any:
        def __init__(ddp: Any, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            if self.recorder.on:
                self.meet(ddp, False)

        return __init__

    @digest.safely
    def meet(self, ddp: Any, made_before: bool) -> KnownModel | None:
        """The model's facts, taken when it is made or first called."""
        inner = ddp.module
        facts = ModelFacts(
            len(self.recorder.record.models), "ddp", type(inner).__name__, ranks_of(ddp.process_group),
            self.recorder.place(2), made_before,
        )  # fmt: skip
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        named = dict(inner.named_parameters())
        own = {name: p for name, p in named.items() if name not in ignored}
        facts.names, facts.order = list(own)[:ENDS], digest.of_names(named)
        facts.ignored, facts.broadcasts = sorted(ignored & named.keys()), bool(ddp.broadcast_buffers)
        facts.held_buffers = [name for name, _ in inner.named_buffers()][:ENDS]
        exchanged = {name: p for name, p in own.items() if p.requires_grad or made_before}
        known = KnownModel(ddp, facts, exchanged, ddp.process_group)
        known.frozen = {id(p) for p in own.values() if not p.requires_grad} if not made_before else set()
        if facts.broadcasts and facts.held_buffers:
            known.own = OwnBuffers(inner, self.recorder.is_programs)
            facts.own_names = known.own.names
        self._add(ddp, known)
        return known

    @digest.safely
    def meet_sharded(self, module: Any, group: Any) -> KnownModel | None:
        """The root of a model that FSDP2 shards over a group."""
        facts = ModelFacts(
            len(self.recorder.record.models),
            "fsdp2",
            type(module).__name__,
            ranks_of(group),
            self.recorder.place(2),
            True,
        )
        known = KnownModel(module, facts, dict(module.named_parameters()), group)
        self._add(module, known)
        return known

    def _add(self, module: Any, known: KnownModel) -> None:
        facts = known.facts
        facts.drops = [
            name for name, each in module.named_modules()
            if type(each).__name__.startswith(("Dropout", "AlphaDropout", "DropPath")) and getattr(each, "p", True)
        ][:16]  # fmt: skip
        self.recorder.record.models.append(facts)
        self.known[module] = known
        for each in module.modules():
            self.members[id(each)] = known
        whole = [(name, p()) for name, p in known.parameters.values()]
        found = [(name, p) for name, p in whole if p is not None and is_whole(p)][:ENDS]
        if found:
            facts.start_names = [name for name, _ in found]
            self.recorder.later(facts, "start", digest.sample([p for _, p in found]))

    def of_parameter(self, parameter: Any) -> tuple[KnownModel | None, str]:
        for known in self.known.values():
            if name := known.knows(parameter):
                return known, name
        return None, ""

    # -- forward and backward --------------------------------------------------------------

    def _forward(self, original: Any) -> Any:
        def forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.recorder.on or capturing():
                return original(ddp, *args, **kwargs)
            known = self.known.get(ddp) or self.meet(ddp, True)
            if known is None:
                return original(ddp, *args, **kwargs)
            armed = torch.is_grad_enabled() and bool(ddp.require_backward_grad_sync)
            known.facts.joins |= torch_extra.joins(ddp)
            return self.call(known, ddp, lambda: original(ddp, *args, **kwargs), (args, kwargs), armed)

        return forward

    @torch_extra.outside_graphs
    def call(self, known: KnownModel, module: Any, do: Callable[[], Any], given: Any, armed: bool) -> Any:
        """Call a model and note it."""
        fact = self._begin(known, module, given, armed)
        looks = fact is not None and fact.training and len(self.recorder.record.forwards) <= RANDOM_FORWARDS
        before = self._generators(known) if looks else None
        self.inside += 1
        try:
            with self._reads(known, fact):
                out = do()
        finally:
            self.inside -= 1
        if fact is not None and self.recorder.on:
            if before is not None and (after := self._generators(known)) is not None:
                used = [name for name in before if before[name] != after.get(name)]
                fact.drew, fact.random = bool(used), before[used[0]] if used else 0
            self._note_out(fact, out)
            self._watch_backward(known, module, fact, out)
        return out

    def _reads(self, known: KnownModel, fact: Forward | None) -> AbstractContextManager[Any]:
        """Within one training forward it is seen which of the program's own buffers the loss depends on."""
        if not known.facts.own_names or fact is None or not fact.training or known.forwards != READS_AT + 1:
            return nullcontext()
        assert known.own is not None
        return known.own.reads(known.facts.read_buffers)

    @digest.safely
    def _note_out(self, fact: Forward, out: Any) -> None:
        if fact.training and len(self.recorder.record.forwards) <= OUTPUTS:
            found = [each.reshape(-1) if not each.dim() else each for each in digest.tensors_in(out)]
            rows = digest.rows_of([each for each in found if type(each) is torch.Tensor])
            if rows is not None:
                self.recorder.later(fact, "out", digest.of_batch(rows))

    @digest.safely
    def _generators(self, known: KnownModel) -> dict[str, int] | None:
        return digest.generators(_device(known))

    @digest.safely
    def _begin(self, known: KnownModel, module: Any, given: Any, armed: bool) -> Forward | None:
        recorder = self.recorder
        recorder.reads.forward_begins()
        training = torch.is_grad_enabled()
        fact = Forward(
            known.facts.number, recorder.tick(), recorder.place(2), training, armed, mode=bool(module.training)
        )
        if training and looked_at(known.forwards):
            fact.others = modes_within(module)
        if training and known.forwards < LOOKS and known.forwards & (known.forwards + 1) == 0:
            known.facts.numbers.append((known.forwards, module_numbers(module)))
        if training and known.facts.own_names and known.forwards < SAMPLED and known.own is not None:
            recorder.later(known.facts.own_buffers, "append", known.own.sample())
        known.forwards += training
        device = _device(known).type
        if torch.is_autocast_enabled(device):
            fact.autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        if not recorder.keep(recorder.record.forwards, fact):
            return None
        found = list(digest.tensors_in(given))
        rows = digest.rows_of(found) if found else None
        if rows is not None:
            fact.size = rows.numel()
            recorder.later(fact, "batch", digest.of_batch(rows))
        return fact

    @digest.safely
    def _watch_backward(self, known: KnownModel, module: Any, fact: Forward, out: Any) -> None:
        if not torch.is_grad_enabled():
            return
        outputs = [each for each in digest.tensors_in(out) if each.requires_grad and not each.is_leaf]
        if not outputs or self.engine is None or torch.compiler.is_compiling():
            self.trained.add(known.facts.number)  # whether backward comes is not known
            return
        reached = [False]

        def reach(_: Any) -> None:
            if reached[0] or not self.recorder.on:
                return
            reached[0] = True
            self._backward_begins(known, module, fact)

        for tensor in outputs:
            tensor.register_hook(reach)

    @digest.safely
    def _backward_begins(self, known: KnownModel, module: Any, fact: Forward) -> None:
        flag = bool(getattr(module, "require_backward_grad_sync", True))
        made = Backward(known.facts.number, self.recorder.tick(), self.recorder.place(2), fact.armed, flag)
        self.trained.add(known.facts.number)
        self.recorder.calls.graph_used()
        self.recorder.reads.backward_begins()
        if not self.recorder.keep(self.recorder.record.backwards, made):
            return

        if known.facts.kind == "ddp" and len(self.recorder.record.backwards) <= KEPT:
            held = [each.grad for each in self.recorder.steps.sampled(known)[:4] if each.grad is not None]
            self.recorder.later(made, "kept", digest.size(held) if held else 0.0)

        def through() -> None:
            self.engine.queue_callback(lambda: self._backward_ended(known, made))

        self.engine.queue_callback(through)

    @digest.safely
    def _backward_ended(self, known: KnownModel, made: Backward) -> None:
        if not self.recorder.on or capturing():
            return
        made.ended = self.recorder.tick()
        if known.facts.kind == "ddp":
            tensors = self.recorder.steps.sampled(known)
            if tensors:
                self.recorder.later(made, "grads", digest.sample([each.grad for each in tensors]))

    # -- communication hooks ---------------------------------------------------------------

    def _comm_hook(self, original: Any) -> Any:
        def register_comm_hook(ddp: Any, state: object, hook: Any) -> Any:
            known = (self.known.get(ddp) or self.meet(ddp, True)) if self.recorder.on else None
            if known is None or not callable(hook):
                return original(ddp, state, hook)
            known.facts.hook = f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', type(hook).__name__)}"
            known.facts.hook_place = self.recorder.place()
            watched = torch.compiler.disable(self._watched(known, hook), recursive=False)
            found = original(ddp, state, watched)
            torch_extra.replace_last_hook(ddp, hook, state)
            return found

        return register_comm_hook

    def _watched(self, known: KnownModel, hook: Any) -> Any:
        def watched(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            facts = self.recorder.record.hooks
            if not self.recorder.on or len(facts) >= HOOK_CALLS or capturing():
                return hook(state, bucket)
            fact = HookCall(known.facts.number, self.recorder.tick())
            facts.append(fact)
            self.recorder.later(fact, "before", digest.elements(bucket.buffer()).to(torch.float64, copy=True))

            def after(future: Any) -> Any:
                value = future.value()
                given = value[0] if isinstance(value, (list, tuple)) else value
                if self.recorder.on:
                    self.recorder.later(fact, "after", digest.elements(given).to(torch.float64, copy=True))
                return given

            return hook(state, bucket).then(after)

        watched.__name__ = getattr(hook, "__name__", "hook")
        watched.__annotations__ = {
            "state": object, "bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]
        }  # fmt: skip
        return watched

    # -- the end ---------------------------------------------------------------------------

    def exchanged(self, given: list[Any]) -> None:
        """Buffers that the program exchanges itself are as good as broadcast."""
        places = {each.data_ptr() for each in given}
        for known in self.known.values():
            module = None if known.facts.broadcasts else known.module()
            if module is not None and any(each.data_ptr() in places for each in module.module.buffers()):
                known.facts.broadcasts = True

    def look_at_buffers(self, known: KnownModel, step: int) -> None:
        """A sample of buffers that nobody broadcasts, at steps 1, 2, 4, 8 and so on: the model may be gone later."""
        module = known.module()
        if module is None or known.facts.kind != "ddp" or step & (step - 1) or not step:
            return
        met = known.facts.held_buffers if known.facts.broadcasts else ()
        found = ((name, each) for name, each in saved_buffers(module.module) if is_whole(each) and name not in met)
        named = list(islice(found, AT_ONCE))
        if named:
            known.facts.buffer_names = [name for name, _ in named]
            known.facts.buffer_steps.append(step)
            self.recorder.later(known.facts.buffers, "append", digest.sample([each for _, each in named]))

    def close(self) -> None:
        """Samples of all that the models hold, one by one, and what has become of their parameters."""
        for known in list(self.known.values()):
            module = known.module()
            if module is None or known.facts.kind != "ddp":
                continue
            inner = module.module
            named = [*inner.named_parameters(), *saved_buffers(inner)]
            whole = [(name, each) for name, each in named if is_whole(each)][:ENDS]
            known.facts.parameters = sum(1 for name, _ in inner.named_parameters())
            known.facts.end_names = [name for name, _ in whole]
            if whole:
                self.recorder.later(known.facts, "ends", digest.sample([each for _, each in whole]))


def saved_buffers(module: Any) -> list[tuple[str, Any]]:
    """Buffers that a checkpoint has. Others hold what is a rank's own, as a recurrent state or a cache."""
    passing = {
        f"{path}.{name}" if path else name
        for path, each in module.named_modules()
        for name in torch_extra.passing_buffers(each)
    }
    return [(name, each) for name, each in module.named_buffers() if name not in passing]


def looked_at(number: int) -> bool:
    return number < RANDOM_FORWARDS or number % RANDOM_FORWARDS == 0


def modes_within(module: Any) -> tuple[str, ...]:
    """Names of the modules that are in another mode than the one that is called."""
    found = (name for name, each in module.named_modules() if each.training != module.training)
    return tuple(islice(found, OTHERS))


def _device(known: KnownModel) -> Any:
    first = next(iter(known.settings.values()), None)
    return torch.device("cpu") if first is None else first[1]


def ranks_of(group: Any) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (RuntimeError, ValueError, KeyError):
        return ()


# -- the program's own buffers ---------------------------------------------------------------------
#
# Statistics, codebooks, queues that its modules move. DDP's forward copies rank 0's to all ranks, so what the others
# have added is lost.

MOST_BUFFERS, SAMPLED = 16, 10  # buffers; training forwards before which they are sampled
READS_AT = 1  # the training forward within which it is seen what the loss depends on
FOLLOWED = 64  # values that are made of buffers


class OwnBuffers:
    """Of one model: floating buffers of a checkpoint whose module's class is the program's. Running statistics as
    those of BatchNorm are no part of a training forward, and left out."""

    def __init__(self, inner: Any, is_programs: Callable[[str], bool]) -> None:
        found = (
            (f"{path}.{name}" if path else name, weakref.ref(module), name)
            for path, module in inner.named_modules() if _is_own(module, is_programs)
            for name, each in module.named_buffers(recurse=False)
            if each.dtype.is_floating_point and type(each) is torch.Tensor
            and "running" not in name and name not in torch_extra.passing_buffers(module)
        )  # fmt: skip
        self._held = list(islice(found, MOST_BUFFERS))

    @property
    def names(self) -> list[str]:
        return [path for path, _, _ in self._held]

    def tensors(self) -> list[Any]:
        modules = [(reference(), name) for _, reference, name in self._held]
        return [getattr(module, name, None) for module, name in modules]

    def sample(self) -> Any:
        return digest.sample(self.tensors())

    def reads(self, found: list[str]) -> _Reads:
        """While this is open, names of buffers that values with gradients are made of go into `found`."""
        return _Reads({id(each): name for name, each in zip(self.names, self.tensors(), strict=True)}, found)


def _is_own(module: Any, is_programs: Callable[[str], bool]) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and is_programs(code.co_filename)


class _Reads(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, names: dict[int, str], found: list[str]) -> None:
        super().__init__()
        self.names, self.found = names, found
        self.made: list[Any] = []  # so that no other value gets the id of one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {self.names[id(each)] for each in digest.tensors_in([args, kwargs]) if id(each) in self.names}
        if given and isinstance(out, torch.Tensor):
            if out.requires_grad:
                self.found.extend(sorted(given - {*self.found}))
            elif id(out) not in self.names and len(self.made) < FOLLOWED:
                self.made.append(out)
                self.names[id(out)] = min(given)
        return out
