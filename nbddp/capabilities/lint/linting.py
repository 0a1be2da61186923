"""Programs → findings: each rule over each program, without what a comment silences. Pure."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from nbddp.capabilities.lint.meaning import Meaning
from nbddp.capabilities.lint.rule import Hit, Rule
from nbddp.capabilities.lint.rules import RULES
from nbddp.capabilities.lint.sources import ProgramText, SourceLine
from nbddp.errors import BadInput
from nbddp.launch.options import nearest
from nbddp.protocol.codec import is_silenced

LONGEST = 60  # characters of a program's own words in a sentence


@dataclass(frozen=True)
class LintFinding:
    """A rule at a place. column: from 1."""

    rule: Rule
    place: SourceLine
    column: int
    message: str


@dataclass(frozen=True)
class LintResult:
    """What was found in so many programs, how many findings a comment silences, and what could not be read."""

    findings: Sequence[LintFinding]
    silenced: int = 0
    unread: Sequence[str] = ()
    programs: int = 0


def chosen(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> list[Rule]:
    """Raises BadInput for a name of no rule."""
    for name in (*select, *ignore):
        rule_named(name)
    return [rule for name, rule in RULES.items() if (not select or name in select) and name not in ignore]


def rule_named(name: str) -> Rule:
    """Raises BadInput, with the nearest name."""
    if name in RULES:
        return RULES[name]
    near = nearest(name, RULES)
    advice = f"did you mean {near}?" if near else "--list-rules lists the rules"
    raise BadInput(f"there is no rule {name!r}; {advice}")


def lint(sources: Iterable[ProgramText], rules: Collection[Rule], unread: Sequence[str] = ()) -> LintResult:
    """Findings in the order of the files and lines. What is not Python is unread."""
    found: list[LintFinding] = []
    silenced, missed, programs = 0, list(unread), 0
    for source in sources:
        try:
            tree = source.tree()
        except BadInput as e:
            missed.append(str(e))
            continue
        programs += 1
        own, quiet = _of_program(source, tree, rules)
        found += own
        silenced += quiet
    return LintResult(found, silenced, missed, programs)


def _of_program(source: ProgramText, tree: ast.Module, rules: Collection[Rule]) -> tuple[list[LintFinding], int]:
    if not any("torch" in row for row in source.rows):
        return [], 0  # no rule is about anything else
    some = frozenset(source.some_ranks)
    program = Meaning(tree, source.kind == "ranks", source.kind != "script", some, source.starts)
    hits = {(hit.node, rule.name): hit for rule in rules for hit in rule.check(program)}
    found, quiet = [], 0
    for (node, name), hit in hits.items():
        if any(is_silenced(source.places[row - 1].text) for row in _rows(node)):
            quiet += 1
            continue
        rule, line = RULES[name], getattr(node, "lineno", 1)
        place = source.places[line - 1]
        found.append(LintFinding(rule, place, _column(node, place.text, source.rows[line - 1]), _sentence(rule, hit)))
    return sorted(found, key=lambda one: (source.places.index(one.place), one.column, one.rule.name)), quiet


def _column(node: ast.AST, text: str, row: str) -> int:
    """In characters; `ast` counts bytes. row: the line as it was parsed, which may lack the indent of its cell."""
    before = len(row.encode()[: getattr(node, "col_offset", 0)].decode(errors="replace"))
    return before + 1 + (len(text) - len(row) if text.endswith(row) else 0)


def _sentence(rule: Rule, hit: Hit) -> str:
    short = {name: word if len(word) <= LONGEST else f"{word[: LONGEST - 1]}…" for name, word in hit.words.items()}
    return rule.what.format(**{name: " ".join(word.split()) for name, word in short.items()})


def _rows(node: ast.AST) -> range:
    """The rows of a node, or of the head of a statement that has a body."""
    first = getattr(node, "lineno", 1)
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if isinstance(body, list) and body else getattr(node, "end_lineno", first)
    return range(first, max(first, last) + 1)
