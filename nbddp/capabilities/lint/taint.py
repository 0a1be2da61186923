"""Where a value goes within one function: whether a loss that is made of it is differentiated. Pure: `ast` alone."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from nbddp.capabilities.lint.flow import Flow, own_nodes

CUTS = {"item", "detach", "tolist", "numpy", "cpu", "argmax", "data", "size", "shape", "eq", "topk", "max"}
NO_GRAD = ("torch.no_grad", "torch.inference_mode")


def owner(flow: Flow, node: ast.AST) -> ast.AST:
    """The function that a node is in, or the module."""
    return flow.function_of(node) or flow.tree


def without_gradient(flow: Flow, node: ast.AST) -> bool:
    """Whether it stands under `no_grad`."""
    for up, _ in flow.above(node):
        if isinstance(up, (ast.With, ast.AsyncWith)):
            calls = [item.context_expr for item in up.items]
            if any(isinstance(c, ast.Call) and flow.dotted(c.func) in NO_GRAD for c in calls):
                return True
        if isinstance(up, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = [d.func if isinstance(d, ast.Call) else d for d in up.decorator_list]
            if any(flow.dotted(d) in NO_GRAD for d in decorators):
                return True
    return False


def backward_calls(flow: Flow, function: ast.AST) -> list[ast.Call]:
    """`loss.backward()` and `scaler.scale(loss).backward()` of a function itself."""
    return [
        node for node in own_nodes(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
    ]  # fmt: skip


def differentiated(flow: Flow, function: ast.AST, source: Callable[[ast.AST], bool]) -> bool:
    """Whether something of which `source` is true goes into a `.backward()` of the same function."""
    return any(True for _ in differentiated_at(flow, function, source, set()))


def differentiated_at(
    flow: Flow, function: ast.AST, source: Callable[[ast.AST], bool], names: set[str]
) -> Iterator[ast.Call]:
    """The `.backward()` calls that it goes into. names: those that hold it before."""
    names = set(names)
    statements = [node for node in own_nodes(function) if isinstance(node, ast.stmt)]
    for _ in range(2):  # what a loop's end sets, its begin reads
        for one in statements:
            _spread(one, source, names)
    for call in backward_calls(flow, function):
        assert isinstance(call.func, ast.Attribute)
        if _holds(call.func.value, source, names):
            yield call


def _spread(one: ast.stmt, source: Callable[[ast.AST], bool], names: set[str]) -> None:
    match one:
        case ast.Assign(targets=targets, value=value) if _holds(value, source, names):
            for target in targets:
                names.update(_targets(target))
        case ast.AugAssign(target=target, value=value) if _holds(value, source, names):
            names.update(_targets(target))
        case ast.AnnAssign(target=target, value=ast.expr() as value) if _holds(value, source, names):
            names.update(_targets(target))
        case ast.With(items=items):
            for item in items:
                if item.optional_vars is not None and _holds(item.context_expr, source, names):
                    names.update(_targets(item.optional_vars))
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="append", value=ast.Name(id=name)), args=[value])):
            if _holds(value, source, names):
                names.add(name)


def _targets(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, (ast.Tuple, ast.List)):
        for each in target.elts:
            yield from _targets(each)
    elif isinstance(target, (ast.Subscript, ast.Starred)):
        yield from _targets(target.value)


def _holds(expr: ast.AST, source: Callable[[ast.AST], bool], names: set[str]) -> bool:
    """Whether a tainted name or a source is in an expression, and not cut off by `.item()` or so."""
    if source(expr):
        return True
    if isinstance(expr, ast.Name):
        return expr.id in names
    if isinstance(expr, ast.Call) and isinstance(expr.func, ast.Attribute) and expr.func.attr in CUTS:
        return False
    if isinstance(expr, ast.Attribute) and expr.attr in CUTS:
        return False
    if isinstance(expr, (ast.Compare, ast.Lambda)):
        return False
    return any(_holds(child, source, names) for child in ast.iter_child_nodes(expr))
