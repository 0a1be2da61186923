"""The names of a program: which value, import, parameter or loop a name may stand for where it is used.

An approximation of what a compiler calls reaching definitions, over one file. What it cannot follow it leaves as a
leaf, so a rule can be silent. Pure: `ast` alone.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Node = TypeVar("Node", bound=ast.AST)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
SPAWN = "torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn", "torch.multiprocessing.start_processes"
DEPTH = 40  # names that are followed one after the other


@dataclass(frozen=True, eq=False)
class Binding:
    """What gives a name its meaning.

    - how: `import`, `value`, `update` (such as +=), `part` (of a tuple), `element` (of an iterable), `parameter`,
      `definition`, or `other`.
    - node: the statement. value: the expression; target: an import's dotted name; index: of the part.
    - at: its place in the order of the program.
    """

    name: str
    how: str
    node: ast.AST
    at: int
    value: ast.expr | None = None
    target: str = ""
    index: int = 0


Leaf: TypeAlias = "ast.expr | Binding"


class Scope:
    """A module, class or function. outer: names that `global` or `nonlocal` gives to another scope."""

    def __init__(self, node: ast.AST, parent: Scope | None):
        self.node, self.parent = node, parent
        self.bound: dict[str, list[Binding]] = defaultdict(list)
        self.outer: set[str] = set()

    def place_of(self, name: str) -> Scope:
        """The scope in which a statement here binds the name."""
        if name not in self.outer:
            return self
        above = self.parent
        while above is not None and above.parent is not None and name not in above.bound:
            above = above.parent
        return above or self


class Flow:
    """A parsed program with its scopes."""

    def __init__(self, tree: ast.Module):
        self.tree = tree
        self.parent: dict[ast.AST, ast.AST] = {}
        self.field: dict[ast.AST, str] = {}  # of its parent
        self.scope: dict[ast.AST, Scope] = {}
        self.inner: dict[ast.AST, Scope] = {}  # what a function or class makes
        self.order: dict[ast.AST, int] = {}
        self.last: dict[ast.AST, int] = {}
        self.stars: list[str] = []
        self.attributes: dict[str, list[Binding]] = defaultdict(list)
        self._count = 0
        self._walk(tree, Scope(tree, None))
        for imported in self.nodes(ast.Import):
            self._bind_import(imported)
        for imported_from in self.nodes(ast.ImportFrom):
            self._bind_from(imported_from)
        for node in self.nodes(ast.stmt, ast.comprehension, ast.NamedExpr, ast.withitem):
            self._bind(node)
        for function in self.nodes(*FUNCTIONS):
            self._bind_parameters(function)
        self.calls: list[ast.Call] = list(self.nodes(ast.Call))
        self._following: set[ast.expr] = set()
        self._called: dict[ast.Call, ast.AST | None] = {}
        self._sites: dict[ast.AST, list[tuple[ast.Call, int]]] | None = None
        self._escaped: set[ast.AST] = set()
        self._sites = self._find_sites()

    # -- the tree ----------------------------------------------------------------------

    def _walk(self, node: ast.AST, scope: Scope) -> None:
        stack: list[tuple[ast.AST, Scope, bool]] = [(node, scope, False)]
        while stack:
            one, around, done = stack.pop()
            if done:
                self.last[one] = self._count
                continue
            self.order[one] = self._count = self._count + 1
            self.scope[one] = around
            inner = Scope(one, around) if isinstance(one, (*FUNCTIONS, ast.ClassDef)) else around
            stack.append((one, around, True))
            for name, child in reversed(list(_children(one))):
                self.parent[child], self.field[child] = one, name
                stack.append((child, inner, False))
            if inner is not around:
                self.inner[one] = inner

    def nodes(self, *kinds: type[Node]) -> Iterator[Node]:
        """Nodes of these kinds, in the order of the program."""
        return (node for node in self.order if isinstance(node, kinds))

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Each (parent, child) on the way up."""
        while node in self.parent:
            yield self.parent[node], node
            node = self.parent[node]

    def function_of(self, node: ast.AST) -> Function | None:
        return next((up for up, _ in self.above(node) if isinstance(up, FUNCTIONS)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        return next((up for up, _ in self.above(node) if isinstance(up, ast.ClassDef)), None)

    def statement_of(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parent[node]
        return node

    def block_of(self, statement: ast.AST) -> list[ast.stmt]:
        """The list of statements that one is in."""
        found = getattr(self.parent.get(statement), self.field.get(statement, ""), None)
        return found if isinstance(found, list) and isinstance(statement, ast.stmt) else []

    def loops(self, node: ast.AST) -> list[ast.AST]:
        """The loops around a node in its function, the innermost first; not those whose iterable or `else` it is in."""
        found: list[ast.AST] = []
        for up, child in self.above(node):
            if isinstance(up, FUNCTIONS):
                break
            if isinstance(up, LOOPS) and self.field[child] == "body":
                found.append(up)
        return found

    def inside(self, node: ast.AST, outer: ast.AST) -> bool:
        return self.order[outer] <= self.order[node] <= self.last[outer]

    # -- what binds --------------------------------------------------------------------

    def _add(self, node: ast.AST, name: str, how: str, at: int, value: ast.expr | None = None,
             target: str = "", index: int = 0) -> None:  # fmt: skip
        place = self.scope[node].place_of(name)
        place.bound[name].append(Binding(name, how, node, at, value, target, index))

    def _bind(self, node: ast.AST) -> None:
        match node:
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                self.scope[node].outer.update(names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._add(node, node.name, "definition", self.order[node])
            case ast.Assign():
                for each in node.targets:
                    self._bind_target(node, each, node.value, "value", self.last[node])
            case ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value):
                self._bind_target(node, node.target, value, "value", self.last[node])
            case ast.AugAssign():
                self._bind_target(node, node.target, node.value, "update", self.last[node])
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                self._bind_target(node, node.target, node.iter, "element", self.last[node.iter])
            case ast.withitem(optional_vars=ast.expr() as target):
                self._bind_target(self.parent[node], target, node.context_expr, "other", self.last[node.context_expr])

    def _bind_import(self, node: ast.Import) -> None:
        for one in node.names:
            first = one.name.split(".")[0]
            self._add(node, one.asname or first, "import", self.last[node], target=one.name if one.asname else first)

    def _bind_from(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for one in node.names:
            if one.name == "*":
                self.stars.append(module)
            else:
                target = f"{module}.{one.name}" if module.strip(".") else f"{module}{one.name}"
                self._add(node, one.asname or one.name, "import", self.last[node], target=target)

    def _bind_target(self, node: ast.AST, target: ast.expr, value: ast.expr, how: str, at: int) -> None:
        match target:
            case ast.Name():
                self._add(node, target.id, how, at, value)
            case ast.Attribute():
                path = self.path_of(target)
                self.attributes[path].append(Binding(path, how, self.statement_of(node), at, value))
            case ast.Starred():
                self._bind_target(node, target.value, value, "other", at)
            case ast.Tuple() | ast.List():
                own = value.elts if isinstance(value, (ast.Tuple, ast.List)) and how == "value" else []
                for i, each in enumerate(target.elts):
                    if len(own) == len(target.elts):
                        self._bind_target(node, each, own[i], how, at)
                    elif isinstance(each, ast.Name):
                        kind = "part" if how == "value" else how
                        self.scope[node].place_of(each.id).bound[each.id].append(
                            Binding(each.id, kind, node, at, value, "", i)
                        )
                    else:
                        self._bind_target(node, each, value, "other", at)

    def _bind_parameters(self, function: ast.AST) -> None:
        assert isinstance(function, FUNCTIONS)
        for one in parameters(function):
            found = Binding(one.arg, "parameter", function, self.order[one])
            self.inner[function].bound[one.arg].append(found)

    def path_of(self, node: ast.expr) -> str:
        """`self.loader` of a class as `Class.loader`, else the text of names with dots."""
        if not isinstance(node, ast.Attribute):
            return node.id if isinstance(node, ast.Name) else "?"
        own = self.class_of(node)
        if isinstance(node.value, ast.Name) and node.value.id == "self" and own is not None:
            return f"<{own.name}>.{node.attr}"
        return f"{self.path_of(node.value)}.{node.attr}"

    # -- what a name may be ------------------------------------------------------------

    def bindings(self, use: ast.Name) -> list[Binding]:
        """Those that may reach this use; none for a builtin."""
        scope: Scope | None = self.scope[use]
        here = scope
        while scope is not None:
            hidden = isinstance(scope.node, ast.ClassDef) and scope is not here
            if use.id in scope.bound and not hidden:
                known = scope.bound[use.id]
                return self._reaching(use, known) if scope is here else known
            scope = scope.parent
        return []

    def _reaching(self, use: ast.Name, known: list[Binding]) -> list[Binding]:
        at = self.order[use]
        before = [one for one in known if one.at < at and not self._apart(one, use)]
        kills = [one for one in before if one.how != "update" and self._dominates(one, use)]
        least = max((one.at for one in kills), default=-1)
        found = [one for one in before if one.at >= least]
        loops = self.loops(use)
        around = [loop for loop in loops if least < self.order[loop]]
        found += [b for b in known if b.at >= at and any(self.inside(b.node, loop) for loop in around)]
        return found or known

    def _dominates(self, binding: Binding, use: ast.AST) -> bool:
        """Whether the use cannot be reached but through the binding."""
        node = binding.node
        if binding.how == "parameter":
            return True
        if isinstance(node, ast.comprehension):
            return self.inside(use, self.parent[node])
        if isinstance(node, (ast.For, ast.AsyncFor)):
            return self.inside(use, node) and not self.inside(use, node.iter)
        if not isinstance(node, ast.stmt):
            node = self.statement_of(node)
        owner, field = self.parent[node], self.field[node]
        if not self.inside(use, owner):
            return False
        return any(up is owner and self.field[child] == field for up, child in self.above(use))

    def _apart(self, binding: Binding, use: ast.AST) -> bool:
        """Whether they are in two branches of one `if`, or the binding's branch leaves before the use."""
        ups = dict(self.above(use))
        if isinstance(binding.node, ast.comprehension):
            return not self.inside(use, self.parent[binding.node])
        for up, child in self.above(binding.node):
            if up in ups:
                return isinstance(up, ast.If) and self.field[child] != self.field[ups[up]]
            block = self.block_of(child)
            if block and isinstance(block[-1], (ast.Return, ast.Raise)) and not self.inside(use, up):
                return True
        return False

    # -- what an expression may be -----------------------------------------------------

    def origins(self, expr: ast.expr) -> list[Leaf]:
        """Expressions that are no names, and bindings that cannot be followed, which this may stand for."""
        if expr in self._following:
            return []
        if len(self._following) > DEPTH:
            return [expr]
        self._following.add(expr)
        try:
            return list(self._followed(expr))
        finally:
            self._following.discard(expr)

    def _followed(self, expr: ast.expr) -> Iterator[Leaf]:
        match expr:
            case ast.Name():
                known = self.bindings(expr)
                if not known:
                    yield expr
                for one in known:
                    yield from self._of_binding(one)
            case ast.Attribute():
                for value in self._of_attribute(expr):
                    yield from self.origins(value) if value is not expr else (expr,)
            case ast.Call():
                yield from self._of_call(expr, None)
            case _:
                parts = _alternatives(expr)
                for value in parts:
                    yield from self.origins(value)
                if not parts:
                    yield expr

    def _of_attribute(self, use: ast.Attribute) -> Iterator[ast.expr]:
        """Values that this program gives an attribute; with itself where another may be left, as in `args.rank`."""
        path = self.path_of(use)
        known, at, scope = self.attributes.get(path, []), self.order[use], self.scope[use]
        here = [b for b in known if self.scope[b.node] is scope and b.at < at and self._dominates(b, use)]
        if here:
            known = [b for b in known if self.scope[b.node] is not scope or b.at >= here[-1].at]
        elif not path.startswith("<") or not known:
            yield use
        for one in known:
            if one.how == "value" and one.value is not None:
                yield one.value
            else:
                yield use

    def _of_binding(self, one: Binding) -> Iterator[Leaf]:
        if one.how == "value" and one.value is not None:
            yield from self.origins(one.value)
        elif one.how == "part" and isinstance(one.value, ast.Call):
            yield from self._of_call(one.value, one)
        elif one.how == "parameter":
            yield from self._of_parameter(one)
        elif one.how != "update":
            yield one

    def _of_call(self, call: ast.Call, part: Binding | None) -> Iterator[Leaf]:
        """What an own function returns, or its part of a tuple."""
        function = self.called(call)
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield call if part is None else part
            return
        returned = [r.value for r in own_nodes(function) if isinstance(r, ast.Return) and r.value is not None]
        yields = any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in own_nodes(function))
        if not returned or yields or function.decorator_list:
            yield call if part is None else part
            return
        for value in returned:
            if part is None:
                yield from self.origins(value)
            elif isinstance(value, ast.Tuple) and part.index < len(value.elts):
                yield from self.origins(value.elts[part.index])
            else:
                yield part

    def _of_parameter(self, one: Binding) -> Iterator[Leaf]:
        function = one.node
        sites = self.sites(function)  # none while they are looked for
        if not sites or function in self._escaped:
            yield one
        for call, skipped in sites:
            value = argument_of(function, one.name, call, skipped)
            if value is None:
                yield one
            else:
                yield from self.origins(value)

    # -- own functions -----------------------------------------------------------------

    def called(self, call: ast.Call) -> ast.AST | None:
        """The function or class of this program that a call calls."""
        if call not in self._called:
            self._called[call] = None  # while it is looked for
            self._called[call] = self._callee(call)
        return self._called[call]

    def _callee(self, call: ast.Call) -> ast.AST | None:
        match call.func:
            case ast.Name():
                known = self.bindings(call.func)
                return known[0].node if len(known) == 1 and known[0].how == "definition" else None
            case ast.Attribute(value=ast.Name(id="self")):
                own = self.class_of(call)
                return method(own, call.func.attr) if own is not None else None
            case ast.Attribute():
                found = [
                    self.called(one) if isinstance(one, ast.Call) else None for one in self.origins(call.func.value)
                ]
                classes = {one for one in found if isinstance(one, ast.ClassDef)}
                return method(classes.pop(), call.func.attr) if len(classes) == 1 else None
        return None

    def sites(self, function: ast.AST) -> list[tuple[ast.Call, int]]:
        """Calls of an own function, and how many of its parameters a call does not give, such as `self`."""
        return self._sites.get(function, []) if self._sites is not None else []

    def escapes(self, function: ast.AST) -> bool:
        """Whether something else than a call of this program may call it."""
        return function in self._escaped

    def _find_sites(self) -> dict[ast.AST, list[tuple[ast.Call, int]]]:
        found: dict[ast.AST, list[tuple[ast.Call, int]]] = defaultdict(list)
        callees = set()
        for call in self.calls:
            function = self.called(call)
            if isinstance(function, ast.ClassDef):
                callees.add(call.func)
                function = method(function, "__init__")
                if function is not None:
                    found[function].append((call, 1))
            elif function is not None:
                callees.add(call.func)
                found[function].append((call, int(isinstance(self.parent[function], ast.ClassDef))))
            elif self.dotted(call.func) in SPAWN and call.args and isinstance(call.args[0], ast.Name):
                callees.add(call.args[0])
                for one in self.bindings(call.args[0]):
                    if one.how == "definition":
                        found[one.node].append((call, -1))
        for node in self.nodes(ast.Name):
            if node not in callees and isinstance(node.ctx, ast.Load):
                self._escaped.update(b.node for b in self.bindings(node) if b.how == "definition")
        return found

    # -- dotted names ------------------------------------------------------------------

    def dotted(self, expr: ast.expr) -> str:
        """`torch.distributed.barrier` for `dist.barrier`; empty for what is no import."""
        if isinstance(expr, ast.Attribute):
            above = self.dotted(expr.value)
            return f"{above}.{expr.attr}" if above else ""
        if not isinstance(expr, ast.Name):
            return ""
        known = self.bindings(expr)
        targets = {one.target for one in known}
        if not known:
            own = () if hasattr(builtins, expr.id) else self.stars
            return next((f"{star}.{expr.id}" for star in own if star.startswith("torch")), "")
        if any(one.how != "import" for one in known):
            return ""
        return targets.pop() if len(targets) == 1 else _common(targets)


def _common(targets: Iterable[str]) -> str:
    """The torch one of several, as in `try: from apex … except ImportError: from torch …`."""
    found = [one for one in targets if one.startswith("torch.")]
    return found[0] if len(found) == 1 else ""


def _alternatives(expr: ast.expr) -> list[ast.expr]:
    """Expressions one of which is the value of this one. `model.module if … else model` is the module of a wrapper."""
    match expr:
        case ast.IfExp(body=ast.Attribute(attr="module", value=model) as body, orelse=other):
            return [body] if ast.dump(model) == ast.dump(other) else [body, other]
        case ast.IfExp(body=body, orelse=other):
            return [body, other]
        case ast.BoolOp(values=values):
            return values
        case ast.NamedExpr(value=value) | ast.Await(value=value):
            return [value]
    return []


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """With the names of their fields."""
    for name, value in ast.iter_fields(node):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.AST):
                yield name, one


def parameters(function: Function) -> list[ast.arg]:
    args = function.args
    more = [one for one in (args.vararg, args.kwarg) if one is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *more]


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, in order, without those of functions and classes in it."""
    stack = list(reversed(list(ast.iter_child_nodes(function))))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            stack += reversed(list(ast.iter_child_nodes(node)))


def method(own: ast.ClassDef, name: str) -> ast.AST | None:
    return next((one for one in own.body if isinstance(one, ast.FunctionDef) and one.name == name), None)


def keyword(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """An argument by its name or its position."""
    for one in call.keywords:
        if one.arg == name:
            return one.value
    plain = [one for one in call.args if not isinstance(one, ast.Starred)]
    if position is not None and len(plain) == len(call.args) and position < len(plain):
        return plain[position]
    return None


def open_ended(call: ast.Call) -> bool:
    """Whether it has `*words` or `**options`, which may be anything."""
    return any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)


def argument_of(function: ast.AST, name: str, call: ast.Call, skipped: int) -> ast.expr | None:
    """What a call gives for a parameter; None if that is not said. skipped -1: `mp.spawn`, which adds the first."""
    assert isinstance(function, FUNCTIONS)
    args = function.args
    names = [one.arg for one in (*args.posonlyargs, *args.args)]
    if skipped < 0:
        passed = keyword(call, "args", 1)
        at = names.index(name) - 1 if name in names else -1
        return passed.elts[at] if isinstance(passed, ast.Tuple) and 0 <= at < len(passed.elts) else None
    if open_ended(call):
        return None
    position = names.index(name) - skipped if name in names else -1
    given = keyword(call, name, position if position >= 0 else None)
    if given is not None or name not in names:
        return given
    defaults = dict(zip(reversed(names), reversed(args.defaults), strict=False))
    return defaults.get(name)
