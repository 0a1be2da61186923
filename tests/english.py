"""The terms of what a person reads, and its sentences: one table and one splitter, for messages and for pages.

A term stands here if a reader of PyTorch or Jupyter knows a better one. Where a word has another meaning too (memory is
freed), the pattern has the words beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST = 25  # words of a sentence

TERMS = {  # pattern of a wrong term → the standard one
    r"names (?:are|were) (?:kept|lost|gone)": "variables are kept, lost",
    r"names (?:on|of) (?:\S+ ){0,8}(?:are|is) (?:gone|lost|kept)": "variables on … are lost, kept",
    r"(?:keeps?|loses?) (?:its|their) names": "keeps its variables",
    r"(?:ranks?|stuck) (?:\S+ )?(?:is|are|was|were) freed": "unblocked",
    r"(?:can|could) ?not be freed": "could not be unblocked",
    r"frees? (?:the |stuck |blocked |all )*(?:ranks?|workers?)": "unblocks",
    r"leave (?:it|one|them|that|\S+ or \S+)? ?out": "remove …",
    r"leave out": "remove …",
    r"last words": "last output",
    r"says so": "reports it, prints it",
    r"(?:is|are|was|were|be|been) told": "is reported",
    r"stand-ins?": "mock, placeholder",
    r"made-up": "synthetic, example",
    r"seams?": "private API",
    r"(?:takes?|took|taking) no part": "does not take part",
    r"where the ranks meet": "the ranks' store, the rendezvous",
    r"(?<!notebook )(?<!Jupyter )(?<!Linux )(?:the|this) kernel(?!-)": "the notebook kernel, the Linux kernel",
    r"without end": "forever",
    r"at most so often": "at most N times",
    r"as asked for": "as requested",
    r"now and then": "occasionally",
    r"taken? for granted": "assumed",
    r"(?<!there )(?:is|are) no (?:file|folder|notebook|address|answer|step|rank|terminal|number|pool)": "is not a",
    r"(?:the|its|their|a|in) words of": "the text of",
    r"in (?:the )?meantime": "meanwhile",
    r"outlives?": "survives",
    r"comes? and goes?|come and go": "join and leave",
}
SHOWN = {  # more of them, in what a user of nbddp reads: not in docstrings and comments
    r"(?:is|are|was|were|be|been) ended": "is stopped, closed or killed",
    r"(?:left|leaves|leaving) out": "removed, omitted, missing",
    r"look(?:s|ed)? at": "check, compare, inspect",
    r"anew": "again",
}
WRONG, WRONG_SHOWN = (
    {re.compile(rf"(?<![\w-]){wrong}(?![\w-])", re.I): right for wrong, right in terms.items()}
    for terms in (TERMS, TERMS | SHOWN)
)
# a semicolon, an empty line and a bullet end a sentence too
ENDS = re.compile(r"(?:(?<=[.!?;…])|(?<=[.!?]\)))\s+|\n\s*\n|^\s*(?:[-*]|\d+\.)\s", re.M)
CODE = re.compile(r"`[^`]*`")


def sentences(text: str) -> Iterator[str]:
    """Each with its words on one line. What is between backticks counts as one word."""
    for sentence in ENDS.split(CODE.sub("code", text)):
        if sentence and sentence.strip():
            yield " ".join(sentence.split())


def long_sentences(text: str, most: int = MOST) -> list[str]:
    return [sentence for sentence in sentences(text) if len(sentence.split()) > most]


def wrong_terms(text: str, shown: bool = True) -> list[tuple[str, str]]:
    """Each wrong term that the text has, and the standard one. shown: whether users of nbddp read it."""
    plain, table = " ".join(CODE.sub("code", text).split()), WRONG_SHOWN if shown else WRONG
    return [(found.group(), right) for wrong, right in table.items() for found in wrong.finditer(plain)]
