"""The meaning of values in a data-parallel program, such as a rank, a DDP model or a sampler, and who reaches a line.

Two questions need opposite care. `on_some_ranks` is true if a condition surely differs by rank, `on_all_ranks` if
surely every rank gets there. Where neither is known, both are false and the rules are silent. Pure: `ast` alone.
"""

from __future__ import annotations

import ast
import re
import sys
from bisect import bisect
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TypeAlias

from nbddp.capabilities.lint.flow import (
    FUNCTIONS,
    LEAVES,
    Binding,
    Flow,
    Function,
    Leaf,
    parameters,
)

DIST = "torch.distributed"
DDP, SAMPLER, LOADER = "ddp", "sampler", "loader"
RANK, LOCAL, NODE, WORLD, SPAWNED, NAMED = "rank", "local rank", "node rank", "world size", "spawn index", "named rank"
OPTIMIZER, SCHEDULER, INNER = "optimizer", "scheduler", "module of ddp"
RANKS = {RANK, LOCAL, NODE, SPAWNED, NAMED}

SAME = (  # other places of the same class
    ("torch.nn.parallel.distributed.", "torch.nn.parallel."),
    ("torch.utils.data.distributed.", "torch.utils.data."),
    ("torch.utils.data.dataloader.", "torch.utils.data."),
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
)
CLASSES = {
    "torch.nn.parallel.DistributedDataParallel": DDP,
    "torch.utils.data.DistributedSampler": SAMPLER,
    "torch.utils.data.DataLoader": LOADER,
}
OF_GROUP = {f"{DIST}.get_rank": RANK, f"{DIST}.get_node_local_rank": LOCAL, f"{DIST}.get_world_size": WORLD}
VARIABLES = {
    "RANK": RANK, "SLURM_PROCID": RANK, "OMPI_COMM_WORLD_RANK": RANK, "PMI_RANK": RANK,
    "LOCAL_RANK": LOCAL, "SLURM_LOCALID": LOCAL, "OMPI_COMM_WORLD_LOCAL_RANK": LOCAL, "MPI_LOCALRANKID": LOCAL,
    "GROUP_RANK": NODE, "NODE_RANK": NODE, "SLURM_NODEID": NODE,
    "WORLD_SIZE": WORLD, "SLURM_NTASKS": WORLD, "OMPI_COMM_WORLD_SIZE": WORLD,
}  # fmt: skip
NAMES = {"rank", "global_rank", "world_rank", "local_rank", "ddp_rank", "ddp_local_rank", "rank_id"}
FIRST = {  # of functions that other modules have
    "is_main_process", "is_master", "is_master_process", "is_rank_zero", "is_rank_0", "is_rank0", "is_main_rank",
    "is_global_master", "is_primary", "is_local_master",
}  # fmt: skip
GUARD = re.compile(
    r"rank|main|master|primary|chief|root|leader|zero|first|local|proc|gpu|device|node|save|writ|log|verbose|worker"
    r"|accelerator|fabric|host|pid|uuid|uid|time|date|random|tmp|temp|seed|coord|replica|shard|idx|jax|xla|env"
    r"|leaves|dist|ddp|world|parallel|single|multi|fsdp|mesh|group|stage|role|expert|id$|_r$|^r$"
)
TWO = re.compile(r"dist|ddp|parallel|world|multi")  # of a condition that asks whether there are several ranks
PLAIN = {  # calls whose result is that of their arguments
    "int", "str", "float", "len", "max", "min", "round", "abs", "bool", "range", "enumerate", "zip", "sum", "sorted",
    "os.path.join", "os.path.basename", "os.path.dirname", "os.path.abspath", "os.fspath", "pathlib.Path", "format",
}  # fmt: skip
TEXT = {"format", "join", "replace", "strip", "lower", "upper", "with_suffix", "joinpath", "resolve", "absolute"}
KNOWN = sys.stdlib_module_names | {
    "torch", "torchvision", "torchaudio", "torchtext", "numpy", "scipy", "tqdm", "PIL", "cv2", "sklearn", "pandas",
    "matplotlib", "datasets", "transformers", "tokenizers", "tiktoken", "einops", "yaml", "wandb", "tensorboard",
    "tensorboardX", "timm", "nbddp", "IPython",
}  # fmt: skip


