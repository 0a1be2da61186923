"""Holds the map of the package (`map.tsv`) against its sources, and counts what ties core and capabilities together.

`python -m tests.house.check` prints what is counted, and with `--keep` writes the numbers down. It reads the sources,
and imports nothing of the package.

An import counts for the code that uses the name, and for the place where the name is to go. So neither the line of the
import nor the file it names decides, but the parts of files that have rows of their own.
"""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1] / "nbddp"
CORE = [  # from the ground up: a folder imports from itself and from those before it
    {"errors"}, {"compat"}, {"protocol"}, {"launch"}, {"agent"}, {"deadlock"}, {"worker", "output"},
    {"execution"}, {"pool"}, {"notebook"}, {"public"},
]  # fmt: skip
FLOORS = {name: floor for floor, names in enumerate(CORE) for name in names}
TABLE = "capabilities"  # the file of rows, which anybody reads and which imports none of their folders
SHARED = {"analysis", "figures", "compat/extra"}  # what capabilities and lessons share
OTHERS = {"lessons", "teach", "grading", "export"}  # teach and export: public names of what lies elsewhere
LEAST = HERE / "least.json"  # what has been counted, for the test: it goes down alone


@dataclass
class Map:
    targets: dict[str, str]  # path → where the file goes
    parts: dict[str, dict[str, str]]  # path → name of a part → where it goes
    needs: dict[str, set[str]]
    owners: dict[str, str]  # word → the capability that owns it


def read_map() -> Map:
    found = Map({}, defaultdict(dict), {}, {})
    for line in (HERE / "map.tsv").read_text(encoding="utf-8").splitlines():
        cells = line.split("\t")
        if cells[0] == "# needs":
            found.needs[cells[1]] = set(cells[2].split())
        elif cells[0] == "# words":
            found.owners |= dict.fromkeys(cells[2].split(), cells[1])
        elif not line.startswith("#"):
            path, _, part = cells[0].partition("::")
            if part:
                found.parts[path][part] = cells[1]
            else:
                found.targets[path] = cells[1]
    return found


def folder_of(target: str) -> str:
    """`core`'s folders by their names, capabilities with theirs; the package's own files are `public`."""
    first, *rest = target.split("/")
    if first in ("errors.py", "export.py"):
        return first.removesuffix(".py")
    if target.startswith("compat/extra/"):
        return "compat/extra"
    if not rest:
        return "public"
    return f"{first}/{rest[0]}" if first == "capabilities" and len(rest) > 1 else first


def is_known(folder: str) -> bool:
    return folder in FLOORS or folder in SHARED | OTHERS or folder.startswith("capabilities")


@dataclass
class Module:
    path: str
    folder: str
    parts: dict[str, str]  # name → folder
    tree: ast.Module
    spans: list[tuple[int, int, str]] = field(default_factory=list)  # of the parts, outer ones first
    used: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))  # name → line, attribute
    nodes: list[ast.AST] = field(default_factory=list)  # all

    def __post_init__(self) -> None:
        self.nodes = [*ast.walk(self.tree)]
        for part, node in definitions(self.tree.body):
            if part in self.parts:
                first = min(n.lineno for n in [node, *getattr(node, "decorator_list", [])])
                self.spans.append((first, node.end_lineno or first, part))
        taken: dict[int, str] = {id(node.value): node.attr for node in self.nodes if isinstance(node, ast.Attribute)}
        for name in self.nodes:
            if isinstance(name, ast.Name):
                self.used[name.id].append((name.lineno, taken.get(id(name), "")))

    def folder_at(self, line: int) -> str:
        inner = [name for first, last, name in self.spans if first <= line <= last]
        return self.parts[inner[-1]] if inner else self.folder

    def folder_of(self, *name: str) -> str:
        """Where a name that others take from here goes, or an attribute of it."""
        return self.parts.get(".".join(name)) or self.parts.get(name[0]) or self.folder


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = [n for target in targets for n in ast.walk(target)]
            yield from ((prefix + name.id, node) for name in named if isinstance(name, ast.Name))
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{prefix}{node.name}.")


@dataclass(frozen=True)
class Edge:
    source: str
    target: str
    file: str
    line: int
    name: str
    by_text: bool = False


def modules_of(found: Map) -> dict[str, Module]:
    modules = {}
    for path in sorted(ROOT.rglob("*.py")):
        own = str(path.relative_to(ROOT))
        name = own.removesuffix(".py").replace("/", ".").removesuffix("__init__").rstrip(".")
        parts = {part: folder_of(target) for part, target in found.parts.get(own, {}).items()}
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules[name] = Module(own, folder_of(found.targets.get(own, own)), parts, tree)
    return modules


