"""`--sanitize` and its options. Pure."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from nbddp.capabilities.sanitizer.table import KINDS
from nbddp.launch.options import nearest
from nbddp.protocol.capability import FieldValues


@dataclass(frozen=True)
class Sanitize:
    """allow: kinds that are not reported. same_input: the ranks are to see the same input."""

    allow: tuple[str, ...] = ()
    same_input: bool = False


def kind(name: str) -> str:
    """Raises ArgumentTypeError for a name that no kind has."""
    if name not in KINDS:
        near = nearest(name, KINDS)
        hint = f"did you mean {near}?" if near else "docs/findings.md lists them"
        raise argparse.ArgumentTypeError(f"{name!r} is not a kind of finding; {hint}")
    return name


def asked(typed: FieldValues) -> Sanitize:
    """`--allow` and `--same-input` ask for the sanitizer as well."""
    return Sanitize(tuple(typed.get("allow") or ()), bool(typed.get("same_input")))