Condition: TypeAlias = tuple[ast.expr, bool]  # a test, and whether it is true


class Meaning(Flow):
    """A program, with what its values mean.

    cells: whether it is the `%%ddp` cells of a notebook; notebook: whether it is cells at all. some_ranks: lines of
    statements that some ranks alone run; starts: at which lines cells begin.
    """

    def __init__(
        self, tree: ast.Module, cells: bool, notebook: bool, some_ranks: frozenset[int], starts: Sequence[int]
    ):
        self.cells, self.notebook, self.some_ranks, self._starts = cells, notebook or cells, some_ranks, starts
        self._kinds: dict[ast.expr, frozenset[str]] = {}
        self._tests: dict[ast.match_case, ast.Compare] = {}
        super().__init__(tree)

    # -- the program -------------------------------------------------------------------

    def named(self, *names: str) -> list[ast.Call]:
        """Calls of these functions, by their dotted names."""
        return [call for call in self.calls if self.name_of(call) in names]

    def methods(self, name: str) -> list[tuple[ast.Call, ast.expr]]:
        """Calls of methods of this name, each with what it is called on."""
        return [(c, c.func.value) for c in self.calls if isinstance(c.func, ast.Attribute) and c.func.attr == name]

    def name_of(self, call: ast.Call) -> str:
        return self._callees.get(call, "")

    @cached_property
    def _callees(self) -> dict[ast.Call, str]:
        return {call: same_name(self.dotted(call.func)) for call in self.calls}

    @cached_property
    def words(self) -> set[str]:
        """All names and attributes that the program has."""
        found = {node.id for node in self.nodes(ast.Name)} | {node.attr for node in self.nodes(ast.Attribute)}
        imports = [one for node in self.nodes(ast.ImportFrom, ast.Import) for one in getattr(node, "names", ())]
        found |= {one.name.rsplit(".")[-1] for one in imports}
        return found | {n.name for n in self.nodes(ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
                        if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))}  # fmt: skip

    @cached_property
    def texts(self) -> set[str]:
        """All strings that it has."""
        found = (node.value for node in self.nodes(ast.Constant))
        return {value for value in found if isinstance(value, str)}

    @cached_property
    def closed(self) -> bool:
        """Whether nothing is imported but well-known libraries: what is not in this file is nowhere."""
        for node in self.nodes(ast.Import, ast.ImportFrom):
            if isinstance(node, ast.ImportFrom):
                if node.level or (node.module or "").split(".")[0] not in KNOWN:
                    return False
            elif isinstance(node, ast.Import) and any(one.name.split(".")[0] not in KNOWN for one in node.names):
                return False
        return True

    @cached_property
    def wraps(self) -> list[ast.Call]:
        """Calls that make a DDP model."""
        return self.named("torch.nn.parallel.DistributedDataParallel")

    @cached_property
    def spawns(self) -> bool:
        """Whether it starts its ranks itself, so that what no spawned function reaches is one process alone."""
        for call in self.calls:
            callee = ast.unparse(call.func)
            if re.search(r"launch|spawn|Process\b|submit", callee):
                given = [*call.args, *(each.value for each in call.keywords)]
                if any(self._is_function(each) for each in given):
                    return True
        return False

    def _is_function(self, expr: ast.expr) -> bool:
        return isinstance(expr, ast.Name) and any(b.how in ("definition", "import") for b in self.bindings(expr))

    @cached_property
    def distributed(self) -> bool:
        """Whether several ranks run it."""
        return self.cells or bool(self.inits or self.wraps)

    @cached_property
    def one_node(self) -> bool:
        """Whether it says itself that it runs on one node: it spawns its ranks, or they meet on localhost."""
        if self.spawns:
            return True
        return any(re.search(r"localhost|127\.0\.0\.1", text) for text in self.texts)

    def is_model_call(self, node: ast.AST) -> bool:
        """`ddp(x)`."""
        return isinstance(node, ast.Call) and self.may(node.func, DDP)

    @cached_property
    def inits(self) -> list[ast.Call]:
        return self.named(f"{DIST}.init_process_group")

    # -- kinds of values ---------------------------------------------------------------

    def kinds(self, expr: ast.expr) -> frozenset[str]:
        """What it may be; `?` for anything else."""
        if expr not in self._kinds:
            self._kinds[expr] = frozenset({"?"})  # while it is looked for
            found = frozenset(kind for leaf in self.origins(expr) for kind in self._kinds_of(leaf))
            self._kinds[expr] = found or frozenset({"?"})
        return self._kinds[expr]

    def must(self, expr: ast.expr, *kinds: str) -> bool:
        """Whether it is one of these, whatever way the program takes."""
        return self.kinds(expr) <= set(kinds)

    def may(self, expr: ast.expr, *kinds: str) -> bool:
        return bool(self.kinds(expr) & set(kinds))

    def _kinds_of(self, leaf: Leaf) -> frozenset[str]:
        if isinstance(leaf, Binding):
            if leaf.how == "parameter":
                return self._of_parameter_kind(leaf)
            return frozenset({"?"})
        match leaf:
            case ast.Call():
                return self._of_call_kind(leaf)
            case ast.Subscript(value=value, slice=ast.Constant(value=str() as name)):
                return one(VARIABLES.get(name, "?") if self.dotted(value) == "os.environ" else "?")
            case ast.Attribute(attr="module") if self.may(leaf.value, DDP):
                return one(INNER)
            case ast.Attribute(attr=name) if name in NAMES:
                return one(NAMED)
            case ast.Name(id=name) if name.lower() in NAMES:
                return one(NAMED)
        return one("?")

    def _of_parameter_kind(self, leaf: Binding) -> frozenset[str]:
        function = leaf.node
        assert isinstance(function, FUNCTIONS)
        first = parameters(function)[0].arg == leaf.name
        if first and any(skipped == -1 for _, skipped in self.sites(function)):
            return one(SPAWNED)
        return one(NAMED if leaf.name in NAMES else "?")

    def _of_call_kind(self, call: ast.Call) -> frozenset[str]:
        name = self.name_of(call)
        if name in CLASSES:
            return one(CLASSES[name])
        if name.startswith("torch.optim.lr_scheduler."):
            return one(SCHEDULER)
        if name.startswith("torch.optim.") and name.count(".") == 2:
            return one(OPTIMIZER)
        if name in OF_GROUP:
            return one("?" if call.args or call.keywords else OF_GROUP[name])
        if name in ("os.environ.get", "os.getenv") and call.args and isinstance(call.args[0], ast.Constant):
            return one(VARIABLES.get(str(call.args[0].value), "?"))
        if isinstance(call.func, ast.Name) and call.func.id in ("int", "str") and len(call.args) == 1:
            return self.kinds(call.args[0])
        if name == "torch.compile" and call.args:
            return self.kinds(call.args[0])
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cuda", "train", "eval"):
            return self.kinds(call.func.value)
        return one("?")

    def is_rank(self, expr: ast.expr) -> bool:
        """Surely a number that tells ranks apart."""
        return self.must(expr, *RANKS)

    # -- conditions --------------------------------------------------------------------

    def on_some_ranks(self, test: ast.expr, true: bool = True, depth: int = 0) -> bool:
        """Whether a condition that is `true` (or is not) surely holds on some ranks and not on others."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.on_some_ranks(operand, not true, depth)
            case ast.BoolOp(op=op, values=values):
                found = [self.on_some_ranks(value, true, depth) for value in values]
                if isinstance(op, ast.And) is true:
                    return any(found)
                left = [value for value, one in zip(values, found, strict=True) if not one]
                return any(found) and all(self._asks_for_one(value, true) for value in left)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compares_ranks(left, op, right)
            case ast.Call(func=ast.Name(id=name)) if name in FIRST and self.called(test) is None:
                return True
            case ast.Call(func=ast.Attribute(attr=name)) if name in FIRST and not test.args:
                return True
            case ast.Name() | ast.Call() if depth < 4:
                return self.is_rank(test) or self._all_by_rank(test, true, depth)
        return isinstance(test, ast.Attribute) and self.is_rank(test)

    def _all_by_rank(self, test: ast.expr, true: bool, depth: int) -> bool:
        """Whether each value of a name is such a condition, besides True for programs of one process."""
        found = self.origins(test)
        values = [one for one in found if not (isinstance(one, ast.Constant) and isinstance(one.value, bool))]
        return bool(values) and all(
            isinstance(one, ast.expr) and one is not test and self.on_some_ranks(one, true, depth + 1) for one in values
        )

    def _asks_for_one(self, test: ast.expr, true: bool) -> bool:
        """`not distributed`, `world_size == 1`: false where there are several ranks; if not `true`, the opposite."""
        text = ast.unparse(test)
        one = text.startswith("not ") or "== 1" in text or "< 2" in text
        return bool(TWO.search(text.lower())) and one is true

    def _compares_ranks(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool:
        value = right
        if self._of_rank(right) and not self._of_rank(left):
            left, value = right, left
        if not self._of_rank(left) or isinstance(op, (ast.Is, ast.IsNot)):
            return False
        number = ast.literal_eval(value) if _is_number(value) else None
        if number is not None and number < 0:
            return False  # whether there are ranks at all
        if number == 0 and isinstance(op, (ast.GtE, ast.Lt)):
            return False
        return not (isinstance(value, ast.Constant) and value.value in (None, ""))

    def _of_rank(self, expr: ast.expr) -> bool:
        if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Mod):
            return self.is_rank(expr.left)
        return self.is_rank(expr)

    def conditions(self, node: ast.AST) -> list[Condition]:
        """Conditions that hold where a node of a function is reached."""
        found = []
        for up, child in self.above(node):
            if isinstance(up, (ast.If, ast.While, ast.IfExp)) and child is not up.test:
                found.append((up.test, self.field[child] == "body"))
            elif isinstance(up, ast.BoolOp):
                at = next(i for i, value in enumerate(up.values) if value is child)
                found += [(value, isinstance(up.op, ast.And)) for value in up.values[:at]]
            elif isinstance(up, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
                within = not isinstance(child, ast.comprehension)
                found += [(test, True) for one in up.generators for test in one.ifs if within]
            elif (
                isinstance(up, (ast.For, ast.AsyncFor)) and self.field[child] == "body" and self._may_be_empty(up.iter)
            ):
                found.append((up.iter, True))
            elif isinstance(up, ast.Match) and isinstance(child, ast.match_case):
                found += self._of_cases(up, child)
            found += self._left_before(child)
            if isinstance(up, FUNCTIONS):
                break
        return found

    def _may_be_empty(self, items: ast.expr) -> bool:
        """Whether a loop's items depend on the rank, or are what a generator of the program yields."""
        parts = [node for node in ast.walk(items) if isinstance(node, (ast.Name, ast.Attribute, ast.Call))]
        return any(self.is_rank(one) or (isinstance(one, ast.Call) and self._yields(one)) for one in parts)

    def _yields(self, call: ast.Call) -> bool:
        function = self.called(call)
        return function is not None and any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in ast.walk(function))

    def _of_cases(self, match: ast.Match, case: ast.match_case) -> Iterator[Condition]:
        """`case 0:` as `subject == 0`, which is false in the cases below; the subject itself for another pattern."""
        for one in match.cases[: match.cases.index(case) + 1]:
            if one.guard is not None:
                yield one.guard, one is case
            if isinstance(one.pattern, ast.MatchValue):
                yield self._equal(match.subject, one), one is case
            elif not (isinstance(one.pattern, ast.MatchAs) and one.pattern.pattern is None):
                yield match.subject, one is case

    def _equal(self, subject: ast.expr, case: ast.match_case) -> ast.Compare:
        """The test of a case, as a node of the tree."""
        if case not in self._tests:
            assert isinstance(case.pattern, ast.MatchValue)
            made = self._tests[case] = ast.Compare(subject, [ast.Eq()], [case.pattern.value])
            self.parent[made], self.field[made], self.scope[made] = case, "pattern", self.scope[case]
            self.order[made], self.last[made] = self.order[case.pattern], self.last[case.pattern]
        return self._tests[case]

    def _left_before(self, child: ast.AST) -> Iterator[Condition]:
        """`if …: return` above a statement: its condition is false here. What ends a cell ends no later one."""
        for one in self.block_of(child) if isinstance(child, ast.stmt) else ():
            if one is child:
                break
            if self.cell_of(one) != self.cell_of(child):
                continue
            if isinstance(one, ast.If) and leaves(one.body):
                yield one.test, False
            elif isinstance(one, ast.If) and one.orelse and leaves(one.orelse):
                yield one.test, True

    def guard(self, node: ast.AST) -> Condition | None:
        """A condition, in the node's function, that surely keeps some ranks from it."""
        return next((one for one in self.conditions(node) if self.on_some_ranks(*one)), None)

    def on_all_ranks(self, node: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> bool:
        """Whether surely every rank of a run with several gets there, as far as conditions by rank go."""
        if self.statement_line(node) in self.some_ranks:
            return False
        if not all(self._is_plain(test, true) for test, true in self.conditions(node)):
            return False
        if any(isinstance(up, (ast.With, ast.AsyncWith)) and not self._plain_with(up) for up, _ in self.above(node)):
            return False
        function = self.function_of(node)
        if function is None:
            return self.class_of(node) is None and not self.spawns
        if function in seen or isinstance(function, ast.Lambda) or not self._plain_decorators(function):
            return False
        sites = self.sites(function)
        return any(skip < 0 or self.on_all_ranks(call, seen | {function}) for call, skip in sites)

    def statement_line(self, node: ast.AST) -> int:
        """The line at which the module's own statement begins that a node is in."""
        top = next((child for up, child in self.above(node) if up is self.tree), node)
        return getattr(top, "lineno", 0)

    def cell_of(self, node: ast.AST) -> int:
        """Which cell's row this is; a script is one cell."""
        return bisect(self._starts, self.statement_line(node))

    def _plain_decorators(self, function: Function) -> bool:
        known = {"staticmethod", "classmethod", "torch.no_grad", "torch.inference_mode", "property",
                 "torch.distributed.elastic.multiprocessing.errors.record"}  # fmt: skip
        found = getattr(function, "decorator_list", ())
        return all(self.dotted(_callee(d)) in known or ast.unparse(d) in known for d in found)

    def _plain_with(self, node: ast.With | ast.AsyncWith) -> bool:
        """Whether what stands behind `with` surely sends all ranks into its body."""
        texts = [
            self.dotted(_callee(item.context_expr)) or ast.unparse(_callee(item.context_expr)) for item in node.items
        ]
        return all(text == "open" or text.startswith("torch.") or text.endswith((".no_sync", ".join", "tqdm"))
                   for text in texts)  # fmt: skip

    def _is_plain(self, test: ast.expr, true: bool) -> bool:
        """Whether a condition surely does not tell ranks apart, or only asks whether there are several."""
        text = ast.unparse(test)
        if text == "__name__ == '__main__'":
            return true
        if isinstance(test, (ast.Name, ast.Attribute)) and true and TWO.search(text) and not self.kinds(test) & RANKS:
            return True
        if text.endswith("is_initialized()") and true:
            return True
        return self.same_everywhere(test)

    # -- what is equal on all ranks ----------------------------------------------------

    def same_everywhere(self, expr: ast.expr, depth: int = 0) -> bool:
        """Whether a value is surely equal on all ranks, or at least does not depend on the rank.

        Losses and metrics count as such: they differ, but all ranks have one.
        """
        if depth > 8 or any(GUARD.search(word.lower()) for word in _words(expr)):
            return False
        return all(self._same(leaf, depth + 1) for leaf in self._leaves_of(expr))

    def _leaves_of(self, expr: ast.expr) -> Iterator[Leaf]:
        """Leaves of the names in an expression, and its calls."""
        stack: list[ast.AST] = [expr]
        while stack:
            node = stack.pop()
            if isinstance(node, (ast.Name, ast.Attribute)):
                yield from self.origins(node)
            elif isinstance(node, ast.Call):
                yield node
            else:
                stack += ast.iter_child_nodes(node)

    def _same(self, leaf: Leaf, depth: int) -> bool:
        if isinstance(leaf, Binding):
            return self._same_binding(leaf, depth)
        match leaf:
            case ast.Constant():
                return True
            case ast.Call():
                return self._same_call(leaf, depth)
            case ast.Attribute(value=value):
                return self._is_arguments(value)
            case ast.Name():
                return False
        return self.same_everywhere(leaf, depth)

    def _same_binding(self, leaf: Binding, depth: int) -> bool:
        if GUARD.search(leaf.name.lower()):
            return False
        if leaf.how == "element" and leaf.value is not None:
            counted = isinstance(leaf.value, ast.Call) and ast.unparse(leaf.value.func) == "enumerate"
            return (counted and leaf.index == 0) or self.same_everywhere(leaf.value, depth)
        return False

    def _is_arguments(self, value: ast.expr) -> bool:
        """`args` of `args = parser.parse_args()`: every rank has the same command line."""
        found = self.origins(value)
        return bool(found) and all(
            isinstance(leaf, ast.Call) and isinstance(leaf.func, ast.Attribute) and leaf.func.attr == "parse_args"
            for leaf in found
        )

    def _same_call(self, call: ast.Call, depth: int) -> bool:
        arguments = [*call.args, *(one.value for one in call.keywords)]
        name = self.name_of(call) or (call.func.id if isinstance(call.func, ast.Name) else "")
        if name in PLAIN or name.startswith(("torch.nn.", "torch.optim.")):
            return all(self.same_everywhere(one, depth) for one in arguments)
        if isinstance(call.func, ast.Attribute) and not self.name_of(call):
            method = call.func.attr
            if method in ("item", "mean", "sum", "state_dict", "backward", "parse_args"):
                return True
            return method in TEXT and all(self.same_everywhere(a, depth) for a in (call.func.value, *arguments))
        found = self.origins(call)
        return bool(found) and call not in found and all(self._same(leaf, depth) for leaf in found)


def condition_text(condition: Condition) -> str:
    text = ast.unparse(condition[0])
    return text if condition[1] else f"not ({text})"


def one(kind: str) -> frozenset[str]:
    return frozenset({kind})


def same_name(dotted: str) -> str:
    for old, new in SAME:
        if dotted.startswith(old):
            return new + dotted.removeprefix(old)
    return dotted


def _callee(expr: ast.expr) -> ast.expr:
    return expr.func if isinstance(expr, ast.Call) else expr


def _is_number(expr: ast.expr) -> bool:
    if isinstance(expr, ast.UnaryOp) and isinstance(expr.op, ast.USub):
        expr = expr.operand
    return isinstance(expr, ast.Constant) and type(expr.value) in (int, float)


def _words(expr: ast.AST) -> set[str]:
    """Names and attributes in an expression, without those of functions that are called."""
    found = set()
    for node in ast.walk(expr):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def leaves(block: list[ast.stmt]) -> bool:
    last = block[-1]
    if isinstance(last, LEAVES):
        return True
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return ast.unparse(last.value.func) in ("sys.exit", "exit", "quit", "os._exit")
    return False
