"""Sentences of docstrings and comments that are too long to be read at once."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator

MOST = 25  # words of a sentence
# a semicolon, an empty line and a bullet end one too
ENDS = re.compile(r"(?:(?<=[.!?;])|(?<=[.!?]\)))\s+|\n\s*\n|^\s*(?:[-*]|\d+\.)\s", re.M)
CODE = re.compile(r"`[^`]*`|``.*?``")
NO_PROSE = re.compile(r"^(?: {4,}|>>>|\.\.\.|[|│├└]).*$", re.M)  # examples, drawings and tables


def long_sentences(source: str) -> Iterator[tuple[int, str]]:
    """Line of the text it is in, and the sentence, of all with more than `MOST` words."""
    for line, text in texts(source):
        for sentence in ENDS.split(NO_PROSE.sub("", text)):
            if sentence and len(CODE.sub("code", sentence).split()) > MOST:
                yield line, " ".join(sentence.split())


@functools.cache
def texts(source: str) -> tuple[tuple[int, str], ...]:
    """Line and text of each docstring, and of each comment: those that fill lines of their own together."""
    return (*_docstrings(source), *_comments(source))


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """It, and all within it that no expression has."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.expr):
            yield from _statements(child)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    first, last, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, alone = token.start[0], token.line.lstrip().startswith("#")
            if not (alone and line == last + 1):
                yield first, "\n".join(lines)
                first, lines = line, []
            lines.append(token.string.lstrip("#").removeprefix(" "))
            last = line if alone else 0
    yield first, "\n".join(lines)
