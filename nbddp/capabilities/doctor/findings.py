"""The findings of `%ddp doctor` as text and as HTML: versions, the machine, the table of private APIs, and lost
functions. Knows no matplotlib and no pool."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypedDict

from nbddp.analysis.quantities import size
from nbddp.capabilities.doctor.seams import SEAMS, ProbeResult, Seam, said
from nbddp.figures.table import Table
from nbddp.launch.topology import counted

WIDTH = 118
ALL_SEAMS = "all {} uses of internals"


class Machine(TypedDict):
    cores: int  # that this process may use
    memory: int  # bytes
    gpus: list[str]  # names of those that torch sees


@dataclass(frozen=True)
class Findings:
    """`verdicts` has a ProbeResult for each private API that was tested. `ended` says why not all were; `pool` what a
    pool's workers say; `system` says what the operating system costs."""

    versions: Mapping[str, str]
    machine: Machine | None = None
    verdicts: Mapping[str, ProbeResult] = field(default_factory=dict)
    ended: str = ""
    pool: str = ""
    system: Sequence[str] = ()

    def table(self, only: Sequence[str] | None = None) -> Table:
        """Every private API: whose it is, whether its names are present, whether it works, what is lost without it.
        only: the keys of those that are wanted."""
        rows = []
        for seam in (seam for seam in SEAMS if only is None or seam.key in only):
            verdict = self.verdicts.get(seam.key, ProbeResult(True, None))
            present = said(verdict.present if seam.key in self.verdicts else None)
            rows.append([seam.library, seam.key, present, said(verdict.works), seam.without])
        return Table(["library", "private API", "present", "works", "if missing"], rows)

    def broken(self) -> list[tuple[Seam, ProbeResult]]:
        """The private APIs that are missing or fail, in the table's order."""
        found = ((seam, self.verdicts.get(seam.key)) for seam in SEAMS)
        return [(seam, v) for seam, v in found if v is not None and v.works is False]

    def differs(self) -> list[str]:
        """Keys of the private APIs that do not work, or were not tested."""
        return [seam.key for seam, _ in (*self.broken(), *self._untried())]

    def head(self) -> list[str]:
        lines = [" · ".join(f"{name} {version}" for name, version in self.versions.items())]
        if self.machine:
            lines.append(_machine(self.machine))
        return lines + ([self.pool] if self.pool else [])

    def describe(self) -> list[str]:
        """What the table amounts to: how many work, what is untried, and what is lost."""
        broken, untried = self.broken(), self._untried()
        works = sum(v.works is True for v in self.verdicts.values())
        lines = [f"{len(SEAMS)} private APIs: {works} work, {len(broken)} fail, {len(untried)} not tried"]
        lines += [f"{seam.key}: {why}" for seam, why in untried if why]
        for seam, verdict in broken:
            lines.append(f"{seam.library}: {seam.key}: {verdict.why}. Lost: {seam.without}")
        return [*lines, *self.system, *([self.ended] if self.ended else [])]

    def _untried(self) -> list[tuple[Seam, str]]:
        unknown = ProbeResult(True, None)
        return [(s, self.verdicts.get(s.key, unknown).why) for s in SEAMS
                if self.verdicts.get(s.key, unknown).works is None]  # fmt: skip

    def __repr__(self) -> str:
        return "\n".join([*_wrapped(self.describe()), "", *self.head(), "", repr(self.table())])

    def _repr_html_(self) -> str:
        """The verdict, then what differs; the whole table is folded."""
        first, *rest = [escape(line) for line in self.describe()]
        verdict = f"<div><b>{first}</b></div>" + "".join(f"<div>{line}</div>" for line in rest)
        head = "".join(f"<div>{escape(line)}</div>" for line in self.head())
        differs = self.differs()
        some = self.table(differs)._repr_html_() if differs else ""
        whole = f"<details><summary>{ALL_SEAMS.format(len(SEAMS))}</summary>{self.table()._repr_html_()}</details>"
        return f"{verdict}{head}{some}{whole}"


@dataclass(frozen=True)
class Together:
    """Several things to show, one below the other."""

    parts: Sequence[Any]

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self.parts))

    def _repr_html_(self) -> str:
        return "<hr>".join(part._repr_html_() for part in self.parts)


def _machine(found: Machine) -> str:
    gpus = found["gpus"]
    names = ", ".join(dict.fromkeys(gpus))
    return " · ".join(
        [counted(found["cores"], "core"), f"{size(found['memory'])} of memory",
         f"{counted(len(gpus), 'GPU')}: {names}" if gpus else "no GPU that torch can use"]
    )  # fmt: skip


def _wrapped(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        yield from textwrap.wrap(line, WIDTH, subsequent_indent="  ")
