"""Mistakes of the model, its gradients and its optimizer: replicas that drift, gradients that are not exchanged."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nbddp.capabilities.lint.flow import keyword, own_nodes
from nbddp.capabilities.lint.meaning import (
    DDP,
    DIST,
    INNER,
    LOCAL,
    NAMED,
    OPTIMIZER,
    RANK,
    SCHEDULER,
    SPAWNED,
    WORLD,
    Meaning,
    condition_text,
)
from nbddp.capabilities.lint.rule import Hit
from nbddp.capabilities.lint.taint import (
    backward_calls,
    differentiated,
    differentiated_at,
    owner,
    without_gradient,
)

FLAG = "require_backward_grad_sync"
HARMLESS = {  # methods of a module that are no forward
    "state_dict", "parameters", "named_parameters", "modules", "named_modules", "children", "buffers", "eval", "train",
    "to", "load_state_dict", "zero_grad", "apply", "requires_grad_", "half", "float", "cuda", "cpu", "named_buffers",
    "get_parameter", "get_submodule", "named_children", "register_forward_hook", "register_buffer", "add_module",
    "configure_optimizers",
}  # fmt: skip
ASK = {"isinstance", "hasattr", "getattr", "len", "print", "type", "id"}
LAYERS = re.compile(
    r"Linear|Bilinear|Conv(Transpose)?[123]d|Embedding(Bag)?|LayerNorm|GroupNorm|BatchNorm[123]d|LSTM|GRU|RNN"
    r"|MultiheadAttention|Transformer\w*|PReLU|Parameter"
)


def _exchanges_by_hand(p: Meaning) -> bool:
    """Whether gradients or parameters are exchanged without DDP."""
    calls = p.named(*(f"{DIST}.{name}" for name in ("all_reduce", "reduce_scatter", "all_gather", "reduce")))
    return any("grad" in ast.unparse(call) or "param" in ast.unparse(call) for call in calls)


def forward_past_ddp(p: Meaning) -> Iterator[Hit]:
    if _exchanges_by_hand(p):
        return
    for call in p.calls if p.wraps else ():
        if not _past(p, call) or without_gradient(p, call):
            continue
        function = owner(p, call)
        inside = any(isinstance(up, ast.With) and "no_sync" in ast.unparse(up.items[0]) for up, _ in p.above(call))
        if inside or _may_arm(p, function) or (_is_of_outputs(call) and any(map(p.is_model_call, p.calls))):
            continue
        if _steps(function) and differentiated(p, function, lambda node, own=call: node is own):  # type: ignore[misc]
            yield Hit(call, {"call": ast.unparse(call.func)})
    yield from _unwrapped(p)


def _may_arm(p: Meaning, function: ast.AST, depth: int = 0) -> bool:
    """Whether a function may run DDP's forward: itself, in one that it calls, or in one that gets the model."""
    for node in own_nodes(function):
        if not isinstance(node, ast.Call):
            continue
        given = [*node.args, *(one.value for one in node.keywords)]
        called = p.called(node)
        if p.is_model_call(node) or (called is not None and depth < 4 and _may_arm(p, called, depth + 1)):
            return True
        handed = called is None and not isinstance(p.parent[node], ast.Expr) and ast.unparse(node.func) not in ASK
        if handed and any(isinstance(one, (ast.Name, ast.Attribute)) and p.may(one, DDP) for one in given):
            return True
    return False


def _is_of_outputs(call: ast.Call) -> bool:
    """Whether its name says that it may compute with the model's outputs alone."""
    return isinstance(call.func, ast.Attribute) and any(word in call.func.attr.lower() for word in ("loss", "criteri"))


def _steps(function: ast.AST) -> bool:
    """Whether it makes optimizer steps: a backward without one is not training."""
    return any(isinstance(node, ast.Attribute) and node.attr == "step" for node in own_nodes(function))


