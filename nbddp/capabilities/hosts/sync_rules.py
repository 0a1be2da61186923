"""Which files of a folder are copied to other hosts: rules on paths, and the text about a copy. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MOST_BYTES, MOST_FILES = 1 << 30, 50_000  # of a copy
CACHES = frozenset({"__pycache__", "node_modules"})
CACHE_MARKS = frozenset({"CACHEDIR.TAG", "pyvenv.cfg"})  # files that say what their folder is: a cache, an environment
MOST_TOLD = 5


@dataclass(frozen=True)
class FileEntry:
    """A file or a link. size: bytes; written: when, in ns; runs: whether it may be executed; link: where it leads."""

    size: int
    written: int
    runs: bool = False
    link: str = ""

    def row(self) -> list[int | bool | str]:
        """As JSON has it; `FileEntry(*row)` is the entry again."""
        return [self.size, self.written, self.runs, self.link]


def inside(path: str) -> bool:
    """Whether a relative path of `/`-separated names stays in its folder, and names something there."""
    parts = path.split("/")
    return not path.startswith("/") and "\0" not in path and not {"", ".", ".."} & set(parts)


def leads_inside(path: str, link: str) -> bool:
    """Whether a link at `path` leads to something in the folder, by a relative way that never leaves it."""
    at = posixpath.dirname(path).split("/") if "/" in path else []
    if posixpath.isabs(link) or "\0" in link:
        return False
    for part in link.split("/"):
        if part == "..":
            if not at:
                return False
            at.pop()
        elif part not in ("", "."):
            at.append(part)
    return True


def is_left_out(name: str) -> bool:
    """Of a folder that is no git checkout: hidden files and caches stay here."""
    return name.startswith(".") or name in CACHES


def too_much(entries: Mapping[str, FileEntry], root: str, is_git: bool, written: Mapping[int, str]) -> str:
    """Why a folder is not copied, or empty. written: the two totals in words."""
    total = sum(entry.size for entry in entries.values())
    if total <= MOST_BYTES and len(entries) <= MOST_FILES:
        return ""
    largest = sorted(entries, key=lambda path: -entries[path].size)[:3]
    advice = (
        "list what is not needed there in .gitignore"
        if is_git
        else "make it a git checkout, so that its .gitignore applies"
    )
    return (
        f"--sync: {root} has {len(entries)} files of {written[total]}, but a copy may have at most {MOST_FILES} "
        "files and "
        f"{written[MOST_BYTES]}; the largest are {', '.join(largest)}; {advice}, or start in a smaller folder"
    )


def some(lines: Iterable[str], noun: str) -> list[str]:
    """The first few of these lines, and how many more there are."""
    found = [*lines]
    more = len(found) - MOST_TOLD
    return [*found[:MOST_TOLD], *([f"and {more} more {noun}"] if more > 0 else [])]


def copied_words(host: str, folder: str, files: int, size: str, seconds: float, removed: int) -> str:
    """What was copied to a host."""
    if not files and not removed:
        return f"{host}: nothing has changed in {folder}"
    gone = f", {removed} removed" if removed else ""
    return f"{host}: {files} file{'s' * (files != 1)}, {size} copied to {folder} in {seconds:.1f} s{gone}"


def batches(paths: Sequence[str], most: int) -> list[Sequence[str]]:
    """The paths in groups of so many."""
    return [paths[i : i + most] for i in range(0, len(paths), most)]
