"""The values that a step reaches: its arguments, and the names in its code, in globals, closures and attributes.

Only names that occur in the code of the step, or of functions of the program that it names, are followed. Code of
libraries is not read. Nothing is called and nothing changes.
"""

from __future__ import annotations

import dis
import functools
import os
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DEEPEST = 6  # attributes and containers within each other
MOST = 4000  # values of one container that are looked at
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "LOAD_SUPER_ATTR")
LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})


Names = dict[str, Any]  # name → what it holds


@dataclass
class ValuePlace:
    """Where a value is held: in a dict, under a key; or in the cell of a closure; or in a list of arguments."""

    holder: Any
    key: Any = None

    def put(self, value: object) -> None:
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value


@dataclass
class Reached:
    """Name → its place and value. modules, optimizers: in the order in which they were found."""

    places: dict[str, ValuePlace] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    loaders: list[str] = field(default_factory=list)

    def tensors(self) -> Iterator[Any]:
        """All tensors in the values."""
        for value in self.values.values():
            yield from (leaf for _, leaf in leaves(value) if is_tensor(leaf))


def is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of nested dicts, lists, tuples and data classes."""
    parts = items(value) if depth < DEEPEST else None
    if parts is None:
        yield path, value
        return
    for key, part in parts:
        at = f"{path}.{key}" if isinstance(key, str) and key.isidentifier() and path else f"{path}[{key!r}]"
        yield from leaves(part, at, depth + 1)


def items(value: Any) -> Sequence[tuple[Any, Any]] | None:
    """Keys and values of a container; None if it is none."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    held = getattr(value, "__dataclass_fields__", None)
    if held is not None and not isinstance(value, type):
        return [(name, getattr(value, name)) for name in held]
    return None


def holds_batch(value: Any) -> bool:
    """Whether it is a tensor that is no parameter, or a container with such a tensor and without modules."""
    import torch

    parts = items(value)
    if parts is not None and len(parts) > MOST:
        return False
    found = [leaf for _, leaf in leaves(value)]
    if any(isinstance(leaf, torch.nn.Module | torch.nn.Parameter | torch.optim.Optimizer) for leaf in found):
        return False
    return any(is_tensor(leaf) and not (leaf.requires_grad and leaf.is_leaf) for leaf in found)


def reach(step: Callable[..., Any], args: Names, given: Names) -> Reached:
    """Follow a step and its arguments. given: the dict from which the step will take its arguments."""
    walk = _Walk()
    for name, value in args.items():
        walk.value(name, value, ValuePlace(given, name), 0)
    walk.function(step, 0)
    return walk.found


class _Walk:
    def __init__(self) -> None:
        self.found = Reached()
        self._seen: set[int] = set()
        self._held: list[Any] = []  # what was made on the way keeps its id

    def function(self, function: Any, depth: int) -> None:
        """Of a function, method or partial: what its code names."""
        if isinstance(function, functools.partial):
            for i, value in enumerate([*function.args, *function.keywords.values()]):
                self.value(f"argument {i + 1}", value, None, depth + 1)
            function = function.func
        owner = getattr(function, "__self__", None)
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType | type):
            owner, function = function, vars(type(function)).get("__call__")
        if not isinstance(function, types.FunctionType) or id(function) in self._seen or of_library(function):
            return
        self._seen.add(id(function))
        self._names(function, owner, depth)
        inner = getattr(function, "__wrapped__", None)
        if inner is not None:
            self.function(inner, depth)

    def _names(self, function: types.FunctionType, owner: Any, depth: int) -> None:
        code, held = function.__code__, function.__globals__
        named = attributes(code)
        if owner is not None:
            self._attributes("self", owner, named, depth)
        for name in code_names(code):
            if name in held:
                self.value(name, held[name], ValuePlace(held, name), depth + 1, named)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if cell != types.CellType():
                self.value(name, cell.cell_contents, ValuePlace(cell), depth + 1, named)

    def value(self, name: str, value: Any, place: ValuePlace | None, depth: int, names: Sequence[str] = ()) -> None:
        """names: attributes that the code which names this value reads."""
        import torch

        if depth > DEEPEST or isinstance(value, types.ModuleType | type):
            return
        is_number = isinstance(value, int | float)
        if not is_number and id(value) in self._seen:
            return
        if isinstance(value, torch.nn.Module):
            self._seen.add(id(value))
            self.found.modules[name] = value
        elif isinstance(value, torch.optim.Optimizer):
            self._seen.add(id(value))
            self.found.optimizers[name] = value
        elif is_number or holds_batch(value):
            self._seen.add(id(value))
            if place is not None:
                self.found.places.setdefault(name, place)
                self.found.values.setdefault(name, value)
        elif isinstance(value, torch.utils.data.DataLoader) or is_loader_iterator(value):
            self.found.loaders.append(name)
        else:
            self._other(name, value, depth, names)

    def _other(self, name: str, value: Any, depth: int, names: Sequence[str]) -> None:
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self.function(value, depth)
            return
        parts = items(value)
        if parts is not None:
            self._seen.add(id(value))
            self._held.append(value)
            for key, part in parts[:MOST]:
                place = ValuePlace(value, key) if isinstance(value, dict | list) else None
                self.value(f"{name}[{key!r}]", part, place, depth + 1, names)
        elif is_of_program(type(value)):
            self._attributes(name, value, names, depth)

    def _attributes(self, name: str, owner: Any, names: Sequence[str], depth: int) -> None:
        """Attributes and methods of an object that code names."""
        import torch

        if id(owner) in self._seen:
            return
        if isinstance(owner, torch.nn.Module):
            self.found.modules[name] = owner
        self._seen.add(id(owner))
        self._held.append(owner)
        held = getattr(owner, "__dict__", {})
        methods = [vars(kind).get(n) for n in names for kind in type(owner).__mro__ if n in vars(kind)]
        functions = [m for m in methods if isinstance(m, types.FunctionType) and not of_library(m)]
        known = dict.fromkeys([*names, *(n for m in functions for n in attributes(m.__code__))])
        for method in functions:
            self.function(types.MethodType(method, owner), depth + 1)
        for key in known:
            if key in held:
                self.value(f"{name}.{key}", held[key], ValuePlace(held, key), depth + 1, list(known))


def code_names(code: types.CodeType, loads: tuple[str, ...] = ("LOAD_GLOBAL", "LOAD_NAME")) -> list[str]:
    """Global names in code and in the functions within it; with other `loads`, attributes."""
    found = dict.fromkeys(str(i.argval) for i in dis.get_instructions(code) if i.opname in loads)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found.update(dict.fromkeys(code_names(inner, loads)))
    return list(found)


def attributes(code: types.CodeType) -> list[str]:
    return code_names(code, ATTRIBUTES)


def of_library(function: types.FunctionType) -> bool:
    return os.path.realpath(function.__code__.co_filename).startswith(LIBRARIES)


def is_of_program(kind: type) -> bool:
    """Whether a class may hold a program's own values: it has defined it, or it is a plain namespace."""
    module = kind.__module__
    return module in ("__main__", "types", "argparse") or module.partition(".")[0] not in _known_libraries()


@functools.cache
def _known_libraries() -> frozenset[str]:
    import sys

    return frozenset((*sys.stdlib_module_names, "torch", "numpy", "IPython", "ipykernel", "nbddp", "ipyparallel"))


def is_loader_iterator(value: object) -> bool:
    from nbddp.compat.extra import torch as torch_extra

    kind = torch_extra.loader_iterator()
    return kind is not None and isinstance(value, kind)