def _past(p: Meaning, call: ast.Call) -> bool:
    """`ddp.module(x)`, or a method of it that computes with data."""
    if not call.args and not call.keywords:
        return False
    if p.may(call.func, INNER) and not p.may(call.func, DDP):
        return True
    func = call.func
    return isinstance(func, ast.Attribute) and func.attr not in HARMLESS and p.may(func.value, INNER) and not p.may(
        func.value, DDP
    )  # fmt: skip


def _unwrapped(p: Meaning) -> Iterator[Hit]:
    """`model(x)` below `ddp = DDP(model)`, where `ddp` is never called."""
    if any(p.is_model_call(call) for call in p.calls):
        return
    for wrap in p.wraps:
        assigned, module = p.parent.get(wrap), keyword(wrap, "module", 0)
        if not (isinstance(assigned, ast.Assign) and isinstance(module, ast.Name)):
            continue
        name = ast.unparse(assigned.targets[0])
        if name != module.id and not _goes_on(p, name):
            for call in _calls_below(p, wrap, module):
                if differentiated(p, owner(p, wrap), lambda node, own=call: node is own):  # type: ignore[misc]
                    yield Hit(call, {"call": ast.unparse(call.func)})


def _calls_below(p: Meaning, wrap: ast.Call, module: ast.Name) -> Iterator[ast.Call]:
    """Calls of the module that DDP got, with gradient, below the wrapping in its function."""
    bound, function = p.bindings(module), owner(p, wrap)
    for call in p.calls:
        func = call.func
        if not (isinstance(func, ast.Name) and func.id == module.id and p.order[call] > p.order[wrap]):
            continue
        if p.bindings(func) == bound and owner(p, call) is function and not without_gradient(p, call):
            yield call


def _goes_on(p: Meaning, name: str) -> bool:
    """Whether a name is used in another way than `name.attribute`."""
    uses = [n for n in p.nodes(ast.Name) if n.id == name and isinstance(n.ctx, ast.Load)]
    return any(not isinstance(p.parent[one], ast.Attribute) for one in uses)


def no_sync_after_forward(p: Meaning) -> Iterator[Hit]:
    for node in p.nodes(ast.Assign):
        target = node.targets[0]
        if not (isinstance(target, ast.Attribute) and target.attr == FLAG and p.may(target.value, DDP)):
            continue
        if not _may_be_false(p):
            return
        for block, at in _blocks(p, node):
            before, after = block[:at], block[at + 1 :]
            forward = [s for s in before if _has_forward(p, s)]
            told = any(FLAG in ast.unparse(s) for s in before)
            backward = any(".backward(" in ast.unparse(s) for s in after)
            again = any(_has_forward(p, s) for s in after)
            if forward and backward and not told and not again:
                yield Hit(node, {"ddp": ast.unparse(target.value)})
                break


def _may_be_false(p: Meaning) -> bool:
    """Whether the flag is ever set to something else than True."""
    values = [n.value for n in p.nodes(ast.Assign) if FLAG in ast.unparse(n.targets[0])]
    return not all(isinstance(value, ast.Constant) and value.value is True for value in values)


