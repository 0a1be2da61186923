"""Which names a statement sets, which it needs at once, and which its functions look up later. Pure: ast."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator

BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__"}
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SEE_ALL = ("globals", "locals", "vars", "eval", "exec")  # functions that find names by their text


IPYTHONS = ("display", "get_ipython", "In", "Out", "_", "__", "___")  # names that IPython sets, and a script lacks


def ipythons(nodes: Iterable[ast.AST]) -> list[str]:
    """Those of IPython's names that these statements look up and never set."""
    every = [n for node in nodes for n in ast.walk(node)]
    read = {n.id for n in every if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    own = {n.id for n in every if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    own |= {n.arg for n in every if isinstance(n, ast.arg)} | bound(every)
    return [name for name in IPYTHONS if name in read - own]


def bound(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that these statements set in the scope they are in."""
    return {name for node in nodes for name in _bound(node)}


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, DEFINED):
        yield node.name
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
        yield node.id
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    for field in ("name", "rest"):  # of an except clause, of a pattern
        if isinstance(getattr(node, field, None), str) and not isinstance(node, ast.alias):
            yield getattr(node, field)
    comprehension = isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp))
    for child in ast.iter_child_nodes(node):
        if comprehension:  # its own names are its own, but not those of `:=`
            yield from (n.target.id for n in ast.walk(child) if isinstance(n, ast.NamedExpr))
        else:
            yield from _bound(child)


def needed_at_once(node: ast.AST) -> set[str]:
    """Names that a definition looks up when it is carried out: decorators, defaults, annotations, bases, the body of a
    class."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        given = node.args
        arguments = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        parts: list[ast.AST | None] = [*node.decorator_list, *given.defaults, *given.kw_defaults, node.returns]
        parts += [a.annotation for a in arguments if a]
        return {name for part in parts if part is not None for name in needed_at_once(part)}
    if isinstance(node, ast.Lambda):
        return {name for part in (*node.args.defaults, *node.args.kw_defaults) if part for name in needed_at_once(part)}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    found = {name for child in ast.iter_child_nodes(node) for name in needed_at_once(child)}
    return found - bound(node.body) if isinstance(node, ast.ClassDef) else found


def mentioned(node: ast.AST) -> set[str]:
    """All names that are read, or declared global, anywhere within."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | declared_global(node)


def declared_global(node: ast.AST) -> set[str]:
    return {name for n in ast.walk(node) if isinstance(n, ast.Global) for name in n.names}


def called(node: ast.AST) -> set[str]:
    """The names of all functions that are called, under whatever module's name."""
    return {str(getattr(n.func, "attr", getattr(n.func, "id", ""))) for n in ast.walk(node) if isinstance(n, ast.Call)}


def sees_all(node: ast.AST) -> bool:
    """Whether names may be looked up by their text."""
    return any(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in SEE_ALL for n in ast.walk(node)
    )
