"""A rank's record of optimizers, schedulers, scalers and clipping."""

from __future__ import annotations

import sys
import weakref
from itertools import islice
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nbddp.capabilities.sanitizer import on_rank_digest as digest
from nbddp.capabilities.sanitizer.on_rank_models import AT_ONCE, ENDS, KnownModel, is_whole, ranks_of, shard_groups
from nbddp.capabilities.sanitizer.recording import (
    BESIDE,
    CalledFunction,
    HandAveraged,
    HeldParameters,
    OptimizerStep,
    OutsideParameter,
    Part,
    ShardedStep,
)
from nbddp.compat.extra import torch as torch_extra
from nbddp.deadlock.on_rank import frames
from nbddp.worker.gpus import capturing

LOOKS = 4  # first steps at which an optimizer's parameters are looked through; then at each fiftieth
STEPS = 1000  # that are kept with samples
MESHES = 256  # parameters whose placements are looked at
HYPER = 64  # numbers of an optimizer's groups
EDITS = (  # what edits gradients: where it stands, and the name that users know
    (clip_grad, "_clip_grads_with_norm_", "clip_grad_norm_"),
    (clip_grad, "clip_grad_value_", "clip_grad_value_"),
    (torch.amp.GradScaler, "unscale_", "GradScaler.unscale_"),
)


class KnownOptimizer:
    """An optimizer that has stepped. split: its parameters by the model that knows them."""

    def __init__(self, number: int) -> None:
        self.number, self.steps = number, 0
        self.split: dict[int, list[tuple[str, Any]]] = {}
        self.shape: tuple[int, ...] = ()
        self.open: OptimizerStep | None = None
        self.graded: OptimizerStep | None = None  # whose gradients were looked at