def _blocks(p: Meaning, node: ast.AST) -> Iterator[tuple[list[ast.stmt], int]]:
    """The lists of statements around a node in its function, the innermost first, and its place in each."""
    for up, child in [(p.parent[node], node), *p.above(p.parent[node])]:
        block = p.block_of(child)
        if block:
            yield block, next(i for i, one in enumerate(block) if one is child)
        if isinstance(up, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return


def _has_forward(p: Meaning, statement: ast.AST) -> bool:
    return any(p.is_model_call(node) for node in ast.walk(statement))


def no_sync_without_forward(p: Meaning) -> Iterator[Hit]:
    found = [node for node in p.nodes(ast.With) if _has_backward_alone(p, node)]
    others = sum(isinstance(node, ast.Attribute) and node.attr == "no_sync" for node in ast.walk(p.tree)) - len(found)
    for node in found if not others else ():
        yield Hit(node)


def _has_backward_alone(p: Meaning, node: ast.With) -> bool:
    """`with ddp.no_sync(): loss.backward()`, where the loss was made by a forward above."""
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    entered = [c.func.value for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "no_sync"]
    if not entered or not p.must(entered[0], DDP):
        return False
    inner = [one for one in ast.walk(node) if isinstance(one, ast.Call) and one not in calls]
    backward = [b for b in backward_calls(p, owner(p, node)) if b in inner]
    plain = all(isinstance(one.func, ast.Attribute) and one.func.attr in ("backward", "scale") for one in inner)
    return bool(backward and plain) and backward[0] in differentiated_at(p, owner(p, node), p.is_model_call, set())


def parameters_after_wrap(p: Meaning) -> Iterator[Hit]:
    for node in p.nodes(ast.Assign):
        target = node.targets[0]
        if not isinstance(target, ast.Attribute) or not _has_parameters(p, node.value):
            continue
        base = target.value
        while isinstance(base, ast.Attribute) and not p.may(base, INNER):
            base = base.value
        if not (p.must(base, DDP, INNER) or _is_wrapped(p, base, node)):
            continue
        later = any(p.order[wrap] > p.order[node] for wrap in p.wraps)
        if not later and p.function_of(node) is p.function_of(p.wraps[0]) and len(p.wraps) == 1:
            yield Hit(node, {"target": ast.unparse(target)})


def _has_parameters(p: Meaning, value: ast.expr) -> bool:
    name = p.name_of(value) if isinstance(value, ast.Call) else ""
    head, _, last = name.rpartition(".")
    frozen = isinstance(value, ast.Call) and keyword(value, "requires_grad", 1 if last == "Parameter" else None)
    return head in ("torch.nn", "torch.nn.parameter") and bool(LAYERS.fullmatch(last)) and not frozen


def _is_wrapped(p: Meaning, base: ast.expr, node: ast.AST) -> bool:
    """Whether it is the module that DDP got above, in the same list of statements."""
    if not isinstance(base, ast.Name):
        return False
    for wrap in p.wraps:
        module, statement = keyword(wrap, "module", 0), p.statement_of(wrap)
        if isinstance(module, ast.Name) and module.id == base.id and p.bindings(module) == p.bindings(base):
            block = p.block_of(statement)
            below = block[block.index(statement) + 1 :] if statement in block else []
            return any(p.inside(node, one) for one in below)
    return False


def averaged_twice(p: Meaning) -> Iterator[Hit]:
    if {"no_sync", FLAG} & p.words or not any(p.is_model_call(call) for call in p.calls):
        return
    if any(_past(p, call) for call in p.calls):
        return  # what goes past DDP has to be averaged by hand
    for loop in p.nodes(ast.For):
        source, name = loop.iter, ast.unparse(loop.target)
        if not (isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute)):
            continue
        if source.func.attr == "parameters" and p.must(source.func.value, DDP, INNER):
            for call in p.named(f"{DIST}.all_reduce"):
                if (
                    p.inside(call, loop)
                    and call.args
                    and ast.unparse(call.args[0]) in (f"{name}.grad", f"{name}.grad.data")
                ):
                    yield Hit(call)


def hook_without_division(p: Meaning) -> Iterator[Hit]:
    for call, model in p.methods("register_comm_hook"):
        hook = keyword(call, "hook", 1)
        known = p.bindings(hook) if isinstance(hook, ast.Name) else []
        if len(known) != 1 or not isinstance(known[0].node, ast.FunctionDef) or not p.may(model, DDP):
            continue
        body = known[0].node
        reduces = [c for c in p.named(f"{DIST}.all_reduce") if p.inside(c, body)]
        divides = any(
            isinstance(node, (ast.Div, ast.Mult)) or (isinstance(node, ast.Attribute) and node.attr in DIVIDES)
            for node in ast.walk(p.tree)
        )
        if reduces and not divides:
            yield Hit(reduces[0], {"hook": body.name})


