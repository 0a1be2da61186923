"""Puts the site's pages together: those of the repository under the names that they have on the site.

`docs/README.md` is the site's first page and its table of contents: a heading is a section, an item of its list a
page. Links of pages lead to other pages, and to GitHub for what is no page. Links to the site itself name the pages
that are generated (`docs/reference.py`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote
from zlib import crc32

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/nbddp/nbddp"
SITE = "https://nbddp.github.io/nbddp/"
INDEX = "docs/README.md"
PLACES = {  # in the repository → on the site
    INDEX: "index.md",
    "docs/explanation/README.md": "explanation/how-it-works.md",
    "docs/lessons.md": "lessons/index.md",
    "notebooks/00-quickstart.ipynb": "lessons/00-quickstart.ipynb",
    "notebooks/INSTRUCTORS.md": "teaching/instructors.md",
    "nbddp/README.md": "explanation/architecture.md",
    "nbddp/protocol/README.md": "explanation/protocol.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "RELEASING.md": "project/releasing.md",
    "SECURITY.md": "project/security.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
}
PICTURES = (".png", ".gif", ".svg")
FENCES = re.compile(r"(^ *```.*?^ *```$|``[^\n]+?``|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\.(png|gif)\)")
TITLED = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
BADGE = re.compile(r"\[!\[(\w+)\]\[\w+\]\]")
DEFINITION = re.compile(r"(?m)^\[\w+\]: \S+\n?")
SECTION = re.compile(r"(?m)^## (.+)$")
ITEM = re.compile(r"(?m)^ *- .+$")


@dataclass(frozen=True)
class Section:
    """A heading of the index. text: what stands below it."""

    title: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.title.lower().replace(' ', '-')}/index.md"


def sections() -> list[Section]:
    _, *parts = SECTION.split((ROOT / INDEX).read_text(encoding="utf-8"))
    return [Section(title, text.strip()) for title, text in zip(parts[::2], parts[1::2], strict=True)]


def sources() -> dict[str, str]:
    """All pages that are files: in the repository → on the site."""
    found = {}
    for path in sorted(ROOT.glob("docs/**/*.md")):
        name = path.relative_to(ROOT).as_posix()
        found[name] = name.removeprefix("docs/")
    for path in sorted(ROOT.glob("notebooks/solutions/*.ipynb")):
        found[path.relative_to(ROOT).as_posix()] = f"lessons/{path.name}"
    return {**found, **PLACES}


def target_of(page: str, link: str, known: dict[str, str]) -> tuple[str, str]:
    """Where a link of a page leads: a page or picture of the site, else an address; and the anchor with its #."""
    path, mark, anchor = link.partition("#")
    if path.startswith(SITE):
        return path.removeprefix(SITE).replace(".html", ".md") or "index.md", mark + anchor
    if re.match(r"\w+:", path):
        return path, mark + anchor
    if not path:
        return known[page], mark + anchor
    place = os.path.normpath(PurePosixPath(page).parent / unquote(path))
    if place in known:
        return known[place], mark + anchor
    if (solved := f"notebooks/solutions/{PurePosixPath(place).name}") in known:
        return known[solved], ""
    if place.endswith(PICTURES):
        return place.removeprefix("docs/"), ""
    if not (ROOT / place).exists():
        raise FileNotFoundError(f"{page} links to {link}, which is not there")
    return f"{REPOSITORY}/{'tree' if (ROOT / place).is_dir() else 'blob'}/main/{place}", mark + anchor


def rewritten(text: str, page: str, known: dict[str, str], place: str = "") -> str:
    """A page's Markdown with the site's links. place: where it is on the site, if that is not its own place."""
    here = PurePosixPath(place or known[page]).parent

    def link(found: re.Match[str]) -> str:
        to, anchor = target_of(page, found[2], known)
        local = not re.match(r"\w+:", to)
        return f"{found[1]}{os.path.relpath(to, here) if local else to}{anchor}{found[3]}"

    text = DEFINITION.sub("", BADGE.sub(r"[\1]", text))
    parts = FENCES.split(text)
    return "".join(part if i % 2 else IMAGE.sub(_image, LINK.sub(link, part)) for i, part in enumerate(parts))


def _image(found: re.Match[str]) -> str:
    """A picture that follows the theme: figures are inverted by a rule, some outputs have a picture of their own."""
    words, path = found[1], found[2]
    dark = path.replace("-light", "-dark")
    if "looks/" not in path and found[3] == "png":
        return f"{found[0]}{{.figure-alone}}"
    if dark != path and (ROOT / "docs" / "looks" / f"{PurePosixPath(dark).name}.png").exists():
        return f"{found[0]}{{.only-light}}![{words}]({dark}.png){{.only-dark}}"
    return f"{found[0]}{{.screen}}"


def toctree(pages: Mapping[str, str], here: str) -> str:
    """Pages of the menu → their titles there; empty for that of the page."""
    paths = {os.path.relpath(page, PurePosixPath(here).parent): title for page, title in pages.items()}
    names = "\n".join(f"{title} <{path}>" if title else path for path, title in paths.items())
    return f"\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"


