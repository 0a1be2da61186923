"""The part of a worker that sees, in ordinary runs, what costs nothing to know of optimizers and DDP.

DDP's forwards and buckets are counted by the recorder of timings. A hook before optimizer steps compares these counts,
which takes about two microseconds. Gradients and parameters are looked at only where a step looks wrong. No collective
is called. Of the program one small parameter is kept alive until it has ended.
"""

from __future__ import annotations

import linecache
import sys
import traceback
import weakref
import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from nbddp.capabilities.sanitizer.hints import Look, RankHints, SeenOptimizer
from nbddp.capabilities.timings.on_rank import Recorder, keep_out_of_graphs
from nbddp.capabilities.timings.on_rank_marks import Tally
from nbddp.deadlock.on_rank import call_log, frames
from nbddp.protocol.codec import is_silenced, to_json
from nbddp.protocol.outcome import Outcome
from nbddp.protocol.run_spec import RunSpec
from nbddp.worker import gpus
from nbddp.worker.parts import RankWorker

MOST = 32  # optimizers of a run; with more nothing is said
EACH = 64  # looks at each step so far, and then around powers of two
LOOKED_AT = 4  # parameters
ELEMENTS = 1024  # of a parameter, in its checksum
SMALL = 65536  # bytes of the parameter that is kept for the end
INTERNAL = 2  # broadcasts in which a reducer tells its new buckets


