"""This process's working folder, which somebody may have removed: then the operating system has no path for it."""

from __future__ import annotations

import os
from contextlib import suppress

from nbddp.errors import BadInput

DELETED = " (deleted)"  # says Linux


def known() -> str:
    """Its path; empty if it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def here() -> str:
    """Its path. Raises BadInput, which names it, if it is gone: no process can start there."""
    return known() or _gone()


def _gone() -> str:
    was = os.environ.get("PWD", "")
    with suppress(OSError):
        was = os.readlink("/proc/self/cwd").removesuffix(DELETED)
    raise BadInput(f"the working directory {was or 'of this process'} no longer exists; %cd FOLDER changes to another")
