"""A message as JSON, and back; JSON in lines; and text as it is sent and read. Pure.

A message has the fields of a dataclass by their names, without those that have their default. A receiver ignores keys
that it does not know. Fields are read by their annotations: a dataclass, `X | None`, `tuple`, `list` and `dict` of
those; all else stays as JSON has it.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, ClassVar, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints


class DataclassInstance(Protocol):
    """Any of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


T = TypeVar("T", bound=DataclassInstance)
Json = dict[str, Any]  # an object of JSON
Read = Callable[[Any], Any]
AS_IS = (str, int, float, bool, bytes, type(None))


def to_json(message: DataclassInstance) -> Json:
    """The fields of a message that differ from their defaults."""
    found = {}
    for name, default in _defaults(type(message)):
        value = getattr(message, name)
        if value is not default and value != default:
            found[name] = value if type(value) in AS_IS else _jsonable(value)
    return found


def _jsonable(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(value)
    if isinstance(value, list | tuple):
        return [each if type(each) in AS_IS else _jsonable(each) for each in value]
    if isinstance(value, dict):
        return {key: each if type(each) in AS_IS else _jsonable(each) for key, each in value.items()}
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


# -- lines --------------------------------------------------------------------------------------------

# One message to a line: how agent, clients and store host talk. Requests carry `op` and `id`; the answer carries the
# same `id`; events carry `ev`. `LineBuffer` turns chunks of bytes into messages. Processes of ours talk on descriptors
# that are nobody else's; through ssh there is only stdout, where a program may print in between. So a line that is no
# message is reported, and the next one is read.

Message = dict[str, Any]
MOST_BEFORE = 65536  # bytes that are kept of it
LONGEST_UNKNOWN = 1000  # bytes that are reported of a line
MARK = b"#nbddp#"  # the line after which messages come, where a shell may have printed before
PING_EVERY = 2.0  # seconds between two signs of life of an owner at the far end of a connection


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def parsed(line: bytes) -> Message | None:
    """The message on a line; None if it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def log_unknown(line: bytes) -> None:
    """Report a line that is no message on stderr, which is the log of a process of ours."""
    print(unknown_words(line), file=sys.stderr, flush=True)


def unknown_words(line: bytes) -> str:
    return f"not a message: {line[:LONGEST_UNKNOWN].decode(errors='replace').strip()}"


class LineBuffer:
    """Bytes in, whole messages out; keeps the unfinished rest."""

    def __init__(self, after: bytes = b"", unknown: Callable[[bytes], None] = log_unknown):
        """after: a line that is waited for; what comes before it is kept in `before`. unknown: called with each line
        that is no message."""
        self._rest, self._after, self._unknown = b"", after, unknown
        self.before = b""

    def feed(self, chunk: bytes) -> Iterator[Message]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if self._after:
                if line == self._after:
                    self._after = b""
                else:
                    self.before = (self.before + line + b"\n")[-MOST_BEFORE:]
            elif line.strip():
                message = parsed(line)
                if message is None:
                    self._unknown(line)
                else:
                    yield message


# -- lone surrogates --------------------------------------------------------------------------------

# Lone surrogates: a `str` may hold them and UTF-8 does not. Python makes them of a file's name that is no UTF-8 (PEP
# 383), and a program may cut a pair in two.


NAME, FILE = 500, 4096  # characters of a name and of a file's path; Linux has no longer paths


def plain(text: str) -> str:
    """`text` as it can be sent and shown: each lone surrogate as its escape."""
    return str.encode(text, "utf-8", "backslashreplace").decode()


def name_of(text: str) -> str:
    """What a program calls something, such as a function or a thread, as it can be sent and shown: it may be of any
    size."""
    return plain(text if len(text) <= NAME else f"{text[:NAME]}…")


def plain_in(value: Any) -> Any:
    """What a message holds, with all its text plain."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain_in(key): plain_in(each) for key, each in value.items()}
    return [plain_in(each) for each in value] if isinstance(value, list | tuple) else value


def shown(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """`pack`, which makes bytes of a message, for one that somebody will read: it is sent whatever text is in it."""

    @functools.wraps(pack)
    def packed(message: Any) -> bytes:
        try:
            return pack(message)
        except UnicodeEncodeError:
            return pack(plain_in(message))

    return packed


# -- rows of a cell ---------------------------------------------------------------------------------

WORD = re.compile(r"\s*(\w*)")
SILENCED = re.compile(r"#\s*nbddp:\s*ok\b", re.IGNORECASE)


def is_silenced(text: str) -> bool:
    """Whether a line of a text has the comment `# nbddp: ok`, which silences findings."""
    return SILENCED.search(text) is not None


def program_rows(text: str) -> list[int]:
    """Which rows of a text are neither empty nor comments."""
    rows = enumerate(map(str.strip, text.splitlines()))
    return [i for i, row in rows if row and not row.startswith("#")]


def first_word(row: str) -> str:
    """What IPython takes for the name of a magic whose % is left out."""
    found = WORD.match(row)
    return found[1] if found else ""
