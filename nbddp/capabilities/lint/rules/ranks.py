"""Mistakes of the process group: who calls a collective, when the group is there, which device a rank takes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nbddp.capabilities.lint.flow import LOOPS, SPAWN, keyword, own_nodes
from nbddp.capabilities.lint.meaning import DIST, RANK, Meaning, condition_text, leaves
from nbddp.capabilities.lint.rule import Hit
from nbddp.capabilities.lint.taint import backward_calls

COLLECTIVES = (
    "barrier", "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_object",
    "broadcast_object_list", "gather", "gather_object", "scatter", "scatter_object_list", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "monitored_barrier", "new_group",
)  # fmt: skip
SHOWS_RANK = re.compile(r"rank|gpu|proc|worker|node|device|pid|\[\{|cuda", re.IGNORECASE)


def collective_of_some_ranks(p: Meaning) -> Iterator[Hit]:
    for name in COLLECTIVES:
        calls = [call for call in p.named(f"{DIST}.{name}") if not _of_group(call)]
        guarded = [(call, p.guard(call)) for call in calls]
        if any(guard is None and _of_called_by_some(p, call) for call, guard in guarded):
            continue
        for call, guard in guarded:
            texts = {
                condition_text(other) for one, other in guarded if other is not None and _may_meet(p, call, one, name)
            }
            if guard is not None and len(texts) == 1 and not _others_may_call(p, call, guard[0], name):
                yield Hit(call, {"call": f"{name}()", "guard": condition_text(guard)})


def _may_meet(p: Meaning, call: ast.Call, other: ast.Call, name: str) -> bool:
    """Whether one may be the other ranks' part of the other. No rank leaves a barrier, and with it its cell, alone."""
    fixed = all(p.function_of(one) is None and not one.args and not one.keywords for one in (call, other))
    return not (name == "barrier" and fixed and p.cell_of(call) != p.cell_of(other))


def _of_called_by_some(p: Meaning, call: ast.Call) -> bool:
    """Whether a function has it that some ranks alone call: they may be the others."""
    function = p.function_of(call)
    return function is not None and any(p.guard(site) is not None for site, _ in p.sites(function))


def _of_group(call: ast.Call) -> bool:
    given = {one.arg for one in call.keywords}
    return bool(given & {"group", "use_local_synchronization", None}) or len(call.args) > 2


def _others_may_call(p: Meaning, call: ast.Call, test: ast.expr, name: str) -> bool:
    """Whether the branch of the other ranks calls something that may make the same call."""
    branch = p.parent[test]
    if isinstance(branch, (ast.IfExp, ast.BoolOp)) and isinstance(p.parent[branch], ast.Expr):
        others = (
            [] if isinstance(branch, ast.BoolOp) else [branch.orelse if p.inside(call, branch.body) else branch.body]
        )
        return any(isinstance(node, ast.Call) for other in others for node in ast.walk(other))
    if isinstance(branch, ast.match_case):
        other = _other_cases(p, call, branch)
    elif isinstance(branch, ast.If):
        inside = any(p.inside(call, one) for one in branch.body)
        other = branch.orelse if inside else branch.body
        if inside and leaves(branch.body):
            other = [*other, *_after(p, branch)]
    else:
        return True
    for one in (node for statement in other for node in ast.walk(statement)):
        if isinstance(one, ast.Call):
            text = ast.unparse(one.func)
            if p.called(one) is not None or name in text or not (p.name_of(one) or text in ("print", "len", "int")):
                return True
    return False


def _other_cases(p: Meaning, call: ast.Call, case: ast.match_case) -> list[ast.stmt]:
    """What ranks do that another case of the same `match` takes; after the match too, if the call's case leaves it."""
    match = p.parent[case]
    assert isinstance(match, ast.Match)
    own = next(one for one in match.cases if p.inside(call, one))
    other = [statement for one in match.cases if one is not own for statement in one.body]
    return [*other, *_after(p, match)] if leaves(own.body) else other


