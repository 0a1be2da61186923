"""Classes of cells on their way: where values of several ranks arrive, equal definitions are one class.

cloudpickle sends such a class by value under a random id. Each rank draws its own, so equal members of an enum of two
ranks would be of two classes, and differ. So a class brings along what defines it, as a digest of its bytes without
ids. A class whose attributes or globals differ between ranks has other bytes, and stays one of each rank.
"""

from __future__ import annotations

import hashlib
import pickletools
import weakref
from collections.abc import Callable
from typing import Any

Reduced = tuple[Any, ...]
GETS = ("BINGET", "LONG_BINGET")
MOST = 1_000_000  # bytes of a class, with the globals that it uses, that are read one by one

_known: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()  # by digest
_digests: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()  # of what has arrived or was sent
_guests: weakref.WeakSet[type] = weakref.WeakSet()  # that were made elsewhere


def digest(data: bytes) -> str:
    """What a pickle says. Whether equal texts in it are one object depends on the process, and does not count."""
    said, others, text = hashlib.sha256(), 0, ""
    memo: list[str] = []
    if len(data) > MOST:
        return hashlib.sha256(data).hexdigest()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "MEMOIZE":
            others += not text
            memo.append(text or f"the {others}th")
        elif opcode.name != "FRAME":
            text = repr(argument) if isinstance(argument, str | bytes) else ""
            one = memo[int(argument or 0)] if opcode.name in GETS else text or f"{opcode.name} {argument}"
            said.update(f"{one}\n".encode(errors="surrogatepass"))
    return said.hexdigest()


def is_by_value(value: object, reduced: Any) -> bool:
    """Whether cloudpickle has made this of a class that it sends by value: the last argument but one is its id."""
    return isinstance(value, type) and isinstance(reduced, tuple) and len(reduced[1]) > 2


def without_id(reduced: Reduced) -> Reduced:
    """Nor with what `copyreg` notes in a class when the first of its instances is pickled."""
    make, args, (own, slots), *rest = reduced
    defined = {name: value for name, value in own.items() if name != "__slotnames__"}
    return (make, (*args[:-2], "", args[-1]), (defined, slots), *rest)


def with_digest(kind: type, reduced: Reduced, measure: Callable[[type], str]) -> Reduced:
    """What makes the class where it arrives, unless that is known there. One from elsewhere goes on as it came.

    measure: makes the digest of a class as it is now.
    """
    digest = _digests[kind] if kind in _guests else measure(kind)
    _remember(kind, digest)
    if kind not in _guests:  # it may have been defined anew in the same words
        _known[digest] = kind
    make, args, state, *rest, describe = reduced
    return (_made, (make, args, digest), (describe, state), *rest, _describe)


def _made(make: Callable[..., type], args: tuple[Any, ...], digest: str) -> type:
    """Where it arrives: the class of that definition, or of that id if it came before."""
    kind = make(*args)
    if kind not in _guests:
        kind = _known.get(digest, kind)
        if kind not in _digests:
            _guests.add(kind)
    _remember(kind, digest)
    return kind


def _describe(kind: type, told: tuple[Callable[[type, Any], Any], Any]) -> None:
    """Give a class that has arrived what it holds. One that was defined here keeps its own functions."""
    describe, state = told
    if kind in _guests:
        describe(kind, state)


def _remember(kind: type, digest: str) -> None:
    """A class that has changed is no longer found under what it was."""
    before = _digests.get(kind)
    if before is not None and before != digest and _known.get(before) is kind:
        del _known[before]
    _digests[kind] = digest
    _known.setdefault(digest, kind)
