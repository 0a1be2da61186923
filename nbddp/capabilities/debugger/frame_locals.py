"""What the names of a failing frame held, in words, for `%debug`.

No code of the program's is called for it: its `__repr__` may raise, take long, or wait for other ranks.
"""

from __future__ import annotations

import re
import sys
import types
from typing import Any

from nbddp.protocol.surrogates import plain

MOST = 20  # names of a frame
LENGTH = 60  # characters of a text
IDENTIFIER = re.compile(r"[^\W\d]\w*")
NOT_TOLD = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


def values(frame: types.FrameType, line: str) -> list[tuple[str, str]]:
    """Names and what they held: of a function all its own, of a cell those on the failing line."""
    held = frame.f_locals
    own_level = frame.f_code.co_name.startswith(("<module>", "<cell line"))
    names = list(dict.fromkeys(IDENTIFIER.findall(line))) if own_level else list(held)
    told = [n for n in names if n in held and not n.startswith("__") and not issubclass(type(held[n]), NOT_TOLD)]
    found = [(name, _told(held[name])) for name in told[:MOST]]
    return found if len(told) <= MOST else [*found, ("…", f"{len(told) - MOST} more names")]


def words(value: Any) -> str:
    """A value in a line."""
    kind = type(value)  # a class may have its own idea of equality: identity alone counts
    if any(kind is k for k in (bool, int, float, complex, type(None), range)):
        return _short(repr(value))
    if kind is str or kind is bytes:
        return repr(value) if len(value) <= LENGTH else f"{value[:LENGTH]!r}… ({len(value)} long)"
    if any(kind is k for k in (list, tuple, set, frozenset, dict)):
        return _short(repr(value)) if not value else f"{kind.__name__} of {len(value)}"
    torch = sys.modules.get("torch")
    if torch is not None and (kind is torch.Tensor or kind is torch.nn.Parameter):
        what = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
        number = f" = {value.item()!r}" if value.device.type == "cpu" and value.dim() == 0 else ""
        return f"{'parameter' if kind is torch.nn.Parameter else 'tensor'} {what}{number}"
    return f"{type.__getattribute__(kind, '__qualname__')} object"


def _told(value: Any) -> str:
    try:
        return plain(words(value))
    except Exception as e:  # a tensor whose memory is gone, say
        return f"(cannot be read: {type(e).__name__})"


def _short(text: str) -> str:
    return text if len(text) <= LENGTH else text[:LENGTH] + "…"
