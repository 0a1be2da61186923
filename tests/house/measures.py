"""What the package's design is measured by: size, ties, names, types, and how many files a cell enters.

`python -m tests.house.measures` prints a table; `--paths` starts a pool of two ranks and counts the files that a warm
cell, a failure's report and the figure of a step enter; `--list NAME` prints the places of one measure. A test keeps
the numbers of `tests.house.check` from rising.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from tests.house import check

LONG = 40  # lines of a function
TYPED = ("protocol", "execution", "pool")
LOOSE = {"dict", "Mapping", "MutableMapping"}
TRAINING = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
if not dist.is_initialized(): dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


def static() -> dict[str, list[str]]:
    """Measure → its places, by reading the sources."""
    found = check.modules_of(check.read_map())
    lines = {m.path: len((check.ROOT / m.path).read_text(encoding="utf-8").splitlines()) for m in found.values()}
    core = [m.path for m in found.values() if m.folder in check.FLOORS]
    counted, _ = check.count()
    return {
        "Python lines": [path for path, n in lines.items() for _ in range(n)],
        "lines of the core": [path for path in core for _ in range(lines[path])],
        "files of the core": core,
        **{what: [str(place) for place in places] for what, places in counted.items()},
        "modules with a single importer": sorted(single_importers(found)),
        "class names used twice": sorted(twice(found)),
        "loosely typed dicts in signatures": [f"{m.path}:{line}" for m in found.values() for line in loose(m.tree)],
        "of these in protocol, execution and pool": [
            f"{m.path}:{line}" for m in found.values() if m.folder in TYPED for line in loose(m.tree)
        ],
        f"functions over {LONG} lines": [f"{m.path}:{at}" for m in found.values() for at in long_functions(m.tree)],
    }  # fmt: skip


def single_importers(modules: dict[str, check.Module]) -> Iterator[str]:
    """Modules that one other imports. Not counted: lessons, `compat`, and what a row of the table names."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, module in modules.items():
        for edge in check.edges_of(module, modules):
            importers[edge.name.partition(":")[0]].add(name if not edge.by_text else "the table")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nbddp"):
                base = (node.module or "").partition(".")[2]
                for alias in node.names:
                    whole = f"{base}.{alias.name}".lstrip(".")
                    importers[whole if whole in modules else base].add(name)
    for name, by in importers.items():
        top = name.split(".")[0]
        if (
            len(by) == 1
            and "the table" not in by
            and top not in ("lessons", "compat")
            and not _is_package(modules, name)
        ):
            yield f"{name}, by {next(iter(by))}"


def _is_package(modules: dict[str, check.Module], name: str) -> bool:
    return name in modules and modules[name].path.endswith("__init__.py")


def twice(modules: dict[str, check.Module]) -> Iterator[str]:
    where: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not module.path.startswith("lessons"):
                where[node.name].add(module.path)
    yield from (f"{name}: {', '.join(sorted(paths))}" for name, paths in where.items() if len(paths) > 1)


def loose(tree: ast.Module) -> Iterator[int]:
    """Lines of `dict[str, Any]` and the like in the signature of a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [
                *node.args.posonlyargs,
                *node.args.args,
                *node.args.kwonlyargs,
                node.args.vararg,
                node.args.kwarg,
            ]
            annotations = [a.annotation for a in arguments if a is not None] + [node.returns]
            for part in (p for a in annotations if a is not None for p in ast.walk(a)):
                if isinstance(part, ast.Subscript) and _is_loose(part):
                    yield part.lineno


def _is_loose(part: ast.Subscript) -> bool:
    names = part.slice.elts if isinstance(part.slice, ast.Tuple) else []
    return isinstance(part.value, ast.Name) and part.value.id in LOOSE and any(
        isinstance(one, ast.Name) and one.id == "Any" for one in names
    )  # fmt: skip


def long_functions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= LONG:
            yield f"{node.lineno} {node.name} ({(node.end_lineno or 0) - node.lineno + 1})"


# -- paths -----------------------------------------------------------------------------------------


class Trace:
    """Calls of functions of the package by file, in every thread that starts after it."""

    def __init__(self, root: str) -> None:
        self.root, self.on, self.calls = root, False, Counter[tuple[str, str]]()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(self.root):
            self.calls[frame.f_code.co_filename[len(self.root) :], frame.f_code.co_name] += 1

    def words(self) -> str:
        return f"{len({file for file, _ in self.calls})} files, {len(self.calls)} functions, {self.calls.total()} calls"


ON_RANK = """
import sys as _sys
from tests.house.measures import Trace as _Trace
_trace = _Trace({root!r})
_sys.setprofile(_trace)
"""


def paths(files: bool) -> None:
    """Prints what a warm cell, a failure and the figure of a step enter, in the notebook's process and on rank 0."""
    import nbddp

    root = os.path.dirname(nbddp.__file__) + os.sep
    trace = Trace(root)
    threading.setprofile(trace)
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "nbddp")

    def run(cell: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            shell.run_cell("%%ddp --nproc 2\n" + cell if not cell.startswith("%") else cell)

    run(f"import sys\nsys.path.insert(0, {str(check.ROOT.parent)!r})")
    run(ON_RANK.format(root=root))
    for _ in range(3):
        run("x = 1")
    for title, before, cell in (
        ("a warm cell `x = 2`", "", "x = 2"), ("a failure's report, `1/0`", "", "1/0"),
        ("a step's figure, `%ddp timings`", TRAINING, "%ddp timings"),
    ):  # fmt: skip
        run(before or "x = 1")
        run("_trace.calls.clear(); _trace.on = True")
        _count(trace, shell, run, title, cell, files)
    run("%ddp stop")


def _count(trace: Trace, shell: Any, run: Callable[[str], None], title: str, cell: str, files: bool) -> None:
    trace.calls.clear()
    sys.setprofile(trace)
    trace.on = True
    run(cell)
    trace.on = False
    sys.setprofile(None)
    run("_calls, _trace.on = dict(_trace.calls), False")
    run("%ddp pull _calls")
    rank = Trace("")
    rank.calls = Counter(shell.user_ns["_calls"][0])
    both = len({file for file, _ in {*trace.calls, *rank.calls}})
    print(f"{title}\n  notebook: {trace.words()}\n  rank 0:   {rank.words()}\n  together: {both} files")
    for where, one in (("notebook", trace), ("rank 0", rank)) if files else ():
        print(*(f"    {where} {file}" for file in sorted({file for file, _ in one.calls})), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paths", action="store_true", help="start a pool, and count the files that a cell enters")
    parser.add_argument("--files", action="store_true", help="with --paths: name the files")
    parser.add_argument("--list", metavar="NAME", help="the places of the measures whose names begin so")
    asked = parser.parse_args()
    if asked.paths:
        paths(asked.files)
        return
    for what, places in static().items():
        print(f"{len(places):6} {what}")
        if asked.list and what.startswith(asked.list):
            print(*(f"         {place}" for place in places), sep="\n")


if __name__ == "__main__":
    main()
