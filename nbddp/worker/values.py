"""Values between notebook and ranks: cloudpickle bytes, or words where a value cannot travel.

A CUDA tensor travels as its CPU copy, so that fetching it never touches a GPU in the
notebook's kernel. A value that cannot be pickled here or unpickled there becomes a
`NotSent`: its repr and the reason. Imports cloudpickle; torch only if it is there already.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from typing import Any

import cloudpickle

from nbddp.base.surrogates import plain
from nbddp.worker import code

REPR_LIMIT = 2000  # characters of a repr that stands for a value


@dataclass(frozen=True)
class NotSent:
    """Stands for a value that could not travel: its repr on the rank, and why."""

    text: str
    why: str

    def __repr__(self) -> str:
        return f"{self.text}  (not sent: {self.why})"


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table = code.table()

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor) and value.is_cuda:
            return value.detach().cpu().__reduce_ex__(2)
        return super().reducer_override(value)


def pack(value: Any) -> bytes:
    """cloudpickle bytes of `value`. Raises whatever pickling raises."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
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
