"""`--env` on a rank that lives."""

import os
from collections.abc import Mapping


def environment(worker: object, buffers: object, *, variables: Mapping[str, str | None]) -> list[bytes]:
    """Variables that a living process can take; None takes one away."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return []
