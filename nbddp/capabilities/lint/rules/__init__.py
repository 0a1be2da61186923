"""The rules, by topic: data, gradients, ranks, files."""

from __future__ import annotations

from nbddp.capabilities.lint.rule import Rule
from nbddp.capabilities.lint.rules import data, files, gradients, ranks

RULES: dict[str, Rule] = {rule.name: rule for rule in (*data.RULES, *gradients.RULES, *ranks.RULES, *files.RULES)}
