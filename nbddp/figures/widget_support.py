"""Whether widgets may be shown, and how a bundle names one."""

from __future__ import annotations

from typing import Any

from nbddp.output.buffer import VIEW as WIDGET
from nbddp.protocol.messages import MimeBundle

VERSION = {"version_major": 2, "version_minor": 0}  # ipywidgets 7 and 8; 7 shows a widget itself, without a bundle


__all__ = ["WIDGET", "may_be_shown", "view_of"]


def may_be_shown() -> bool:
    """Whether a front end may be there that shows widgets: not in a terminal's IPython, nor without ipywidgets."""
    from IPython.core.getipython import get_ipython

    if getattr(get_ipython(), "kernel", None) is None:
        return False
    try:
        import ipywidgets  # noqa: F401
    except ImportError:  # not installed, or installed and broken: the still pictures and the words are there
        return False
    return True


def view_of(widget: Any) -> MimeBundle:
    """A bundle's entry for a widget."""
    return {WIDGET: {**VERSION, "model_id": widget.model_id}}
