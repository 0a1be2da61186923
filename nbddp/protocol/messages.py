"""Types of the Jupyter messages between notebook and worker. `protocol/README.md` says what each holds.

Printed text and displayed values are Jupyter's own messages, except for `STREAMS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

MimeBundle = dict[str, Any]  # MIME type → text, or JSON of any form: each type has its own
Metadata = dict[str, Any]  # of a mimebundle: Jupyter gives it no keys

RUN = "nbddp_run"  # notebook → worker, shell channel: a request; it has no reply
SPEC = "nbddp"  # where in its metadata the `RunSpec` is
QUESTION, REPLY = "nbddp_request", "nbddp_reply"  # on the control channel, also while the worker is busy
OUTCOME = "nbddp_outcome"  # worker → notebook, iopub, as all below: the last message of a run
STREAMS = "nbddp_streams"  # text of both streams in its order
INTERRUPTED = "nbddp_interrupted"  # the program has had an interrupt


class JupyterHeader(TypedDict, total=False):
    """That of a message or of its parent, which may have none."""

    msg_id: str
    msg_type: str
    session: str


class JupyterMessage(TypedDict):
    """A message as Jupyter's session has it. content: an object of JSON, or what that was made into."""

    header: JupyterHeader
    parent_header: JupyterHeader
    metadata: dict[str, Any]
    content: Any
    buffers: Sequence[bytes | memoryview]


@dataclass(frozen=True)
class Streams:
    """`STREAMS`. segments: (stream, text). cell: who has started what printed it after the end of the run, if known."""

    segments: tuple[tuple[str, str], ...]
    cell: int | None = None
