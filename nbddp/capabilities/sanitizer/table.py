"""The kinds of mistakes: the name, weight, rule and repair of each, as `kinds.ini` has them. Pure.

From weight 60 on results are wrong, from 30 on they may be, and below they are only slow. Where two findings have one
cause, `explains` names the effects that are not reported beside the cause.
"""

from __future__ import annotations

from configparser import ConfigParser, SectionProxy
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MistakeKind:
    """A section of `kinds.ini`. group: of the table in the documentation. rule: what must have been seen. example: of a
    mistake."""

    name: str
    group: str
    weight: int
    rule: str
    cure: str
    example: str = ""
    explains: tuple[str, ...] = ()


def _kind(row: SectionProxy) -> MistakeKind:
    return MistakeKind(
        row.name, row["group"], int(row["weight"]), row["rule"], row["cure"], row.get("example", ""),
        tuple(row.get("explains", "").split()),
    )  # fmt: skip


_kinds = ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
_kinds.read_string(Path(__file__).with_name("kinds.ini").read_text(encoding="utf-8"))
KINDS = {name: _kind(_kinds[name]) for name in _kinds.sections()}
