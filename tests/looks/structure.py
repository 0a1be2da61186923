"""What of an output is compared with what is kept: its kind, its elements and its words, without what changes from run
to run. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT = Path(__file__).with_name("kept")
LEAST = 4.5  # WCAG 2: contrast of text
CHANGES = (
    (re.compile(r"[ \t\u2007\xa0]+"), " "),
    (re.compile(r"(/[\w.+-]+){2,}"), "PATH"),
    (re.compile(r"\b\d+\.\d+(\.\d+)*(\+\w+)?\b|\b\d[\d,]*\b"), "0"),
    (re.compile(r"\b0( ?)(ns|µs|ms|s|B|KiB|MiB|GiB|TiB|KB|MB|GB|KB/s|MB/s|GB/s)\b"), r"0\1U"),
    (re.compile(r"[█▏▎▍▌▋▊▉░]+"), "█"),
    (re.compile(r"\[rank\d+\]:\[([A-Z])\d{4} "), r"[rank0]:[\g<1>0 "),  # a line of C++, with its day
)


@dataclass(frozen=True)
class Seen:
    """What a front end showed of one cell. outputs: {"mime", "tree", "text"} of each; texts: contrasts, as page.js
    finds them; figure: the PNG of a figure."""

    outputs: Sequence[Mapping[str, Any]]
    texts: Sequence[Mapping[str, Any]] = ()
    figure: bytes = b""

    def description(self, measured: bool) -> str:
        """The structure as text. measured: without words."""
        lines: list[str] = []
        for output in self.outputs:
            if not str(output["text"]).strip() and "img" not in output["tree"]:
                continue  # the live view, which is empty when a cell has ended
            lines.append(f"{output['mime']}: {output['tree']}")
            if not measured:
                lines += [f"    {line}" for line in steady(str(output["text"]))]
        return "\n".join(lines) + "\n"

    def too_faint(self) -> list[str]:
        """A line for each text whose contrast is too low."""
        found = (
            f"{t['ratio']:.2f}:1 {t['where']} {tuple(t['ink'])} on {tuple(t['behind'])}: {t['text']}"
            for t in self.texts
            if t["ratio"] < LEAST
        )
        return list(dict.fromkeys(found))

    def least(self) -> float:
        return min((float(t["ratio"]) for t in self.texts), default=21.0)


def steady(text: str) -> Iterable[str]:
    """Lines of a text, without what changes from run to run: the order of lines of several ranks, too."""
    lines = [_steady(line) for line in text.rstrip().splitlines()]
    for of_ranks, group in itertools.groupby(lines, key=lambda line: line.startswith("rank 0 │")):
        some = list(group)
        yield from sorted(some) if of_ranks else some


def _steady(line: str) -> str:
    for pattern, instead in CHANGES:
        line = pattern.sub(instead, line)
    return line.rstrip()


def kept(front: str, name: str) -> Path:
    """Where the structure of an output is kept; JupyterLab and Notebook 7 must show the same."""
    return KEPT / ("terminal" if front == "terminal" else "notebook") / f"{name}.txt"
