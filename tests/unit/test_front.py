"""What a visitor clicks: badges and clone lines lead to the one repository, and every link leads to something."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

from tests import places

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = places.ROOT
README = (ROOT / "README.md").read_text(encoding="utf-8")
LESSONS = (ROOT / "docs" / "lessons.md").read_text(encoding="utf-8")
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
NAME = urlsplit(REPOSITORY).path.strip("/")
NOTEBOOKS = sorted(p.name for p in ROOT.glob("notebooks/*.ipynb"))
SERVICES = {
    "binder": f"https://mybinder.org/v2/gh/{NAME}/HEAD?urlpath=lab/tree/notebooks/",
    "colab": f"https://colab.research.google.com/github/{NAME}/blob/main/notebooks/",
    "nbviewer": f"https://nbviewer.org/github/{NAME}/blob/main/notebooks/",
}
HOSTS = ("mybinder.org", "colab.research.google.com", "nbviewer.org", "github.com")
IMAGES = (".svg", ".png")
PAGES = [
    "README.md",
    "notebooks/INSTRUCTORS.md",
    *(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")),
    "nbddp/README.md",
    "nbddp/protocol/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]


def texts() -> Iterator[tuple[Path, str]]:
    """(file, Markdown) of all pages and of the notebooks' cells of text."""
    for name in PAGES:
        yield ROOT / name, (ROOT / name).read_text(encoding="utf-8")
    for path in [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("notebooks/solutions/*.ipynb")]:
        for cell in nbformat.read(path, 4).cells:
            if cell.cell_type == "markdown":
                yield path, cell.source


def links(text: str) -> set[str]:
    """What Markdown links to, images included; code in backticks and fences is none of it."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "``", text, flags=re.DOTALL)
    inline = re.findall(r"\]\(([^)\s]+)\)", text)
    return {*inline, *re.findall(r"(?m)^\[\w+\]: (\S+)$", text), *re.findall(r"<(https?://[^>]+)>", text)}


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"(?m)^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", t.lower()).strip().replace(" ", "-") for t in titles}


def leads_nowhere(page: Path, text: str, link: str) -> bool:
    """Whether a relative link has no file, or no heading, at its end."""
    path, _, anchor = link.partition("#")
    target = (page.parent / unquote(path)).resolve() if path else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return True
    return bool(anchor) and anchor not in anchors(target.read_text(encoding="utf-8") if path else text)


def test_every_relative_link_leads_to_something() -> None:
    wrong = [
        (str(page.relative_to(ROOT)), link)
        for page, text in texts()
        for link in links(text)
        if not urlsplit(link).scheme and leads_nowhere(page, text, link)
    ]
    assert not wrong


def test_a_link_to_nothing_would_be_seen() -> None:
    text = "[a](docs/topology.png) ![b](docs/none.png) `[c](no.md)` [d](#it) [e](#none)\n\n[f]: none.md\n# It"
    assert {x for x in links(text) if leads_nowhere(ROOT / "README.md", text, x)} == {
        "docs/none.png",
        "#none",
        "none.md",
    }


@pytest.mark.parametrize("service", SERVICES)
def test_every_lesson_has_its_badges(service: str) -> None:
    prefix = SERVICES[service]
    at_the_top, opened = (re.findall(re.escape(f"[{service}]]({prefix}") + r"([^)]+)\)", t) for t in (README, LESSONS))
    lessons = [f"solutions/{name}" if service == "nbviewer" else name for name in NOTEBOOKS[1:]]
    assert at_the_top == [NOTEBOOKS[0]]
    assert opened == [NOTEBOOKS[0], *lessons], "a row for each in the table, in order"
    for page in (README, LESSONS):
        assert re.search(rf"(?m)^\[{service}\]: https://\S+\.svg$", page), "its picture"
    for line in LESSONS.splitlines():
        if found := re.match(r"\| \[`(\d\d)`.*?\]\((\.\./notebooks/\S+)\)", line):
            assert Path(found[2]).name.startswith(found[1])
            assert any(prefix + at + Path(found[2]).name in line for at in ("", "solutions/")), (
                "the badge is that of its row"
            )


def test_all_addresses_are_the_projects_own() -> None:
    """What is on GitHub or shown by one of the services is this repository, wherever it is written."""
    for page, text in texts():
        for url in re.findall(r"https?://[^\s)`\"'>]+", text):
            where = urlsplit(url)
            if where.hostname in HOSTS and not where.path.endswith(IMAGES) and NAME.split("/")[1] in url:
                assert url.startswith((REPOSITORY, *SERVICES.values())), f"{page.name}: {url}"


def test_clone_and_pip_lines_take_the_repository() -> None:
    assert f"git clone {REPOSITORY}.git && cd {NAME.split('/')[1]}" in README
    assert f"%pip install -q git+{REPOSITORY}\n" in LESSONS
    taken = [
        u for _, text in texts() for u in re.findall(r"(?:git clone |git\+)(https?://\S+?)(?:\.git)?[\s'\")`]", text)
    ]
    assert taken
    assert set(taken) == {REPOSITORY}


def test_the_table_of_where_things_are_taught_names_lessons() -> None:
    table = LESSONS.split("| source | topic |")[1].split("\n\n")[0].splitlines()[2:]
    taught = {n for row in table for n in re.findall(r"\d\d", row.rsplit("|", 2)[1])}
    assert taught == {n[:2] for n in NOTEBOOKS} - {"00"}, "every lesson teaches something, and only lessons do"


def test_the_instructors_lines_take_solutions_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "notebooks" / "INSTRUCTORS.md").read_text(encoding="utf-8")
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import nbformat" in c]
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns("solutions"))
    monkeypatch.chdir(tmp_path)
    exec(textwrap.dedent(code), {})
    assert sorted(p.name for p in (tmp_path / "course").iterdir()) == NOTEBOOKS
    for name in NOTEBOOKS:
        given, whole = (nbformat.read(folder / name, 4).cells for folder in (tmp_path / "course", ROOT / "notebooks"))
        solved = {
            s for c in whole if "</details>" in c.source for s in re.findall(r"```python\n(.*?)```", c.source, re.S)
        }
        assert len(given) == len(whole) - len(solved)
        assert not any(s.strip() in c.source for s in solved for c in given)
        assert bool(solved) == (name != NOTEBOOKS[0]), f"{name}: every lesson has a solution"