DIVIDES = {"div", "div_", "mul", "mul_", "AVG", "divide", "true_divide", "mean", "PREMUL_SUM", "lerp_"}


def gather_cuts_gradient(p: Meaning) -> Iterator[Hit]:
    for call in p.named(f"{DIST}.all_gather", f"{DIST}.all_gather_into_tensor"):
        if len(call.args) < 2 or not isinstance(call.args[0], ast.Name) or not isinstance(call.args[1], ast.Name):
            continue
        function, gathered, given = owner(p, call), call.args[0].id, call.args[1].id
        if without_gradient(p, call) or _put_back(p, call, gathered) or not _made_by_model(p, function, given):
            continue
        if any(differentiated_at(p, function, lambda node: False, {gathered})):
            yield Hit(call, {"tensor": given})


def _put_back(p: Meaning, call: ast.Call, name: str) -> bool:
    """Whether the list is changed below the call, as in `gathered[rank] = z`, or used by a method of its own."""
    for node in own_nodes(owner(p, call)):
        below = p.order[node] > p.last[call]
        if below and isinstance(node, ast.Attribute) and ast.unparse(node.value) == name:
            return True
        changed = node.targets if below and isinstance(node, (ast.Assign, ast.Delete)) else []
        if any(ast.unparse(one).split("[")[0] == name for one in changed):
            return True
    return False


def _made_by_model(p: Meaning, function: ast.AST, name: str) -> bool:
    """Whether each assignment of the name in this function has a DDP model's output, with gradient."""
    values = [
        node.value for node in own_nodes(function)
        if isinstance(node, ast.Assign) and any(ast.unparse(t) == name for t in node.targets)
    ]  # fmt: skip
    found = [any(p.is_model_call(n) and not without_gradient(p, n) for n in ast.walk(value)) for value in values]
    cut = any(word in ast.unparse(value) for value in values for word in (".detach()", ".data", ".item()"))
    return bool(found) and all(found) and not cut


def step_of_some_ranks(p: Meaning) -> Iterator[Hit]:
    steps = p.methods("step")
    for call, stepped in steps:
        same = [one for _, one in steps if ast.unparse(one) == ast.unparse(stepped)]
        guard = p.guard(call) if len(same) == 1 and p.must(stepped, OPTIMIZER, SCHEDULER) else None
        if guard is not None and _moves_ddp(p, stepped):
            yield Hit(call, {"call": ast.unparse(call), "guard": condition_text(guard)})


def _moves_ddp(p: Meaning, optimizer: ast.expr) -> bool:
    """Whether an optimizer, or a scheduler's, has a DDP model's parameters."""
    modules = [keyword(wrap, "module", 0) for wrap in p.wraps]
    wrapped = {bound for one in modules if isinstance(one, ast.Name) for bound in p.bindings(one)}
    for made in p.origins(optimizer):
        for one in made.args if isinstance(made, ast.Call) else ():
            if isinstance(one, ast.Name) and p.may(one, OPTIMIZER):
                return _moves_ddp(p, one)
            for node in ast.walk(one):
                if isinstance(node, ast.Name) and (p.may(node, DDP, INNER) or wrapped & {*p.bindings(node)}):
                    return True
    return False


def load_of_some_ranks(p: Meaning) -> Iterator[Hit]:
    loads = [found for found in p.methods("load_state_dict") if p.may(found[1], DDP, INNER)]
    if len(loads) != 1 or any("broadcast" in word or "sync_" in word for word in p.words):
        return
    call, model = loads[0]
    guard = p.guard(call)
    trains = any(p.order[one] > p.order[call] for one in backward_calls(p, owner(p, call)))
    if guard is not None and trains and p.must(model, DDP, INNER):
        yield Hit(call, {"call": f"{ast.unparse(call.func)}()", "guard": condition_text(guard)})


