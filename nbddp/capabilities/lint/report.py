"""Findings as text, HTML, JSON or SARIF 2.1.0, and the rules as text. Pure."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from nbddp.capabilities.lint.linting import LintFinding, LintResult
from nbddp.capabilities.lint.rule import MARK, Rule
from nbddp.capabilities.lint.rules import RULES
from nbddp.figures.html import LOOK
from nbddp.launch.topology import counted
from nbddp.protocol.codec import Json

WIDTH = 110
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
DOCS = "https://github.com/nbddp/nbddp/blob/main/docs/lint.md"


def where(one: LintFinding) -> str:
    """`train.py:12:5`, or `In[3]:2:1`."""
    names = [name for name in (one.place.file, one.place.cell) if name]
    return ":".join([*names, str(one.place.line), str(one.column)])


def summary(outcome: LintResult) -> list[str]:
    count = len(outcome.findings)
    lines = [counted(count, "finding") if count else f"no findings in {counted(outcome.programs, 'program')}"]
    if not outcome.programs and outcome.unread:
        lines = []
    elif outcome.silenced:
        lines[0] += f"; # nbddp: ok silences {outcome.silenced} more"
    return [*lines, *outcome.unread]


def as_text(outcome: LintResult) -> str:
    """Three rows for each finding: place and sentence, its line, its cure."""
    rows = []
    for one in outcome.findings:
        rows += [
            f"{where(one)}: {one.rule.level} [{one.rule.name}] {one.message}",
            f"    {one.place.text.strip()}",
            f"    cure: {one.rule.cure}",
        ]
    return "\n".join([*rows, *summary(outcome)])


def as_html(outcome: LintResult) -> str:
    """The same with the source line, and what each rule is about behind a line that opens it."""
    parts = []
    for one in outcome.findings:
        rule = one.rule
        parts.append(
            f'<div style="margin: 8px 0"><div><b>{escape(where(one))}</b> {escape(rule.level)} '
            f"<code>{escape(rule.name)}</code></div>"
            f'<pre style="{LOOK}; padding-left: 12px; border-left: 3px solid currentColor">'
            f"{escape(one.place.text.strip())}</pre>"
            f"<div>{escape(one.message)}</div><div>Cure: {escape(rule.cure)}</div></div>"
        )
    return "".join(parts) + "".join(f"<div>{escape(line)}</div>" for line in summary(outcome))


def as_json(outcome: LintResult) -> str:
    found = [
        {
            "file": one.place.file, "cell": one.place.cell or None, "line": one.place.line, "column": one.column,
            "rule": one.rule.name, "level": one.rule.level, "message": one.message, "cure": one.rule.cure,
            "source": one.place.text,
        }
        for one in outcome.findings
    ]  # fmt: skip
    whole = {"findings": found, "silenced": outcome.silenced, "unread": list(outcome.unread)}
    return json.dumps(whole, indent=2, ensure_ascii=False)


def as_sarif(outcome: LintResult, version: str) -> str:
    """SARIF 2.1.0. A line of a cell is no line of the notebook's file, so it is in the message."""
    rules = list(dict.fromkeys(one.rule.name for one in outcome.findings))
    driver = {
        "name": "nbddp lint", "version": version, "informationUri": DOCS,
        "rules": [_rule(RULES[name]) for name in rules],
    }  # fmt: skip
    unread = [{"level": "error", "message": {"text": text}} for text in outcome.unread]
    run = {
        "tool": {"driver": driver}, "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": not unread, "toolExecutionNotifications": unread}],
        "results": [_result(one, rules.index(one.rule.name)) for one in outcome.findings],
    }  # fmt: skip
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False)


def _rule(rule: Rule) -> Json:
    return {
        "id": rule.name, "shortDescription": {"text": rule.title}, "fullDescription": {"text": rule.why},
        "help": {"text": f"Cure: {rule.cure}"}, "helpUri": f"{DOCS}#{rule.name}",
        "defaultConfiguration": {"level": rule.level},
    }  # fmt: skip


def uri_of(file: str) -> str:
    """A file's name as a URI reference. A relative name stays relative; characters that RFC 3986 lacks are escaped."""
    path = file.replace("\\", "/")
    drive = re.match(r"[A-Za-z]:/", path)
    if path.startswith("//"):
        return f"file:{quote(path)}"
    if drive or path.startswith("/"):
        return f"file://{'/' * bool(drive)}{quote(path, safe='/:' if drive else '/')}"
    return quote(path) or "stdin"


def _result(one: LintFinding, index: int) -> Json:
    place: Json = {"artifactLocation": {"uri": uri_of(one.place.file)}}
    location: Json = {"physicalLocation": place}
    text = f"{one.message}. Cure: {one.rule.cure}"
    if one.place.cell:
        location["logicalLocations"] = [{"name": one.place.cell, "kind": "member"}]
        text = f"{one.place.cell}, line {one.place.line}: {text}"
    else:
        place["region"] = {
            "startLine": one.place.line, "startColumn": one.column, "snippet": {"text": one.place.text},
        }  # fmt: skip
    return {
        "ruleId": one.rule.name, "ruleIndex": index, "level": one.rule.level, "message": {"text": text},
        "locations": [location],
    }  # fmt: skip


def listed(rules: Sequence[Rule]) -> str:
    """All rules, a line each."""
    width = max(len(rule.name) for rule in rules)
    return "\n".join(f"{rule.name:<{width}}  {rule.level:<7}  {rule.title}" for rule in rules)


def explained(rule: Rule) -> str:
    """What a rule finds, why that is a mistake, its cure, and its two examples."""
    text = [f"{rule.name} ({rule.level}): {rule.title}", "", *textwrap.wrap(rule.why, WIDTH), f"Cure: {rule.cure}"]
    wrong = rule.wrong.replace(MARK, f"# <- {rule.name}")
    parts = [("Seen in: " + rule.seen, ""), ("Wrong:", wrong), ("Right:", rule.right)]
    for head, body in parts:
        text += ["", head, *(f"    {row}".rstrip() for row in body.rstrip().split("\n") if body)]
    return "\n".join(text)
