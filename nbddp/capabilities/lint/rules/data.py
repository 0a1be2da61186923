"""Mistakes of samplers and loaders: which rank sees which sample."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nbddp.capabilities.lint.flow import keyword, open_ended
from nbddp.capabilities.lint.meaning import DIST, LOADER, LOCAL, SAMPLER, WORLD, Meaning
from nbddp.capabilities.lint.rule import ERROR, WARNING, Hit, Rule
from nbddp.capabilities.lint.rules.examples import END, HEAD, LOAD, TRAIN
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


RULES = (
    Rule(
        name="no-set-epoch", level=WARNING, title="a sampler that shuffles, without set_epoch",
        what="the epoch of {sampler} never changes, so every epoch has the same order",
        why="A DistributedSampler shuffles by its seed and its epoch, and the epoch stays 0 until set_epoch is called.",
        cure="sampler.set_epoch(epoch) at the top of the epoch loop", seen="issue threads of training libraries",
        check=no_set_epoch,
        wrong=f"{HEAD}{LOAD}for epoch in range(3):  # <-\n{TRAIN}{END}",
        right=f"{HEAD}{LOAD}for epoch in range(3):\n    sampler.set_epoch(epoch)\n{TRAIN}{END}",
    ),
    Rule(
        name="shuffle-beside-sampler", level=ERROR, title="shuffle=True beside a sampler",
        what="a DataLoader takes either shuffle=True or a sampler, and raises ValueError for both",
        why="The sampler decides the order. It shuffles by itself.",
        cure="remove shuffle=True; DistributedSampler(dataset, shuffle=True) is the default",
        seen="torch's documentation",
        check=shuffle_beside_sampler,
        wrong=f"{HEAD}sampler = DistributedSampler(dataset)\n"
        f"loader = DataLoader(dataset, batch_size=4, shuffle=True, sampler=sampler)  # <-\n{END}",
        right=f"{HEAD}sampler = DistributedSampler(dataset)\n"
        f"loader = DataLoader(dataset, batch_size=4, sampler=sampler)\n{END}",
    ),
    Rule(
        name="local-rank-as-rank", level=WARNING, title="LOCAL_RANK where the global rank belongs",
        what="{call} gets LOCAL_RANK as the rank; with several nodes, ranks of different nodes get the same number",
        why="LOCAL_RANK counts within a node. With two nodes, two samplers yield the same samples.",
        cure='rank=int(os.environ["RANK"]), or remove rank: the default is dist.get_rank()',
        seen="issue threads of training libraries", check=local_rank_as_rank,
        wrong=f'{HEAD}local_rank = int(os.environ["LOCAL_RANK"])\n'
        f"sampler = DistributedSampler(dataset, rank=local_rank)  # <-\n{END}",
        right=f"{HEAD}sampler = DistributedSampler(dataset, rank=dist.get_rank())\n{END}",
    ),
    Rule(
        name="sampler-of-one-rank", level=ERROR, title="a sampler whose rank is a number",
        what="every rank makes the sampler of rank {rank}, so all ranks train on the same samples",
        why="Each rank needs its own part of the data. Gradients of equal batches average to that of one.",
        cure="remove rank: the default is dist.get_rank()", seen="pull requests of training libraries",
        check=sampler_of_one_rank,
        wrong=f"{HEAD}sampler = DistributedSampler(dataset, num_replicas=2, rank=0)  # <-\n"
        f"loader = DataLoader(dataset, batch_size=4, sampler=sampler)\nif True:\n{TRAIN}{END}",
        right=f"{HEAD}{LOAD}if True:\n{TRAIN}{END}",
    ),
    Rule(
        name="loader-without-sampler", level=WARNING, title="a training loader without a sampler",
        what="every rank goes through all of {dataset} in an epoch: the DataLoader has no sampler",
        why="Without a sampler an epoch takes as many steps as on one process, and each sample is used once per rank.",
        cure="DataLoader(dataset, sampler=DistributedSampler(dataset)), and set_epoch in each epoch",
        seen="issue threads of training programs", check=loader_without_sampler,
        wrong="from torchvision.datasets import FakeData\n" + HEAD.replace(
            "torch.utils.data.TensorDataset(torch.arange(32.0).reshape(32, 1))", "FakeData()"
        ) + f"loader = DataLoader(dataset, batch_size=4, shuffle=True)  # <-\nfor epoch in range(3):\n{TRAIN}{END}",
        right="from torchvision.datasets import FakeData\n" + HEAD.replace(
            "torch.utils.data.TensorDataset(torch.arange(32.0).reshape(32, 1))", "FakeData()"
        ) + f"{LOAD}for epoch in range(3):\n    sampler.set_epoch(epoch)\n{TRAIN}{END}",
    ),
    Rule(
        name="shuffle-then-slice", level=ERROR, title="a list shuffled in each rank's own order, then sliced by rank",
        what="each rank shuffles {list} in another order and takes its slice of that, so slices overlap",
        why="Slices by rank are disjoint only if all ranks slice the same list. Some samples come twice, others never.",
        cure="random.Random(0).shuffle(files): the same seed on all ranks", seen="pull requests of training libraries",
        check=shuffle_then_slice,
        wrong="import random\n\nimport torch.distributed as dist\n\n"
        'dist.init_process_group("gloo")\nrank, world = dist.get_rank(), dist.get_world_size()\n'
        f'files = [f"{{i}}.pt" for i in range(32)]\nrandom.shuffle(files)  # <-\nmine = files[rank::world]\n{END}',
        right="import random\n\nimport torch.distributed as dist\n\n"
        'dist.init_process_group("gloo")\nrank, world = dist.get_rank(), dist.get_world_size()\n'
        f'files = [f"{{i}}.pt" for i in range(32)]\nrandom.Random(0).shuffle(files)\nmine = files[rank::world]\n{END}',
    ),
    Rule(
        name="split-differs", level=ERROR, title="an unseeded random_split",
        what="nothing seeds random_split, so each rank splits in another way and validates on what another trains on",
        why="Each process starts torch's generator at another number.",
        cure="random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))",
        seen="issue threads of training programs", check=split_differs,
        wrong=f"{HEAD}train, val = torch.utils.data.random_split(dataset, [24, 8])  # <-\n{END}",
        right=f"{HEAD}train, val = torch.utils.data.random_split(\n"
        f"    dataset, [24, 8], generator=torch.Generator().manual_seed(0)\n)\n{END}",
    ),
)  # fmt: skip
