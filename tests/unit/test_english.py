"""The documents use one standard term per thing, and sentences that can be read at once.

`tests/english.py` has the terms of messages and documents; here are those of documents alone. A finding has the file
and line, the sentence, and the better word. An exception stands in `KEPT`, with its reason.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.english import CODE, MOST, wrong_terms
from tests.places import ROOT

TERMS = {  # pattern of a wrong term → the better word
    r"says?(?!:)|told": "reports, prints, shows",
    r"words(?! of text)": "text, caption",
    r"tried": "tested",
    r"mend(?:s|ed)?": "fix",
    r"(?:goes|went|going) on": "continues",
    r"for good": "permanently",
    r"in vain": "is deadlocked",
    r"hears?|unasked": "receives; without a request",
    r"travels?": "is sent",
    r"made up": "synthetic, example",
    r"what (?:it|they|nbddp|torch|\w+ \w+) (?:costs?|says?|has|have|holds?|held|does|did|sends?|needs?)": "a noun",
}
WRONG = {re.compile(rf"\b(?:{wrong})\b", re.I): right for wrong, right in TERMS.items()}
KEPT = {  # (page, text of the finding) → why it stays
}
LONG = {  # page → why its sentences may be long; every other page has none
}
WIDEST_CELL = 200  # characters: two lines of a table on the site
WIDE = {  # page → why some cells of its tables are wider
    "docs/findings.md": "the evidence as the program's table has it",
    "docs/scripts.md": "a list of torchrun's flags",
    "CHANGELOG.md": "history",
}
NO_TERMS = {"CHANGELOG.md": "history; its entries quote old messages"}
ENDS = re.compile(r"(?<=[.!?;…])[)*\"]*\s+|(?<=[.!?]\))\s+")
ITEM = re.compile(r"^\s*(?:(?:[-*]|\d+\.)\s+|#+ )")
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\](?:\([^)]*\)|\[\w*\])")


@dataclass(frozen=True)
class Sentence:
    place: str
    text: str

    @property
    def is_long(self) -> bool:
        return sum(bool(re.search(r"\w", word)) for word in self.text.split()) > MOST

    def terms(self) -> Iterator[tuple[str, str]]:
        yield from wrong_terms(self.text)
        asks = self.text.endswith("?")
        for wrong, right in WRONG.items():
            if not (asks and right == "a noun"):
                yield from ((found[0], right) for found in wrong.finditer(self.text))


@dataclass(frozen=True)
class Block:
    line: int
    text: str
    is_cell: bool = False


def blocks(page: str) -> Iterator[Block]:
    """Each paragraph, heading, list item and table cell, without code blocks and comments."""
    page = re.sub(r"(?ms)^ *```.*?^ *```|<!--.*?-->|^    .*?$", lambda found: "\n" * found[0].count("\n"), page)
    first, lines = 0, list[str]()
    for number, line in enumerate([*page.split("\n"), ""], 1):
        if not line.strip() or ITEM.match(line) or line.lstrip().startswith("|"):
            if lines:
                yield Block(first, "\n".join(lines))
            lines = []
        if line.lstrip().startswith("|"):
            yield from (Block(number, cell, True) for cell in re.split(r"(?<!\\)\|", line) if cell.strip(" :-"))
        elif line.strip():
            first = first if lines else number
            lines.append(ITEM.sub("", line, count=1) if not lines else line)


def sentences(name: str, page: str) -> Iterator[Sentence]:
    for block in blocks(page):
        text, start = CODE.sub("code", LINK.sub(r"\1", block.text)), 0
        for end in [*(found.end() for found in ENDS.finditer(text)), len(text)]:
            if words := " ".join(text[start:end].split()):
                yield Sentence(f"{name}:{block.line + text.count(chr(10), 0, start)}", words.strip("*_;"))
            start = end


def wrong(name: str, page: str) -> list[str]:
    """A line for each wrong term, wide cell and long sentence."""
    found = [*sentences(name, page)]
    terms = [
        f"{one.place}: {term!r} → {right}: {one.text}"
        for one in found
        for term, right in one.terms()
        if name not in NO_TERMS and (name, term.lower()) not in KEPT
    ]
    long = [f"{one.place}: more than {MOST} words: {one.text}" for one in found if one.is_long and name not in LONG]
    wide = [
        f"{name}:{block.line}: a cell of more than {WIDEST_CELL} characters: {block.text.strip()}"
        for block in blocks(page)
        if block.is_cell and len(LINK.sub(r"\1", block.text).strip()) > WIDEST_CELL and name not in WIDE
    ]
    return terms + wide + long


PAGES = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_standard_terms_and_short_sentences(name: str) -> None:
    found = wrong(name, (ROOT / name).read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


def test_no_exception_is_left_that_nothing_needs() -> None:
    used = {
        (name, term.lower())
        for name in {name for name, _ in KEPT}
        for one in sentences(name, (ROOT / name).read_text(encoding="utf-8"))
        for term, _ in one.terms()
    }
    assert set(KEPT) <= used
    assert {*LONG, *NO_TERMS, *WIDE} <= {*PAGES}


PLANTED = """names are kept, the rank is freed, says so, seam, made-up, the kernel ends, last words, leave it out,
tried, look at, stand-in, what it costs, is told, goes on, words, left out, in vain, anew, travels"""


@pytest.mark.parametrize("term", re.split(r",\s", PLANTED))
def test_a_wrong_term_would_be_found_with_its_place_and_a_better_word(term: str) -> None:
    page = f"# Title\n\n```sh\n{term}\n```\nGood `{term}`.\nIn short: {term} at once."
    (found,) = {line.partition(": ")[0] for line in wrong("a.md", page)}
    assert found == "a.md:7"
    assert all(" → " in line and term in line for line in wrong("a.md", page))


def test_a_long_sentence_would_be_found_in_a_paragraph_a_list_and_a_table() -> None:
    long = "word " * 25 + "end."
    page = f"Short. \n{long} Short.\n\n- {long}\n  Short.\n\n| a | {long} |\n"
    assert [line.partition(":  ")[0].split(": ")[0] for line in wrong("a.md", page)] == ["a.md:2", "a.md:4", "a.md:7"]
    short = "word " * 24 + "[end](far/away.md)."
    assert wrong("a.md", f"{short} {short}; {short}\n\n1. {short}\n") == []


def test_a_wide_cell_of_a_table_would_be_found() -> None:
    (found,) = wrong("a.md", f"| a | {'Short one. ' * 20} |\n| b | [{'c' * 99}]({'d' * 300}.md) |\n")
    assert found.startswith("a.md:1: a cell of more than 200 characters: Short one.")