def _after(p: Meaning, statement: ast.stmt) -> list[ast.stmt]:
    block = p.block_of(statement)
    return block[block.index(statement) + 1 :]


def before_init(p: Meaning) -> Iterator[Hit]:
    if len(p.inits) != 1 or "is_initialized" in p.words:
        return
    init = p.inits[0]
    if any(p.order[one] < p.order[init] for one in p.named(f"{DIST}.destroy_process_group")):
        return
    statement = p.statement_of(init)
    block = p.block_of(statement)
    needs = {f"{DIST}.{name}" for name in (*COLLECTIVES, "get_rank", "get_world_size")}
    needs.add("torch.nn.parallel.DistributedDataParallel")
    for one in block[: block.index(statement)] if p.parent[init] is statement else ():
        for call in (node for node in _executed(one) if isinstance(node, ast.Call)):
            if p.name_of(call) in needs and not [t for t, _ in p.conditions(call) if p.inside(t, one)]:
                yield Hit(call, {"call": f"{ast.unparse(call.func)}()"})


def _executed(statement: ast.stmt) -> Iterator[ast.AST]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Try, *LOOPS)):
        return
    yield from own_nodes(statement)


def device_of_global_rank(p: Meaning) -> Iterator[Hit]:
    if p.one_node or p.cells:
        return
    for call in (*p.named("torch.cuda.set_device"), *p.wraps):
        if call in p.wraps:
            listed = keyword(call, "device_ids", 1)
            device = listed.elts[0] if isinstance(listed, (ast.List, ast.Tuple)) and listed.elts else None
        else:
            device = keyword(call, "device", 0)
        if device is not None and p.must(device, RANK):
            yield Hit(device, {"rank": ast.unparse(device)})


def spawn_without_guard(p: Meaning) -> Iterator[Hit]:
    for call in _spawned(p) if not p.notebook else ():
        if any("__name__" in ast.unparse(test) for test, _ in p.conditions(call)):
            continue
        function = p.function_of(call)
        sites = [site for site, _ in p.sites(function)] if function is not None else [call]
        bare = [s for s in sites if p.function_of(s) is None and not p.conditions(s) and p.class_of(s) is None]
        if bare:
            yield Hit(call)


def _spawned(p: Meaning) -> list[ast.Call]:
    found = [call for call in p.calls if p.dotted(call.func) in SPAWN]
    fork = [c for c in found if "fork" in ast.unparse(keyword(c, "start_method", 5) or ast.Constant(""))]
    return [call for call in found if call not in fork]


def spawn_from_notebook(p: Meaning) -> Iterator[Hit]:
    for call in _spawned(p) if p.notebook else ():
        known = p.bindings(call.args[0]) if call.args and isinstance(call.args[0], ast.Name) else []
        if known and all(one.how == "definition" for one in known):
            yield Hit(call, {"function": ast.unparse(call.args[0])})


def init_without_destroy(p: Meaning) -> Iterator[Hit]:
    if p.notebook or not p.closed or "destroy_process_group" in p.words:
        return
    reached = [call for call in p.inits if _is_program(p, call)]
    if reached:
        yield Hit(reached[0])


def _is_program(p: Meaning, call: ast.Call, depth: int = 0) -> bool:
    """Whether running this file gets there, whatever conditions say."""
    function = p.function_of(call)
    if function is None:
        return True
    return depth < 6 and any(skip < 0 or _is_program(p, site, depth + 1) for site, skip in p.sites(function))


def print_on_all_ranks(p: Meaning) -> Iterator[Hit]:
    if p.notebook or not p.closed or not p.inits or {"builtins", "__builtin__"} & p.words:
        return
    for call in p.calls:
        if not (isinstance(call.func, ast.Name) and call.func.id == "print") or p.bindings(call.func):
            continue
        loops = p.loops(call)
        steps = [b for b in backward_calls(p, p.function_of(call) or p.tree) if any(p.inside(b, one) for one in loops)]
        if steps and not SHOWS_RANK.search(ast.unparse(call)) and p.on_all_ranks(call):
            yield Hit(call)
