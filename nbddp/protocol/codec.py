"""A message as JSON, and back: the fields of a dataclass by their names, without those that have their default.

A receiver ignores keys that it does not know. Fields are read by their annotations: a dataclass, `X | None`, `tuple`,
`list` and `dict` of those; all else stays as JSON has it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, ClassVar, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints


class DataclassInstance(Protocol):
    """Any of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


T = TypeVar("T", bound=DataclassInstance)
Json = dict[str, Any]  # an object of JSON
Read = Callable[[Any], Any]
PLAIN = (str, int, float, bool, bytes, type(None))


def to_json(message: DataclassInstance) -> Json:
    """The fields of a message that differ from their defaults."""
    found = {}
    for name, default in _defaults(type(message)):
        value = getattr(message, name)
        if value is not default and value != default:
            found[name] = value if type(value) in PLAIN else _plain(value)
    return found


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(value)
    if isinstance(value, list | tuple):
        return [each if type(each) in PLAIN else _plain(each) for each in value]
    if isinstance(value, dict):
        return {key: each if type(each) in PLAIN else _plain(each) for key, each in value.items()}
    return value


@functools.cache
def _defaults(kind: type[DataclassInstance]) -> tuple[tuple[str, Any], ...]:
    """Name and default of each field. A field without a default has one that equals nothing."""
    return tuple((f.name, f.default if f.default_factory is MISSING else f.default_factory()) for f in fields(kind))


def from_json(kind: type[T], found: Mapping[str, object]) -> T:
    """The message that `to_json` has made this of."""
    readers = _readers(kind)
    return kind(**{name: readers[name](value) for name, value in found.items() if name in readers})


@functools.cache
def _readers(kind: type[DataclassInstance]) -> dict[str, Read]:
    hints = get_type_hints(kind)
    return {f.name: _reader(hints[f.name]) for f in fields(kind)}


def _reader(hint: Any) -> Read:
    """What makes a value of this type of JSON."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [a for a in args if a is not type(None)]
        return _unless_none(_reader(kinds[0])) if len(kinds) == 1 else _same
    if origin is tuple:
        if args[1:] == (...,):
            return _each(_reader(args[0]), tuple)
        readers = tuple(map(_reader, args))
        if all(read is _same for read in readers):
            return tuple
        return lambda value: tuple(read(each) for read, each in zip(readers, value, strict=True))
    if origin is list:
        return _each(_reader(args[0]), list)
    if origin is dict:
        read, whole = _reader(args[1]), args[0] is int  # JSON's keys are text
        return lambda value: {int(k) if whole else k: read(each) for k, each in value.items()}
    return functools.partial(from_json, hint) if is_dataclass(hint) and isinstance(hint, type) else _same


def _each(read: Read, made: Callable[[Any], Any]) -> Read:
    return made if read is _same else lambda value: made(map(read, value))


def _unless_none(read: Read) -> Read:
    return read if read is _same else lambda value: None if value is None else read(value)


def _same(value: Any) -> Any:
    return value
