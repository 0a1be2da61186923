"""A folder of submissions → files as text, by learner, with protection against malicious files.

A file is opened once, never through a link, and never waited for; files that are too large or not text are reported.
Its text is parsed in a process that is the learner's alone (`grading.reader`).
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbddp.grading import gradebook
from nbddp.grading.definitions import missing
from nbddp.grading.sandbox.client import ForkedProcess, Gone, Server, bounds
from nbddp.grading.sandbox.rlimits import bounded
from nbddp.grading.submissions import Cell

SUFFIXES = (".ipynb", ".py")
LARGEST = 32 << 20  # bytes of a file
MEMORY, SECONDS = 1 << 30, 60.0  # that parsing a file may take


@dataclass(frozen=True)
class Submission:
    """One file as text. cells: those that may define answers; names: the exercises that they define; unread: why
    nothing in it can be; digest: of all files of the learner."""

    path: Path
    cells: tuple[Cell, ...] = ()
    names: frozenset[str] = frozenset()
    unread: str = ""
    digest: str = ""

    def defines(self, names: Sequence[str]) -> list[str]:
        return [n for n in names if n in self.names]


def by_learner(folder: Path) -> dict[str, list[Path]]:
    """The files that each learner has handed in, also who has an empty folder."""
    seen = [p for p in sorted(folder.rglob("*")) if not _hidden(p, folder)]
    sent: dict[str, list[Path]] = {p.name: [] for p in seen if p.is_dir() and p.parent == folder}
    for path in seen:
        if path.suffix in SUFFIXES and not path.is_dir():
            parts = path.relative_to(folder).parts
            sent.setdefault(path.stem if len(parts) == 1 else parts[0], []).append(path)
    return sent


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def read(server: Server, paths: Sequence[Path], folder: Path, names: Sequence[str]) -> list[Submission]:
    """A learner's files, and which of `names` each defines; parsed in a process that is the learner's alone."""
    texts = [_text(path) for path in paths]
    digests = [f"{path.relative_to(folder)} {digest}" for path, (_, _, digest) in zip(paths, texts, strict=True)]
    digest = f"sha256:{hashlib.sha256(os.fsencode(chr(10).join(digests))).hexdigest()[:32]}"
    reader: ForkedProcess | None = None
    sent = []
    for path, (text, why, _) in zip(paths, texts, strict=True):
        outline: dict[str, Any] = {"cells": [], "defines": [], "unread": why}
        if not why:
            reader = reader or server.start("nbddp.grading.reader:main", bounded(bounds(MEMORY, int(SECONDS))))
            try:
                asked = {"name": path.name, "suffix": path.suffix, "text": text, "names": list(names)}
                outline = reader.ask(asked, SECONDS)
            except Gone:
                outline["unread"] = f"{path.name} cannot be read: it is nested too deeply, or much too long"
                reader.dismiss()
                reader = None
        cells = tuple((str(where), str(source)) for where, source in outline["cells"])
        defines = frozenset(outline["defines"]) & set(names)
        sent.append(Submission(path, cells, defines, gradebook.clean(outline["unread"]), digest))
    if reader is not None:
        reader.dismiss()
    return sent


def _text(path: Path) -> tuple[str, str, str]:
    """A file's text, or why there is none, and a digest of what it holds."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        link = error.errno == errno.ELOOP
        why = f"{path.name} {'is a link; hand in the file itself' if link else f'cannot be read: {error.strerror}'}"
        return "", why, why
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > LARGEST:
            why = (
                f"{path.name} is larger than {LARGEST >> 20} MiB"
                if facts.st_size > LARGEST
                else f"{path.name} is not a file"
            )
            return "", why, why
        data = file.read(LARGEST)
    kind = "notebook: it does not contain notebook JSON" if path.suffix == ".ipynb" else "UTF-8 text file"
    digest = hashlib.sha256(data).hexdigest()
    try:
        return data.decode("utf-8"), "", digest
    except UnicodeDecodeError:
        return "", f"{path.name} is not a {kind}", digest


def those_with(name: str, sent: Sequence[Submission], own: Path) -> Sequence[Submission]:
    """Those of a learner's files in which an exercise is; if in none, one that says why."""
    having = [s for s in sent if name in s.names]
    unreadable = [s for s in sent if s.unread]
    if having or unreadable or len(sent) == 1:
        return having or unreadable[:1] or sent
    files = ", ".join(gradebook.named(s.path.name) for s in sent)
    why = missing(name, f" in {files}") if files else "not handed in: there is no notebook in the folder"
    return [Submission(own, unread=why, digest=sent[0].digest if sent else "")]
