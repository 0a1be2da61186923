"""For the tests of lessons: solutions out of the notebooks' sources, and answers as a cell would define them."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from nbddp.pool.pool import WorkerPool
from nbddp.teach import check
from tests import places, warm

NOTEBOOKS = places.ROOT / "notebooks"
SOURCES = sorted((NOTEBOOKS / "source").glob("*.py"))


def builder() -> ModuleType:
    """`notebooks/build.py` as a module."""
    return script("build")


def script(name: str) -> ModuleType:
    """A script of `notebooks/` as a module."""
    full = f"notebooks_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, NOTEBOOKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full]


def cells(lesson: str) -> list[Any]:
    """The cells of the source whose name begins with `lesson`, such as "02"."""
    return list(_cells(lesson))


@functools.cache
def _cells(lesson: str) -> tuple[Any, ...]:
    (path,) = [p for p in SOURCES if p.name.startswith(lesson)]
    return tuple(builder().parse(path.read_text(encoding="utf-8")))


def solution(lesson: str, name: str) -> Any:
    """What the lesson's solution defines under `name`, as its notebook's cell would."""
    return _one(builder().solutions(cells(lesson)), lesson, name)


def exercise(lesson: str, name: str) -> Any:
    """The unfinished `name` that the lesson gives a learner."""
    return _one(builder().exercises(cells(lesson)), lesson, name)


def text_of(outputs: Iterable[Any]) -> str:
    """What a notebook's outputs say: streams, and displays as text."""
    return "".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") + o.get("evalue", "") for o in outputs)


def is_ok(outputs: Iterable[Any]) -> bool:
    """Whether the last line is a check's `ok`, with what was verified or without."""
    last = text_of(outputs).rstrip().split("\n")[-1]
    return last == "ok" or last.startswith("ok: ")


def _one(sources: list[str], lesson: str, name: str) -> Any:
    found = [s for s in sources if name in assigned(s)]
    assert len(found) == 1, f"lesson {lesson} defines {name} in {len(found)} cells of its kind"
    return defined(found[0], name)


def assigned(source: str) -> set[str]:
    """Names that a cell binds at its top level."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return found


def defined(source: str, name: str) -> Any:
    """`name` as a notebook that has run `source` would have it: of `__main__`, so that it travels by value."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(textwrap.dedent(source), "<cell>", "exec"), space)
    return space[name]


@contextmanager
def pool_of(nproc: int, **options: Any) -> Iterator[WorkerPool]:
    """A real pool on which all checks inside the block run."""
    with warm.pool(nproc, **options) as pool, check.on(pool):
        yield pool