class Steps:
    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.known: weakref.WeakKeyDictionary[Any, KnownOptimizer] = weakref.WeakKeyDictionary()
        self.reported: set[tuple[int, str]] = set()
        self.within = 0
        self.schedulers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._sampled: dict[int, tuple[int, list[Any]]] = {}

    def install(self) -> None:
        self.recorder.undo(register_optimizer_step_pre_hook(self._before).remove)
        self.recorder.undo(register_optimizer_step_post_hook(self._after).remove)
        for owner, name, shown in EDITS:
            if name in vars(owner):
                self.recorder.wrap(owner, name, lambda original, shown=shown: self._noted(original, shown))
        self.recorder.wrap(torch.amp.GradScaler, "update", self._scaler)
        own = [c for c in vars(lr_scheduler).values() if isinstance(c, type) and "step" in vars(c)]
        for each in dict.fromkeys(own):
            self.recorder.wrap(each, "step", self._scheduler)

    # -- steps -----------------------------------------------------------------------------

    @digest.safely
    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """What a step begins with. Where a closure computes the gradients, it is given back with a look after it."""
        if not self.recorder.on or torch.compiler.is_compiling() or capturing():
            return None
        recorder = self.recorder
        known = self.known.get(optimizer)
        if known is None:
            known = self.known[optimizer] = KnownOptimizer(len(self.known))
            recorder.record.settings.setdefault("threads", torch.get_num_threads())
            self._over_meshes(optimizer)
        known.steps += 1
        recorder.record.step_counts[known.number] = known.steps
        if known.steps & (known.steps - 1) == 0:
            recorder.calls.settings_now()
        shape = tuple(sum(p.requires_grad for p in group["params"]) for group in optimizer.param_groups)
        if known.steps <= LOOKS or known.steps % 50 == 0 or shape != known.shape:
            known.shape = shape
            self._split(optimizer, known)
        if not known.split.keys() - {BESIDE}:
            if known.steps == LOOKS:
                self._idle(optimizer)
            self._averaged_by_hand(optimizer, known)
            self._sharded(optimizer, known)
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._note(optimizer, known, callable(closure))
        if known.open is None or not callable(closure):
            return None
        looked = self._looks_after(closure, known, known.open)
        return (args, {**kwargs, "closure": looked}) if "closure" in kwargs else ((args[0], looked, *args[2:]), kwargs)

    def _averaged_by_hand(self, optimizer: Any, known: KnownOptimizer) -> None:
        """Parameters of no model, whose gradients have all been all-reduced since the last step."""
        recorder = self.recorder
        reduced, recorder.calls.by_hand = recorder.calls.by_hand, {}
        if known.steps > LOOKS or not reduced:
            return
        own = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and is_whole(p)]
        groups = {reduced.get(p.grad.data_ptr()) for p in own}
        if len(groups) == 1 and (group := groups.pop()) is not None:
            shapes = [tuple(p.shape) for p in own]
            fact = HandAveraged(known.number, recorder.place(3), group, digest.of_names(map(str, shapes)), len(own))
            if recorder.keep(recorder.record.averaged, fact, 64):
                recorder.later(fact, "values", digest.sample(own[:AT_ONCE]))

    def _sharded(self, optimizer: Any, known: KnownOptimizer) -> None:
        """A sharded optimizer, each of whose ranks moves its part of the parameters by its own gradients."""
        kind = type(optimizer)
        if (
            known.steps > LOOKS
            or kind.__name__ != "ZeroRedundancyOptimizer"
            or kind.__module__.split(".")[0] != "torch"
        ):
            return
        named = [
            (f"parameter {i} of shape {list(p.shape)}", p) for i, p in enumerate(optimizer.param_groups[0]["params"])
        ]
        whole = [(name, p) for name, p in named if is_whole(p)][:AT_ONCE]
        fact = ShardedStep(
            known.number, self.recorder.place(3), ranks_of(optimizer.process_group), [name for name, _ in whole],
            self.recorder.tick(), torch_extra.has_step_hooks(optimizer),
        )  # fmt: skip
        if whole and self.recorder.keep(self.recorder.record.sharded, fact, 64):
            self.recorder.later(fact, "grads", digest.sample([p.grad for _, p in whole]))

    def _over_meshes(self, optimizer: Any) -> None:
        """The groups over which an optimizer's parameters are sharded."""
        own = (p for group in optimizer.param_groups for p in group["params"])
        groups = sorted(set().union(*map(shard_groups, islice(own, MESHES))))
        if groups:
            fact = CalledFunction("sharded parameters", self.recorder.tick(), self.recorder.place(3), groups)
            self.recorder.keep(self.recorder.record.calls, fact)

    def _idle(self, optimizer: Any) -> None:
        """An optimizer of no model, whose parameters have the shapes of a sharded one's, and no gradients."""
        own = [each for group in optimizer.param_groups for each in group["params"]]
        if any(each.grad is not None for each in own):
            return
        for model in self.recorder.models.known.values():
            held = [reference() for _, reference in model.parameters.values()]
            shapes = [tuple(each.shape) for each in held if each is not None]
            if model.facts.kind == "fsdp2" and shapes == [tuple(each.shape) for each in own]:
                fact = CalledFunction(
                    "idle optimizer", self.recorder.tick(), self.recorder.place(3), model.facts.number
                )
                self.recorder.keep(self.recorder.record.calls, fact)

    def _looks_after(self, closure: Any, known: KnownOptimizer, step: OptimizerStep) -> Any:
        def looked() -> Any:
            found = closure()
            if self.recorder.on and known.open is step is not known.graded:
                self._gradients(known, step)
            return found

        return looked

    def _note(self, optimizer: Any, known: KnownOptimizer, by_closure: bool) -> None:
        recorder = self.recorder
        step = OptimizerStep(known.number, known.steps - 1, recorder.tick(), recorder.place(2))
        step.hyper, step.within = _hyper(optimizer), torch_extra.in_backward()
        if not recorder.keep(recorder.record.steps, step, STEPS):
            return
        known.open = step
        for model in recorder.models.known.values():
            if model.facts.number in known.split:
                recorder.models.look_at_buffers(model, known.steps)
        for number, named in known.split.items():
            some = _turn(named, step.number)
            earlier = _turn(named, max(0, step.number - 1))
            part = Part(number, [name for name, _ in some], [name for name, _ in earlier])
            step.parts.append(part)
            if some:
                recorder.later(part, "before", digest.sample([each for _, each in earlier]))
        if not by_closure:
            self._gradients(known, step)

    @digest.safely
    def _gradients(self, known: KnownOptimizer, step: OptimizerStep) -> None:
        """The gradients that a step begins to use, and what the models' groups had begun until then."""
        recorder = self.recorder
        step.at, known.graded = recorder.tick(), step
        for model in recorder.models.known.values():
            number = model.facts.number
            if number in known.split and (sequence := model.sequence()) is not None:
                step.sequences[number] = sequence
        for part in step.parts:
            some = _turn(known.split.get(part.model, []), step.number)
            if some:
                recorder.later(part, "grads", digest.sample([each.grad for _, each in some]))

    @digest.safely
    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        known = self.known.get(optimizer)
        if known is None or known.open is None or not self.recorder.on or torch.compiler.is_compiling():
            return
        step, known.open = known.open, None
        self.recorder.tick()
        for part in step.parts:
            if not known.split.get(part.model):
                continue
            tensors = [each for _, each in _turn(known.split[part.model], step.number)]
            self.recorder.later(part, "after", digest.sample(tensors))

    def _split(self, optimizer: Any, known: KnownOptimizer) -> None:
        """Which model knows each parameter. Those with a gradient that none knows are noted."""
        models = self.recorder.models
        known.split = {}
        outside: list[Any] = []
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            model, name = models.of_parameter(parameter)
            if model is not None and model.facts.kind != "ddp":
                known.split.setdefault(model.facts.number, [])  # its numbers are compared, and no shards
            if not is_whole(parameter) or (model is not None and model.facts.kind != "ddp"):
                continue
            if model is None:
                outside.append(parameter)
                continue
            known.split.setdefault(model.facts.number, []).append((name, parameter))
            if model.settings[id(parameter)] != (parameter.dtype, parameter.device) and not model.facts.moved:
                before = model.settings[id(parameter)]
                model.facts.moved = (
                    f"{name} was {before[0]} on {before[1]}, and is {parameter.dtype} on {parameter.device}"
                )
                model.facts.moved = model.facts.moved.replace("torch.", "")
                model.facts.moved_place = self.recorder.place(2)
        self._hold(optimizer, known)
        for parameter in outside:
            self._outside(known, parameter)

    def _hold(self, optimizer: Any, known: KnownOptimizer) -> None:
        """Which of a model's parameters it has, once for each model."""
        if known.steps > 1:
            return
        numbers = [_numbers(group) for group in optimizer.param_groups]
        of = {id(p): numbers.index(numbers[i]) for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
        for model, named in known.split.items():
            groups = {name: of[id(each)] for name, each in named[:ENDS] if each.requires_grad}
            self.recorder.keep(self.recorder.record.held, HeldParameters(known.number, model, groups), 64)

    def _outside(self, known: KnownOptimizer, parameter: Any) -> None:
        models = list(self.recorder.models.known.values())
        for model in (each for each in models if each.facts.kind == "ddp"):
            module = model.module()
            if module is None:
                continue
            name = next((name for name, each in module.module.named_parameters() if each is parameter), "")
            if name:
                why = "replaced" if name in model.facts.names else "added"
                why = "ignored" if name in model.facts.ignored else why
                why = "unfrozen" if id(parameter) in model.frozen else why
                known.split.setdefault(model.facts.number, [])
                self._report(known, model.facts.number, name, why, parameter)
                known.split.setdefault(BESIDE, []).append((name, parameter))
                return
        if known.split and parameter.grad is not None:
            name = f"parameter of shape {list(parameter.shape)}"
            known.split.setdefault(BESIDE, []).append((name, parameter))
            number = min(known.split.keys() - {BESIDE}, default=BESIDE)
            self._report(known, number, name, "outside", parameter)

    def _report(self, known: KnownOptimizer, model: int, name: str, why: str, parameter: Any) -> None:
        key = (id(parameter), why)
        if parameter.grad is None or key in self.reported:
            return
        self.reported.add(key)
        recorder = self.recorder
        fact = OutsideParameter(model, known.number, name, why, recorder.place(5), recorder.clock)
        recorder.keep(recorder.record.outside, fact, 64)

    def sampled(self, model: KnownModel) -> list[Any]:
        """The parameters of a model whose gradients are sampled after backward: those of the next step."""
        for optimizer in self.known.values():
            if named := optimizer.split.get(model.facts.number):
                return [each for _, each in _turn(named, optimizer.steps)]
        return [each for each in model.tensors() if each.requires_grad][:AT_ONCE]

    # -- what stands between backward and step ---------------------------------------------

    def _noted(self, original: Any, shown: str) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self.recorder.on and not torch.compiler.is_compiling():
                fact = CalledFunction(shown, self.recorder.tick(), self.recorder.place(), [])
                if self.recorder.keep(self.recorder.record.calls, fact) and shown == "clip_grad_norm_":
                    self._ratio(fact, *args)
            return original(*args, **kwargs)

        return noted

    @digest.safely
    def _ratio(self, fact: CalledFunction, parameters: Any, limit: Any, norm: Any = None, *args: Any) -> None:
        """The norm of the gradients that are clipped, over the limit."""
        if type(norm) is torch.Tensor and not norm.requires_grad and norm.numel() == 1 and not capturing():
            self.recorder.later(fact.detail, "append", (norm / limit).reshape(()))
            self._of_shards(fact.place, parameters, norm / limit)

    def _of_shards(self, place: int, parameters: Any, ratio: Any) -> None:
        """Whether a rank clips its parts of gradients, as plain tensors: their norm is of these alone."""
        given = parameters if isinstance(parameters, (list, tuple)) else ()  # a generator is the program's to use up
        places = {each.grad.data_ptr() for each in given if each.grad is not None and is_whole(each.grad)}
        for model in self.recorder.models.known.values() if places else ():
            held = [reference() for _, reference in model.parameters.values()]
            own = [torch_extra.shard(each.grad) for each in held if each is not None and each.grad is not None]
            if model.facts.kind == "fsdp2" and {each.data_ptr() for each in own if each.numel()} & places:
                fact = CalledFunction("shards clipped", self.recorder.tick(), place, [model.facts.number])
                if self.recorder.keep(self.recorder.record.calls, fact):
                    self.recorder.later(fact.detail, "append", ratio.reshape(()))

    def _scaler(self, original: Any) -> Any:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            scale = torch_extra.scale_of(scaler)
            if self.recorder.on and scale is not None and not capturing():
                fact = CalledFunction("scale", self.recorder.tick(), self.recorder.place())
                if self.recorder.keep(self.recorder.record.calls, fact):
                    self.recorder.later(fact, "detail", scale.detach().clone())
            return original(scaler, *args, **kwargs)

        return update

    def _scheduler(self, original: Any) -> Any:
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.recorder.on or self.within:
                return original(scheduler, *args, **kwargs)
            self.within += 1
            try:
                found = original(scheduler, *args, **kwargs)
            finally:
                self.within -= 1
            optimizer = self.known.get(getattr(scheduler, "optimizer", None))
            if optimizer is not None and not _of_accelerate():
                own = self.schedulers.setdefault(scheduler, len(self.schedulers))
                fact = CalledFunction("scheduler", self.recorder.tick(), self.recorder.place(), (optimizer.number, own))
                self.recorder.keep(self.recorder.record.calls, fact)
            return found

        return step

    def close(self) -> None:
        pass


def _of_accelerate() -> bool:
    """Whether accelerate steps a scheduler: it does so for each process, by design."""
    frame: Any = sys._getframe(2)
    for _ in range(4):
        if frame is None:
            return False
        if frames.package(frame.f_code.co_filename) == "accelerate":
            return True
        frame = frame.f_back
    return False


def _turn(named: list[tuple[str, Any]], step: int) -> list[tuple[str, Any]]:
    """Of many tensors those whose turn it is at a step: each comes by."""
    turns = -(-len(named) // AT_ONCE)
    return named if turns <= 1 else named[step % turns :: turns]


def _numbers(group: Any) -> dict[str, object]:
    return {name: value for name, value in group.items() if isinstance(value, (int, float, tuple))}


def _hyper(optimizer: Any) -> list[tuple[str, object]]:
    """The numbers of an optimizer's groups. Those that are tensors are left out: to read them waits for a GPU."""
    found: list[tuple[str, object]] = []
    for i, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            numbers = value if isinstance(value, tuple) else (value,)
            if name != "params" and all(isinstance(n, (int, float)) for n in numbers) and len(found) < HYPER:
                found.append((name if len(optimizer.param_groups) == 1 else f"{name} of group {i}", value))
    return found
