"""A rank's record of collectives that Python calls, of files that it writes, and of settings."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbddp.capabilities.sanitizer import on_rank_digest as digest
from nbddp.capabilities.sanitizer.on_rank_models import ranks_of, sharded_over
from nbddp.capabilities.sanitizer.on_rank_recorder import TORCH
from nbddp.capabilities.sanitizer.recording import CalledFunction, GroupCall
from nbddp.capabilities.timings.on_rank import tensors
from nbddp.compat.extra import torch as torch_extra
from nbddp.deadlock.on_rank import frames
from nbddp.deadlock.on_rank.call_log import COLLECTIVES
from nbddp.worker.gpus import capturing

KEPT = 600  # collectives
PARTS = 4096  # entries of a saved dict that are looked at
NODES = 4000  # of a graph that are looked through
SAVES = (  # module, function, which argument is the file, what is added to its name
    ("torch", "save", 1, ""), ("numpy", "save", 0, ".npy"), ("safetensors.torch", "save_file", 1, ""),
)  # fmt: skip
NAMES = ("f", "file", "filename", "fp")  # of such an argument
DUMPS = ("json", "pickle")  # modules whose `dump` writes into an open file
SUSPECTS = 8  # gathers whose results are looked for in a graph


def _file_of(args: Sequence[object], kwargs: Mapping[str, object], at: int) -> Any:
    """The file that a call writes: its argument number `at`, or by a name."""
    return args[at] if len(args) > at else next((kwargs[name] for name in NAMES if name in kwargs), None)


class CollectiveCalls:
    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.inside = False
        self.gathers: list[tuple[int, tuple[int, ...], list[Any]]] = []
        self.by_hand: dict[int, tuple[int, ...]] = {}  # address of what was all-reduced since the last step → ranks
        self._grads: tuple[int, dict[int, str]] = (-1, {})
        self._ranks: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        for name in COLLECTIVES:
            if name in vars(dist.ProcessGroup):
                self.recorder.wrap(
                    dist.ProcessGroup, name, lambda original, name=name: self._collective(original, name)
                )
        for module, name, at, ending in SAVES:
            if module in sys.modules and name in vars(sys.modules[module]):
                make = functools.partial(self._save, shown=f"{module}.{name}", at=at, ending=ending)
                self.recorder.wrap(sys.modules[module], name, make)
        for name in DUMPS:
            if name in sys.modules:
                self.recorder.wrap(sys.modules[name], "dump", functools.partial(self._dump, shown=f"{name}.dump"))
        self.recorder.wrap(torch.Tensor, "backward", self._from, graphs=True)

    # -- collectives -----------------------------------------------------------------------

    def _collective(self, original: Any, name: str) -> Any:
        op = COLLECTIVES[name][0]

        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.recorder.on or self.inside or torch.compiler.is_compiling() or capturing():
                return original(group, *args, **kwargs)
            self.inside = True
            try:
                self._note(group, op, args)
                found = original(group, *args, **kwargs)
            finally:
                self.inside = False
            return found

        return collective

    @digest.safely
    def _note(self, group: Any, op: str, args: Any) -> None:
        recorder = self.recorder
        given = list(tensors(args))
        recorder.models.exchanged(given)
        if group not in self._ranks:
            self._ranks[group] = ranks_of(group)
        ranks = self._ranks[group]
        reduce_op = (
            str(getattr(getattr(args[-1], "reduceOp", ""), "op", getattr(args[-1], "reduceOp", ""))) if args else ""
        )
        reduce_op = reduce_op.rsplit(".", 1)[-1]
        shape = f"{str(given[0].dtype).removeprefix('torch.')}{list(given[0].shape)}" if given else ""
        place, at = recorder.place(2), recorder.tick()
        if _is_the_programs():  # and not of a part of torch, as Join or FSDP2
            recorder.keep(recorder.record.collectives, GroupCall(ranks, op, reduce_op, shape, at, place), KEPT)
        if op == "all_reduce" and given and not recorder.models.known:
            self.by_hand[given[0].data_ptr()] = ranks
        if not torch.is_grad_enabled() or torch_extra.in_backward():
            return
        if op in ("all_reduce", "reduce") and given:
            self._reduced(given[0], reduce_op, at, place, ranks)
        if op == "all_gather" and len(given) > 1:
            self._gathered(given, place)

    def _reduced(self, tensor: Any, op: str, at: int, place: int, ranks: tuple[int, ...]) -> None:
        recorder = self.recorder
        if tensor.requires_grad and not tensor.is_leaf:
            if tensor.numel() > 1:
                return  # a statistic over ranks that the loss is made of, as a cross-correlation; not the loss

            def used(gradient: Any) -> None:
                fact = CalledFunction("graph reduced", recorder.tick(), place, [op])
                if recorder.on and recorder.keep(recorder.record.calls, fact):
                    recorder.later(fact.detail, "append", gradient.detach().reshape(()).clone())

            tensor.register_hook(used)
        elif tensor.is_floating_point():
            name = self._grad_names().get(tensor.data_ptr())
            if name is not None:
                recorder.keep(recorder.record.calls, CalledFunction("gradient reduced", at, place, (name, op, ranks)))

    def _grad_names(self) -> dict[int, str]:
        """Address of each gradient of a model → the parameter's name; made once after each backward, and each step."""
        steps = len(self.recorder.record.steps)
        if self._grads[0] != steps:
            found: dict[int, str] = {}
            for known in self.recorder.models.known.values():
                if known.facts.kind == "ddp":
                    for name, reference in known.parameters.values():
                        parameter = reference()
                        if parameter is not None and parameter.grad is not None:
                            found[parameter.grad.data_ptr()] = name
            self._grads = (steps, found)
        return self._grads[1]

    # -- gathers that cut gradients --------------------------------------------------------

    def _gathered(self, given: list[Any], place: int) -> None:
        own = next((each for each in given if each.requires_grad and not each.is_leaf), None)
        if own is None or len(self.gathers) >= SUSPECTS or own.dim() < 2:
            return
        outputs = [each for each in given if each is not own]
        self.gathers.append((place, tuple(own.shape), outputs))

    def _from(self, original: Any) -> Any:
        compiling = torch.compiler.is_compiling

        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not compiling() and self.recorder.on and self.gathers:
                self._look_through(tensor)
            return original(tensor, *args, **kwargs)

        return backward

    @digest.safely
    def _look_through(self, loss: Any) -> None:
        """Whether values that came by a gather are saved in the graph of a loss, where no gradient leads to them. A
        product of gathered rows alone, with the own ones put back, is a loss of all ranks' samples on each rank."""
        suspects, self.gathers = self.gathers, []
        gathered = [torch.cat([each.detach().reshape(-1, shape[-1]) for each in out]) for _, shape, out in suspects]
        saved = list(_saved(loss))
        whole = [all(e.requires_grad and any(_holds(e, rows) for rows in gathered) for e in some) for some in saved]
        for (place, shape, _), rows in zip(suspects, gathered, strict=True):
            if any(_holds(e, rows) for some, all_put_back in zip(saved, whole, strict=True) for e in some
                   if not all_put_back):  # fmt: skip
                self.recorder.keep(
                    self.recorder.record.calls, CalledFunction("gather cuts", self.recorder.tick(), place, list(shape))
                )

    def graph_used(self) -> None:
        self._grads = (-1, {})

    # -- files, settings -------------------------------------------------------------------

    def _save(self, original: Any, shown: str, at: int, ending: str) -> Any:
        def save(*args: Any, **kwargs: Any) -> Any:
            saved = original(*args, **kwargs)
            file = _file_of(args, kwargs, at)
            if self.recorder.on and isinstance(file, (str, os.PathLike)):
                self._saved(os.fspath(file), shown, ending)
                self._shards(args[0] if args else None)
            return saved

        return save

    @digest.safely
    def _shards(self, value: Any) -> None:
        """What a file has of sharded tensors is this rank's part of each."""
        some = [each for each in digest.tensors_in(value, PARTS) if sharded_over(each)]
        if len(some) > 1 or any(isinstance(each, torch.nn.Parameter) for each in some):
            fact = CalledFunction("shards saved", self.recorder.tick(), self.recorder.place(2), None)
            fact.detail = (len(some), list(sharded_over(some[0])))
            self.recorder.keep(self.recorder.record.calls, fact)

    def _dump(self, original: Any, shown: str) -> Any:
        def dump(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if self.recorder.on:
                self._dumped(_file_of(args, kwargs, 1), shown)
            return found

        return dump

    @digest.safely
    def _dumped(self, file: Any, shown: str) -> None:
        """Into a file that the program has opened anew. What a library writes so may be a cache."""
        own = self.recorder.record.at(self.recorder.place(2))
        mode, path = str(getattr(file, "mode", "")), getattr(file, "name", None)
        if isinstance(path, (str, bytes)) and ("w" in mode or "x" in mode) and own.line and not own.through:
            self._saved(path, shown, "")

    @digest.safely
    def _saved(self, path: Any, shown: str, ending: str) -> None:
        path = os.path.realpath(os.fsdecode(path))
        path = path if path.endswith(ending) else f"{path}{ending}"
        if os.path.exists(path) and not os.path.isfile(path):
            return  # a device, as os.devnull
        try:
            status = os.stat(path)
            detail = (path, status.st_dev, status.st_ino, shown)
        except OSError:
            detail = (path, 0, 0, shown)
        fact = CalledFunction("save", self.recorder.tick(), self.recorder.place(2), detail)
        self.recorder.keep(self.recorder.record.calls, fact, 4000)

    def settings_now(self) -> None:
        """Of precision and determinism, as a step has them: a rank that exports afterwards may have others."""
        settings = self.recorder.record.settings
        settings["float32 matmul precision"] = torch.get_float32_matmul_precision()
        settings["deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
        settings["default dtype"] = str(torch.get_default_dtype()).removeprefix("torch.")
        if torch.cuda.is_available():
            settings["cuDNN benchmark"] = torch.backends.cudnn.benchmark
            settings["TF32 in matrix products"] = torch.backends.cuda.matmul.allow_tf32

    def close(self) -> None:
        settings = self.recorder.record.settings
        settings.setdefault("threads", torch.get_num_threads())
        settings["on CPU"] = not torch.cuda.is_initialized()
        settings["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


BETWEEN = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/c10d_logger.py", "/contextlib.py")


def _is_the_programs() -> bool:
    """Whether nothing of torch but the collective's function stands between the program and this call."""
    frame: Any = sys._getframe(1)
    for _ in range(40):
        if frame is None:
            return False
        file = frame.f_code.co_filename
        in_torch = file.startswith(TORCH)
        if in_torch and not file.endswith(BETWEEN) and "/_dynamo/" not in file:
            return False
        if not in_torch and not file.startswith(f"{frames.ROOT}/") and not file.endswith(BETWEEN):
            return True
        frame = frame.f_back
    return False


def _saved(loss: Any) -> Any:
    """The tensors that each node of a graph has saved."""
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting and len(seen) < NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        found = []
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    value = getattr(node, name)
                except RuntimeError:  # freed by an earlier backward
                    continue
                if isinstance(value, torch.Tensor):
                    found.append(value)
        if found:
            yield found


def _holds(saved: Any, rows: Any) -> bool:
    """Whether a tensor has these rows, or all but one rank's of them, as rows or columns in their order."""
    if saved.dim() != 2 or saved.dtype != rows.dtype:
        return False
    with torch.no_grad():
        for each in (saved.detach(), saved.detach().t()):
            if each.shape == rows.shape:
                equal = (each == rows).all(1)
                return bool(equal.float().mean() >= 0.49)
    return False
