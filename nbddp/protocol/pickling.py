"""Values between notebook and ranks: cloudpickle bytes, or words where a value cannot travel.

A CUDA tensor travels as its CPU copy, so that fetching it never touches a GPU in the
notebook's kernel. A value that cannot be pickled here or unpickled there becomes a
`NotSent`: its repr and the reason. Imports cloudpickle; torch only if it is there already.

Where values of several ranks arrive, equal definitions are one class: cloudpickle sends a class of a cell by value
under a random id. Each rank draws its own, so equal members of an enum of two ranks would be of two classes, and
differ. So a class brings along what defines it, as a digest of its bytes without ids. A class whose attributes or
globals differ between ranks has other bytes, and stays one of each rank.
"""

from __future__ import annotations

import hashlib
import io
import pickletools
import sys
import weakref
from collections import ChainMap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import cloudpickle

from nbddp.protocol.codec import plain

REPR_LIMIT = 2000  # characters of a repr that stands for a value
Reduced = tuple[Any, ...]
GETS = ("BINGET", "LONG_BINGET")
MOST = 1_000_000  # bytes of a class, with the globals that it uses, that are read one by one
_known: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()  # by digest
_digests: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()  # of what has arrived or was sent
_guests: weakref.WeakSet[type] = weakref.WeakSet()  # that were made elsewhere


@dataclass(frozen=True)
class NotSent:
    """Stands for a value that a rank could not send. `text` (str): its repr on the rank; `why` (str): the reason.

    Example:

        pool.run_cell("import threading; lock = threading.Lock()")
        lock = pool.pull("lock")["lock"][0]
        assert isinstance(lock, nbddp.NotSent), lock
    """

    text: str
    why: str

    def __repr__(self) -> str:
        return f"{self.text}  (not sent: {self.why})"


# -- code objects -----------------------------------------------------------------------------------

# Code objects on their way keep the name of their file. An error names its place by it, and a report knows the user's
# frames by it. cloudpickle leaves it out from 3.1.3 on.


def table() -> ChainMap[type, Any]:
    """The dispatch table of such a pickler. It is of its class: one in C reads the table once, when it is made."""
    return ChainMap({CodeType: reduced}, cloudpickle.Pickler.dispatch_table)


def reduced(code: CodeType) -> tuple[Any, ...]:
    """What cloudpickle makes of it, and its file."""
    found: tuple[Any, ...] = cloudpickle.Pickler.dispatch_table[CodeType](code)
    make, made_of = found[:2]
    return found if code.co_filename in made_of else (placed, (code.co_filename, make, made_of))


def placed(file: str, make: Callable[..., CodeType], made_of: tuple[Any, ...]) -> CodeType:
    """Where it arrives: the code, with its file."""
    return make(*made_of).replace(co_filename=file)


# -- pickles ---------------------------------------------------------------------------------------


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table = table()

    causes = True  # whether an exception travels with those that led to it

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor) and value.is_cuda:
            return value.detach().cpu().__reduce_ex__(2)
        kind = type(value)
        if issubclass(kind, BaseException) and not isinstance(kind.__reduce__, FunctionType):
            make, args, *state = value.__reduce__()
            led = (value.__cause__, value.__context__, value.__suppress_context__) if self.causes else None
            return _raised, (make, args, value.args), (state, led), None, None, _led_to
        parallel = sys.modules.get("torch.nn.parallel")
        if parallel is not None and type(value) is parallel.DistributedDataParallel:
            raise TypeError("a DDP model holds its process group, which stays on its rank; use its .module")
        reduced = super().reducer_override(value)
        return self.of_class(value, reduced) if is_by_value(value, reduced) else reduced

    def of_class(self, kind: type, reduced: Reduced) -> Reduced:
        """What is sent of a class that goes by value."""
        return with_digest(kind, reduced, _defined)


class _Alone(_Pickler):
    causes = False


class _Definition(_Pickler):
    def reducer_override(self, value: Any) -> Any:
        reduced = super().reducer_override(value)
        if isinstance(value, FunctionType) and isinstance(reduced, tuple):
            reduced[1][1].pop("__file__", None)  # which of its globals is that of the cell that runs
        return reduced

    def of_class(self, kind: type, reduced: Reduced) -> Reduced:
        return without_id(reduced)


def _defined(kind: type) -> str:
    return digest(_packed(kind, _Definition))


def _raised(kind: type[BaseException], args: tuple[Any, ...], held: tuple[Any, ...]) -> BaseException:
    """An exception as it was, whatever its `__init__` takes: Python itself calls that with `args`, which are those that
    it has given to `super().__init__`."""
    if not isinstance(kind.__init__, FunctionType):
        return kind(*args)
    native = next(base for base in kind.__mro__ if not isinstance(vars(base).get("__init__"), FunctionType | None))
    try:
        made: BaseException = kind.__new__(kind, *args)
    except TypeError:
        made = native.__new__(kind, *args)
    with suppress(TypeError):
        native.__init__(made, *args)  # type: ignore[misc]
    made.args = held
    return made


def _led_to(error: BaseException, told: tuple[Any, Any]) -> None:
    state, led = told
    if state:
        error.__setstate__(*state)
    if led is not None:
        error.__cause__, error.__context__, error.__suppress_context__ = led


def pack(value: Any) -> bytes:
    """cloudpickle bytes of `value`. Raises whatever pickling raises."""
    try:
        return _packed(value, _Pickler)
    except Exception:
        if not isinstance(value, BaseException):
            raise
        return _packed(value, _Alone)  # one that led to it may not travel


def _packed(value: Any, kind: type[_Pickler]) -> bytes:
    buffer = io.BytesIO()
    kind(buffer).dump(value)
    return buffer.getvalue()


def pack_or_words(value: Any) -> bytes:
    """Bytes of (value, repr), or of a NotSent with the reason."""
    return _pack_or_text(value, describe(value))


def pack_answer(value: Any) -> bytes:
    """The same for a value of nbddp's own, whose repr nobody reads: that of thousands of steps takes long."""
    return _pack_or_text(value, "")


def _pack_or_text(value: Any, text: str) -> bytes:
    try:
        return cloudpickle.dumps((pack(value), text))  # type: ignore[no-any-return]
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # `__reduce__` is the program's own code, and may exit
        return cloudpickle.dumps((None, NotSent(text, reason(e))))  # type: ignore[no-any-return]


def unpack(data: bytes) -> Any:
    """The value that `pack_or_words` or `pack_answer` packed, or a NotSent."""
    packed, text = cloudpickle.loads(data)
    if packed is None:
        return text
    try:
        return cloudpickle.loads(packed)
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        return NotSent(text, reason(e))


def describe(value: Any) -> str:
    """repr, cut to REPR_LIMIT; a repr that raises is reported."""
    try:
        text = plain(repr(value))
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        text = f"<{type(value).__name__} whose repr raises {type(e).__name__}>"
    return text if len(text) <= REPR_LIMIT else text[:REPR_LIMIT] + "…"


def reason(error: BaseException) -> str:
    """`TypeError: cannot pickle ...` in one line."""
    try:
        said = str(error)
    except BaseException:
        said = ""
    return plain(f"{type(error).__name__}: {said}".removesuffix(": ").splitlines()[0])


# -- classes of cells ------------------------------------------------------------------------------


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
