"""Mistakes of samplers and loaders: which rank sees which sample."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nbddp.capabilities.lint.flow import keyword, open_ended
from nbddp.capabilities.lint.meaning import DIST, LOADER, LOCAL, SAMPLER, WORLD, Meaning
from nbddp.capabilities.lint.rule import Hit
from nbddp.capabilities.lint.taint import backward_calls, differentiated

AROUND = {"enumerate", "tqdm", "iter", "zip", "tqdm.tqdm", "tqdm.auto.tqdm", "trange"}
TRAINS = re.compile(r"backward|optimize_parameters|(train|training|optimizer?)_step|train_on_batch")
HARMLESS = AROUND | {"len", "next", "print", "range", "isinstance", "type", "id", "hasattr"}
SAMPLERS = "torch.utils.data.DistributedSampler"


def _loader(expr: ast.expr) -> ast.expr:
    """`loader` of `enumerate(tqdm(loader))`."""
    while isinstance(expr, ast.Call) and expr.args and ast.unparse(expr.func) in AROUND:
        expr = expr.args[0]
    return expr


def _shuffling(p: Meaning, expr: ast.expr) -> ast.Call | None:
    """A sampler that shuffles, which this loader may have."""
    for loader in p.origins(expr):
        if isinstance(loader, ast.Call) and p.name_of(loader) == "torch.utils.data.DataLoader":
            given = keyword(loader, "sampler", 3)
            for one in p.origins(given) if given is not None else ():
                if isinstance(one, ast.Call) and p.name_of(one) == SAMPLERS and _shuffles(one):
                    return one
    return None


def _shuffles(sampler: ast.Call) -> bool:
    shuffle = keyword(sampler, "shuffle", 3)
    seeded = keyword(sampler, "seed", 4) is not None
    constant = shuffle is None or (isinstance(shuffle, ast.Constant) and shuffle.value is True)
    return constant and not seeded and not open_ended(sampler)


def _epochs(p: Meaning, loop: ast.AST) -> ast.AST | None:
    """The loop around a loop over batches: in the same function, or around the function's one call."""
    loops = p.loops(loop)
    if loops:
        return loops[0]
    function = p.function_of(loop)
    sites = p.sites(function) if function is not None and not p.escapes(function) else []
    outer = [p.loops(call) for call, _ in sites]
    return outer[0][0] if len(sites) == 1 and outer[0] else None


def _repeats(loop: ast.AST) -> bool:
    """Whether it is no `range(1)`."""
    if not isinstance(loop, ast.For):
        return isinstance(loop, ast.While)
    called = loop.iter if isinstance(loop.iter, ast.Call) else None
    once = called is not None and [ast.unparse(one) for one in called.args] in (["1"], ["0", "1"])
    return called is not None and ast.unparse(called.func) in ("range", "trange") and not once


def _handed_on(p: Meaning, loop: ast.AST) -> bool:
    """Whether a loader or sampler goes to a function that is not of this file: it may call `set_epoch`."""
    for call in p.calls:
        if p.inside(call, loop) and ast.unparse(call.func) not in HARMLESS and p.called(call) is None:
            given = [*call.args, *(one.value for one in call.keywords)]
            if any(p.may(one, LOADER, SAMPLER) for one in given if not isinstance(one, ast.Starred)):
                return True
    return False


def no_set_epoch(p: Meaning) -> Iterator[Hit]:
    if "set_epoch" in p.words | p.texts:
        yield from _same_epoch(p)
        return
    for batches in p.nodes(ast.For):
        loader = _loader(batches.iter)
        outer = _epochs(p, batches) if p.may(loader, LOADER) else None
        if outer is None or not _repeats(outer) or not _is_training(p, batches):
            continue
        sampler = _shuffling(p, loader)
        if sampler is not None and not p.inside(sampler, outer) and not _handed_on(p, outer):
            yield Hit(outer, {"sampler": f"the sampler of {ast.unparse(loader)}"})


