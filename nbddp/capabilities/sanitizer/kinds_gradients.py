"""Gradients that are not exchanged. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbddp.capabilities.sanitizer.recording import OutsideParameter, Past, ShardedStep
from nbddp.capabilities.sanitizer.rules import Seen, alone, make
from nbddp.capabilities.sanitizer.view import AlignedStep, RanksView, Replica, difference, exempt, shown_steps
from nbddp.launch.machine import counted, listed
from nbddp.launch.topology import rank_words

LEAST = 2  # steps
ALONE = "each rank moves its copy of these parameters by its own gradient, so the replicas drift apart"


def found(view: RanksView) -> Iterator[Seen]:
    for replica in view.replicas:
        if replica.kind == "ddp":
            yield from _outside(replica)
            yield from _moved(replica)
            yield from _steps(replica)
            yield from _kept(replica)
            yield from _without_optimizer(replica, view)
    yield from _sharded_optimizer(view)


@alone
def _sharded_optimizer(view: RanksView) -> Iterator[Seen]:
    """ZeroRedundancyOptimizer shares out the parameters' updates, and not their gradients."""
    first = next(iter(view.records.values()))
    for number, group in dict.fromkeys((s.optimizer, s.group) for s in first.sharded):
        of = {r: [s for s in view.records[r].sharded if (s.optimizer, s.group) == (number, group)]
              for r in group if r in view.records}  # fmt: skip
        rows = [dict(zip(of, row, strict=True)) for row in zip(*of.values(), strict=False)]
        apart = [difference({rank: s.grads for rank, s in row.items()}, next(iter(row.values())).names) for row in rows]
        if len(group) < 2 or len(of) < len(group) or len(rows) < LEAST or any(each is None for each in apart):
            continue
        if any(_exchanges(view, rank, group, steps) for rank, steps in of.items()):
            continue
        rank = min(of)
        yield make(
            "no-exchange", "ZeroRedundancyOptimizer steps by gradients that no DDP model has exchanged",
            [f"its parameters are in no DDP model, and gradients differed between ranks at each of its first "
             f"{counted(len(rows), 'step')}, {apart[0].words}"],  # type: ignore[union-attr]
            "each parameter moves by the gradient of the one rank that updates it, and the other ranks' samples count "
            "for nothing there", view.records[rank].at(of[rank][0].place), ranks=tuple(of),
            cure="ZeroRedundancyOptimizer(ddp.parameters(), ...), with ddp = DDP(model), and ddp(x) for the loss",
        )  # fmt: skip
        return


def _exchanges(view: RanksView, rank: int, group: Sequence[int], some: Sequence[ShardedStep]) -> bool:
    """Whether the program may exchange the gradients itself: in hooks, or by its own collectives between the steps."""
    begun = [
        each.at for each in view.records[rank].collectives
        if each.name != "barrier" and each.numel != 1 and set(each.group) & set(group) and len(each.group) > 1
    ]  # fmt: skip
    return any(each.hooked for each in some) or any(some[0].at < at < some[-1].at for at in begun)


