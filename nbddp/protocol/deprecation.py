"""How a public name goes: for one release it works as before and warns; the next one has it no more.

docs/stability.md promises that. Pure.
"""

from __future__ import annotations

import warnings


def warn_deprecated(old: str, instead: str, gone_in: str, stacklevel: int = 3) -> None:
    """Warn the program that uses `old`. instead: what to write; gone_in: the first version without `old`.

    stacklevel: as `warnings.warn` counts it from here; 3 is the caller of the function that calls this one.

    Example: `warn_deprecated("pool.group", "use pool.topology()", "0.3")`.
    """
    text = f"{old} is deprecated, and nbddp {gone_in} will not have it; {instead}"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
