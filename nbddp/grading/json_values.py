"""Plain data as JSON: how answers travel from ranks that have run strangers' code.

A pickle is a program, and whoever runs code on a rank can send any. JSON is data. `read` accepts None, bool, int,
float, str, `Strange`, and lists, tuples and dicts of them, bounded in size and depth; nothing else. What is no plain
data is sent as the words for it.
"""

from __future__ import annotations

import json
from typing import Any

from nbddp.errors import BadInput
from nbddp.lessons.framework.plain_values import Strange, plain

LARGEST = 4 << 20  # bytes of an answer
DEEPEST = 50  # containers in containers
DIGITS = 3000  # hexadecimal ones of a whole number; Python writes no more than 4300 decimal ones
SHORT = 1 << 53  # whole numbers below it are JSON numbers everywhere


class TooMuch(ValueError):
    """An answer is too large, or nested too deeply, to be sent."""


def write(value: Any) -> bytes:
    """`value` as JSON. Raises TooMuch."""
    data = json.dumps(_tagged(value, 0), separators=(",", ":")).encode()
    if len(data) > LARGEST:
        raise TooMuch(f"the answer takes {len(data)} bytes; {LARGEST} are the most that can be judged")
    return data


def _tagged(value: Any, depth: int) -> Any:
    """Lists as lists, other containers as {"t": tuple}, {"d": pairs of a dict}; {"i": digits}, {"s": words}."""
    if depth > DEEPEST:
        raise TooMuch(f"the answer has more than {DEEPEST} lists in lists")
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if abs(value) < SHORT else _long(value)
    if kind is list:
        return [_tagged(v, depth + 1) for v in value]
    if kind is tuple:
        return {"t": [_tagged(v, depth + 1) for v in value]}
    if kind is dict:
        return {"d": [[_tagged(k, depth + 1), _tagged(v, depth + 1)] for k, v in value.items()]}
    return {"s": value.text} if kind is Strange else _tagged(plain(value), depth + 1)


def _long(value: int) -> dict[str, str]:
    if value.bit_length() > 4 * DIGITS:
        return {"s": f"<a whole number of {value.bit_length()} bits>"}
    return {"i": f"{value:x}"}


def read(data: bytes) -> Any:
    """What `write` wrote. Raises BadInput for anything else: a rank may send what it likes."""
    if len(data) > LARGEST:
        raise BadInput(f"a rank's answer takes {len(data)} bytes; {LARGEST} are the most that can be judged")
    try:
        return _untagged(json.loads(data), 0)
    except (ValueError, TypeError, RecursionError):
        raise BadInput("a rank sent no valid answer: its code has changed the functions that send answers") from None


def _untagged(found: Any, depth: int) -> Any:
    if depth > DEEPEST:
        raise ValueError("nested too deeply")
    if isinstance(found, str):
        return _whole(found)
    if isinstance(found, list):
        return [_untagged(v, depth + 1) for v in found]
    if not isinstance(found, dict):
        return found
    ((tag, inside),) = found.items()
    readers = {"t": _tuple, "d": _dict, "i": _int, "s": _strange}
    return readers[tag](inside, depth + 1) if tag in readers else _refuse(tag)


def _tuple(inside: Any, depth: int) -> tuple[Any, ...]:
    return tuple(_untagged(v, depth) for v in _a(list, inside))


def _dict(inside: Any, depth: int) -> dict[object, object]:
    return {_untagged(k, depth): _untagged(v, depth) for k, v in _a(list, inside)}


def _int(inside: Any, depth: int) -> int:
    if len(_a(str, inside)) > DIGITS + 1:
        raise ValueError("too many digits")
    return int(inside, 16)


def _strange(inside: Any, depth: int) -> Strange:
    return Strange(_whole(_a(str, inside)))


def _a(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else _refuse(value)


def _refuse(what: object) -> Any:
    raise ValueError(f"no part of an answer: {what!r:.80}")


def _whole(text: str) -> str:
    """Text that UTF-8 has: a lone surrogate as its escape."""
    return text.encode("utf-8", "backslashreplace").decode()