def rank_in_optimizer(p: Meaning) -> Iterator[Hit]:
    for call in p.calls:
        if not p.name_of(call).startswith("torch.optim.") or not p.may(call, OPTIMIZER) or not _moves_ddp(p, call):
            continue
        for given in (*call.args[1:], *(one.value for one in call.keywords)):
            known = p.bindings(given) if isinstance(given, ast.Name) else []
            value = known[0].value if len(known) == 1 and known[0].how == "value" else given
            if _depends_on_rank(p, value or given):
                yield Hit(given, {"value": ast.unparse(given)})


def _depends_on_rank(p: Meaning, value: ast.expr) -> bool:
    """Whether a number surely differs by rank: it is computed from the rank, or chosen by a condition that is not the
    same everywhere."""
    if isinstance(value, ast.IfExp):
        return p.on_some_ranks(value.test) and ast.unparse(value.body) != ast.unparse(value.orelse)
    if isinstance(value, (ast.Compare, ast.BoolOp)):
        return False
    parts = [n for n in ast.walk(value) if isinstance(n, (ast.Name, ast.Attribute, ast.Call))]
    tests = [n for n in ast.walk(value) if isinstance(n, (ast.Compare, ast.IfExp))]
    return any(
        p.must(one, RANK, LOCAL, SPAWNED, NAMED) and not any(p.inside(one, test) for test in tests) for one in parts
    )


def scheduler_world_times(p: Meaning) -> Iterator[Hit]:
    for loop in p.nodes(ast.For):
        times = loop.iter
        if not (isinstance(times, ast.Call) and ast.unparse(times.func) == "range" and len(times.args) == 1):
            continue
        for one in loop.body if p.must(times.args[0], WORLD) else ():
            match one:
                case ast.Expr(value=ast.Call(func=ast.Attribute(attr="step", value=owned)) as called):
                    if p.must(owned, SCHEDULER):
                        yield Hit(called, {"call": ast.unparse(called)})


def reduced_before_backward(p: Meaning) -> Iterator[Hit]:
    for call in p.named(f"{DIST}.all_reduce"):
        statement = p.statement_of(call)
        block = p.block_of(statement)
        if not call.args or not isinstance(call.args[0], ast.Name) or not p.wraps:
            continue
        name, below = call.args[0].id, block[block.index(statement) + 1 :] if statement in block else []
        divided = [i for i, one in enumerate(below) if _divides_by_world(p, one, name)]
        backward = [i for i, one in enumerate(below) if ast.unparse(one) == f"{name}.backward()"]
        ordered = bool(divided and backward) and divided[0] < backward[0]
        if ordered and differentiated(p, owner(p, call), p.is_model_call):
            yield Hit(call, {"loss": name})


def _divides_by_world(p: Meaning, statement: ast.stmt, name: str) -> bool:
    match statement:
        case ast.AugAssign(target=ast.Name(id=own), op=ast.Div(), value=value) if own == name:
            return p.must(value, WORLD)
        case ast.Assign(targets=[ast.Name(id=own)], value=ast.BinOp(left=ast.Name(id=left), op=ast.Div(), right=right)):
            return own == left == name and p.must(right, WORLD)
    return False


def static_graph_with_no_sync(p: Meaning) -> Iterator[Hit]:
    for call, model in p.methods("no_sync"):
        made = p.origins(model)
        if made and all(isinstance(one, ast.Call) and _is_true(one, "static_graph") for one in made):
            yield Hit(call)


def _is_true(call: ast.Call, name: str) -> bool:
    value = keyword(call, name)
    return isinstance(value, ast.Constant) and value.value is True


def find_unused_with_static_graph(p: Meaning) -> Iterator[Hit]:
    for wrap in p.wraps:
        if _is_true(wrap, "static_graph") and _is_true(wrap, "find_unused_parameters"):
            yield Hit(wrap)
