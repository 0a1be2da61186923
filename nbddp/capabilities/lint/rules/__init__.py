"""The rules, by topic: what each says stands in the topic's page, and its check, of the same name, in the module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from nbddp.capabilities.lint.rule import Rule

TOPICS = ("data", "gradients", "ranks", "files")
SECTION = re.compile(r"^## ([a-z-]+): (.+?)\n(.*?)(?=^## |\Z)", re.M | re.S)
FIELD, CODE = re.compile(r"^- (\w+): (.+)$", re.M), re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def _of(topic: str) -> Iterator[Rule]:
    checks = import_module(f"{__name__}.{topic}")
    page = Path(__file__).with_name(f"{topic}.md").read_text(encoding="utf-8")
    for name, title, text in SECTION.findall(page):
        fields, (wrong, right) = dict(FIELD.findall(CODE.sub("", text))), CODE.findall(text)
        cells = fields.pop("cells", "no") == "yes"
        check = getattr(checks, name.replace("-", "_"))
        yield Rule(name, title=title, wrong=wrong, right=right, check=check, cells=cells, **fields)


RULES: dict[str, Rule] = {rule.name: rule for topic in TOPICS for rule in _of(topic)}
