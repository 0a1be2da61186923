"""The map of the code and the pages that explain it: short, and what they name is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.english import wrong_terms
from tests.house.prose import MOST as MOST_OF_A_SENTENCE
from tests.house.prose import NO_PROSE, long_sentences, texts
from tests.places import ROOT

PACKAGE = ROOT / "nbddp"
MAP = PACKAGE / "README.md"
MOST_WORDS = 1500
PAGES = [MAP, *sorted(ROOT.glob("docs/explanation/*.md"))]
PLACEHOLDER = re.compile("NN|name")  # as in `notebooks/source/NN-name.py`


def prose(text: str) -> str:
    """A page without its drawings and tables."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.sub(r"(?m)^(    |\|).*$", "", text)


def sentences(text: str) -> Iterator[str]:
    """Of paragraphs, headings and items of lists."""
    for line in prose(text).splitlines():
        line = re.sub(r"^\s*(#+|-|\d+\.) ", "", line)
        yield from re.split(r"(?<=[.?!]) +|(?<=[.?!][)*]) +", line)


def code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def paths(text: str) -> set[str]:
    """Paths within the repository, and names of modules."""
    words = {word for span in code(text) for word in span.split()}
    return {w for w in words if re.fullmatch(r"[\w.-]+(/[\w.-]*)+|\w+\.py", w)}


def is_there(path: str) -> bool:
    """In the package or the repository; a module's name alone may be anywhere in the package."""
    if "/" not in path:
        return any(PACKAGE.rglob(path))
    pattern = PLACEHOLDER.sub(lambda found: "[0-9][0-9]" if found[0] == "NN" else "*", path.rstrip("/"))
    return any(any(base.glob(pattern)) for base in (PACKAGE, ROOT))


def names(text: str) -> list[tuple[str, str]]:
    """(name, module) of all that a page says to be in a module."""
    return re.findall(r"`([\w.]+)` (?:in|of) `([\w/]+\.py)`", text)


def absent(text: str) -> list[tuple[str, str]]:
    return [
        (name, path)
        for name, path in names(text)
        if not re.search(rf"\b{name.split('.')[-1]}\b", (PACKAGE / path).read_text(encoding="utf-8"))
    ]


def test_the_map_can_be_read_on_the_first_day() -> None:
    assert len(MAP.read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_the_picture_has_each_capability_once() -> None:
    drawn = re.findall(r" capabilities/ ((?:.+\n)+)", MAP.read_text(encoding="utf-8"))[0].split()
    folders = [path.parent.name for path in (PACKAGE / "capabilities").glob("*/__init__.py")]
    assert sorted(drawn) == sorted(folders)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    assert [path for path in sorted(paths(page.read_text(encoding="utf-8"))) if not is_there(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_finds_in_a_module_is_there(page: Path) -> None:
    assert absent(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_sentence_is_long(page: Path) -> None:
    found = sentences(page.read_text(encoding="utf-8"))
    assert [s for s in found if len(s.split()) > MOST_OF_A_SENTENCE] == []


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "explanation" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[2:] if f"]({page.name})" not in index] == []


def test_a_wrong_path_a_wrong_name_and_a_long_sentence_would_be_seen() -> None:
    text = "`pool/runs.py` `pool/none.py` `none.py` `/proc/self` `lessons/lNN_name/` `Runs` in `pool/runs.py`\n"
    assert {path for path in paths(text) if not is_there(path)} == {"pool/none.py", "none.py"}
    assert absent(text + "`Runs.fly` in `pool/runs.py`") == [("Runs.fly", "pool/runs.py")]
    assert max(len(s.split()) for s in sentences("- " + "word " * 26 + "end. Short.")) == 27


PARTS = sorted(path for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py")
OF_GPUS = ("nbddp/capabilities/simulated_gpus/", "nbddp/capabilities/trace/")  # where a kernel is a GPU's


def files_of(part: Path) -> list[Path]:
    return sorted(part.rglob("*.py")) if part.is_dir() else [part]


def terms_of(source: str, file: str = "") -> list[tuple[int, str, str]]:
    """Line, wrong term and the standard one, of docstrings and comments."""
    return [
        (line, wrong, right)
        for line, text in texts(source)
        for wrong, right in wrong_terms(NO_PROSE.sub("", text), shown=False)
        if not (wrong.lower() == "the kernel" and file.startswith(OF_GPUS))
    ]


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.stem)
def test_no_sentence_of_a_docstring_or_comment_is_too_long_to_be_read_at_once(part: Path) -> None:
    assert [(str(f), *found) for f in files_of(part) for found in long_sentences(f.read_text("utf-8"))] == []


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.stem)
def test_docstrings_and_comments_have_the_standard_terms(part: Path) -> None:
    names = {file: file.relative_to(ROOT).as_posix() for file in files_of(part)}
    assert [(n, *found) for f, n in names.items() for found in terms_of(f.read_text("utf-8"), n)] == []


def test_a_wrong_term_of_a_docstring_or_a_comment_would_be_found() -> None:
    example = '"""Fine.\n\nTwo:\n\n    is told in an example\n"""\n'
    source = f'{example}x = 1  # the kernel ends\n\n\ndef f():\n    """The seam\n    ends."""\n'
    assert [(line, wrong) for line, wrong, _ in terms_of(source)] == [(11, "seam"), (7, "the kernel")]
    assert [wrong for _, wrong, _ in terms_of(source, f"{OF_GPUS[0]}a.py")] == ["seam"]