class Hints:
    """`on` in a program of several ranks, unless `--no-timings` or `--sanitize` is said."""

    def __init__(self, worker: RankWorker) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.worker = worker
        self.recorder: Recorder = worker.parts["timings"]
        self.on, self._sleeps = False, True
        self.world = 1
        self.found: RankHints | None = None
        self._alone: object = None  # of accelerate, as an earlier run left it
        self._called: dict[str, int] = {}  # before the run, as `_calls` has it
        self.before: weakref.WeakKeyDictionary[Tally, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._watched: dict[int, Watched] = {}
        keep_out_of_graphs(sys.modules[__name__])
        register_optimizer_step_pre_hook(self._hook())

    def begin(self, spec: RunSpec) -> None:
        env = {} if spec.rendezvous is None else spec.rendezvous.env
        self.world, self.found, self._watched = int(env.get("WORLD_SIZE", 1)), None, {}
        asked = spec.options.get("timings", True) and not spec.options.get("sanitize")
        self.on = bool(spec.is_program and self.world > 1 and asked)
        self._alone = _alone()
        self._called = _calls() if "accelerate.state" in sys.modules else {}
        self.before.clear()
        if self.on:
            self.before.update({tally: (tally.forwards, tally.buckets) for tally in self.recorder.tallies()})

    def group_begins(self) -> None:
        if self._sleeps:
            self._wake()

    def _wake(self) -> None:
        self.worker.parts.wake("hints")
        self._alone, self._called = None, {}  # it has slept in runs before: what there is now is this one's
        self.before.clear()
        self._sleeps = False

    def ended(self, error: BaseException | None) -> None:
        on, self.on = self.on, False
        trains = bool(self._watched) and not any(each.muted for each in self._watched.values())
        watched, self._watched = [each for each in self._watched.values() if each.tallies], {}
        if on and error is None and watched and not any(each.muted for each in watched):
            self.found = RankHints(self.world, tuple(each.seen() for each in watched))
        elif on and error is None and trains and self._is_alone():
            self.found = RankHints(self.world, alone="accelerate")

    def _is_alone(self) -> bool:
        """Whether accelerate was made for one process in this run, and nothing was exchanged by its groups."""
        known = (None, self._alone)
        return _alone() not in known and all(n == self._called.get(group, 0) for group, n in _calls().items())

    def end(self, outcome: Outcome, error: BaseException | None) -> None:
        self.on, self._watched = False, {}
        if self.found is not None and error is None:
            outcome.parts["hints"] = to_json(self.found)
        self.found = None

    def _hook(self) -> Any:
        from torch.compiler import is_compiling

        def steps(optimizer: Any, args: Sequence[Any] = (), kwargs: Any = None) -> None:
            if is_compiling():  # a graph must not depend on what is on
                return
            if self._sleeps:
                self._wake()
            if not self.on:
                return
            try:
                watched = self._watched.get(id(optimizer))
                if watched is None or watched.optimizer() is not optimizer:
                    watched = self._watch(optimizer)
                closure = len(args) > 1 or kwargs
                watched.steps_now(optimizer, bool(closure))
            except Exception as e:  # nothing of the program may fail by it
                self.on = False
                self.worker.to_log(f"hints: {''.join(traceback.format_exception(e))}")

        return steps

    def _watch(self, optimizer: Any) -> Watched:
        if id(optimizer) in self._watched or len(self._watched) == MOST:  # another one was here
            raise RuntimeError("a program with too many optimizers for hints")
        watched = self._watched[id(optimizer)] = Watched(self, optimizer)
        return watched


class Watched:
    """One optimizer in a run. tallies: of the DDP models whose parameters it moves. muted: it has what nothing is said
    of, such as sharded parameters, or models whose group has not all ranks."""

    def __init__(self, hints: Hints, optimizer: Any) -> None:
        self.hints, self.optimizer = hints, weakref.ref(optimizer)
        self.tallies: list[Tally] = []
        self.muted = False
        self.steps = self.bare = self.past = self.likeness = self.shapes = 0
        self.counts = (0, 0)  # forwards and buckets before the last step
        self.kept: list[Any] = []  # a small parameter, so that its last value is known also where its model is gone
        self.names: tuple[str, ...] = ()
        self.own: list[weakref.ref[Any]] = []  # parameters that DDP exchanges, and that it does not
        self.beside: list[weakref.ref[Any]] = []
        self.bare_looks: list[Look] = []
        self.beside_looks: list[Look] = []
        self._called: int | None = None  # collectives, and buckets among them, before the first bare step
        self._buckets = self._first = 0

    def steps_now(self, optimizer: Any, closure: bool) -> None:
        """A step begins. closure: what it steps by is computed within."""
        self.steps += 1
        number = self.steps
        if number & (number - 1) == 0 and not self.muted:
            self._scan(optimizer)
        if not self.tallies or self.muted:
            return
        counts = self._counted()
        is_bare = counts[1] == self.counts[1] and not closure
        is_past, self.counts = counts[0] == self.counts[0], counts
        if is_bare:
            self.bare += 1
            self.past += is_past
            if self.bare == 1:
                self._called, self._buckets = _collectives(), counts[1]
            if _is_due(self.bare):
                self._look(self.bare_looks, self.own)
        if self.beside and not closure and _is_due(number):
            self._look(self.beside_looks, self.beside)

    def _counted(self) -> tuple[int, int]:
        return sum(tally.forwards for tally in self.tallies), sum(tally.buckets for tally in self.tallies)

    def _scan(self, optimizer: Any) -> None:
        """Which parameters it has, and who exchanges them."""
        if self.steps == 1:
            self.muted = _is_marked()
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        ids = set(map(id, owned))
        living = self.hints.recorder.tallies()
        mine = [tally for tally in living if not ids.isdisjoint(tally.parameters)]
        if mine != self.tallies:
            self.tallies = mine
            before = [self.hints.before.get(tally, (0, 0)) for tally in mine]
            counted = (sum(forwards for forwards, _ in before), sum(buckets for _, buckets in before))
            self.counts = counted if self.steps == 1 else (-1, -1)  # what came before the last step is not known
            self._first = counted[1]
        if not mine:
            return
        known = frozenset().union(*(tally.parameters for tally in living))
        own = [p for p in owned if id(p) in known]
        self.muted = self.muted or not all(map(_is_plain, owned))
        self.muted = self.muted or any(tally.ranks != self.hints.world for tally in mine)
        self.likeness = _checksum_of([type(optimizer).__name__, *(tuple(p.shape) for p in owned)])
        self.own = _some(own)
        self.kept = [p for p in own if p.untyped_storage().nbytes() <= SMALL][-1:]
        if not self.beside and not self.muted:
            self._take_beside([p for p in owned if id(p) not in known and p.requires_grad and p.grad is not None])

    def _take_beside(self, found: list[Any]) -> None:
        if not found or any(p.grad.is_sparse for p in found):
            return
        models = self.hints.recorder.models()
        ignored = {
            id(p)
            for ddp in models
            for name, p in ddp.module.named_parameters()
            if name in getattr(ddp, "parameters_to_ignore", ())
        }
        found = [p for p in found if id(p) not in ignored]
        self.names = tuple(_names(found, models, self.hints.worker.shell.user_ns))
        self.shapes = _checksum_of([tuple(p.shape) for p in found])
        self.beside = _some(found)

    def _look(self, looks: list[Look], at: list[weakref.ref[Any]]) -> None:
        parameters = [p for p in (ref() for ref in at) if p is not None]
        gradients = [p.grad.detach() for p in parameters if p.grad is not None]
        if not gradients or gpus.capturing():
            return
        sums = tuple(float(gradient.abs().double().sum()) for gradient in gradients)
        looks.append(Look(self.steps, sums, _checksum(parameters)))

    def seen(self) -> SeenOptimizer:
        """All that it has done, once the program has ended."""
        buckets = self._counted()[1]
        called, sent = _collectives() if self.bare else None, buckets - self._buckets
        is_tail = not sent and self._buckets > self._first  # trained by DDP, and then each rank by itself
        quiet = (
            called is not None
            and not is_tail
            and self._called is not None
            and called - self._called - sent in range(1 + INTERNAL * len(self.tallies) * bool(sent))
        )
        return SeenOptimizer(
            self.likeness, self.steps, buckets - self._first, self.bare, self.past, quiet, tuple(self.bare_looks),
            _left(self.kept), self.names, self.shapes, tuple(self.beside_looks),
            _left([ref() for ref in self.beside]),
        )  # fmt: skip


def part(worker: RankWorker) -> Hints:
    return Hints(worker)


def _alone() -> object:
    """What accelerate has made, if it knows of one process."""
    accelerate = sys.modules.get("accelerate.state")
    if not getattr(accelerate, "is_initialized", bool)():  # or another module of this name
        return None
    state = accelerate.PartialState()  # type: ignore[union-attr]
    return state.device if state.num_processes == 1 else None


def _is_marked() -> bool:
    """Whether a file or cell of the program that steps has `# nbddp: ok` on a line."""
    frame, files = sys._getframe(1), set()
    while frame is not None:
        files.add(frame.f_code.co_filename)
        frame = frame.f_back  # type: ignore[assignment]
    return any(is_silenced("".join(linecache.getlines(file))) for file in files if frames.is_user(file, {}))


def _is_due(number: int) -> bool:
    return number <= EACH or number & (number - 1) == 0 or (number - 1) & (number - 2) == 0


def _some(parameters: list[Any]) -> list[weakref.ref[Any]]:
    """Some of many: the first and the last."""
    if len(parameters) > LOOKED_AT:
        half = LOOKED_AT // 2
        parameters = [*parameters[:half], *parameters[-half:]]
    return [weakref.ref(p) for p in parameters]


def _is_plain(parameter: Any) -> bool:
    """Whether each rank has all of it: neither sharded, nor yet without values, nor complex."""
    import torch

    return type(parameter) in (torch.Tensor, torch.nn.Parameter) and parameter.is_floating_point()


def _left(parameters: list[Any]) -> int | None:
    """The checksum of parameters; None if one is gone, or its GPU is still at work."""
    import torch

    if not parameters or any(p is None for p in parameters):
        return None
    if any(p.is_cuda and not torch.cuda.current_stream(p.device).query() for p in parameters):
        return None
    return _checksum(parameters)


def _checksum(parameters: Iterable[Any]) -> int:
    """Of the first elements of each."""
    found = 0
    for p in parameters:
        found = zlib.crc32(array("d", p.detach().reshape(-1)[:ELEMENTS].double().tolist()), found)
    return found


def _checksum_of(words: list[Any]) -> int:
    return zlib.crc32(repr(words).encode())


def _collectives() -> int | None:
    """How many the groups of this process have counted; None where one does not count."""
    counted = list(call_log.CALLS.called().values())
    return None if not counted or min(counted) < 0 else sum(counted)


def _calls() -> dict[str, int]:
    """How many collectives each group has counted, and how many sends and receives."""
    log = call_log.CALLS
    return {**log.called(), **{f"{group} send, recv": n for group, n in log.peer_calls.items()}}


def _names(parameters: list[Any], models: list[Any], names: dict[str, Any]) -> list[str]:
    """What the program calls parameters: by a DDP model's names, else by its variables; else their shapes."""
    import torch

    known: dict[int, str] = {}
    for name, value in list(names.items()):
        if not name.startswith("_") and isinstance(value, torch.nn.Module) and value not in models:
            known |= {id(p): f"{name}.{own}" for own, p in value.named_parameters()}
        elif isinstance(value, torch.nn.Parameter):
            known[id(value)] = name
    for ddp in models:
        known |= {id(p): name for name, p in ddp.module.named_parameters()}
    return [known.get(id(p)) or "shape " + " × ".join(map(str, p.shape or (1,))) for p in parameters]