@alone
def _without_optimizer(replica: Replica, view: RanksView) -> Iterator[Seen]:
    """Parameters that the program moves itself, by gradients of forwards past DDP."""
    pasts = {
        r: [p for p in rec.past if p.used and p.model == replica.facts[r].number] for r, rec in replica.records.items()
    }
    if any(replica.optimizers.values()) or min(map(len, pasts.values())) < LEAST or not view.ended_well:
        return
    for rank, record in replica.records.items():
        facts = replica.facts[rank]
        if facts.made_before or any(b.model == facts.number for b in record.backwards):
            return
        if any(c.numel > LEAST for c in record.collectives):
            return  # the program may average by hand
    looks = {rank: [p.values for p in some if p.values] for rank, some in pasts.items()}
    names = next(iter(replica.facts.values())).start_names
    last = min(map(len, looks.values())) - 1
    if last < 1 or difference({rank: some[0] for rank, some in looks.items()}, names) is not None:
        return
    if (differs := difference({rank: some[last] for rank, some in looks.items()}, names)) is None:
        return
    rank = min(pasts)
    yield make(
        "past-ddp", f"{replica.title} bypasses DDP, so its gradients are not averaged over ranks",
        [f"{counted(len(pasts[rank]), 'training forward')} of {pasts[rank][0].module} ran outside of DDP's forward on "
         f"rank {rank}, and no backward went through DDP's output",
         f"parameters were equal before the first of them, and differed before number {2**last}, {differs.words}"],
        ALONE, replica.place(rank, pasts[rank][0].place), about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


@alone
def _steps(replica: Replica) -> Iterator[Seen]:
    """Each differing step goes to the first rule that holds of it."""
    if exempt(replica):
        return
    by: dict[str, list[AlignedStep]] = {}
    for step in replica.steps:
        if step.grads is not None and (name := _why(step)):
            by.setdefault(name, []).append(step)
    for name, some in by.items():
        yield _SAY[name](replica, some)
    if "past-ddp" not in by:
        yield from _armed(replica)


def _why(step: AlignedStep) -> str:
    """Which kind a step with different gradients is of; empty if the exchange took place."""
    if all(each.within for each in step.steps.values()):
        return "within-backward"
    if step.armed_last() and len(step.again) == len(step.steps) and all(step.again.values()) and step.exchanged is None:
        return "backward-again"
    if step.armed_last():
        return "" if step.arrived() else "gradients-by-hand"
    pasts = all(step.pasts.values())
    backs = [each[-1] for each in step.backs.values() if each]
    if not backs:
        return "past-ddp" if pasts else "no-exchange"
    unarmed = [each for each in backs if not each.armed]
    if len(unarmed) < len(step.backs):
        return "no-exchange"
    return "sync-flag-late" if any(each.flag for each in unarmed) else "no-sync-at-step"


@alone
def _kept(replica: Replica) -> Iterator[Seen]:
    """Gradients that were cleared on some ranks alone."""
    bad = [step for step in replica.steps[1:] if len({bool(k) for k in _held(step).values()}) == 2]
    if len(bad) < LEAST:
        return
    step = bad[0]
    kept = [rank for rank, each in _held(step).items() if each]
    cleared = [rank for rank in step.backs if rank not in kept]
    rank = kept[0]
    yield make(
        "kept-gradients", f"{rank_words(kept)} {'keeps' if len(kept) == 1 else 'keep'} gradients that other ranks have "
        "cleared",
        [f"before the first backward of {counted(len(bad), 'step')}, first of step {step.number}, gradients were none "
         f"or 0 on {rank_words(cleared)}, and not on {rank_words(kept)}"],
        "the exchanged mean holds gradients of earlier batches of these ranks as well",
        replica.place(rank, step.backs[rank][0].place), about=replica.group, ranks=kept,
    )  # fmt: skip


def _held(step: AlignedStep) -> dict[int, float]:
    """Rank → size of the gradients before the step's first backward; none if it is not known of all."""
    held = {rank: backs[0].kept for rank, backs in step.backs.items() if backs}
    known = {rank: each for rank, each in held.items() if each is not None}
    return known if len(known) == len(step.steps) else {}


def _past(replica: Replica, some: list[AlignedStep]) -> Seen:
    first = some[0]
    rank = min(first.pasts)
    past = first.pasts[rank][0]
    number = sum(1 for p in replica.records[rank].past if p.used and p.model == replica.facts[rank].number)
    evidence = [
        f"{counted(number, 'training forward')} of {past.module} ran outside of DDP's forward on rank {rank}, and none "
        "of DDP's came before these steps",
        shown_steps(some, replica),
        *_silent(replica, some),
    ]
    return make(
        "past-ddp", f"{replica.title} bypasses DDP, so its gradients are not averaged over ranks", evidence,
        f"no exchange before {len(some)} of {len(replica.steps)} steps: {ALONE}",
        replica.place(rank, past.place), about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


def _silent(replica: Replica, some: list[AlignedStep]) -> list[str]:
    """That the group began no collective between two such steps, where that is known."""
    numbers = {step.number for step in some}
    for one, two in zip(replica.steps, replica.steps[1:], strict=False):
        if two.number in numbers:
            deltas = []
            for rank, facts in replica.facts.items():
                a, b = one.steps[rank].sequences.get(facts.number), two.steps[rank].sequences.get(facts.number)
                deltas.append(None if a is None or b is None else b - a)
            if deltas and all(each == 0 for each in deltas):
                return [f"DDP's group began no collective between steps {one.number} and {two.number}"]
            return []
    return []


@alone
def _armed(replica: Replica) -> Iterator[Seen]:
    """Forwards past DDP whose gradients came out equal."""
    if any(step.grads is not None for step in replica.steps) or not replica.steps:
        return
    pasts = {rank: [p for step in replica.steps for p in _of_step(replica, step, rank)] for rank in replica.ranks}
    if not all(pasts.values()):
        return
    rank = min(pasts)
    first = pasts[rank][0]
    yield make(
        "past-ddp-armed",
        f"a part of {replica.title} is trained by a forward past DDP; gradients were averaged all the same",
        [
            f"{counted(len(pasts[rank]), 'training forward')} of {first.module} ran outside of DDP's forward on rank "
            f"{rank}",
            f"gradients were equal at all {len(replica.steps)} compared steps: an earlier forward of DDP had prepared "
            "the exchange",
        ],
        "no average is missing now; it will be once such a forward comes without DDP's own, or in another order",
        replica.place(rank, first.place), about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


def _of_step(replica: Replica, step: AlignedStep, rank: int) -> list[Past]:
    """Forwards past DDP before a step, except for those that another optimizer's step follows, as a GAN's."""
    others = [s.at for s in replica.records[rank].steps if s.optimizer != step.steps[rank].optimizer]
    end = step.steps[rank].at
    armed = [f.at for f in replica.training[rank] if f.armed and f.at > step.since[rank]]
    begin = min(armed, default=end)  # what came before it, as a search for adversarial inputs, it had not prepared
    return [p for p in step.pasts[rank] if p.at > begin and not any(p.at < other < end for other in others)]


def _late(replica: Replica, some: list[AlignedStep]) -> Seen:
    rank, back = _last(some[0])
    return make(
        "sync-flag-late",
        "the last micro-step before a step is not exchanged: its forward ran while gradient synchronization was off",
        [
            "require_backward_grad_sync was False at the forward and True at its backward; DDP decides at the forward",
            shown_steps(some, replica),
        ],
        f"gradients of the last micro-step stay each rank's own: {ALONE}",
        replica.place(rank, back), about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


def _inside(replica: Replica, some: list[AlignedStep]) -> Seen:
    rank, _ = _last(some[0])
    return make(
        "no-sync-at-step",
        "an optimizer step follows a backward inside no_sync, so gradients are not averaged",
        [
            f"forward and backward of the last micro-step before {counted(len(some), 'step')} ran with synchronization "
            "off",
            shown_steps(some, replica),
        ],
        f"at {len(some)} of {len(replica.steps)} steps {ALONE}",
        replica.place(rank, some[0].steps[rank].place), about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


def _last(step: AlignedStep) -> tuple[int, int]:
    """A rank and the place of its last backward."""
    rank = min(r for r, backs in step.backs.items() if backs)
    return rank, step.backs[rank][-1].place


def _none(replica: Replica, some: list[AlignedStep]) -> Seen:
    rank = min(some[0].steps)
    return make(
        "no-exchange", f"optimizer steps of {replica.title} without an exchange of gradients before them",
        [
            f"no backward through DDP's output came before {len(some)} of {len(replica.steps)} steps on every rank",
            shown_steps(some, replica),
            *_silent(replica, some),
        ],
        f"at these steps {ALONE}",
        replica.place(rank, some[0].steps[rank].place), about=replica.group, ranks=replica.ranks, known=False,
        ruled_out=["a forward of DDP's module past DDP", "no_sync"],
    )  # fmt: skip


def _returned(replica: Replica, some: list[AlignedStep]) -> Seen:
    rank, back = _last(some[0])
    return make(
        "no-exchange", f"gradients of {replica.title} are set without DDP's exchange",
        [
            f"at {counted(len(some), 'step')} the backward through DDP's output left no gradient in the parameters "
            "that were checked, and they had one at the step; so does torch.autograd.grad",
            shown_steps(some, replica),
        ],
        f"at these steps {ALONE}",
        replica.place(rank, back), about=replica.group, ranks=replica.ranks,
        cure="call loss.backward(): DDP exchanges what backward accumulates, not what torch.autograd.grad returns",
    )  # fmt: skip


def _again(replica: Replica, some: list[AlignedStep]) -> Seen:
    first = some[0]
    rank = min(first.steps)
    return make(
        "no-exchange", f"a backward that follows DDP's exchange adds gradients of each rank's own to {replica.title}",
        [
            f"before {counted(len(some), 'step')} another backward began after the one through DDP's output had ended "
            f"({replica.place(rank, first.backs[rank][-1].place)}), and gradients were equal at that end",
            shown_steps(some, replica),
        ],
        "DDP exchanges once after each of its forwards; what comes later is not averaged",
        replica.place(rank, first.again[rank][0].place), about=replica.group, ranks=replica.ranks,
        cure="add the losses, and run one backward: (a + b).backward()",
    )  # fmt: skip


def _within(replica: Replica, some: list[AlignedStep]) -> Seen:
    rank = min(some[0].steps)
    return make(
        "no-exchange", f"the optimizer moves {replica.title} while backward runs, before DDP has exchanged gradients",
        [f"{counted(len(some), 'step')} began within a backward", shown_steps(some, replica)],
        f"at these steps {ALONE}",
        replica.place(rank, some[0].steps[rank].place), about=replica.group, ranks=replica.ranks,
        cure="step after backward has returned; hooks on parameters run before the exchange",
    )  # fmt: skip


_SAY = {
    "backward-again": _again,
    "within-backward": _within,
    "gradients-by-hand": _returned,
    "past-ddp": _past,
    "sync-flag-late": _late,
    "no-sync-at-step": _inside,
    "no-exchange": _none,
}

# -- parameters that DDP does not exchange ---------------------------------------------------------

_KIND = {
    "added": "replaced-parameter", "replaced": "replaced-parameter", "unfrozen": "unfrozen-after-wrap",
    "ignored": "unknown-to-ddp", "outside": "unknown-to-ddp",
}  # fmt: skip
_SAID = {
    "added": "{} was added to the model after DDP had registered its hooks",
    "replaced": "{} is another object than the one that DDP registered its hooks on",
    "unfrozen": "{} did not require a gradient when DDP was made, so DDP does not exchange it",
    "ignored": "{} is in DDP's list of ignored parameters, so DDP does not exchange it",
    "outside": "the optimizer also moves a {} that is in no DDP model",
}


@alone
def _outside(replica: Replica) -> Iterator[Seen]:
    by: dict[str, dict[int, list[OutsideParameter]]] = {}
    for rank, record in replica.records.items():
        for fact in record.outside:
            if fact.model == replica.facts[rank].number:
                by.setdefault(fact.why, {}).setdefault(rank, []).append(fact)
    for why, found_on in by.items():
        proof = _proof(replica)
        if set(found_on) != set(replica.ranks) or not proof:
            continue
        rank = min(found_on)
        some = found_on[rank]
        more = f", and {counted(len(some) - 1, 'more parameter')}" if len(some) > 1 else ""
        place = replica.place(rank, some[0].place)
        yield make(
            _KIND[why], _SAID[why].format(some[0].name) + more,
            [f"on {rank_words(replica.ranks)}: {listed([each.name for each in some[:6]])}"
             f"{', …' if len(some) > 6 else ''}", proof],
            ALONE, place, about=replica.group, ranks=replica.ranks,
        )  # fmt: skip


def _proof(replica: Replica) -> str:
    """What differed of the parameters that no model knows; empty if nothing did, or if it does from the start and
    other collectives may carry it."""
    for step in replica.steps:
        parts = replica.beside(step)
        if len(parts) != len(replica.ranks) or len({tuple(p.names) for p in parts.values()}) != 1:
            return ""
        names = next(iter(parts.values())).names
        grads = difference({r: p.grads for r, p in parts.items()}, names)
        before = difference({r: p.before for r, p in parts.items()}, next(iter(parts.values())).earlier)
        if before is not None and step.number == 0 and _has_collectives(replica):
            return ""  # may be sharded by design, as a classifier's weights
        if grads is not None:
            return f"their gradients differed at step {step.number}, {grads.words}"
    return ""


def _has_collectives(replica: Replica) -> bool:
    return any(
        each.name != "barrier" for record in replica.records.values() for each in record.collectives
        if set(each.group) >= set(replica.group)
    )  # fmt: skip


@alone
def _moved(replica: Replica) -> Iterator[Seen]:
    moved = {rank: facts for rank, facts in replica.facts.items() if facts.moved}
    drift = any(step.grads is not None for step in replica.steps)
    if moved and drift:
        rank = min(moved)
        facts = moved[rank]
        yield make(
            "moved-model", f"{replica.title} was converted after DDP had registered its hooks",
            [f"on {rank_words(list(moved))}: {facts.moved}", *_first_difference(replica)], ALONE,
            replica.place(rank, facts.moved_place), about=replica.group, ranks=tuple(moved),
        )  # fmt: skip


def _first_difference(replica: Replica) -> list[str]:
    some = [step for step in replica.steps if step.grads is not None]
    return [shown_steps(some, replica)] if some else []
