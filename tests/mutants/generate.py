"""One solution → many answers that differ from it in one place: an operator, a constant, a rank, an argument, an order,
a call that is missing or made twice.

`mutants(source)` parses the cell and rewrites one node at a time. Nothing is run here. A mutant's name is the changed
code before and after, so it stays the same when the lines around it move.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

ARITHMETIC: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv, ast.Add),
    ast.FloorDiv: (ast.Mod, ast.Mult, ast.Div),
    ast.Div: (ast.Mult, ast.FloorDiv),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
}
ORDER: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
}
NAMES = {
    "MIN": ("MAX", "SUM"), "min": ("max",), "max": ("min",), "get_rank": ("get_world_size",), "zeros": ("ones",),
    "get_world_size": ("get_rank",), "isend": ("send",), "leaving": ("arriving",), "arriving": ("leaving",),
    "left": ("right",), "right": ("left",), "first": ("last", "cap"), "last": ("first",), "cap": ("first",),
    "node": ("local_rank",), "local_rank": ("node",), "rank": ("world_size", "local_rank"), "world_size": ("rank",),
    "nproc_per_node": ("gpus_per_proc",), "gpus_per_proc": ("nproc_per_node",), "mean": ("sums",), "sent": ("done",),
}  # fmt: skip  # a name or attribute → others that a learner may take it for
TRANSPARENT = {"sorted", "reversed", "list", "int", "str", "clone", "no_grad"}  # calls that may be left out
WRITTEN = {"get_world_size": (2, 3, 4, 8), "get_rank": (0, 1)}  # numbers written in the place of a call


@dataclass(frozen=True)
class Change:
    """A mutant: `name` says what was changed, `source` is the whole cell."""

    name: str
    source: str


def mutants(source: str) -> list[Change]:
    """All mutants of a cell, each once. One that cannot be compiled, or is the cell itself, is none."""
    tree = ast.parse(source)
    seen, made, names = {ast.unparse(tree)}, [], dict[str, int]()
    for name, changed in _changes(tree):
        try:
            text = ast.unparse(ast.fix_missing_locations(changed))
            compile(text, "<mutant>", "exec")
        except (SyntaxError, ValueError, AttributeError, TypeError):
            continue
        if text in seen:
            continue
        seen.add(text)
        names[name] = names.get(name, 0) + 1
        made.append(Change(name if names[name] == 1 else f"{name} ({names[name]})", text))
    return made


def _changes(tree: ast.Module) -> Iterator[tuple[str, ast.Module]]:
    nodes = [n for n in ast.walk(tree) if not _is_docstring(n)]
    for i, node in enumerate(ast.walk(tree)):
        if node not in nodes:
            continue
        if isinstance(node, ast.expr):
            for new in _expressions(node):
                yield _named(node, new), _with(tree, i, new)
        if isinstance(node, ast.AugAssign):
            for operator in ARITHMETIC.get(type(node.op), ()):
                swapped = copy.deepcopy(node)
                swapped.op = operator()
                yield _named(node, swapped), _with(tree, i, swapped)
    yield from _rearranged(tree)


def _rearranged(tree: ast.Module) -> Iterator[tuple[str, ast.Module]]:
    for i, node in enumerate(ast.walk(tree)):
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                for name, change in _statements(block):
                    yield name, _block(tree, i, field, change)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 30


def _named(old: ast.AST, new: ast.AST) -> str:
    return f"{ast.unparse(old)} → {ast.unparse(ast.fix_missing_locations(copy.deepcopy(new)))}"


def _with(tree: ast.Module, index: int, new: ast.AST) -> ast.Module:
    """The tree with the node that `ast.walk` comes to as number `index` replaced."""
    made = copy.deepcopy(tree)
    old = list(ast.walk(made))[index]

    class Put(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return copy.deepcopy(new) if node is old else super().generic_visit(node)

    found = Put().visit(made)
    assert isinstance(found, ast.Module)
    return found


def _block(tree: ast.Module, index: int, field: str, change: Callable[[list[ast.stmt]], list[ast.stmt]]) -> ast.Module:
    made = copy.deepcopy(tree)
    node = list(ast.walk(made))[index]
    setattr(node, field, change(getattr(node, field)) or [ast.Pass()])
    return made


@singledispatch
def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """What may stand in the place of an expression."""
    yield from ()


@_expressions.register
def _(node: ast.BinOp) -> Iterator[ast.expr]:
    for operator in ARITHMETIC.get(type(node.op), ()):
        yield ast.BinOp(node.left, operator(), node.right)
    yield from (node.left, node.right)
    if isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod):
        yield ast.BinOp(node.right, node.op, node.left)


@_expressions.register
def _(node: ast.Compare) -> Iterator[ast.expr]:
    if len(node.ops) == 1:
        yield from (ast.Compare(node.left, [other()], node.comparators) for other in ORDER.get(type(node.ops[0]), ()))


@_expressions.register
def _(node: ast.UnaryOp) -> Iterator[ast.expr]:
    yield node.operand


@_expressions.register
def _(node: ast.IfExp) -> Iterator[ast.expr]:
    yield from (node.body, node.orelse)


@_expressions.register
def _(node: ast.Name) -> Iterator[ast.expr]:
    if isinstance(node.ctx, ast.Load):
        yield from (ast.Name(other, node.ctx) for other in NAMES.get(node.id, ()))


@_expressions.register
def _(node: ast.Attribute) -> Iterator[ast.expr]:
    if isinstance(node.ctx, ast.Load):
        yield from (ast.Attribute(node.value, other, node.ctx) for other in NAMES.get(node.attr, ()))


@_expressions.register
def _(node: ast.Subscript) -> Iterator[ast.expr]:
    if isinstance(node.slice, ast.Slice) and isinstance(node.ctx, ast.Load):
        yield from _slices(node, node.slice)


@_expressions.register(ast.List)
@_expressions.register(ast.Tuple)
def _(node: Any) -> Iterator[ast.expr]:
    if isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
        yield type(node)(node.elts[::-1], node.ctx)
        yield from (type(node)(node.elts[:k] + node.elts[k + 1 :], node.ctx) for k in range(len(node.elts)))


@_expressions.register
def _(node: ast.Dict) -> Iterator[ast.expr]:
    for k in range(len(node.keys)):
        yield ast.Dict(node.keys[:k] + node.keys[k + 1 :], node.values[:k] + node.values[k + 1 :])


@_expressions.register(ast.ListComp)
@_expressions.register(ast.GeneratorExp)
def _(node: Any) -> Iterator[ast.expr]:
    for k, of in enumerate(node.generators):
        if of.ifs:
            rest = ast.comprehension(of.target, of.iter, [], of.is_async)
            yield type(node)(node.elt, [*node.generators[:k], rest, *node.generators[k + 1 :]])


@_expressions.register
def _(node: ast.Constant) -> Iterator[ast.expr]:
    value = node.value
    if type(value) is int:
        yield from (ast.Constant(value + 1), ast.Constant(value - 1))
    elif type(value) is float:
        yield from (ast.Constant(value + 1.0), ast.Constant(0.5 * value))
    elif type(value) is bool:
        yield ast.Constant(not value)
    elif value == "node0":
        yield from (ast.Constant("node1"), ast.Constant("localhost"))


@_expressions.register
def _(node: ast.Call) -> Iterator[ast.expr]:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    yield from (ast.Constant(n) for n in WRITTEN.get(called, ()))
    if called in TRANSPARENT and (node.args or isinstance(node.func, ast.Attribute)):
        yield node.args[0] if node.args else node.func.value  # type: ignore[attr-defined]
    if called == "len":
        yield from (ast.BinOp(node, operator, ast.Constant(1)) for operator in (ast.Add(), ast.Sub()))
    if len(node.args) == 2 and not node.keywords:
        yield ast.Call(node.func, node.args[::-1], [])
    if len(node.args) + len(node.keywords) > 1:
        yield from (ast.Call(node.func, _less(node.args, k), node.keywords) for k in range(len(node.args)))
        yield from (ast.Call(node.func, node.args, _less(node.keywords, k)) for k in range(len(node.keywords)))


def _less(some: list[Any], k: int) -> list[Any]:
    return some[:k] + some[k + 1 :]


def _slices(node: ast.Subscript, cut: ast.Slice) -> Iterator[ast.expr]:
    parts = (cut.lower, cut.upper, cut.step)
    for k in range(3):
        if parts[k] is not None:
            yield ast.Subscript(node.value, ast.Slice(*parts[:k], None, *parts[k + 1 :]), node.ctx)
    if cut.step is not None and cut.upper is None:
        yield ast.Subscript(node.value, ast.Slice(cut.lower, cut.step), node.ctx)
    yield node.value


def _statements(block: list[ast.stmt]) -> Iterator[tuple[str, Callable[[list[ast.stmt]], list[ast.stmt]]]]:
    """Changes of a block: a statement left out, made twice, changed with the next one, or taken out of its `with`."""
    for k, one in enumerate(block):
        words = ast.unparse(one).splitlines()[0]
        if isinstance(one, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef) or (
            isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
        ):
            continue
        if not isinstance(one, ast.Return):
            yield f"without {words}", lambda some, k=k: some[:k] + some[k + 1 :]
        if _has_effect(one):
            yield f"twice {words}", lambda some, k=k: [*some[: k + 1], copy.deepcopy(some[k]), *some[k + 1 :]]
        if isinstance(one, ast.With | ast.For):
            yield f"inside of {words} alone", lambda some, k=k: some[:k] + some[k].body + some[k + 1 :]
        if isinstance(one, ast.If):
            yield f"always, not {words}", lambda some, k=k: some[:k] + some[k].body + some[k + 1 :]
        if k + 1 < len(block) and not isinstance(one, ast.FunctionDef | ast.ClassDef):
            after = ast.unparse(block[k + 1]).splitlines()[0]
            yield f"{after} before {words}", lambda some, k=k: [*some[:k], some[k + 1], some[k], *some[k + 2 :]]
        if isinstance(one, ast.For) and one.body:
            yield (
                f"{ast.unparse(one.body[-1]).splitlines()[0]} after {words}",
                lambda some, k=k: [*some[:k], _short(some[k]), some[k].body[-1], *some[k + 1 :]],
            )


def _has_effect(one: ast.stmt) -> bool:
    """Whether doing it again can differ from doing it once: not so for a return, or a name that is bound to what is
    worked out from others."""
    if not isinstance(one, ast.Assign):
        return not isinstance(one, ast.Return)
    bound = {n.id for target in one.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    read = {n.id for n in ast.walk(one.value) if isinstance(n, ast.Name)}
    return bool(bound & read or "dist" in read or not all(isinstance(t, ast.Name | ast.Tuple) for t in one.targets))


def _short(loop: ast.stmt) -> ast.stmt:
    """A loop without its last statement."""
    made = copy.deepcopy(loop)
    assert isinstance(made, ast.For)
    made.body = made.body[:-1] or [ast.Pass()]
    return made
