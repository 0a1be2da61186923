"""The findings of the sanitizer, as text, HTML and plain data. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

from nbddp.capabilities.sanitizer.recording import NOWHERE, Place
from nbddp.launch.machine import counted, listed
from nbddp.protocol.codec import Json, is_silenced
from nbddp.protocol.messages import Metadata, MimeBundle

HEAVY = 60  # a weight from which results are wrong; from LIGHT on they may be
LIGHT = 30
MOST_SHOWN = 20
LOOK = "border-left: 3px solid {}; padding: 2px 0 2px 10px; margin: 8px 0"
CELL = "text-align: left; vertical-align: top; padding: 0; border: none; overflow-wrap: anywhere"
COLOURS = {"wrong": "#d1495b", "doubtful": "#d98c2b", "slow": "#6b8fb5"}


@dataclass(frozen=True)
class Finding:
    """One mistake.

    kind: its name in the table. what: one sentence. evidence: what was seen, with ranks, steps and numbers. matters:
    what it changes. place: the program's line. cure: the line or change that cures it. cause_known: False if only the
    effect was seen; then ruled_out has the causes whose own evidence was looked for and not seen. weight: more is more
    serious. silenced: by what, empty if it is shown.
    """

    kind: str
    what: str
    evidence: tuple[str, ...]
    matters: str
    place: Place = NOWHERE
    cure: str = ""
    cause_known: bool = True
    ruled_out: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    weight: int = 50
    silenced: str = ""

    @property
    def degree(self) -> str:
        """`wrong`: results are; `doubtful`: they may be; `slow`: they are not."""
        return "wrong" if self.weight >= HEAVY else "doubtful" if self.weight >= LIGHT else "slow"

    def __str__(self) -> str:
        return "\n".join([f"{self.kind}: {self.what}", *(f"  {name:<9}{text}" for name, text in self.lines())])

    def lines(self) -> Iterator[tuple[str, str]]:
        """Name and text of each further line."""
        if self.place.line:
            source = f": {self.place.text}" if self.place.text else ""
            yield "line", f"{self.place}{source}"
        for i, text in enumerate(self.evidence):
            yield "" if i else "seen", text
        yield "matters", self.matters
        if not self.cause_known:
            ruled = f"; ruled out: {listed(list(self.ruled_out))}" if self.ruled_out else ""
            yield "cause", f"not known{ruled}"
        if self.cure:
            yield "cure", self.cure

    def to_dict(self) -> Json:
        """Plain data, as for JSON."""
        found = asdict(self)
        return {**found, "place": {**self.place._asdict()}, "degree": self.degree}


@dataclass(frozen=True)
class SanitizerFindings(Sequence[Finding]):
    """The findings of one run, most serious first; an empty one is false. silenced: those that the program or the line
    asked not to see. notes: what was not recorded.

        found = pool.findings()
        [f.kind for f in found]
        found[0].to_dict()
    """

    found: tuple[Finding, ...] = ()
    silenced: tuple[Finding, ...] = ()
    ranks: int = 0
    steps: int = 0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, index: Any) -> Any:
        return self.found[index]

    def of(self, kind: str) -> list[Finding]:
        """Those of a kind."""
        return [each for each in self.found if each.kind == kind]

    def to_dict(self) -> Json:
        return {
            "findings": [each.to_dict() for each in self.found],
            "silenced": [each.to_dict() for each in self.silenced],
            "ranks": self.ranks, "steps": self.steps, "notes": list(self.notes),
        }  # fmt: skip

    @property
    def title(self) -> str:
        seen = f"{counted(self.ranks, 'rank')}, {counted(self.steps, 'optimizer step')}"
        return f"sanitizer: {counted(len(self.found), 'finding') if self.found else 'no findings'} ({seen})"

    def _tail(self) -> list[str]:
        left = [f"and {len(self.found) - MOST_SHOWN} more; pool.findings() has all"] * (len(self.found) > MOST_SHOWN)
        quiet = [f"silenced: {each.kind}, {each.place} ({each.silenced})" for each in self.silenced]
        return [*left, *quiet, *self.notes]

    def __str__(self) -> str:
        shown = [f"\n{each}" for each in self.found[:MOST_SHOWN]]
        tail = self._tail()
        return "\n".join([self.title, *shown, *([""] if shown and tail else []), *tail])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<div><b>{escape(self.title)}</b></div>"]
        parts += [_html(each) for each in self.found[:MOST_SHOWN]]
        parts += [f'<div style="opacity: 0.75">{escape(line)}</div>' for line in self._tail()]
        return f'<div style="line-height: 1.4; overflow-wrap: anywhere">{"".join(parts)}</div>'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[MimeBundle, Metadata]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}, {}


def _html(each: Finding) -> str:
    rows = []
    for name, text in each.lines():
        where = name == "line" and each.place.text
        shown = f"{escape(str(each.place))}: <code>{escape(each.place.text)}</code>" if where else escape(text)
        head = f'<td style="{CELL}; padding-right: 12px; white-space: nowrap; opacity: 0.7">{name}</td>'
        rows.append(f'<tr>{head}<td style="{CELL}">{shown}</td></tr>')
    table = f'<table style="margin: 2px 0; border: none; font-size: inherit">{"".join(rows)}</table>'
    head = f"<div><b>{escape(each.kind)}</b> ({each.degree}): {escape(each.what)}</div>"
    return f'<div style="{LOOK.format(COLOURS[each.degree])}">{head}{table}</div>'


def silence(found: Sequence[Finding], allowed: Sequence[str]) -> tuple[list[Finding], list[Finding]]:
    """Those to be shown and those that are silenced: by `--allow`, or by a comment on their line."""
    shown: list[Finding] = []
    quiet: list[Finding] = []
    for each in found:
        why = f"--allow {each.kind}" if each.kind in allowed else "# nbddp: ok" if is_silenced(each.place.text) else ""
        (quiet if why else shown).append(replace(each, silenced=why))
    return shown, quiet
