"""Values between notebook and ranks: cloudpickle bytes, or words where a value cannot travel.

A CUDA tensor travels as its CPU copy, so that fetching it never touches a GPU in the
notebook's kernel. A value that cannot be pickled here or unpickled there becomes a
`NotSent`: its repr and the reason. Imports cloudpickle; torch only if it is there already.
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import cloudpickle

from nbddp.protocol import cell_classes, code_objects
from nbddp.protocol.surrogates import plain

REPR_LIMIT = 2000  # characters of a repr that stands for a value


@dataclass(frozen=True)
class NotSent:
    """Stands for a value that could not travel: its repr on the rank, and why."""

    text: str
    why: str

    def __repr__(self) -> str:
        return f"{self.text}  (not sent: {self.why})"


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table = code_objects.table()

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
        return self.of_class(value, reduced) if cell_classes.is_by_value(value, reduced) else reduced

    def of_class(self, kind: type, reduced: cell_classes.Reduced) -> cell_classes.Reduced:
        """What is sent of a class that goes by value."""
        return cell_classes.with_digest(kind, reduced, _defined)


class _Alone(_Pickler):
    causes = False


class _Definition(_Pickler):
    def reducer_override(self, value: Any) -> Any:
        reduced = super().reducer_override(value)
        if isinstance(value, FunctionType) and isinstance(reduced, tuple):
            reduced[1][1].pop("__file__", None)  # which of its globals is that of the cell that runs
        return reduced

    def of_class(self, kind: type, reduced: cell_classes.Reduced) -> cell_classes.Reduced:
        return cell_classes.without_id(reduced)


def _defined(kind: type) -> str:
    return cell_classes.digest(_packed(kind, _Definition))


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
    text = words(value)
    try:
        return cloudpickle.dumps((pack(value), text))  # type: ignore[no-any-return]
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # `__reduce__` is the program's own code, and may exit
        return cloudpickle.dumps((None, NotSent(text, reason(e))))  # type: ignore[no-any-return]


def unpack(data: bytes) -> Any:
    """The value that `pack_or_words` packed, or a NotSent."""
    packed, text = cloudpickle.loads(data)
    if packed is None:
        return text
    try:
        return cloudpickle.loads(packed)
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        return NotSent(text, reason(e))


def words(value: Any) -> str:
    """repr, cut to REPR_LIMIT; a repr that raises is told."""
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