def _is_training(p: Meaning, loop: ast.For) -> bool:
    """Whether the loop differentiates, or calls a method that says that it makes a step."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and TRAINS.fullmatch(node.func.attr)
        for node in ast.walk(loop)
    )


def _same_epoch(p: Meaning) -> Iterator[Hit]:
    for call, sampler in p.methods("set_epoch"):
        loops = p.loops(call)
        constant = bool(call.args) and isinstance(call.args[0], ast.Constant)
        if loops and constant and _repeats(loops[0]) and p.may(sampler, SAMPLER):
            yield Hit(call, {"sampler": ast.unparse(sampler)})


def shuffle_beside_sampler(p: Meaning) -> Iterator[Hit]:
    for call in p.named("torch.utils.data.DataLoader"):
        shuffle, sampler = keyword(call, "shuffle", 2), keyword(call, "sampler", 3)
        shuffles = isinstance(shuffle, ast.Constant) and shuffle.value is True
        if shuffle is not None and shuffles and sampler is not None and p.must(sampler, SAMPLER):
            yield Hit(shuffle)


def local_rank_as_rank(p: Meaning) -> Iterator[Hit]:
    if p.one_node:
        return
    for call in (*p.named(SAMPLERS), *p.named(f"{DIST}.init_process_group")):
        if p.name_of(call) == SAMPLERS:
            rank, world = keyword(call, "rank", 2), keyword(call, "num_replicas", 1)
            whole = world is None or p.must(world, WORLD)
        else:
            rank, world = keyword(call, "rank"), keyword(call, "world_size")
            whole = world is not None and p.must(world, WORLD)
        if rank is not None and whole and p.must(rank, LOCAL):
            yield Hit(rank, {"call": ast.unparse(call.func)})


def sampler_of_one_rank(p: Meaning) -> Iterator[Hit]:
    if not p.wraps:
        return
    for call in p.named(SAMPLERS):
        rank = keyword(call, "rank", 2)
        used = any(_uses(p, one, call) and _trains(p, one) for one in p.named("torch.utils.data.DataLoader"))
        if used and isinstance(rank, ast.Constant) and type(rank.value) is int and p.on_all_ranks(call):
            yield Hit(rank, {"rank": str(rank.value)})


def _uses(p: Meaning, loader: ast.Call, sampler: ast.Call) -> bool:
    given = keyword(loader, "sampler", 3)
    return given is not None and sampler in p.origins(given)


def loader_without_sampler(p: Meaning) -> Iterator[Hit]:
    for call in p.named("torch.utils.data.DataLoader") if p.wraps else ():
        given = {one.arg for one in call.keywords}
        if given & {"sampler", "batch_sampler"} or len(call.args) > 3 or open_ended(call) or not p.on_all_ranks(call):
            continue
        dataset = keyword(call, "dataset", 0)
        if dataset is not None and _is_whole(p, dataset) and _trains(p, call):
            yield Hit(call, {"dataset": ast.unparse(dataset)})


def _is_whole(p: Meaning, dataset: ast.expr) -> bool:
    """Whether it surely holds the same samples on all ranks."""
    found = p.origins(dataset)
    return bool(found) and all(
        isinstance(one, ast.Call) and p.name_of(one).startswith("torchvision.datasets.") for one in found
    )


def _trains(p: Meaning, loader: ast.Call) -> bool:
    for loop in p.nodes(ast.For):
        if [*p.origins(_loader(loop.iter))] == [loader]:
            function = p.function_of(loop) or p.tree
            left = any(isinstance(node, ast.Break) for node in ast.walk(loop))
            if not left and any(p.inside(b, loop) for b in backward_calls(p, function)):
                return differentiated(p, function, p.is_model_call)
    return False


def shuffle_then_slice(p: Meaning) -> Iterator[Hit]:
    alone = p.closed and not any(word.startswith(("broadcast", "scatter")) for word in p.words)
    for call in p.named("random.shuffle", "numpy.random.shuffle") if alone else ():
        name = ast.unparse(call.args[0]) if call.args else ""
        module = p.name_of(call).rpartition(".")[0]
        seeds = [one for one in p.named(f"{module}.seed") if p.order[one] < p.order[call]]
        by_rank = bool(seeds) and _mentions_rank(p, seeds[-1])
        unseeded = not any("seed" in word for word in p.words)
        sliced = [s for s in p.nodes(ast.Subscript) if _of_rank(p, s, name)]
        below = [s for s in sliced if p.order[s] > p.order[call] and p.function_of(s) is p.function_of(call)]
        if (by_rank or unseeded) and below and p.guard(call) is None:
            yield Hit(call, {"list": name})


def _mentions_rank(p: Meaning, node: ast.AST) -> bool:
    return any(isinstance(one, (ast.Name, ast.Attribute)) and p.is_rank(one) for one in ast.walk(node))


def _of_rank(p: Meaning, subscript: ast.Subscript, name: str) -> bool:
    """`name[rank::world]`."""
    cut = subscript.slice
    return (
        isinstance(cut, ast.Slice) and cut.lower is not None and cut.step is not None
        and ast.unparse(subscript.value) == name and p.is_rank(cut.lower)
    )  # fmt: skip


def split_differs(p: Meaning) -> Iterator[Hit]:
    if not p.closed or not (p.wraps or p.named(SAMPLERS)):
        return
    if any("seed" in word or "rng_state" in word or word.startswith("broadcast") for word in p.words):
        return
    for call in p.named("torch.utils.data.random_split"):
        if keyword(call, "generator", 2) is None and not open_ended(call) and p.on_all_ranks(call):
            yield Hit(call)
