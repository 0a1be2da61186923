"""A run as it was asked for: one value, from the line of a cell to the workers (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from nbddp.protocol.capability import FieldValues, added_options, option_fields
from nbddp.protocol.codec import Json
from nbddp.protocol.run_spec import ARGV0, CALL, CELL, RunSpec

if TYPE_CHECKING:
    from nbddp.capabilities import RunFields
else:
    RunFields = option_fields("run")

HANG_AFTER, SHUTDOWN = 5.0, 30.0  # seconds; the second is torchrun's


class Program(Protocol):
    """What runs on every rank instead of a cell, as a capability has it.

    op: the request of its row that runs it on a rank, with `fields` as arguments; reports call it so, too. name: of
    this one. one_shot: whether the ranks' processes end with it, as under torchrun.
    """

    @property
    def op(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def one_shot(self) -> bool: ...
    @property
    def fields(self) -> Json: ...


@dataclass(frozen=True, kw_only=True)
class Options(RunFields):
    """What a line says of a run, and a call in Python too: a `LaunchSpec` has it, and a `Request` takes it over. Rows
    of capabilities add fields.

    ranks, show: which take part, and whose output is shown; None: all.
    hang_after: seconds a deadlock may stand before it is ended (None: never).
    timeout: seconds it may take, with all attempts (None: any time).
    shutdown_timeout: seconds that ranks have to clean up when another rank's failure, a deadlock or `timeout` ends
    the run; where their processes end with it, whatever ends it.
    max_restarts: on a failure start all workers anew and run again, at most so many times.
    argv: sys.argv[1:]; program: what runs instead of a cell, with its words in `argv`.
    """

    ranks: Sequence[int] | None = None
    show: Sequence[int] | None = None
    hang_after: float | None = HANG_AFTER
    timeout: float | None = None
    shutdown_timeout: float = SHUTDOWN
    max_restarts: int = 0
    argv: tuple[str, ...] = ()
    program: Program | None = None

    def options(self) -> FieldValues:
        """These by name."""
        return {each.name: getattr(self, each.name) for each in fields(Options)}

    def as_request(self, code: str, number: int, want_value: bool = False) -> Request:
        """The run that this line and the code below it ask for, as In[number]."""
        return Request(
            op=CELL if self.program is None else self.program.op, code=code, cell=number, argv0=f"Cell In[{number}]",
            want_value=want_value, **self.options(),
        )  # fmt: skip


@dataclass(frozen=True)
class Request(Options):
    """What ranks are to do, which of them, and how long it may take.

    op: "cell", "call", that of `program`, or another that `worker.requests` knows; `fields` and `buffers` are its own;
    state: what `%ddp status` says of the ranks meanwhile. meets: whether the ranks may meet at a store; a look at what
    they have needs none.

    Of a cell: its source, `cell` (the n of its In[n]) and `argv0` (sys.argv[0]); want_value: that of its last
    expression comes back.
    """

    op: str = CELL
    fields: Mapping[str, Any] = field(default_factory=dict)
    buffers: Sequence[bytes] = ()
    state: str = ""
    meets: bool = True
    code: str = ""
    cell: int = 1
    argv0: str = ARGV0
    want_value: bool = False

    @property
    def is_program(self) -> bool:
        """Whether a program of the user's runs; the rest are looks at what the ranks have."""
        return self.op == CALL or self.is_numbered

    @property
    def is_numbered(self) -> bool:
        """Whether it has an In[n]."""
        return self.op == CELL or self.program is not None

    @property
    def one_shot(self) -> bool:
        """Whether its ranks' processes end with it."""
        return self.program is not None and self.program.one_shot

    @property
    def source(self) -> str:
        """The code as it is sent: IPython would cut empty lines at its beginning, and miscount."""
        return re.sub(r"\A\s*\n", lambda blank: "#\n" * blank[0].count("\n"), self.code)

    def on(self, ranks: Sequence[int], show: Sequence[int] | None) -> Request:
        """The same, where the ranks are known."""
        return replace(self, ranks=ranks, show=show, state=self.state or self._words())

    def _words(self) -> str:
        if self.program is not None:
            return f"running {self.program.name}"
        return f"running Cell In[{self.cell}]" if self.op == CELL else self.op

    def spec(self, run: int) -> RunSpec:
        """What a worker gets to know of it. run: the run's number."""
        told = {each.name: bool(getattr(self, each.name)) for each in added_options("run") if each.to_ranks}
        if not self.is_numbered:
            return RunSpec(self.op, run, fields=self.fields, options=told if self.is_program else {})
        return RunSpec(
            self.op, run, cell=self.cell, argv=(self.argv0, *self.argv), want_value=self.want_value, options=told,
            fields=self.fields if self.program is None else self.program.fields,
        )  # fmt: skip