def lesson_menu(known: dict[str, str]) -> dict[str, str]:
    """The lessons with their numbers, then the glossary."""
    menu = {}
    for place in sorted(place for place in known.values() if place.endswith(".ipynb")):
        name = PurePosixPath(place).name
        book = json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"))
        menu[place] = f"{name[:2]} {''.join(book['cells'][0]['source']).partition(chr(10))[0].removeprefix('# ')}"
    return {**menu, "lessons/glossary.md": ""}


def pages_of(page: str, text: str, known: dict[str, str]) -> dict[str, str]:
    """The site's pages to which the items of a list lead → the text of an item's first link; else empty."""
    found: dict[str, str] = {}
    for item in ITEM.findall(text):
        for number, (title, link) in enumerate(TITLED.findall(item)):
            to = target_of(page, link, known)[0]
            if to.endswith((".md", ".ipynb")) and not to.startswith(REPOSITORY):
                found.setdefault(to, "" if number else title)
    return found


def assemble(folder: Path, generated: dict[str, Callable[[], str]]) -> None:
    """Write all pages into an empty folder. generated: place on the site → its text."""
    shutil.rmtree(folder, ignore_errors=True)
    known = sources()
    for name, place in known.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        made = lesson(text, name, known) if name.endswith(".ipynb") else rewritten(text, name, known)
        if name == "docs/explanation/README.md":
            made += toctree(pages_of(name, text, known), place)
        write(folder / place, made)
    for place, text_of in generated.items():
        write(folder / place, text_of())
    write(folder / "index.md", first_page(known))
    for section in sections():
        if section.place not in known.values():
            write(folder / section.place, section_page(section, known))
    with open(folder / "lessons/index.md", "a", encoding="utf-8") as page:
        page.write(toctree(lesson_menu(known), "lessons/index.md"))
    for path in ROOT.glob("docs/**/*"):
        if path.suffix in PICTURES:
            write(folder / path.relative_to(ROOT / "docs"), path.read_bytes())
    shutil.copytree(ROOT / "docs/_static", folder / "_static")


def write(place: Path, content: str | bytes) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content.encode() if isinstance(content, str) else content)


def first_page(known: dict[str, str]) -> str:
    """The index; each heading leads to its section."""
    text = rewritten((ROOT / INDEX).read_text(encoding="utf-8"), INDEX, known)
    for section in sections():
        text = text.replace(f"\n## {section.title}\n", f"\n## [{section.title}]({section.place})\n")
    return text + toctree({section.place: section.title for section in sections()}, "index.md")


def section_page(section: Section, known: dict[str, str]) -> str:
    text = rewritten(section.text, INDEX, known, section.place)
    return f"# {section.title}\n\n{text}" + toctree(pages_of(INDEX, section.text, known), section.place)


# -- lessons --------------------------------------------------------------------------------------


def lesson(text: str, name: str, known: dict[str, str]) -> str:
    """A solved notebook for readers: launch links on top, exercises before their folded solutions."""
    book = json.loads(text)
    file = PurePosixPath(name).name
    exercises = iter(exercises_of(file))
    cells: list[dict[str, Any]] = []
    for cell in book["cells"]:
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] == "markdown":
            cell["source"] = rewritten("".join(cell["source"]), name, known)
        if "prediction" in tags or "hidden" in tags:
            cell["metadata"]["tags"] = [*tags, "remove-input" if "prediction" in tags else "hide-input"]
        if "outputs" in cell:
            cell["outputs"] = [output for output in cell["outputs"] if not is_empty(output)]
        if cell["cell_type"] == "code" and "%load_ext nbddp" in (source := "".join(cell["source"])):
            cell["source"] = source[source.index("%load_ext") :]  # who runs it elsewhere has the notebook
        if "solution" in tags:
            cells.append(markdown(f"```python\n{next(exercises)}\n```"))
            cell["metadata"]["tags"] = [*tags, "hide-input"]
            words = "Solution (when you have tried)"
            cell["metadata"]["mystnb"] = {"code_prompt_show": words, "code_prompt_hide": words}
        cells.append(cell)
    cells.insert(1, markdown(launch(file)))
    return json.dumps({**book, "cells": cells})


def is_empty(output: dict[str, Any]) -> bool:
    """Whether it shows nothing, as the live view of a cell that has ended."""
    return "data" in output and not "".join("".join(text) for text in output["data"].values()).strip()


def markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text, "id": f"m{crc32(text.encode())}"}


def exercises_of(file: str) -> list[str]:
    """The unfinished functions of a learner's notebook, in order."""
    book = json.loads((ROOT / "notebooks" / file).read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in book["cells"] if "exercise" in cell["metadata"].get("tags", [])]


def launch(file: str) -> str:
    """Where a lesson can be run."""
    name = REPOSITORY.removeprefix("https://github.com/")
    binder = f"https://mybinder.org/v2/gh/{name}/HEAD?urlpath=lab/tree/notebooks/{file}"
    colab = f"https://colab.research.google.com/github/{name}/blob/main/notebooks/{file}"
    return f"Run it: [Binder]({binder}) · [Colab]({colab}) · [the notebook]({REPOSITORY}/blob/main/notebooks/{file})"