@functools.cache
def known_modules() -> tuple[Map, dict[str, Module]]:
    """The map, and the modules of the package as they are now; read once."""
    found = read_map()
    return found, modules_of(found)


def edges_of(module: Module, modules: dict[str, Module]) -> Iterator[Edge]:
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nbddp":
            base = (node.module or "").partition(".")[2]
            for alias in node.names:
                whole = f"{base}.{alias.name}".lstrip(".")
                for line, attribute in module.used.get(alias.asname or alias.name) or [(node.lineno, "")]:
                    if whole in modules:
                        other, target = whole, modules[whole].folder_of(attribute)
                    else:
                        other, target = base, modules[base].folder_of(alias.name, attribute)
                    yield Edge(module.folder_at(line), target, module.path, line, f"{other}:{alias.name}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("nbddp."):
            other, _, name = node.value.removeprefix("nbddp.").partition(":")  # a target of an import by text
            if other and other in modules:
                target = modules[other].folder_of(name)
                yield Edge(module.folder_at(node.lineno), target, module.path, node.lineno, f"{other}:{name}", True)


@functools.cache
def known_edges() -> dict[str, list[Edge]]:
    """Module → its imports; read once."""
    _, modules = known_modules()
    return {name: [*edges_of(module, modules)] for name, module in modules.items()}


def words_of(module: Module, owners: dict[str, str]) -> Iterator[tuple[str, int, str]]:
    """Core lines with a name, an attribute, a keyword or a text that one capability owns."""
    for node in module.nodes:
        word = {ast.Name: "id", ast.Attribute: "attr", ast.keyword: "arg", ast.Constant: "value"}.get(type(node))
        text = getattr(node, word) if word else None
        if isinstance(text, str) and text in owners and module.folder_at(node.lineno) in FLOORS:  # type: ignore[attr-defined]
            yield module.path, node.lineno, owners[text]  # type: ignore[attr-defined]


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of folders that reach each other."""
    reached = {start: _reached(graph, start) for start in graph}
    found = {frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in graph if a in reached[a]}
    return sorted(sorted(one) for one in found)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [*graph.get(start, ())]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += graph.get(one, ())
    return found


def count() -> tuple[dict[str, Sequence[object]], list[str]]:
    """What is counted, each with its places; and what is wrong with the map."""
    found, modules = known_modules()
    wrong = [m.path for m in modules.values() if not is_known(m.folder)]
    wrong += [path for path in {*found.targets, *found.parts} if not (ROOT / path).exists()]
    wrong += [f"{m.path}::{name}" for m in modules.values() for name in m.parts.keys() - {n for *_, n in m.spans}]
    edges = {e for of_one in known_edges().values() for e in of_one if e.source != e.target}
    once = {
        (e.source, e.target, e.file, e.name): e for e in sorted(edges, key=lambda e: (e.file, e.line), reverse=True)
    }

    graph: dict[str, set[str]] = defaultdict(set)
    for edge in edges:
        if not edge.by_text and TABLE not in (edge.source, edge.target):
            graph[edge.source].add(edge.target)
    some = [*once.values()]
    return {
        "imports from the core to a capability": [e for e in some if e.source in FLOORS and is_outside(e.target)],
        "imports between capabilities without a `needs`": [e for e in some if is_undeclared(e, found.needs)],
        "imports upward in the core": [e for e in some if is_upward(e)],
        "folders in circles": [name for circle in circles(graph) for name in circle],
        "core lines that name a capability": sorted({w for m in modules.values() for w in words_of(m, found.owners)}),
    }, sorted(wrong)


def is_outside(folder: str) -> bool:
    return folder not in FLOORS and folder != TABLE


def is_undeclared(edge: Edge, needs: dict[str, set[str]]) -> bool:
    """What capabilities share imports none of them."""
    source, target = (folder.removeprefix("capabilities/") for folder in (edge.source, edge.target))
    above = edge.source in SHARED or source != edge.source
    return above and target != edge.target and target not in needs.get(source, ())


def is_upward(edge: Edge) -> bool:
    """Also to the folder beside: `worker` and `output` do not know each other."""
    own, other = FLOORS.get(edge.source), FLOORS.get(edge.target)
    return own is not None and other is not None and other >= own and not edge.by_text


if __name__ == "__main__":
    counted, wrong = count()
    for what, places in counted.items():
        print(f"{what}: {len(places)}", *places, sep="\n  ")
    print("wrong in the map:", *wrong)
    if "--keep" in sys.argv:
        from tests.house import measures

        known = json.loads(LEAST.read_text(encoding="utf-8"))
        kept = {what: len(places) for what, places in measures.static(counted).items() if what in known}
        LEAST.write_text(json.dumps(kept, indent=2) + "\n")
