"""Messages to a worker: a request (`nbddp_run`), and questions while it carries one out (`nbddp_request`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CELL, CALL = "cell", "call"  # programs of the user's
END_GROUP = "end_group"
ARGV0 = "<cell>"
Address = tuple[str, int]


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a run meet.

    master: MASTER_ADDR and MASTER_PORT; store: what leads to that store on this node; listen: this node's address,
    empty on one machine. env: torchrun's variables. shares_gpus: whether ranks share GPUs.
    """

    master: Address
    store: Address
    listen: str = ""
    env: dict[str, str] = field(default_factory=dict)
    shares_gpus: bool = False


@dataclass(frozen=True)
class RunSpec:
    """A request to a worker; its code and binary values travel beside it.

    op: CELL, or another that `worker.requests` knows, whose function has `fields` as keyword arguments.
    run: counts up in a pool. rendezvous: None for the pool's own requests. debug: somebody types for ranks that stop.
    Of a cell, or what runs instead: `cell` is the n of its In[n], `argv` with sys.argv[0]. want_value: the value of the
        last expression comes back. as_python: IPython's version, and the cell after IPython's syntax.
    options: what of the line is for parts of capabilities, by the names of `protocol.request.Options`.
    """

    op: str
    run: int
    rendezvous: Rendezvous | None = None
    debug: bool = False
    cell: int | None = None
    argv: tuple[str, ...] = ()
    want_value: bool = False
    as_python: tuple[str, str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_program(self) -> bool:
        """Whether a program of the user's runs."""
        return self.op in (CELL, CALL) or self.cell is not None


@dataclass(frozen=True)
class Question:
    """A question that the control thread of a worker answers, also while the main thread works. op: one that
    `worker.requests` knows, whose function has `fields` as keyword arguments. answers: whether an answer is wanted."""

    op: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    answers: bool = True

    @classmethod
    def of(cls, op: str, **fields: Any) -> Question:
        return cls(op, fields)


@dataclass(frozen=True)
class Reply:
    """`nbddp_reply`. failed: why there is no answer."""

    answer: Any = None
    failed: str = ""
