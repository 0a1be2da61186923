"""The lessons are the folders of `nbddp.lessons` with a number: whatever lists them finds them here."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from configparser import ConfigParser
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TypeVar

LESSONS = Path(__file__).parents[1]
T = TypeVar("T")


def lessons() -> list[Path]:
    """The folder of each lesson, in order. One that holds nothing but `__pycache__` was a lesson's once."""
    return sorted(package.parent for package in LESSONS.glob("l[0-9][0-9]_*/__init__.py"))


def sections(path: Path) -> ConfigParser:
    """The sections of a lesson's INI file, whose texts may have every character."""
    parser = ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.read_string(path.read_text(encoding="utf-8"), str(path))
    return parser


@functools.cache
def hints() -> dict[str, tuple[str, ...]]:
    """The hints of each exercise: a section of its lesson's `hints.ini`."""
    files = [sections(folder / "hints.ini") for folder in lessons()]
    return {name: tuple(file[name].values()) for file in files for name in file.sections()}


def defined(part: str, kind: type[T]) -> dict[str, T]:
    """Public names of one kind that the lessons' modules of a name, such as `exercise`, define or gather."""
    return {
        name: value
        for module in map(import_module, modules(part))
        for name, value in vars(module).items()
        if isinstance(value, kind) and not name.startswith("_")
    }


def modules(part: str) -> list[str]:
    """The lessons' modules of a name, such as `exercise`."""
    return [f"nbddp.lessons.{folder.name}.{part}" for folder in lessons()]


def missing(module: str, what: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for a name that no lesson defines: it names near ones."""
    near = get_close_matches(name, known, 3)
    return AttributeError(f"{module} has no {what} {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
