"""Run the mutants through the checks, and hold those that pass against the table of known ones.

    python -m tests.mutants.survivors            all exercises: prints a line for each, and every survivor
    python -m tests.mutants.survivors pack       these
    python -m tests.mutants.survivors --write    also put unknown survivors into the table, without a reason

`survivors.json` has, by exercise, each mutant that passes and the reason why it is right. A survivor without a reason
is a gap in the check. Real ranks run every mutant; a pool is made anew where one has killed it.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from nbddp.teach import check
from tests.lessons.answers import SOURCES, assigned, builder, cells, defined, pool_of
from tests.mutants.generate import Change, mutants

TABLE = Path(__file__).with_name("survivors.json")
RANKS = 4


def known() -> dict[str, dict[str, str]]:
    """By exercise: the mutants that pass, and why each is right."""
    found: dict[str, dict[str, str]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


@cache
def solutions() -> dict[str, str]:
    """By exercise, the cell of its solution."""
    sources = [s for path in SOURCES for s in builder().solutions(cells(path.name[:2]))]
    return {name: source for source in sources for name in assigned(source) if name in check.__all__}


def made(name: str) -> list[Change]:
    """The mutants of an exercise's solution."""
    return mutants(solutions()[name])


def passing(name: str, changes: Iterable[Change]) -> list[str]:
    """The mutants that the exercise's check takes for right, on the pool that checks run on."""
    return [c.name for c in changes if answer(name, c.source).ok]


def answer(name: str, source: str) -> check.Answer:
    """The check's answer to one mutant. One that its cell already refuses has no answer: it raises there."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            written = defined(source, name)
        except Exception as error:
            return check.Answer(False, f"the cell raised {type(error).__name__}")
        given: check.Answer = getattr(check, name)(written)
        return given


def run(names: Sequence[str], write: bool) -> int:
    """Run them, print what passes, and return how many survivors the table does not explain."""
    table, unexplained = known() if TABLE.exists() else {}, 0
    for name in names:
        begun, changes = time.monotonic(), made(name)
        with pool_of(RANKS):
            found = passing(name, changes)
        reasons = table.get(name, {})
        print(f"{name}: {len(changes)} mutants, {len(found)} pass ({time.monotonic() - begun:.0f} s)", flush=True)
        for one in found:
            unexplained += not reasons.get(one)
            print(f"    {one}: {reasons.get(one) or 'NO REASON'}", flush=True)
        for gone in sorted(set(reasons) - set(found)):
            print(f"    (no longer passes: {gone})", flush=True)
        if write:
            table[name] = {one: reasons.get(one, "") for one in found}
            TABLE.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return unexplained


if __name__ == "__main__":
    asked = [a for a in sys.argv[1:] if a != "--write"]
    sys.exit(min(1, run(asked or sorted(solutions()), "--write" in sys.argv)))
