"""A rank's record of modules: calls that bypass a model, and state that is loaded into one."""

from __future__ import annotations

import weakref
from itertools import islice
from typing import Any

import torch

from nbddp.capabilities.sanitizer import on_rank_digest as digest
from nbddp.capabilities.sanitizer.on_rank_models import is_whole
from nbddp.capabilities.sanitizer.recording import BesideModule, CalledFunction, Past
from nbddp.compat.extra import torch as torch_extra
from nbddp.worker.gpus import capturing

BESIDE_MODULES = 16
NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
MODES = 16  # calls of such a module whose mode is kept
VALUES = 8  # tensors of such a module that are looked at


class ModuleWatcher:
    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.depth = 0
        self.beside: weakref.WeakKeyDictionary[Any, BesideModule] = weakref.WeakKeyDictionary()
        self.modal: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # whose mode matters

    def install(self) -> None:
        # torch.compile traces calls of modules: there the wrapper is a branch that is not taken
        self.recorder.wrap(torch.nn.Module, "__call__", self._call, graphs=True)
        self.recorder.wrap(torch.nn.Module, "load_state_dict", self._load)

    def _call(self, original: Any) -> Any:
        compiling = torch.compiler.is_compiling

        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling() or self.depth or not self.recorder.on:
                return original(module, *args, **kwargs)
            return self._outermost(original, module, args, kwargs)

        return __call__

    def _outermost(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        models = self.recorder.models
        known = models.members.get(id(module))
        if models.inside or torch_extra.in_backward() or capturing():
            return original(module, *args, **kwargs)  # within a model, or recomputed within backward
        self.depth += 1
        try:
            group = torch_extra.shards_over(module) if known is None or known.facts.kind == "fsdp2" else None
            if group is not None:
                known = models.known.get(module) or models.meet_sharded(module, group)
                sync = torch.is_grad_enabled()
                return models.call(known, module, lambda: original(module, *args, **kwargs), (args, kwargs), sync)
            if known is None and models.known:
                self._beside(module)
            fact = self._past(known, module) if known is not None and module is not known.module() else None
            if known is not None and not torch.is_grad_enabled():
                self._silent(known, module)
            out = original(module, *args, **kwargs)
            if fact is not None:
                self._watch(fact, out)
            return out
        finally:
            self.depth -= 1

    @digest.safely
    def _beside(self, module: Any) -> None:
        """A module of no model, which may be a teacher: its values at its first, second, fourth call and so on."""
        fact = self.beside.get(module)
        if fact is None:
            facts = self.recorder.record.beside
            if len(facts) >= BESIDE_MODULES or len(self.beside) >= 4 * BESIDE_MODULES:
                return
            tensors = _values(module)
            fact = BesideModule(type(module).__name__, self.recorder.place(2), [name for name, _ in tensors])
            self.beside[module] = fact
            self.modal[module] = any(map(_is_modal, module.modules()))
            if tensors and not any(each.requires_grad for each in module.parameters()):
                facts.append(fact)
        fact.calls += 1
        if self.modal[module] and len(fact.modes) < MODES:
            fact.modes.append(module.training)
        if fact.names and fact.calls & (fact.calls - 1) == 0:
            self.recorder.later(fact.values, "append", digest.sample([each for _, each in _values(module)]))

    @digest.safely
    def _past(self, known: Any, module: Any) -> Past | None:
        recorder = self.recorder
        if known.facts.kind != "ddp" or not torch.is_grad_enabled() or not module.training:
            return None
        if not any(each.requires_grad and known.knows(each) for each in module.parameters()):
            return None
        fact = Past(known.facts.number, recorder.tick(), recorder.place(2), type(module).__name__)
        if not recorder.keep(recorder.record.past, fact):
            return None
        number = len(recorder.record.past)
        if not recorder.record.step_counts and number & (number - 1) == 0 and (tensors := known.tensors()[:VALUES]):
            recorder.later(fact, "values", digest.sample(tensors))
        return fact

    @digest.safely
    def _silent(self, known: Any, module: Any) -> None:
        """A forward without gradients that moves running statistics. One that computes them anew has no momentum."""
        if module.training and any(_is_norm(e) and e.training and e.momentum is not None for e in module.modules()):
            fact = CalledFunction("train forward", self.recorder.tick(), self.recorder.place(2), known.facts.number)
            self.recorder.keep(self.recorder.record.calls, fact)

    @digest.safely
    def _watch(self, fact: Past, out: Any) -> None:
        """Whether backward comes to what such a forward gave: an evaluation has none."""

        def reached(_: Any) -> None:
            fact.used = True
            self.recorder.models.trained.add(fact.model)

        for tensor in digest.tensors_in(out):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(reached)

    def _load(self, original: Any) -> Any:
        def load_state_dict(module: Any, *args: Any, **kwargs: Any) -> Any:
            known = self.recorder.models.members.get(id(module))
            if self.recorder.on and known is not None:
                fact = CalledFunction(
                    "load_state_dict", self.recorder.tick(), self.recorder.place(), known.facts.number
                )
                self.recorder.keep(self.recorder.record.calls, fact)
            elif self.recorder.on:
                self._loads(module)
            return original(module, *args, **kwargs)

        return load_state_dict

    @digest.safely
    def _loads(self, module: Any) -> None:
        """A state that goes into a module beside the models, into one that has it, or into a part of one."""
        parts = set(module.modules())
        for each, fact in self.beside.items():
            fact.loaded = fact.loaded or each in parts or module in set(each.modules())

    def close(self) -> None:
        pass


def _is_norm(module: Any) -> bool:
    return isinstance(module, NORMS) and module.track_running_stats


def _is_modal(module: Any) -> bool:
    """Whether a module computes otherwise in train mode."""
    dropout = type(module).__name__.startswith(("Dropout", "AlphaDropout", "DropPath")) and getattr(module, "p", True)
    return bool(dropout) or _is_norm(module)


def _values(module: Any) -> list[tuple[str, Any]]:
    """The first parameters of a module that need no gradient."""
    whole = ((n, p) for n, p in module.named_parameters() if is_whole(p) and p.dtype.is_floating_point)
    return list(islice(whole, VALUES))
