"""What the package's design is measured by: size, ties, names, types, and how many files a cell enters.

`python -m tests.house.measures` prints a table; `--paths` starts a pool of two ranks and counts the files that a warm
cell, a failure's report and the figure of a step enter; `--list NAME` prints the places of one measure. A test keeps
the numbers of `tests.house.check` from rising.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import json
import operator
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


def static(counted: Mapping[str, Sequence[object]] | None = None) -> dict[str, list[str]]:
    """Measure → its places, by reading the sources. counted: as `check.count` has it, if that is known."""
    found = check.known_modules()[1]
    lines = {m.path: len((check.ROOT / m.path).read_text(encoding="utf-8").splitlines()) for m in found.values()}
    core = [m.path for m in found.values() if m.folder in check.FLOORS]
    counted = check.count()[0] if counted is None else counted
    return {
        "Python lines": [path for path, n in lines.items() for _ in range(n)],
        "lines of the core": [path for path in core for _ in range(lines[path])],
        "files of the core": core,
        **{what: [str(place) for place in places] for what, places in counted.items()},
        "modules with a single importer": sorted(single_importers(found)),
        "class names used twice": sorted(twice(found)),
        "loosely typed dicts in signatures": [f"{m.path}:{line}" for m in found.values() for line in loose(m.nodes)],
        "of these in protocol, execution and pool": [
            f"{m.path}:{line}" for m in found.values() if m.folder in TYPED for line in loose(m.nodes)
        ],
        f"functions over {LONG} lines": [f"{m.path}:{at}" for m in found.values() for at in long_functions(m.nodes)],
    }  # fmt: skip


def single_importers(modules: dict[str, check.Module]) -> Iterator[str]:
    """Modules that one other imports. Not counted: lessons, `compat`, and what a row of the table names."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, module in modules.items():
        for edge in check.known_edges()[name]:
            importers[edge.name.partition(":")[0]].add(name if not edge.by_text else "the table")
        for node in module.nodes:
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


def loose(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines of `dict[str, Any]` and the like in the signature of a function."""
    for node in nodes:
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


def long_functions(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= LONG:
            yield f"{node.lineno} {node.name} ({(node.end_lineno or 0) - node.lineno + 1})"


# -- paths -----------------------------------------------------------------------------------------


class Trace:
    """Calls of functions of the package by file, in every thread that starts after it; `came`: file → who led there
    first."""

    def __init__(self, root: str) -> None:
        self.root, self.on, self.calls = root, False, Counter[tuple[str, str]]()
        self.came: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(self.root):
            file, name = frame.f_code.co_filename[len(self.root) :], frame.f_code.co_name
            self.calls[file, name] += 1
            if file not in self.came:
                self.came[file] = f"{name}, called by {self._caller(frame)}"

    def _caller(self, frame: FrameType) -> str:
        back = frame.f_back
        while back is not None and not back.f_code.co_filename.startswith(self.root):
            back = back.f_back
        return "no file of the package" if back is None else (
            f"{back.f_code.co_name} in {back.f_code.co_filename[len(self.root) :]}"
        )  # fmt: skip

    def clear(self) -> None:
        self.calls.clear()
        self.came.clear()


@dataclass(frozen=True)
class Entered:
    """What each of several equal cells has entered, on one side. came: file → the function that led there."""

    calls: Counter[tuple[str, str]]
    came: Mapping[str, str]

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    def describe(self) -> str:
        return f"{len(self.files)} files, {len(self.calls)} functions, {self.calls.total()} calls"


ON_RANK = """
import sys as _sys
from tests.house.measures import Trace as _Trace
_trace = _Trace({root!r})
_sys.setprofile(_trace)
"""
TIMES = 4  # what a busy machine adds to one of so many cells is no part of their way
NOTEBOOK, RANK = "notebook", "rank 0"
CELL, FAILURE, FIGURE = "a warm cell `x = 2`", "a failure's report, `1/0`", "a step's figure, `%ddp timings`"
TRIPS = {CELL: ("", "x = 2"), FAILURE: ("", "1/0"), FIGURE: (TRAINING, "%ddp timings")}


def trips() -> Iterator[tuple[str, dict[str, Entered]]]:
    """What a warm cell, a failure and the figure of a step enter, in the notebook's process and on rank 0."""
    import nbddp

    root = os.path.dirname(nbddp.__file__) + os.sep
    trace = Trace(root)
    threading.setprofile(trace)
    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.deadlock import watch
    from nbddp.execution import execution

    # seconds: on a slow machine too a cell is a short one, and the others' failures come before a look at them
    execution.EARLIEST = execution.LONG = execution.START_EACH = watch.START_EACH = 60.0
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "nbddp")

    def run(cell: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            shell.run_cell("%%ddp --nproc 2\n" + cell if not cell.startswith("%") else cell)

    run(f"import sys\nsys.path.insert(0, {str(check.ROOT.parent)!r})")
    run(ON_RANK.format(root=root))
    for _ in range(3):
        run("x = 1")
    for title, (before, cell) in TRIPS.items():
        run(before or "x = 1")
        yield title, _together([_one(trace, shell, run, cell) for _ in range(TIMES)])
    run("%ddp stop")


def _one(trace: Trace, shell: Any, run: Callable[[str], None], cell: str) -> dict[str, Entered]:
    run("_trace.clear(); _trace.on = True")
    trace.clear()
    sys.setprofile(trace)
    trace.on = True
    run(cell)
    trace.on = False
    sys.setprofile(None)
    run("_trace.on = False; _calls, _came = dict(_trace.calls), dict(_trace.came)")
    run("%ddp pull _calls _came")
    calls, came = (shell.user_ns[name][0] for name in ("_calls", "_came"))
    return {NOTEBOOK: Entered(Counter(trace.calls), dict(trace.came)), RANK: Entered(Counter(calls), came)}


def _together(found: list[dict[str, Entered]]) -> dict[str, Entered]:
    """What is in all of them."""
    return {
        side: Entered(functools.reduce(operator.and_, [one[side].calls for one in found]), found[-1][side].came)
        for side in found[0]
    }


def paths(files: bool) -> None:
    """Prints `trips`. files: and the files, each with the function that led there."""
    for title, found in trips():
        print(title, *(f"  {side + ':':9} {entered.describe()}" for side, entered in found.items()), sep="\n")
        print(f"  together: {len(set().union(*(entered.files for entered in found.values())))} files")
        for side, entered in found.items() if files else ():
            print(*(f"    {side} {file}: {entered.came[file]}" for file in sorted(entered.files)), sep="\n")


def as_json() -> str:
    """`trips`: trip → side → file → the function that led there."""
    return json.dumps({
        title: {side: {file: entered.came[file] for file in sorted(entered.files)} for side, entered in found.items()}
        for title, found in trips()
    })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paths", action="store_true", help="start a pool, and count the files that a cell enters")
    parser.add_argument("--files", action="store_true", help="with --paths: name the files")
    parser.add_argument("--json", action="store_true", help="with --paths: the files as JSON")
    parser.add_argument("--list", metavar="NAME", help="the places of the measures whose names begin so")
    asked = parser.parse_args()
    if asked.paths:
        print(as_json()) if asked.json else paths(asked.files)
        return
    for what, places in static().items():
        print(f"{len(places):6} {what}")
        if asked.list and what.startswith(asked.list):
            print(*(f"         {place}" for place in places), sep="\n")


if __name__ == "__main__":
    main()
