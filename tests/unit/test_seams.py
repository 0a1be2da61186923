"""What is private in torch, ipykernel, IPython and ipyparallel is used in three modules, and nowhere else."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Iterator

import pytest

from nbddp.compat import ipykernel

# of sys, os and argparse; and what asyncio's documentation has for those who extend it
STANDARD = {
    "_current_frames", "_getframe", "_exit", "_actions", "_set_running_loop", "_enter_task", "_leave_task",
    "_asdict",
}  # fmt: skip
PRIVATE = re.compile(r"_[A-Za-z](\w*[^\W_])?")  # `_repr_html_` and the like are protocols that anybody may follow
WITHIN = re.compile(rf"([\w./]*[./])?{PRIVATE.pattern}")


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of what is private and not defined in the same file."""
    own = defined(tree)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        for name in named(node, docs):
            if name not in own:
                yield getattr(node, "lineno", 0), name


def named(node: ast.AST, docs: set[int]) -> Iterator[str]:
    """Private names that this node reads, imports, or has as a text."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        found = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        yield from (part for name in found for part in name.split(".") if PRIVATE.fullmatch(part))
    elif isinstance(node, ast.Attribute):
        yield from {node.attr} - STANDARD if PRIVATE.fullmatch(node.attr) else ()
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
        standard = node.value.rpartition(".")[2] in STANDARD
        yield from [node.value] if WITHIN.fullmatch(node.value) and not standard else ()


def defined(tree: ast.Module) -> set[str]:
    """Functions, classes, names and attributes of `self` that this file makes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return found


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch._C import _distributed_c10d", "_distributed_c10d"),
        ("import torch._dynamo", "_dynamo"),
        ("world = dist.distributed_c10d._world", "_world"),
        ("getattr(stream, '_fid', None)", "_fid"),
        ("sys.modules.get('torch._C')", "torch._C"),
        ("class A(B):\n def f(self): return self._topic('x')", "_topic"),
        ("stream._fid = 3", "_fid"),
    ],
)
def test_the_reader_of_sources_sees_each_way_of_using_one(source: str, name: str) -> None:
    assert name in {found for _, found in private_names(ast.parse(source))}


@pytest.mark.parametrize(
    "source", ["os._exit(1)", "self._mine = 1\nself._mine", "x._repr_html_()", "'_do_'", "a.__dict__"]
)
def test_and_leaves_what_is_ours_or_pythons(source: str) -> None:
    assert list(private_names(ast.parse(source))) == []


@pytest.mark.parametrize("pending", [False, True, None])
def test_streams_are_flushed_before_a_display_unless_they_have_nothing(
    monkeypatch: pytest.MonkeyPatch, pending: bool | None
) -> None:
    """None: a stream that does not know."""
    done: list[str] = []
    stream = types.SimpleNamespace() if pending is None else types.SimpleNamespace(_flush_pending=pending)
    monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(_flush_pending=False))
    monkeypatch.setattr(sys, "stdout", stream)

    class Publisher:
        def _flush_streams(self) -> None:
            done.append("flush")

        def publish(self, data: dict[str, str], update: bool = False) -> None:
            self._flush_streams()
            done.append(data["text/plain"])

    publisher = Publisher()
    ipykernel.publish(publisher, {"text/plain": "shown"}, update=True)
    assert done == (["shown"] if pending is False else ["flush", "shown"])
    publisher.publish({"text/plain": "by another"})
    assert done[-2:] == ["flush", "by another"]
